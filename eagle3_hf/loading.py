"""Reading a head's folder: translate its config, let transformers load the tensors, then account for every one.

transformers loads what fits and reports the rest; for a draft head a missing or ignored tensor means acceptance near
zero and no error, so here each one is an error that names it.
"""

import os
from typing import Any

from transformers import PretrainedConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import cached_file

from . import vocab
from .configuration_eagle3 import Eagle3DraftConfig
from .layouts import WEIGHT_RENAMINGS, HeadFormatError, canonical_config, is_own_layout, read_tensor_shapes


_HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

# By class name: transformers looks renamings up there whatever model_type the file's config claims.
register_checkpoint_conversion_mapping(
    "Eagle3DraftModel",
    [WeightRenaming(source_patterns=old, target_patterns=new) for old, new in WEIGHT_RENAMINGS],
    overwrite=True,
)


def load_head(from_pretrained, path: str | os.PathLike, *args, **kwargs):
    """`from_pretrained` for heads of every supported layout.

    Args:
        from_pretrained: transformers' own loader of the draft class.
        path: Folder or Hub id.
        kwargs: Of `from_pretrained`; names of config fields override the file's.

    Raises:
        HeadFormatError: see [`Eagle3DraftModel.from_pretrained`].
    """
    wants_info = kwargs.pop("output_loading_info", False)
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    config = kwargs.pop("config", None)
    shapes = _tensor_shapes(path, hub)
    if config is None:
        config, kwargs = _config_of(path, shapes, hub, kwargs)
    kwargs.setdefault("dtype", getattr(config, "dtype", None) or "auto")
    try:
        draft, info = from_pretrained(path, *args, config=config, output_loading_info=True, **kwargs)
    except RuntimeError as error:
        raise HeadFormatError(f"the tensors of {path} do not fit its config: {error}") from error
    _account_for_tensors(draft, info, path)
    return (draft, info) if wants_info else draft


def _tensor_shapes(path, hub: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    for name in _WEIGHT_FILES:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
        if file is not None:
            return read_tensor_shapes(file)
    raise HeadFormatError(
        f"{path} has neither {_WEIGHT_FILES[0]} nor {_WEIGHT_FILES[1]}: not a draft head, or an interrupted download "
        "(download it again)"
    )


def _config_of(path, shapes, hub: dict[str, Any], kwargs: dict[str, Any]):
    """The canonical config, with the caller's overrides; returns it and the keywords that are not config fields."""
    published, _ = PretrainedConfig.get_config_dict(path, **hub)
    fields = published if is_own_layout(published) else canonical_config(published, shapes)
    known = Eagle3DraftConfig().to_dict()
    overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in known and name not in ("dtype",)}
    fields = {k: v for k, v in {**fields, **overrides}.items() if k not in ("model_type", "architectures")}
    config = Eagle3DraftConfig(**fields)
    config._name_or_path = str(path)
    return config, kwargs


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
    if t2d is None:
        draft.t2d[vocab.ids_from_offsets(draft.d2t)] = True
    draft._has_draft_vocab = True
