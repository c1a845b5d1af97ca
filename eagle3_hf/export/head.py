"""`export_head`: writes a head in the format that one engine loads, completely or not at all."""

import copy
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..model.configuration_eagle3 import Eagle3DraftConfig
from ..model.offload import require_resident
from ..model.target_check import check_target
from ..model.target_modules import num_target_layers
from ..utils.logging import get_logger
from .borrowed import borrowed_tensors
from .card import looks_like_hub_id, write_card
from .errors import ExportError
from .unsupported import ENGINES, unsupported_features
from .writing import all_or_nothing, check_folder, save_for_engine, save_own


logger = get_logger(__name__)

FORMATS = (*ENGINES, "eagle3-hf")


def export_head(
    draft: Any,
    folder: str | os.PathLike,
    to: str,
    *,
    target: PreTrainedModel | PreTrainedConfig | None = None,
    dtype: str | torch.dtype | None = None,
    verifier: str | None = None,
    acceptance: Mapping[str, Mapping[str, float | str]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a head as `config.json`, `model.safetensors` and a model card for one engine.

    Args:
        draft: An [`Eagle3DraftModel`]; it is not changed.
        folder: The folder to write to, which is created. One that is not empty is rejected; with `overwrite`, only one
            that does not hold a head is.
        to: "vllm", "sglang", "speculators" or "eagle3-hf" (the format of `save_pretrained`).
        target: The head's target, for what the head's own file leaves open. Its config is enough, except where the
            format needs the target's weights (see [`needs_target_weights`]).
        dtype: The dtype of the floating-point tensors; by default they keep theirs. `d2t` stays int64.
        verifier: Hub id or folder of the target, for "speculators"; by default the name that head or `target` records.
        acceptance: Results for the card's table, by task, such as `{"HumanEval": {"tau": 2.45, "speed-up": "1.56x"}}`.
        overwrite: Replace the files of an earlier export; other files, and a card that was edited, are kept.

    Returns:
        The folder.

    Raises:
        ExportError: the engine cannot run this head (the message lists every reason), or the draft vocabulary or the
            layer ids are unknown. Nothing was written.
        FileExistsError: the folder is not empty, see `folder`.
        ValueError: `to` or `dtype` is unknown, the head does not fit `target`, or the head is offloaded.
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}: choose from {', '.join(FORMATS)}")
    require_resident(draft, "export")
    folder, torch_dtype = Path(folder), _torch_dtype(dtype)
    check_folder(folder, overwrite)
    config = _completed_config(draft.config, target)
    problems = _unsettled(draft, config) + (unsupported_features(config, to) if to in ENGINES else [])
    verifier = _verifier(config, verifier, target) if to == "speculators" else None
    if to == "speculators" and verifier is None:
        problems.append(
            "the verifier: it needs the folder or Hub id of the target, and the head records none that exists; pass "
            "verifier= (--verifier)"
        )
    extra, missing = borrowed_tensors(draft, config, to, target)
    problems += missing
    if problems:
        raise ExportError(f"{to} cannot run this head as it is:\n" + "\n".join(f"- {reason}" for reason in problems))
    if config.guessed_layer_ids:
        logger.warning(
            f"The layer ids {config.target_layer_ids} of this head are a guess, since its file does not say what they "
            f"number, and {folder} will not say that they are. If acceptance is low, load the head with "
            "target_layer_ids=[...] and export it again."
        )
    about = {"engine": to, "acceptance": acceptance}
    with all_or_nothing(folder) as draft_folder:
        if to == "eagle3-hf":
            save_own(draft, config, draft_folder, torch_dtype)
        else:
            save_for_engine(draft, config, to, draft_folder, torch_dtype, extra, verifier, target)
        write_card(draft_folder, config, draft.generation_config, **about)
    write_card(folder, config, draft.generation_config, **about)  # an earlier card of ours was left in place
    return folder


class _ConfigOfTarget:
    """Stands in for a target of which only the config is known, for checks that need no weights."""

    def __init__(self, config: PreTrainedConfig):
        self.config = config

    def get_input_embeddings(self) -> None:
        return None

    def get_output_embeddings(self) -> None:
        return None


def _completed_config(
    config: Eagle3DraftConfig, target: PreTrainedModel | PreTrainedConfig | None
) -> Eagle3DraftConfig:
    """Return a copy of the config, completed with what only the target knows."""
    config = copy.deepcopy(config)
    if target is None:
        return config
    model: Any = _ConfigOfTarget(target) if isinstance(target, PreTrainedConfig) else target
    check_target(config, model)
    text_config = model.config.get_text_config()
    config.target_num_hidden_layers = num_target_layers(model)
    config.target_model_type = config.target_model_type or text_config.model_type
    config.target_name_or_path = config.target_name_or_path or getattr(model.config, "_name_or_path", None) or None
    return config


def _unsettled(draft: Any, config: Eagle3DraftConfig) -> list[str]:
    problems = []
    if not draft.has_draft_vocab:
        problems.append(
            "draft vocabulary: only its size is known; train the head or call draft.set_draft_vocab(ids) first"
        )
    if config.target_layer_ids is None:
        problems.append(
            "target_layer_ids: the head's file names none, and they depend on the target; pass target= (--target)"
        )
    return problems


def _verifier(
    config: Eagle3DraftConfig, given: str | None, target: PreTrainedModel | PreTrainedConfig | None
) -> str | None:
    """Return the given or first known name that is a local folder (as an absolute path) or could be a Hub id."""
    known = config.target_name_or_path, getattr(getattr(target, "config", target), "_name_or_path", None)
    for name in (given,) if given else known:
        if name and Path(name).is_dir():
            return str(Path(name).resolve())
        if looks_like_hub_id(name):
            return name
    return None


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is None or dtype in known.values():
        return dtype  # type: ignore[return-value]
    name = re.sub(r"^torch\.", "", str(dtype))
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)}, got {dtype!r}")
    return known[name]


__all__ = ["FORMATS", "export_head"]
