"""Reading a head's folder: translate its config, let transformers load the tensors, then account for every one.

transformers loads what fits and reports the rest; for a draft head a missing or ignored tensor means acceptance near
zero and no error, so here each one is an error that names it.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig
from transformers.utils import cached_file

from . import vocab
from .configuration_eagle3 import Eagle3DraftConfig
from .layouts import (
    FOREIGN_KEYS,
    WEIGHT_RENAMINGS,
    HeadFormatError,
    TensorInfo,
    canonical_config,
    check_is_head,
    float_dtype,
    is_own_layout,
    read_tensor_table,
)


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "token", "revision", "subfolder")
_SAFETENSORS, _PICKLE = "model.safetensors", "pytorch_model.bin"


def load_head(from_pretrained, path: str | os.PathLike, *args, **kwargs) -> tuple[Any, dict[str, Any]]:
    """`from_pretrained` for heads of every supported layout; returns the head and transformers' loading info.

    Args:
        from_pretrained: transformers' own loader of the draft class.
        path: Folder or Hub id.
        kwargs: Of `from_pretrained`; names of config fields override the file's.

    Raises:
        HeadFormatError: see [`Eagle3DraftModel.from_pretrained`].
    """
    kwargs.pop("output_loading_info", None)
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    config = kwargs.pop("config", None)
    if not isinstance(config, PreTrainedConfig):
        published = _read_config(path if config is None else config, hub)
        tensors = _tensor_table(path, hub, kwargs, published)
        config, kwargs = _config_of(path, published, tensors, kwargs)
    elif not isinstance(config, Eagle3DraftConfig):
        raise ValueError(f"config must be an Eagle3DraftConfig, got a {type(config).__name__}")
    else:
        _tensor_table(path, hub, kwargs, None)  # a damaged or unsafe file is refused before anything is loaded
    # Tensors of other shapes are reported like missing ones, each with both shapes, instead of transformers' summary.
    kwargs["ignore_mismatched_sizes"] = True
    kwargs["key_mapping"] = {**WEIGHT_RENAMINGS, **(kwargs.get("key_mapping") or {})}
    draft, info = from_pretrained(path, *args, config=config, output_loading_info=True, **kwargs)
    _account_for_tensors(draft, info, path)
    return draft, info


def _about(path, check: Callable, *args):
    """The result of `check(*args)`; its complaint, if any, begins with the path."""
    try:
        return check(*args)
    except HeadFormatError as error:
        raise HeadFormatError(f"{path}: {error}") from error


# ----- files ---------------------------------------------------------------------------------------------------------


def _file(path, name: str, hub: dict[str, Any]) -> str | None:
    """A file of the folder or repository, downloaded if need be; `None` when it is not there."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)


def _read_json(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            content = json.load(stream)
    except ValueError as error:
        raise HeadFormatError(f"{file} is no JSON ({error}): corrupt or truncated, download it again") from error
    if not isinstance(content, dict):
        raise HeadFormatError(f"{file} must hold a JSON object, it holds a {type(content).__name__}")
    return content


def _read_config(path, hub: dict[str, Any]) -> dict[str, Any]:
    if os.path.isfile(path):
        raise HeadFormatError(f"{path} is a file: pass the folder that holds the head's config.json and weights")
    file = _file(path, "config.json", hub)
    if file is None:
        if not os.path.isdir(path):
            cached_file(path, "config.json", **hub)  # transformers' own words for a repository it cannot reach
        raise HeadFormatError(f"{path} has no config.json: not a draft head, or an interrupted download")
    return _read_json(file)


def _tensor_table(path, hub: dict[str, Any], kwargs: dict[str, Any], config: dict | None) -> dict[str, TensorInfo]:
    """The tensors of the files that transformers is going to load, in its order of preference."""
    wanted = kwargs.get("use_safetensors")
    names = [_SAFETENSORS] * (wanted is not False) + [_PICKLE] * (wanted is not True)
    for name in names:
        if kwargs.get("variant"):
            stem, ending = name.rsplit(".", 1)
            name = f"{stem}.{kwargs['variant']}.{ending}"
        file = _file(path, name, hub)
        if file is not None:
            return read_tensor_table(file)
        index = _file(path, f"{name}.index.json", hub)
        if index is not None:
            return _sharded_table(path, index, hub, config)
    raise HeadFormatError(
        f"{path} has neither {' nor '.join(names)}: not a draft head, or an interrupted download (download it again)"
    )


def _sharded_table(path, index: str, hub: dict[str, Any], config: dict | None) -> dict[str, TensorInfo]:
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict):
        raise HeadFormatError(f"{index} has no `weight_map`: corrupt, download it again")
    if config is not None and not is_own_layout(config):
        _about(path, check_is_head, config, set(where))  # before an ordinary model's many gigabytes are downloaded
    table: dict[str, TensorInfo] = {}
    for name in sorted(set(where.values())):
        file = _file(path, name, hub)
        if file is None:
            raise HeadFormatError(f"{path} lacks {name}, which its index names: an interrupted download")
        table.update(read_tensor_table(file))
    return table


# ----- config --------------------------------------------------------------------------------------------------------


def _config_of(path, published: dict[str, Any], tensors: dict[str, TensorInfo], kwargs: dict[str, Any]):
    """The canonical config, with the caller's overrides; returns it and the keywords that are not config fields."""
    known = Eagle3DraftConfig().to_dict()
    overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in known and name != "dtype"}
    fields = published
    if not is_own_layout(published):
        corrections = {name: value for name, value in overrides.items() if name not in FOREIGN_KEYS}
        fields = _about(path, canonical_config, {**published, **corrections}, tensors)
    fields = {k: v for k, v in {**fields, **overrides}.items() if k not in ("model_type", "architectures")}
    fields.pop("torch_dtype", None)
    fields["dtype"] = _about(path, float_dtype, tensors)  # the file's, also where its config says otherwise
    try:
        config = Eagle3DraftConfig(**fields)
    except Exception as error:  # a file can hold anything; whatever it breaks, the file is what is wrong
        raise HeadFormatError(f"{path}: its config does not describe an EAGLE-3 head: {error}") from error
    config._name_or_path = str(path)
    return config, kwargs


# ----- tensors -------------------------------------------------------------------------------------------------------


def _account_for_tensors(draft, info: dict[str, Any], path) -> None:
    config = draft.config
    missing = set(info["missing_keys"]) - {"t2d"}
    if config.draft_vocab_size == config.vocab_size:
        missing.discard("d2t")  # heads over the whole vocabulary are published without a map
    problems = []
    if "d2t" in missing:
        missing.discard("d2t")
        problems.append(
            f"draft vocabulary without a map: the head has {config.draft_vocab_size} of {config.vocab_size} tokens "
            "and no `d2t` tensor that says which"
        )
    if missing:
        problems.append(f"missing tensors {sorted(missing)}: these would stay random")
    if info["unexpected_keys"]:
        problems.append(f"tensors that no part of an EAGLE-3 head uses: {sorted(info['unexpected_keys'])}")
    for name, found, wanted in sorted(info["mismatched_keys"]):
        problems.append(f"{name} has shape {tuple(found)} in the file, but the config makes it {tuple(wanted)}")
    if problems:
        raise HeadFormatError(f"{path}: " + "; ".join(problems))
    _settle_vocabulary(draft, info, path)


def _settle_vocabulary(draft, info: dict[str, Any], path) -> None:
    """Check the map that was loaded, and rebuild the redundant `t2d` if the file lacks it."""
    config = draft.config
    if "d2t" in info["missing_keys"]:
        return  # whole vocabulary: the buffers already hold the identity
    t2d = None if "t2d" in info["missing_keys"] else draft.t2d
    try:
        vocab.validate(draft.d2t, t2d, config.vocab_size, config.draft_vocab_size)
    except ValueError as error:
        raise HeadFormatError(f"{path}: {error}") from error
    draft.d2t = draft.d2t.long()  # some files store 32 bits
    if t2d is None:
        draft.t2d[vocab.ids_from_offsets(draft.d2t)] = True
    draft._has_draft_vocab = True
