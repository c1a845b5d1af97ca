"""From examples to a batch: padding on the right, packing on request, and no labels that no position could learn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ttt.loss import IGNORE_INDEX
from ...utils.logging import get_logger
from .packing import join_chats, pack_examples, token_column


logger = get_logger(__name__)


@dataclass
class Eagle3DataCollator:
    """Right-pads examples to one batch.

    `input_ids`, `attention_mask` and `labels` become `(B, T)`; stored features come along where the examples have
    them: `features (B, T, A * Ht)`, `last_hidden (B, T, Ht)` and `top1 (B, T)` (padded with -1), in their own dtypes.
    Packed sequences (from `PackedDataset`, or packed here) add `position_ids (B, T)` int64: they restart at 0 with
    every chat, and padding counts as one more document with attention mask 0.

    Labels of the first two tokens of every document are ignored: no position is early enough to learn them, and
    Trainer divides by the number of the labels that are left.

    Args:
        pad_token_id: id that fills `input_ids`. It is never attended to and never a target, so that it may be the end
            of sequence too.
        pad_to_multiple_of: T is rounded up to a multiple of this.
        packing_length: pack the examples of the batch into sequences of at most this many tokens; B is then the number
            of sequences. This is for data without a length; with one, `PackedDataset` packs better. Longer chats are
            cut, with one warning.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    packing_length: int | None = None
    _warned_of_cut: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise ValueError("pad_token_id is None; pass `tokenizer.pad_token_id`, or the eos id where there is none")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if self.packing_length is not None:
            self._warn_of_cut(examples, self.packing_length)
            examples = pack_examples(examples, self.packing_length)
        elif any("position_ids" in example for example in examples):
            examples = [join_chats([example]) for example in examples]
        lengths = [len(example["input_ids"]) for example in examples]
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(lengths) // multiple) * multiple
        batch = {"attention_mask": _pad([torch.ones(length, dtype=torch.int64) for length in lengths], width, 0)}
        fills = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "features": 0, "last_hidden": 0, "top1": -1}
        for name, fill in fills.items():
            if any(name in example for example in examples) or name == "labels":
                batch[name] = _pad(_column(examples, name, lengths), width, fill)
        if "position_ids" in examples[0]:
            batch["position_ids"] = _pad_positions([example["position_ids"] for example in examples], width)
        positions = batch.get("position_ids", torch.arange(width))
        batch["labels"].masked_fill_((positions < 2).expand_as(batch["labels"]), IGNORE_INDEX)
        return batch

    def _warn_of_cut(self, examples: Sequence[Mapping[str, Any]], packing_length: int) -> None:
        cut = sum(len(example["input_ids"]) > packing_length for example in examples)
        if cut and not self._warned_of_cut:
            self._warned_of_cut = True
            logger.warning(
                "%d of %d chats of a batch are longer than packing_length (%d) and are cut to it; this warning "
                "is shown once.",
                cut,
                len(examples),
                packing_length,
            )


def check_batch(batch: Mapping[str, Any], columns: Sequence[str] = ("input_ids", "labels")) -> None:
    """Check what another collator may get wrong and nothing later would notice.

    Args:
        batch: what the collator made.
        columns: columns that the batch must have: without `position_ids` a packed sequence would be read as one text,
            and without stored features these would be computed again.

    Raises:
        ValueError: a column is missing, or the padding is on the left.
    """
    missing = [name for name in columns if name not in batch]
    if missing:
        raise ValueError(f"the data_collator made a batch without {' and '.join(missing)}; it has {', '.join(batch)}")
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not bool(mask[:, 0].all()):
        raise ValueError(
            "the data_collator pads on the left, but a head counts positions from the left: pad on the right"
        )


def _column(examples: Sequence[Mapping[str, Any]], name: str, lengths: list[int]) -> list[Tensor]:
    pairs = zip(examples, lengths, strict=True)
    return [token_column(example, name, i, length) for i, (example, length) in enumerate(pairs)]


def _pad(columns: Sequence[Tensor], width: int, fill: int) -> Tensor:
    padded = columns[0].new_full((len(columns), width, *columns[0].shape[1:]), fill)
    for target, column in zip(padded, columns, strict=True):
        target[: len(column)] = column
    return padded


def _pad_positions(positions: Sequence[Tensor], width: int) -> Tensor:
    """Pad positions with those of one more document, which count from 0."""
    return torch.stack([torch.cat([own.long(), torch.arange(width - len(own))]) for own in positions])
