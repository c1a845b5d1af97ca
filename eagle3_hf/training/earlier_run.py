"""What an earlier run has left in the output folder: a finished one is left alone, no head is overwritten unasked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..model.configuration_eagle3 import Eagle3DraftConfig
from .arguments import Eagle3TrainingArguments, ModelArguments
from .resume import read_state, tear


SHAPE = ("draft_vocab_size", "target_layer_ids", "hidden_size", "intermediate_size", "num_hidden_layers")
MERGED = "merged"  # folder of the head with its adapters merged in, beside the adapters


@dataclass
class EarlierRun:
    """The end of a run: its head (or adapters) is in `folder`, complete, with the state that is written last."""

    folder: Path
    steps: int
    epochs: float

    def has_all(self, args: Eagle3TrainingArguments) -> bool:
        """Whether a run with these arguments would have nothing left to do."""
        if args.max_steps > 0:
            return self.steps >= args.max_steps
        return self.epochs >= args.num_train_epochs - 1e-6  # a sum of parts of an epoch

    def is_of(self, model: ModelArguments) -> bool:
        """Whether its head is of the shape that is asked for, as far as the options say it."""
        file = self.folder / "config.json"
        if not file.is_file():  # adapters
            return bool(model.lora_r)
        config = Eagle3DraftConfig.from_pretrained(self.folder)
        asked: Mapping[str, Any] = model.head_config if isinstance(model.head_config, dict) else {}
        asked = {name: value for name, value in asked.items() if name in SHAPE}
        if model.head is None:
            asked["draft_vocab_size"] = min(model.draft_vocab_size, config.vocab_size)
        if model.target_layer_ids is not None:
            asked["target_layer_ids"] = model.target_layer_ids
        return not model.lora_r and all(getattr(config, name) == value for name, value in asked.items())

    def in_words(self) -> str:
        return (
            f"the run in {self.folder} is finished, after {self.steps:,} steps ({self.epochs:g} epochs), and nothing "
            "was done. To train further, raise max_steps or num_train_epochs; for a new run take another output_dir"
        )


def find_earlier_run(output_dir: str, adapters: bool) -> EarlierRun | None:
    """The run that was finished in this folder; `None` where there is none, or it was stopped before its end."""
    folder = Path(output_dir)
    state = read_state(folder)
    if state is None or tear(folder) is not None or (adapters and not any((folder / MERGED).glob("*.safetensors"))):
        return None
    return EarlierRun(folder, int(state["global_step"]), float(state.get("epoch") or 0.0))


def refuse_to_overwrite(earlier: EarlierRun) -> None:
    """For a run that has more to do, and no checkpoint to go on from.

    Raises:
        ValueError: always; with the way out.
    """
    raise ValueError(
        f"{earlier.folder} holds a head after {earlier.steps:,} steps, and no checkpoint to go on from: a new run "
        f"would overwrite it. Take another output_dir (and head={earlier.folder}, to train that head further)"
    )
