"""Which checkpoints of a run are whole: a run may have been killed while it wrote one.

Trainer writes a checkpoint file by file into its final folder, `trainer_state.json` last.
"""

import json
import os
import re
import zipfile
from pathlib import Path

from safetensors import safe_open

from ..utils.logging import get_logger


logger = get_logger(__name__)

STATE = "trainer_state.json"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def last_whole_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """The latest checkpoint of a run that was written to its end; torn ones are passed over with a warning.

    Returns:
        Its folder, or `None` where there is none (also where `output_dir` does not exist).
    """
    found = [(int(match[1]), path) for path in _folders(output_dir) if (match := _FOLDER.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        problem = tear(path)
        if problem is None:
            return str(path)
        logger.warning(f"{path} is passed over: {problem}. The run was stopped while it was written.")
    return None


def tear(checkpoint: str | os.PathLike) -> str | None:
    """What is missing or cut off in a checkpoint's folder, in words; `None` when it is whole."""
    folder = Path(checkpoint)
    state = read_state(folder)
    if state is None:
        return f"{STATE} is missing or cut off"
    if not _has_weights(folder):
        return "there are no weights"
    weights = [*folder.glob("*.safetensors")]
    torn = [path.name for path in weights if not _opens(path)]
    torn += [path.name for path in (*folder.glob("*.pt"), *folder.glob("*.pth")) if not zipfile.is_zipfile(path)]
    return f"{', '.join(sorted(torn))} cut off" if torn else None


def steps_of(folder: str | os.PathLike) -> int:
    """Optimizer steps that a checkpoint has had; 0 where none are recorded."""
    state = read_state(Path(folder))
    return int(state["global_step"]) if state is not None else 0


def require_whole(checkpoint: str | os.PathLike) -> None:
    """Raise `ValueError` for a checkpoint that no run can go on from as if unbroken, with the way out."""
    if not Path(checkpoint).is_dir():
        raise ValueError(f"{checkpoint}, which is to be resumed from, is no folder")
    problem = tear(checkpoint)
    if problem is not None:
        raise ValueError(
            f"{checkpoint} is no whole checkpoint: {problem}. Resume from an earlier one; "
            "resume_from_checkpoint=True takes the last that is whole"
        )
    if _holds_weights_alone(Path(checkpoint)):
        raise ValueError(
            f"{checkpoint} holds weights alone (save_only_model), so optimizer and learning rate would start anew: "
            "train it further as a head, in a new run with another output_dir"
        )


def _folders(output_dir: str | os.PathLike) -> list[Path]:
    directory = Path(output_dir)
    return [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []


def read_state(folder: Path) -> dict | None:
    """Trainer's state of a checkpoint, or of a finished run; `None` where it is missing or cut off."""
    try:
        return json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _has_weights(folder: Path) -> bool:
    """A head's or an adapter's weights, or a folder or file that FSDP or DeepSpeed has written."""
    sharded = ("pytorch_model_fsdp*", "global_step*", "*/adapter_model.safetensors")
    return any(folder.glob("*model*.safetensors")) or any(path for name in sharded for path in folder.glob(name))


def _holds_weights_alone(folder: Path) -> bool:
    """Neither an optimizer's state, in whatever layout, nor DeepSpeed's folder."""
    return not any(path for name in ("optimizer*", "*optimizer*.pt", "global_step*") for path in folder.glob(name))


def _opens(path: Path) -> bool:
    """safetensors compares the file's length with what its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except Exception:  # its own error type is not public in every version
        return False
