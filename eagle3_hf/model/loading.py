"""Loading a head: interpret it before any weight is read, let transformers load it, account for every tensor.

transformers loads what fits and reports the rest; for a draft head a missing or ignored tensor means acceptance near
zero and no error. So the file's table of tensors is first compared with an empty skeleton of the head: each difference
is an error that names it, and nothing is allocated, whatever sizes the file claims.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig

from ..published_formats import (
    WEIGHT_RENAMINGS,
    FileNames,
    HeadDescription,
    HeadFormatError,
    describe,
    float_dtype,
    shortened,
)
from ..utils.logging import get_logger
from . import vocab
from .config_fields import is_integer
from .configuration_eagle3 import FIELDS, Eagle3DraftConfig, unknown_keys
from .hub_files import HeadFiles, read_generation_config, read_head_files, read_tensors
from .tree_settings import LARGEST_TREE, PAPER_TREE


logger = get_logger(__name__)

# Without a vocabulary map in the file, the buffers are as large as its config says; the largest real one has 2^18.
_LARGEST_VOCABULARY = 2**24
_NO_FIELDS = ("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "_name_or_path")


def load_head(cls, from_pretrained, path: str | os.PathLike, *args, **kwargs) -> tuple[Any, dict[str, Any]]:
    """Load a head of any supported format; returns the head and transformers' loading info.

    Args:
        cls: The draft class.
        from_pretrained: transformers' own loader of that class.
        path: Local folder or Hub id.
        kwargs: Those of `from_pretrained`; names of config fields override the file's.

    Raises:
        HeadFormatError: see [`Eagle3DraftModel.from_pretrained`].
    """
    kwargs.pop("output_loading_info", None)
    kwargs.pop("trust_remote_code", None)  # no code of a repository is ever run
    config = kwargs.pop("config", None)
    if not isinstance(config, PreTrainedConfig):
        described = _describe(path, read_head_files(path, config, kwargs), _overrides(kwargs))
        config = canonical_config(path, described)
    elif isinstance(config, Eagle3DraftConfig):
        described = _describe(path, HeadFiles(config.to_dict(), read_tensors(path, kwargs)), {})
    else:
        raise ValueError(f"config must be an Eagle3DraftConfig, got a {type(config).__name__}")
    _about(path, check_tensors, cls, config, described)
    _warn(path, described)
    if kwargs.get("generation_config") is None:
        kwargs["generation_config"] = _about(path, _generation_config, read_generation_config(path, kwargs))
    # The skeleton has been compared; should a shape differ all the same, it is reported below.
    kwargs["ignore_mismatched_sizes"] = True
    kwargs["key_mapping"] = {**WEIGHT_RENAMINGS, **(kwargs.get("key_mapping") or {})}
    draft, info = from_pretrained(path, *args, config=config, output_loading_info=True, **kwargs)
    _account_for_tensors(draft, info, described, path)
    return draft, info


def describe_head(path: str | os.PathLike, **kwargs) -> HeadDescription:
    """Describe the head in a local folder or Hub repository from its config and the headers of its weights alone.

    Args:
        path: Local folder or Hub id.
        kwargs: Those of `from_pretrained`; names of config fields override the file's.

    Raises:
        HeadFormatError: not a head that can be loaded.
    """
    overrides = _overrides(kwargs)
    return _describe(path, read_head_files(path, None, kwargs), overrides)


def _about(path, check: Callable, *args):
    """The result of `check(*args)`; its error, if any, begins with the path."""
    try:
        return check(*args)
    except HeadFormatError as error:
        raise HeadFormatError(f"{path}: {error}") from error


def _overrides(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the keywords that are config fields out of those of `from_pretrained`."""
    known = Eagle3DraftConfig().to_dict()
    return {name: kwargs.pop(name) for name in list(kwargs) if name in known and name not in _NO_FIELDS}


def _describe(path, files: HeadFiles, overrides: dict[str, Any]) -> HeadDescription:
    described = _about(path, describe, files.config, files.tensors, overrides)
    strange = unknown_keys(described.fields)
    if strange:
        described.notes.append(f"config keys that are not understood and have no effect: {strange}")
    # A key could have the name of anything that a config has, also of a method.
    kept = FIELDS.union(overrides)
    described.fields = {name: value for name, value in described.fields.items() if name in kept}
    return described


def _generation_config(content: dict[str, Any]) -> GenerationConfig:
    """The tree settings and special tokens of a `generation_config.json`; a draft needs nothing else of it."""
    kept = {}
    for name in (*PAPER_TREE, "assistant_window"):
        value = content.get(name)
        if name == "num_assistant_tokens" and value == "auto":
            pass
        elif value is not None and (not is_integer(value) or not 1 <= value <= LARGEST_TREE):
            raise HeadFormatError(
                f"its generation_config.json says {name} {value!r}: it must be an integer from 1 to {LARGEST_TREE}"
            )
        kept[name] = value
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = content.get(name)
        if not all(is_integer(token) for token in (value if isinstance(value, list) else [value or 0])):
            raise HeadFormatError(f"its generation_config.json says {name} {value!r}: it must be a token id")
        kept[name] = value
    for name in ("assistant_coupled_sampling", "assistant_lookup"):
        value = content.get(name)
        if not isinstance(value, (bool, type(None))):
            raise HeadFormatError(f"its generation_config.json says {name} {value!r}: true or false")
        kept[name] = value
    return GenerationConfig(**{name: value for name, value in kept.items() if value is not None})


def canonical_config(path: str | os.PathLike, described: HeadDescription) -> Eagle3DraftConfig:
    """Build the config of a described head; see [`describe_head`].

    Raises:
        HeadFormatError: fields that no head can have.
    """
    fields = {key: value for key, value in described.fields.items() if key not in _NO_FIELDS}
    fields["dtype"] = _about(
        path, float_dtype, described.tensors, FileNames(described.renamed)
    )  # the file's, also where its config says otherwise
    try:
        config = Eagle3DraftConfig(**fields)
    except Exception as error:  # whatever error it is, the file is its cause
        raise HeadFormatError(f"{path}: its config does not describe an EAGLE-3 head: {error}") from error
    config._name_or_path = str(path)
    return config


def _warn(path, described: HeadDescription) -> None:
    for note in described.notes:
        logger.warning(f"{path}: {shortened(note)}")
    if described.dropped:
        logger.info(f"{path}: tensors that no draft reads were left out: {described.dropped}")


# ----- tensors -------------------------------------------------------------------------------------------------------


def check_tensors(cls, config: Eagle3DraftConfig, described: HeadDescription) -> None:
    """Compare a file's tensors with those of the head that its config describes; nothing is allocated.

    Raises:
        HeadFormatError: naming every tensor that is missing, has no use, or has another shape.
    """
    if config.vocab_size > _LARGEST_VOCABULARY:
        raise HeadFormatError(f"its vocab_size {config.vocab_size} is beyond reason (largest: {_LARGEST_VOCABULARY})")
    try:
        with torch.device("meta"):
            skeleton = cls(config).state_dict()
    except RuntimeError as error:  # sizes of which each is possible, but not their product
        raise HeadFormatError(f"its config describes tensors that are too large to exist: {error}") from error
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.items()}
    found = {name: info.shape for name, info in described.tensors.items()}
    names = FileNames(described.renamed)
    problems = _missing(config, set(wanted) - set(found), names)
    unused = sorted(name for name, ours in described.renamed.items() if ours not in wanted)
    if unused:
        problems.append(f"tensors that no part of an EAGLE-3 head uses: {unused}")
    for name in sorted(set(wanted) & set(found)):
        if wanted[name] != found[name]:
            shown = names.show(name)
            problems.append(f"{shown} has shape {found[name]} in the file, but the config makes it {wanted[name]}")
    if problems:
        raise HeadFormatError("; ".join(problems))


def _missing(config: Eagle3DraftConfig, missing: set[str], names: FileNames) -> list[str]:
    problems = []
    whole = config.draft_vocab_size == config.vocab_size  # such heads are published without a map
    if "d2t" in missing and not whole:
        problems.append(
            f"draft vocabulary without a map: the head has {config.draft_vocab_size} of {config.vocab_size} tokens "
            "and no `d2t` tensor that says which"
        )
    lost = [names.show(name) for name in sorted(missing - {"d2t", "t2d"})]
    if lost:
        problems.append(f"missing tensors {lost}: these would stay random")
    return problems


def _account_for_tensors(draft, info: dict[str, Any], described: HeadDescription, path) -> None:
    """Check after loading that every tensor of the file was loaded, and that its numbers are finite."""
    _check_vocabulary_is_there(draft, path)
    _separate(draft)
    names = FileNames(described.renamed)
    lost = set(info["missing_keys"]) & set(described.tensors) | {name for name, *_ in info["mismatched_keys"]}
    strange = {name for name in info["unexpected_keys"] if name not in described.dropped}
    if lost or strange:
        shown = [names.show(name) for name in sorted(lost | strange)]
        raise HeadFormatError(f"{path}: transformers did not load {shown}; nothing may stay random")
    broken = [names.show(name) for name, tensor in draft.state_dict().items() if not _is_finite(tensor)]
    if broken:
        raise HeadFormatError(f"{path}: NaN or infinity in {broken}: its training broke, or the file is corrupt")
    if "d2t" in described.tensors:
        _settle_vocabulary(draft, "t2d" in described.tensors, path)


def _check_vocabulary_is_there(draft: Any, path) -> None:
    """Drafting reads the vocabulary map itself, so it cannot be fetched by a module's hook."""
    if draft.d2t.is_meta or draft.t2d.is_meta:
        raise ValueError(
            f"{path}: with this device_map the head's vocabulary map (d2t, t2d) is on the meta device, without "
            "numbers: load the head onto one device, or offload it without 'meta' and offload_buffers=True"
        )


def _separate(draft: nn.Module) -> None:
    """Tensors of a `.bin` file may be views of one another, which cannot be saved and would be trained as one."""
    seen: set[int] = set()
    for tensor in (*draft.parameters(), *draft.buffers()):
        if tensor.is_meta:
            continue
        memory = tensor.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != tensor.nbytes or not tensor.is_contiguous():
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.untyped_storage().data_ptr())


def _is_finite(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _settle_vocabulary(draft: Any, has_mask: bool, path) -> None:
    """Check the map that was loaded, and rebuild the redundant `t2d` if the file lacks it."""
    config = draft.config
    t2d = draft.t2d if has_mask else None
    try:
        d2t, absolute = vocab.offsets_from_file(draft.d2t, t2d, config.vocab_size, config.draft_vocab_size)
    except ValueError as error:
        raise HeadFormatError(f"{path}: {error}") from error
    if absolute:
        logger.warning(f"{path}: its d2t holds target ids instead of offsets; they were converted")
    draft.d2t = d2t
    draft.t2d[vocab.ids_from_offsets(d2t)] = True
    draft._has_draft_vocab = True
