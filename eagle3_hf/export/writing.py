"""Writes the files of an export, completely or not at all, into a folder that holds nothing else."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..model.configuration_eagle3 import Eagle3DraftConfig
from .card import CARD_FILE
from .engines import engine_tensor_name, sglang_config, speculators_config, vllm_config


def check_folder(folder: Path, overwrite: bool) -> None:
    """Reject a folder in which the export would mix with other files, or replace them.

    Raises:
        FileExistsError: the folder is a file, or not empty.
    """
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file: name a folder to write the head to")
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not _holds_a_head(folder):
        raise FileExistsError(
            f"{folder} is not empty and holds no earlier export (a config.json of a draft head and its "
            "weights), so there is nothing to overwrite: choose another folder"
        )
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder} is not empty: choose another folder, or replace the export in it "
            "with overwrite=True (--overwrite)"
        )


def _holds_a_head(folder: Path) -> bool:
    """Whether the folder holds a draft head, by keys that only configs of heads have."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        marks = [str(config.get(name)) for name in ("model_type", "architectures", "speculators_model_type")]
    except (OSError, ValueError, AttributeError):
        return False
    return "eagle3" in " ".join(marks).lower() and any(folder.glob("*.safetensors"))


def save_own(draft: Any, config: Eagle3DraftConfig, folder: Path, dtype: torch.dtype | None) -> None:
    """Write a copy of the head in the format of `save_pretrained`, with what `config` knows about the target."""
    clone = copy.deepcopy(draft)
    if dtype is not None:
        clone.to(dtype)
    for name in ("target_layer_ids", "target_num_hidden_layers", "target_model_type", "target_name_or_path"):
        setattr(clone.config, name, getattr(config, name))
    clone.save_pretrained(folder)


def save_for_engine(
    draft: Any,
    config: Eagle3DraftConfig,
    to: str,
    folder: Path,
    dtype: torch.dtype | None,
    extra: dict[str, torch.Tensor],
    verifier: str | None,
    target: PreTrainedModel | PreTrainedConfig | None,
) -> None:
    """Write config and tensors of a head for an engine.

    Args:
        draft: The head.
        config: Its config, completed with what only the target knows.
        to: The engine.
        folder: The folder to write to.
        dtype: The dtype of the floating-point tensors; `None` keeps theirs.
        extra: Tensors of the target that the file must hold.
        verifier: The target's name, only for speculators.
        target: The target or its config, if given.
    """
    tensors = _tensors(draft, to, dtype, extra)
    written = str(tensors["layers.0.input_layernorm.weight"].dtype).removeprefix("torch.")
    if verifier is not None:
        architectures = getattr(getattr(target, "config", target), "architectures", None) or []
        fields = speculators_config(config, written, verifier, architectures)
    else:
        fields = {"vllm": vllm_config, "sglang": sglang_config}[to](config, written)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tensors(
    draft: Any, to: str, dtype: torch.dtype | None, extra: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors under the engine's names; `d2t` and `t2d` only with a reduced vocabulary."""
    whole_vocabulary = draft.config.draft_vocab_size == draft.config.vocab_size
    tensors = {}
    for name, tensor in {**draft.state_dict(), **extra}.items():
        if whole_vocabulary and name in ("d2t", "t2d"):
            continue
        tensor = tensor.detach().cpu()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[engine_tensor_name(name, to)] = tensor.contiguous()
    return tensors


@contextmanager
def all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is moved to `folder` at the end; an error leaves nothing behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        yield part
        if folder.is_dir():
            for file in sorted(part.iterdir(), reverse=True):  # weights before the config that describes them
                if file.name != CARD_FILE or not (folder / CARD_FILE).exists():
                    os.replace(file, folder / file.name)
        else:
            os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


__all__ = ["all_or_nothing", "check_folder", "save_for_engine", "save_own"]
