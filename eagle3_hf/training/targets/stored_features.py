"""Stored features as a map-style dataset of examples; `feature_store` writes them.

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
from torch.utils.data import Dataset
from transformers import PreTrainedModel


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
    """Turn features (T, A * Ht) into eight-bit floats and float32 scales (T, A), one for each layer's vector.

    The largest value of a vector becomes the largest eight-bit float, so that the few huge channels of a residual
    stream fit; every value down to about 1/28,000 of it is off by 1/16 of itself at most.
    """
    vectors = features.float().unflatten(-1, (num_layers, -1))
    scales = vectors.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny * 2**10) / torch.finfo(FP8).max
    return (vectors / scales[..., None]).to(FP8).flatten(-2), scales


def from_fp8(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Turn what [`to_fp8`] made into features (T, A * Ht) in bfloat16."""
    vectors = values.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
    return vectors.flatten(-2).to(torch.bfloat16)


def check_first_choices(target, last_hidden: torch.Tensor, top1: torch.Tensor, directory: Path) -> None:
    """Check that stored features are of this target, by the first choices of its output layer.

    The choices need not be equal everywhere, since the stored states were rounded.

    Raises:
        ValueError: the output layer disagrees with the stored first choices.
    """
    taught = (top1 >= 0).nonzero()[:, 0][:64]
    if not len(taught):
        return
    logits = target.get_output_embeddings()(last_hidden[taught].to(target.device, target.dtype))
    agreement = float((logits.max(-1).indices.cpu() == top1[taught]).float().mean())
    if agreement < 0.5:
        raise ValueError(
            f"{directory} holds features of another target: the output layer of this {type(target).__name__} agrees "
            f"with {agreement:.0%} of the first choices stored there. Use the target that they belong "
            "to, or store the features of this one in another folder"
        )


class StoredFeatures(Dataset):
    """The examples of a store, read on demand (memory-mapped), for `Eagle3Trainer(train_dataset=...)`.

    This is a map-style dataset with a `datasets`-like API: `column_names`, `select`, `shuffle`, `train_test_split`;
    none of them reads a feature. Items have `input_ids`, `labels`, `top1` (T,) int64, `features` (T, A * Ht) and
    `last_hidden` (T, Ht) in the dtype of the store (bfloat16 where the store has eight-bit floats).

    Args:
        directory: Folder that `write_features` has filled.
        indices: Only these examples of the store, such as `range(1000)`; the others can be held out for evaluation.

    Raises:
        ValueError: shards are missing or cut off, or `indices` reach beyond the store.
    """

    column_names = [*TOKEN_FIELDS, *WIDE_FIELDS]

    def __init__(self, directory: str | os.PathLike, indices: Sequence[int] | None = None):
        self.directory = Path(directory)
        self.index: dict[str, Any] = json.loads((self.directory / "index.json").read_text())
        total = self.index["num_examples"]
        self.indices = range(total) if indices is None else indices
        if len(self.indices) and (min(self.indices) < 0 or max(self.indices) >= total):
            raise ValueError(f"indices are {self.indices}, but {directory} has the examples 0 to {total - 1}")
        self._files: dict[int, Any] = {}
        self._offsets: list[list[int]] = []
        shards = -(-total // self.index["shard_size"])
        missing = [i for i in range(shards) if not is_whole(shard_path(self.directory, i))]
        if missing:
            raise ValueError(
                f"{directory} lacks {len(missing)} of {shards} shards: run the same `features` call again"
            )
        for shard in range(shards):
            self._offsets.append([0, *self._open(shard).get_tensor("lengths").cumsum(0).tolist()])

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        shard, start, end = self._locate(i)
        file = self._open(shard)
        item = {name: file.get_slice(name)[start:end] for name in (*TOKEN_FIELDS, *WIDE_FIELDS)}
        if item["features"].dtype == FP8:
            item["features"] = from_fp8(item["features"], file.get_slice(SCALES)[start:end])
        return {name: value.long() if name in TOKEN_FIELDS else value for name, value in item.items()}

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every example, for grouping by length."""
        spans = (self._locate(i) for i in range(len(self)))
        return [end - start for _, start, end in spans]

    def iter_labels(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield only the `labels` of every example, so that tokens are counted without reading the features."""
        return self.iter_column("labels")

    def iter_column(self, name: str) -> Iterator[dict[str, torch.Tensor]]:
        """Yield only the `input_ids`, `labels` or `top1` of every example."""
        for i in range(len(self)):
            shard, start, end = self._locate(i)
            yield {name: self._open(shard).get_slice(name)[start:end].long()}

    # ----- `datasets`-like API --------------------------------------------------------------------------------------

    def select(self, indices: Iterable[int]) -> "StoredFeatures":
        """Return these of the present examples, in this order."""
        return StoredFeatures(self.directory, [self.indices[i] for i in indices])

    def shuffle(self, seed: int | None = None) -> "StoredFeatures":
        """Return the examples in another order. Trainer shuffles by itself."""
        return self.select(np.random.default_rng(seed).permutation(len(self)).tolist())

    def train_test_split(self, test_size: int | float = 0.25, seed: int | None = None) -> dict[str, "StoredFeatures"]:
        """Split into `{"train": ..., "test": ...}`; a seed draws the same examples as in `datasets`.

        Args:
            test_size: Number or share of the examples in `"test"`.
            seed: Seed of the drawing.

        Raises:
            ValueError: one part would be empty.
        """
        count = test_size if isinstance(test_size, int) else math.ceil(test_size * len(self))
        if not 0 < count < len(self):
            raise ValueError(f"test_size is {test_size}, which leaves one part of {len(self)} examples empty")
        drawn = np.random.default_rng(seed).permutation(len(self)).tolist()
        return {"train": self.select(drawn[count:]), "test": self.select(drawn[:count])}

    # ----- does the store fit ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def check(self, target: PreTrainedModel, layer_ids: list[int]) -> None:
        """Check that these are features of `target` at `layer_ids`.

        Raises:
            ValueError: they are not; the message names both sides.
        """
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

    def _locate(self, i: int) -> tuple[int, int, int]:
        """Return the shard of the i-th example, and its first and past-the-last token there."""
        shard, number = divmod(self.indices[int(i)], self.index["shard_size"])
        start, end = self._offsets[shard][number : number + 2]
        return shard, start, end

    def _open(self, shard: int):
        if shard not in self._files:
            self._files[shard] = safe_open(shard_path(self.directory, shard), framework="pt")
        return self._files[shard]

    def __getstate__(self):
        return {**self.__dict__, "_files": {}}  # open files do not travel to worker processes
