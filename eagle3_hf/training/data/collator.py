"""Examples to a batch: padded on the right, packed where asked, with the labels that no row could learn taken out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...ttt.loss import IGNORE_INDEX
from ...utils.logging import get_logger
from .packing import join_chats, pack_rows, token_column


logger = get_logger(__name__)


@dataclass
class Eagle3DataCollator:
    """Right-pad examples to one batch.

    `input_ids`, `attention_mask` and `labels` become `(B, T)`; stored features come along where the examples have
    them: `features (B, T, A * Ht)`, `last_hidden (B, T, Ht)` and `top1 (B, T)` (padded with -1), in their own dtypes.
    Packed rows (from `PackedDataset`, or packed here) add `position_ids (B, T)` int64: they restart at 0 with every
    chat, and padding counts as one more document with attention mask 0.

    Labels of the first two tokens of every document are ignored: no row is early enough to learn them, and Trainer
    divides by what is left.

    Args:
        pad_token_id: fills `input_ids`; never attended to, never a target, so that it may be the end of sequence too.
        pad_to_multiple_of: round T up to a multiple of this.
        packing_length: pack the examples of the batch into rows of at most this many tokens; B is then the number of
            rows they take. For data without a length; with one, `PackedDataset` packs better. Longer chats are cut,
            which is said once.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None
    packing_length: int | None = None
    _cut_said: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise ValueError("pad_token_id is None; pass `tokenizer.pad_token_id`, or the eos id where there is none")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        if self.packing_length is not None:
            self._say_cut(examples, self.packing_length)
            examples = pack_rows(examples, self.packing_length)
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

    def _say_cut(self, examples: Sequence[Mapping[str, Any]], packing_length: int) -> None:
        cut = sum(len(example["input_ids"]) > packing_length for example in examples)
        if cut and not self._cut_said:
            self._cut_said = True
            logger.warning(
                "%d of %d chats of a batch are longer than packing_length (%d) and are cut to it; this is said once.",
                cut,
                len(examples),
                packing_length,
            )


def check_batch(batch: Mapping[str, Any], columns: Sequence[str] = ("input_ids", "labels")) -> None:
    """Refuse what a collator of another maker gets wrong and nothing later would notice.

    Args:
        columns: what the batch must have: packed rows without `position_ids` would be read as one text, and stored
            features that are left out would be made again.

    Raises:
        ValueError: a column is missing, or rows are padded on the left.
    """
    missing = [name for name in columns if name not in batch]
    if missing:
        raise ValueError(f"the data_collator made a batch without {' and '.join(missing)}; it has {', '.join(batch)}")
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2 and not bool(mask[:, 0].all()):
        raise ValueError("the data_collator pads on the left, and a head's rows count from the left: pad on the right")


def _column(examples: Sequence[Mapping[str, Any]], name: str, lengths: list[int]) -> list[Tensor]:
    pairs = zip(examples, lengths, strict=True)
    return [token_column(example, name, i, length) for i, (example, length) in enumerate(pairs)]


def _pad(rows: Sequence[Tensor], width: int, fill: int) -> Tensor:
    padded = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), fill)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _pad_positions(rows: Sequence[Tensor], width: int) -> Tensor:
    """Padding is a document of its own: it counts from 0."""
    return torch.stack([torch.cat([row.long(), torch.arange(width - len(row))]) for row in rows])
