"""Stored features, read: the rows of a store as a map-style dataset. `store` writes them.

A store is a folder of safetensors shards plus `index.json`. Each token has its features (A * Ht), the input of the
target's output layer (Ht), and, where the next token is supervised, the target's own first choice.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import Dataset


TOKEN_FIELDS = ("input_ids", "labels", "top1")
WIDE_FIELDS = ("features", "last_hidden")
SCALES = "feature_scales"

FP8 = torch.float8_e4m3fn


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def is_whole(shard: Path) -> bool:
    """Whether a shard is there, and as long as its header says."""
    try:
        with safe_open(shard, framework="pt"):
            return True
    except Exception:  # safetensors' own error type is not public in every version
        return False


def to_fp8(features: torch.Tensor, num_layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (T, A * Ht) as eight-bit floats, and (T, A) float32 scales: one for each layer's vector of a token.

    The largest value of a vector becomes the largest eight-bit float, so that the few huge channels of a residual
    stream fit; every value down to about 1/28,000 of it is off by 1/16 of itself at most.
    """
    vectors = features.float().unflatten(-1, (num_layers, -1))
    scales = vectors.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny * 2**10) / torch.finfo(FP8).max
    return (vectors / scales[..., None]).to(FP8).flatten(-2), scales


def from_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(T, A * Ht) bfloat16, from what [`to_fp8`] made."""
    vectors = values.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return vectors.flatten(-2).to(torch.bfloat16)


def check_first_choices(target, last_hidden: torch.Tensor, top1: torch.Tensor, directory: Path) -> None:
    """Raise when the target's output layer disagrees with the first choices that were stored: it is another target.

    The two need not be equal everywhere: the stored states were rounded.
    """
    taught = (top1 >= 0).nonzero()[:, 0][:64]
    if not len(taught):
        return
    logits = target.get_output_embeddings()(last_hidden[taught].to(target.device, target.dtype))
    agreement = float((logits.max(-1).indices.cpu() == top1[taught]).float().mean())
    if agreement < 0.5:
        raise ValueError(
            f"{directory} holds features of another target: the output layer of this {type(target).__name__} agrees "
            f"with {agreement:.0%} of the first choices stored there. Take the target that they are of, or store "
            "this one's into another folder"
        )


class StoredFeatures(Dataset):
    """The rows of a store, read on demand (memory-mapped), for `Eagle3Trainer(train_dataset=...)`.

    A map-style dataset with the manners of `datasets`: `column_names`, `select`, `shuffle`, `train_test_split`; none
    of them reads a feature. Items have `input_ids`, `labels`, `top1` (T,) int64, `features` (T, A * Ht) and
    `last_hidden` (T, Ht) in the dtype of the store (bfloat16 where the store has eight-bit floats).

    Args:
        directory: What `write_features` filled.
        rows: Only these rows of the store, such as `range(1000)`; the others can be held out for evaluation.

    Raises:
        ValueError: shards are missing or cut off, or `rows` reaches beyond the store.
    """

    column_names = [*TOKEN_FIELDS, *WIDE_FIELDS]

    def __init__(self, directory: str | os.PathLike, rows: Sequence[int] | None = None):
        self.directory = Path(directory)
        self.index: dict[str, Any] = json.loads((self.directory / "index.json").read_text())
        total = self.index["rows"]
        self.rows = range(total) if rows is None else rows
        if len(self.rows) and (min(self.rows) < 0 or max(self.rows) >= total):
            raise ValueError(f"{self.rows} was asked for, but {directory} has the rows 0 to {total - 1}")
        self._files: dict[int, Any] = {}
        self._offsets: list[list[int]] = []
        shards = -(-total // self.index["shard_rows"])
        missing = [i for i in range(shards) if not is_whole(shard_path(self.directory, i))]
        if missing:
            raise ValueError(
                f"{directory} lacks {len(missing)} of {shards} shards: run the same `features` call again"
            )
        for shard in range(shards):
            self._offsets.append([0, *self._open(shard).get_tensor("lengths").cumsum(0).tolist()])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        shard, start, end = self._place(i)
        file = self._open(shard)
        item = {name: file.get_slice(name)[start:end] for name in (*TOKEN_FIELDS, *WIDE_FIELDS)}
        if item["features"].dtype == FP8:
            item["features"] = from_fp8(item["features"], file.get_slice(SCALES)[start:end])
        return {name: value.long() if name in TOKEN_FIELDS else value for name, value in item.items()}

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, for grouping by length."""
        places = (self._place(i) for i in range(len(self)))
        return [end - start for _, start, end in places]

    def label_rows(self) -> Iterator[dict[str, torch.Tensor]]:
        """All rows' `labels` only, for counting tokens without touching the features."""
        return self.token_rows("labels")

    def token_rows(self, name: str) -> Iterator[dict[str, torch.Tensor]]:
        """All rows' `input_ids`, `labels` or `top1` only."""
        for i in range(len(self)):
            shard, start, end = self._place(i)
            yield {name: self._open(shard).get_slice(name)[start:end].long()}

    # ----- the manners of `datasets` --------------------------------------------------------------------------------

    def select(self, indices: Iterable[int]) -> "StoredFeatures":
        """These rows of the present ones, in this order."""
        return StoredFeatures(self.directory, [self.rows[i] for i in indices])

    def shuffle(self, seed: int | None = None) -> "StoredFeatures":
        """The rows in another order. Trainer shuffles by itself."""
        return self.select(np.random.default_rng(seed).permutation(len(self)).tolist())

    def train_test_split(self, test_size: int | float = 0.25, seed: int | None = None) -> dict[str, "StoredFeatures"]:
        """`{"train": ..., "test": ...}`: a number or a share of the rows, those that `datasets` draws for a seed."""
        count = test_size if isinstance(test_size, int) else math.ceil(test_size * len(self))
        if not 0 < count < len(self):
            raise ValueError(f"test_size {test_size} of {len(self)} rows leaves one part empty")
        drawn = np.random.default_rng(seed).permutation(len(self)).tolist()
        return {"train": self.select(drawn[count:]), "test": self.select(drawn[:count])}

    # ----- does it fit ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, target: nn.Module, layer_ids: list[int]) -> None:
        """Raise unless these are features of `target` at `layer_ids`; both sides are named."""
        if self.index["layer_ids"] != layer_ids:
            raise ValueError(
                f"{self.directory} stores hidden_states indices {self.index['layer_ids']}, but the draft reads "
                f"{layer_ids}: store the features again, or create the draft with "
                f"target_layer_ids={self.index['layer_ids']}"
            )
        width = target.config.get_text_config().hidden_size
        if self.index["hidden_size"] != width:
            raise ValueError(
                f"{self.directory} holds features of width {self.index['hidden_size']}, but {type(target).__name__} "
                f"has hidden_size {width}: they are of another target"
            )
        if len(self):
            first = self[0]
            check_first_choices(target, first["last_hidden"], first["top1"], self.directory)

    def _place(self, i: int) -> tuple[int, int, int]:
        """Shard of the i-th row, and its first and past-the-last token there."""
        shard, row = divmod(self.rows[int(i)], self.index["shard_rows"])
        start, end = self._offsets[shard][row : row + 2]
        return shard, start, end

    def _open(self, shard: int):
        if shard not in self._files:
            self._files[shard] = safe_open(shard_path(self.directory, shard), framework="pt")
        return self._files[shard]

    def __getstate__(self):
        return {**self.__dict__, "_files": {}}  # open files do not travel to worker processes
