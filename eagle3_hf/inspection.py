"""Reports what a head is, what it reads and borrows, and whether it fits a target.

Only configs and the headers of weights files are read, so that a head can be inspected before gigabytes are downloaded
or loaded. All problems are listed, not only the first.
"""

import copy
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from .model.configuration_eagle3 import Eagle3DraftConfig
from .model.loading import canonical_config, check_tensors, describe_head
from .model.modeling_eagle3 import Eagle3DraftModel
from .model.target_check import check_target
from .model.target_modules import decoder_blocks, num_target_layers
from .published_formats import HeadDescription, HeadFormatError


_VOCABULARY = ("d2t", "t2d")
_UNITS = {"B": 10**9, "M": 10**6}
_FOR_BOTH = ("cache_dir", "local_files_only", "token")  # arguments of `from_pretrained` that apply to the target too
# Fields that must fit the target, grouped by what is checked together.
_ASPECTS = (
    {"target_hidden_size"},
    {"vocab_size"},
    {"target_num_hidden_layers"},
    {"target_layer_ids", "guessed_layer_ids"},
)
_NOT_SHOWN = {"architectures", "dtype", "return_dict", "transformers_version", "model_type", "id2label", "label2id"}
_NOT_SHOWN |= {"output_hidden_states", "output_attentions", "is_encoder_decoder", "chunk_size_feed_forward"}
_NOT_SHOWN |= {"problem_type", "tie_word_embeddings", "rope_parameters", "_name_or_path"}


@dataclass(frozen=True)
class Inspection:
    """The result of an inspection; `str()` returns it as a report.

    Attributes:
        path: Folder or repository of the head.
        described: The description of its files.
        config: The config that loading would build; with a target, its layer ids are known.
        problems: Why the head cannot be loaded, or does not fit the target; empty if there is no problem.
        target_name: The target that the head was compared with, if any.
        target_layers: Number of decoder blocks of that target.
    """

    path: str
    described: HeadDescription
    config: Eagle3DraftConfig
    problems: list[str]
    target_name: str | None = None
    target_layers: int | None = None

    @property
    def own_parameters(self) -> int:
        """Number of parameters in the file."""
        tensors = self.described.tensors
        return sum(math.prod(info.shape) for name, info in tensors.items() if name not in _VOCABULARY)

    @property
    def borrowed(self) -> dict[str, int]:
        """The parts that the head borrows from the target, and their numbers of parameters."""
        size, config = self.config.vocab_size * self.config.hidden_size, self.config
        lent = {"embedding": not config.own_embeddings, "output layer": not config.own_lm_head}
        return {part: size for part, is_lent in lent.items() if is_lent}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {
            "head": self.path,
            "format": self.described.format_name,
            "parameters": self.own_parameters,
            "dtype": str(self.config.dtype).removeprefix("torch."),
            "borrows": self.borrowed,
            "target_layer_ids": self.config.target_layer_ids,
            "fields": _shown_fields(self.config),
            "notes": self.described.notes,
            "not_read": self.described.dropped,
            "ignored_keys": self.described.ignored,
            "target": self.target_name,
            "target_layers": self.target_layers,
            "problems": self.problems,
        }

    def __str__(self) -> str:
        sections = [_summary(self), *_reading(self), "", *_listed("fields", _fields(self.config))]
        sections += _listed("notes", self.described.notes) + _listed("not read", self.described.dropped)
        sections += [f"ignored keys   {', '.join(self.described.ignored) or 'none'}", *_verdict(self)]
        return "\n".join(sections)


def inspect_head(
    path: str | os.PathLike, target: str | os.PathLike | PreTrainedModel | None = None, **kwargs: Any
) -> Inspection:
    """Inspect a head without loading its weights.

    Args:
        path: Folder or Hub id of the head, in any published format that loads.
        target: Folder or Hub id of a target, of which only the config is read, or a model.
        kwargs: Further arguments of `from_pretrained`; config fields override those of the file, as they do at load.

    Raises:
        HeadFormatError: this is not an EAGLE-3 head, or its files contradict each other.
    """
    hub = {name: kwargs[name] for name in _FOR_BOTH if name in kwargs}
    described = describe_head(path, **kwargs)
    config = canonical_config(path, described)
    problems = _own_problems(config, described)
    if target is None:
        return Inspection(str(path), described, config, problems)
    model = target if isinstance(target, PreTrainedModel) else _without_weights(target, hub)
    problems += _misfits(config, model)
    name = model.config._name_or_path or type(model).__name__
    return Inspection(str(path), described, config, problems, str(name), num_target_layers(model))


def _own_problems(config: Eagle3DraftConfig, described: HeadDescription) -> list[str]:
    try:
        check_tensors(Eagle3DraftModel, config, described)
    except HeadFormatError as error:
        return str(error).split("; ")
    return []


# ----- the target ----------------------------------------------------------------------------------------------------


def _without_weights(target: str | os.PathLike, hub: dict[str, Any]) -> PreTrainedModel:
    """Build the target on the meta device, that is, without weights."""
    config = AutoConfig.from_pretrained(target, **hub)
    with torch.device("meta"):
        return model_class(config).from_config(config)


def model_class(config: PreTrainedConfig) -> Any:
    """Return the auto class that loads a target with this config: a text model, or one that also reads images."""
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def _misfits(config: Eagle3DraftConfig, target: PreTrainedModel) -> list[str]:
    """Return everything that `check_target` rejects, by checking one aspect at a time, since it stops at the first.

    Layer ids that the file leaves open are set in `config`.
    """
    text_config = target.config.get_text_config()
    fitting = {
        "target_hidden_size": text_config.hidden_size,
        "vocab_size": text_config.vocab_size,
        "target_num_hidden_layers": None,
        "target_layer_ids": [0],
        "guessed_layer_ids": False,
    }
    found = []
    for aspect in _ASPECTS:
        trial = copy.copy(config)
        for name in fitting.keys() - aspect:
            setattr(trial, name, fitting[name])
        found += _complaint(check_target, trial, target)
        for name in aspect:
            setattr(config, name, getattr(trial, name))
    found += _complaint(decoder_blocks, target)
    if config.own_lm_head is False and target.get_output_embeddings() is None:
        found.append(f"this head borrows an output layer, and {type(target).__name__} has none to lend")
    return list(dict.fromkeys(found))


def _complaint(check, *args) -> list[str]:
    try:
        check(*args)
    except ValueError as error:
        return [str(error)]
    return []


# ----- the report ----------------------------------------------------------------------------------------------------


def where(layer_id: int, num_layers: int | None = None) -> str:
    """Describe a `hidden_states` index.

    Args:
        layer_id: The index; -1 is the state after the final norm.
        num_layers: Number of the target's blocks, if known.
    """
    if layer_id == -1:
        return "output of the last block after the final norm"
    if layer_id == 0:
        return "output of the embedding, input of block 0"
    if layer_id == num_layers:
        return f"output of block {layer_id - 1}, the last, before the final norm (no entry of hidden_states)"
    return f"output of block {layer_id - 1}, input of block {layer_id}"


def _summary(found: Inspection) -> str:
    config, size = found.config, found.own_parameters
    lent = [f"{part} ({_count(number)} parameters)" for part, number in found.borrowed.items()]
    share = "every token" if config.draft_vocab_size == config.vocab_size else f"{config.draft_vocab_size} tokens"
    return "\n".join(
        [
            f"head           {found.path}",
            f"format         {found.described.format_name}",
            f"parameters     {_count(size)} in the file, {str(config.dtype).removeprefix('torch.')}",
            f"borrows        {', '.join(lent) or 'nothing'}",
            f"drafts         {share} of a vocabulary of {config.vocab_size}",
            f"rope           {_rope(config)}",
        ]
    )


def _count(number: int) -> str:
    for unit, size in _UNITS.items():
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _rope(config: Eagle3DraftConfig) -> str:
    rope = dict(config.rope_parameters)
    rope_type, theta = rope.pop("rope_type", "default"), rope.pop("rope_theta", None)
    numbers = ", ".join(f"{name} {value}" for name, value in sorted(rope.items()))
    scaling = "no scaling" if rope_type == "default" else rope_type
    return f"base {theta}, {scaling}{f' ({numbers})' if numbers else ''}"


def _reading(found: Inspection) -> list[str]:
    """Return the table of layer ids with what they are."""
    config, ids = found.config, found.config.target_layer_ids
    states = "1 state" if config.num_captured_layers == 1 else f"{config.num_captured_layers} states"
    line = f"reads          {states} of a target of width {config.target_hidden_size}"
    if ids is None:
        return [f"{line}; its file names no layers: [2, L // 2, L - 3] of a target with L blocks are used"]
    stated = found.described.fields.get("target_layer_ids")
    if stated is None and config.use_aux_hidden_state:
        line += f"; its file names no layers: the reference's rule for {found.target_layers} blocks is used"
    elif stated not in (None, ids):
        line += f"; its file's numbers were read as {stated} until compared with this target"
    elif config.guessed_layer_ids:
        line += "; what its file's numbers mean was guessed, see notes"
    lines = [f"    {i:>4}  {f'hidden_states[{i}]':<20} {where(i, found.target_layers)}" for i in ids]
    return [line, f"    {'id':>4}  {'index':<20} block", *lines]


def _fields(config: Eagle3DraftConfig) -> list[str]:
    return [f"{name} = {value}" for name, value in _shown_fields(config).items()]


def _shown_fields(config: Eagle3DraftConfig) -> dict[str, Any]:
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_SHOWN and value is not None}
    return dict(sorted(fields.items()))


def _listed(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"    {line}" for line in lines)] if lines else [f"{title:<14} none"]


def _verdict(found: Inspection) -> list[str]:
    if found.target_name is None:
        return _listed("problems", found.problems)
    blocks = f"{found.target_name} ({found.target_layers} blocks)"
    if not found.problems:
        return [f"fits           {blocks}"]
    return _listed(f"does not run with {blocks}", found.problems)


__all__ = ["Inspection", "inspect_head", "model_class", "where"]
