"""What an earlier run has left in the output folder: checkpoints to resume from, or a finished head.

A run may have been killed while it wrote a checkpoint. Trainer writes a checkpoint file by file into its final folder,
`trainer_state.json` last, so that a complete checkpoint can be told from a torn one. A finished run is left alone, and
no head is overwritten without a request.
"""

import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ..model.configuration_eagle3 import Eagle3DraftConfig
from ..utils.logging import get_logger
from .arguments import Eagle3TrainingArguments, ModelArguments


logger = get_logger(__name__)

STATE = "trainer_state.json"
MERGED = "merged"  # folder of the head with its adapters merged in, beside the adapters
_FOLDER = re.compile(r"checkpoint-(\d+)")
_SHAPE = ("draft_vocab_size", "target_layer_ids", "hidden_size", "intermediate_size", "num_hidden_layers")


# ----- checkpoints ---------------------------------------------------------------------------------------------------


def last_whole_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """Find the latest complete checkpoint of a run; torn ones are skipped with a warning.

    Returns:
        Its folder, or `None` where there is none (also where `output_dir` does not exist).
    """
    found = [(int(match[1]), path) for path in _folders(output_dir) if (match := _FOLDER.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        problem = tear(path)
        if problem is None:
            return str(path)
        logger.warning(f"{path} is skipped: {problem}. The run was stopped while it was written.")
    return None


def tear(checkpoint: str | os.PathLike) -> str | None:
    """Say what is missing or cut off in a checkpoint's folder; `None` when it is complete."""
    folder = Path(checkpoint)
    state = _read_state(folder)
    if state is None:
        return f"{STATE} is missing or cut off"
    if not _has_weights(folder):
        return "there are no weights"
    weights = [*folder.glob("*.safetensors")]
    torn = [path.name for path in weights if not _opens(path)]
    torn += [path.name for path in (*folder.glob("*.pt"), *folder.glob("*.pth")) if not zipfile.is_zipfile(path)]
    return f"{', '.join(sorted(torn))} cut off" if torn else None


def steps_of(folder: str | os.PathLike) -> int:
    """Return the optimizer steps that a checkpoint has had; 0 where none are recorded."""
    state = _read_state(Path(folder))
    return int(state["global_step"]) if state is not None else 0


def require_whole(checkpoint: str | os.PathLike) -> None:
    """Check that a run can go on from a checkpoint as if it had never stopped.

    Raises:
        ValueError: it cannot; the message says what to do instead.
    """
    if not Path(checkpoint).is_dir():
        raise ValueError(f"{checkpoint}, which is to be resumed from, is not a folder")
    problem = tear(checkpoint)
    if problem is not None:
        raise ValueError(
            f"{checkpoint} is not a complete checkpoint: {problem}. Resume from an earlier one; "
            "resume_from_checkpoint=True takes the last complete one"
        )
    if _holds_weights_alone(Path(checkpoint)):
        raise ValueError(
            f"{checkpoint} holds weights alone (save_only_model), so optimizer and learning rate would start anew: "
            "train it further as a head, in a new run with another output_dir"
        )


def require_same_head(checkpoint: str | os.PathLike, config: Any) -> None:
    """Check that a run's checkpoint is of a head with the shape of the one to train.

    Raises:
        ValueError: it is of another shape.
    """
    file = Path(checkpoint) / "config.json"
    if not file.is_file():  # adapters
        return
    saved = Eagle3DraftConfig.from_pretrained(checkpoint)
    for name in _SHAPE:
        before, now = getattr(saved, name), getattr(config, name)
        if before != now:
            raise ValueError(
                f"{checkpoint} is of a head with {name} {before}, and this run asks for {now}: take the options of "
                "that run to go on with it, or another output_dir for a new one"
            )


def _folders(output_dir: str | os.PathLike) -> list[Path]:
    directory = Path(output_dir)
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def _read_state(folder: Path) -> dict | None:
    """Read Trainer's state of a checkpoint, or of a finished run; `None` where it is missing or cut off."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _has_weights(folder: Path) -> bool:
    """Whether there are weights of a head or an adapter, or a folder or file that FSDP or DeepSpeed has written."""
    sharded = ("pytorch_model_fsdp*", "global_step*", "*/adapter_model.safetensors")
    return any(folder.glob("*model*.safetensors")) or any(path for name in sharded for path in folder.glob(name))


def _holds_weights_alone(folder: Path) -> bool:
    """Whether there is neither an optimizer's state, in whatever layout, nor DeepSpeed's folder."""
    return not any(path for name in ("optimizer*", "*optimizer*.pt", "global_step*") for path in folder.glob(name))


def _opens(path: Path) -> bool:
    """Whether a file is as long as its header says, which safetensors compares when it opens the file."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except Exception:  # its own error type is not public in every version
        return False


# ----- finished runs -------------------------------------------------------------------------------------------------


@dataclass
class EarlierRun:
    """A finished run: its head (or adapters) is complete in `folder`, beside the state that is written last."""

    folder: Path
    steps: int
    epochs: float

    def has_all(self, args: Eagle3TrainingArguments) -> bool:
        """Whether a run with these arguments would have nothing left to do."""
        if args.max_steps > 0:
            return self.steps >= args.max_steps
        return self.epochs >= args.num_train_epochs - 1e-6  # a sum of parts of an epoch

    def is_of(self, model: ModelArguments) -> bool:
        """Whether its head has the requested shape, as far as the options say it."""
        file = self.folder / "config.json"
        if not file.is_file():  # adapters
            return bool(model.lora_r)
        config = Eagle3DraftConfig.from_pretrained(self.folder)
        asked: Mapping[str, Any] = model.head_config if isinstance(model.head_config, dict) else {}
        asked = {name: value for name, value in asked.items() if name in _SHAPE}
        if model.head is None:
            asked["draft_vocab_size"] = min(model.draft_vocab_size, config.vocab_size)
        if model.target_layer_ids is not None:
            asked["target_layer_ids"] = model.target_layer_ids
        return not model.lora_r and all(getattr(config, name) == value for name, value in asked.items())

    def in_words(self) -> str:
        """Say that there is nothing to do, and how to train further."""
        return (
            f"the run in {self.folder} is finished, after {self.steps:,} steps ({self.epochs:g} epochs), and nothing "
            "was done. To train further, raise max_steps or num_train_epochs; for a new run take another output_dir"
        )


def find_earlier_run(output_dir: str, adapters: bool) -> EarlierRun | None:
    """Find the run that was finished in this folder; `None` where there is none, or it was stopped before its end."""
    folder = Path(output_dir)
    state = _read_state(folder)
    if state is None or tear(folder) is not None or (adapters and not any((folder / MERGED).glob("*.safetensors"))):
        return None
    return EarlierRun(folder, int(state["global_step"]), float(state.get("epoch") or 0.0))


def forbid_overwriting(earlier: EarlierRun) -> None:
    """Stop a run that has more to do, and no checkpoint to go on from, before it overwrites a head.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"{earlier.folder} holds a head after {earlier.steps:,} steps, and no checkpoint to go on from: a new run "
        f"would overwrite it. Take another output_dir (and head={earlier.folder}, to train that head further)"
    )
