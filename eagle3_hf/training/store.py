"""Target features on disk, so that the target runs once however long a head trains.

A store is a folder of safetensors shards plus `index.json`. Each token has its features (A * Ht), the input of the
target's output layer (Ht), and, where the next token is supervised, the target's own first choice. Shards are written
whole or not at all, so an interrupted run goes on where it stopped.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from ..features import FeatureReader
from ..ttt.loss import IGNORE_INDEX


_TOKEN_FIELDS = ("input_ids", "labels", "top1")
_WIDE_FIELDS = ("features", "last_hidden")


def projected_bytes(num_tokens: int, hidden_size: int, num_layers: int, bytes_per_value: int = 2) -> int:
    """Size of a store: `A` features and the last hidden state of every token, plus three small integers."""
    return num_tokens * ((num_layers + 1) * hidden_size * bytes_per_value + 3 * 4)


@torch.no_grad()
def write_features(
    target: nn.Module,
    dataset,
    directory: str | os.PathLike,
    layer_ids: list[int],
    *,
    batch_tokens: int = 1536,
    shard_rows: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    part: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> None:
    """Run the target over a tokenised dataset and store what training needs.

    Args:
        target: In the dtype to run it in; put on eval here.
        dataset: Rows with `input_ids` and `labels` (see `prepare_dataset`).
        directory: Created; finished shards in it are kept, so that the same call resumes.
        layer_ids: `hidden_states` indices, as in the head's config.
        batch_tokens: Padded tokens a forward.
        shard_rows: Rows a file.
        dtype: Of the stored features.
        part: `(i, n)` writes every n-th shard from the i-th on, for n processes side by side.

    Raises:
        ValueError: the folder holds a store of other data, or the target post-processes its logits (soft-capping,
            scaling), so that they cannot be recomputed from its last hidden state.
    """
    target.eval()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_index(directory, dataset, layer_ids, shard_rows, target)
    check_plain_logits(target, torch.tensor([dataset[0]["input_ids"]], device=target.device))
    starts = range(part[0] * shard_rows, len(dataset), part[1] * shard_rows)
    for start in tqdm(starts, desc="Storing features", unit="shard", disable=not progress):
        path = directory / f"shard-{start // shard_rows:05d}.safetensors"
        if path.exists():
            continue
        rows = [dataset[i] for i in range(start, min(start + shard_rows, len(dataset)))]
        with FeatureReader(target, layer_ids) as reader:
            tensors = _run_rows(target, reader, rows, batch_tokens, dtype)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(path)


def check_plain_logits(target: nn.Module, input_ids: torch.Tensor) -> None:
    """Raise unless the target's logits are its output layer applied to its last hidden state."""
    logits = target(input_ids=input_ids).logits.float()
    again = target.get_output_embeddings()(_last_hidden(target, input_ids, None)).float()
    if not torch.allclose(logits, again, rtol=1e-2, atol=1e-2 * float(logits.abs().max())):
        raise ValueError(
            f"{type(target).__name__} post-processes its logits (soft-capping or scaling): their largest difference "
            f"from lm_head(last hidden state) is {float((logits - again).abs().max()):.3g}. Train it online: pass the "
            "target to Eagle3Trainer with tokenised data instead of stored features"
        )


def _last_hidden(target: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    return target.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]


def _run_rows(target, reader: FeatureReader, rows: list[dict], batch_tokens: int, dtype) -> dict[str, torch.Tensor]:
    """One shard's tensors: the rows' tokens one after the other, in the rows' order."""
    parts: list[dict[str, torch.Tensor] | None] = [None] * len(rows)
    for batch in _length_batches([len(row["input_ids"]) for row in rows], batch_tokens):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(rows[i]["input_ids"]) for i in batch], batch_first=True)
        hidden = _last_hidden(target, ids.to(target.device), None)  # right-padded: causality keeps the padding out
        features = reader.take(dtype=dtype)
        for position, i in enumerate(batch):
            length = len(rows[i]["input_ids"])
            labels = torch.tensor(rows[i]["labels"])
            parts[i] = {
                "input_ids": ids[position, :length].int(),
                "labels": labels.int(),
                "features": features[position, :length].cpu(),
                "last_hidden": hidden[position, :length].to(dtype).cpu(),
                "top1": _first_choices(target, hidden[position, :length], labels),
            }
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    joined["lengths"] = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int32)
    return joined


def _length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices grouped by similar length, each group at most `batch_tokens` when padded."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _first_choices(target, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(T,) int32: the target's argmax at `j` where token `j + 1` is supervised, else -1."""
    choices = torch.full(labels.shape, -1, dtype=torch.int32)
    taught = (labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
    if len(taught):
        logits = target.get_output_embeddings()(hidden[taught.to(hidden.device)])
        choices[taught] = logits.max(-1).indices.int().cpu()  # in bfloat16 on CPU, argmax is four times slower
    return choices


def _write_index(directory: Path, dataset, layer_ids: list[int], shard_rows: int, target) -> None:
    index = {
        "rows": len(dataset),
        "tokens": sum(len(row) for row in dataset["input_ids"]),
        "layer_ids": list(layer_ids),
        "shard_rows": shard_rows,
        "hidden_size": target.config.get_text_config().hidden_size,
        "target": getattr(target.config, "_name_or_path", ""),
    }
    path = directory / "index.json"
    if path.exists():
        known = json.loads(path.read_text())
        different = {key: (known.get(key), value) for key, value in index.items() if known.get(key) != value}
        different.pop("target", None)
        if different:
            raise ValueError(f"{directory} holds a store of something else; (stored, now): {different}")
    path.write_text(json.dumps(index, indent=1))


class StoredFeatures(Dataset):
    """The rows of a store, read on demand (memory-mapped), for `Eagle3Trainer(train_dataset=...)`.

    Items have `input_ids`, `labels`, `top1` (T,) int64, `features` (T, A * Ht) and `last_hidden` (T, Ht).
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        self.index: dict[str, Any] = json.loads((self.directory / "index.json").read_text())
        self._files: dict[int, Any] = {}
        self._offsets: list[list[int]] = []
        shards = -(-self.index["rows"] // self.index["shard_rows"])
        missing = [i for i in range(shards) if not self._path(i).exists()]
        if missing:
            raise ValueError(
                f"{directory} lacks {len(missing)} of {shards} shards: run the same `features` call again"
            )
        for shard in range(shards):
            self._offsets.append([0, *self._open(shard).get_tensor("lengths").cumsum(0).tolist()])

    def __len__(self) -> int:
        return self.index["rows"]

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        shard, row = divmod(int(i), self.index["shard_rows"])
        start, end = self._offsets[shard][row : row + 2]
        file = self._open(shard)
        item = {name: file.get_slice(name)[start:end] for name in (*_TOKEN_FIELDS, *_WIDE_FIELDS)}
        return {name: value.long() if name in _TOKEN_FIELDS else value for name, value in item.items()}

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, for grouping by length."""
        return [end - start for offsets in self._offsets for start, end in zip(offsets, offsets[1:], strict=False)]

    def label_rows(self):
        """All rows' `labels` only, for counting tokens without touching the features."""
        for shard in range(len(self._offsets)):
            labels = self._open(shard).get_tensor("labels")
            for start, end in zip(self._offsets[shard], self._offsets[shard][1:], strict=False):
                yield {"labels": labels[start:end].long()}

    def _path(self, shard: int) -> Path:
        return self.directory / f"shard-{shard:05d}.safetensors"

    def _open(self, shard: int):
        if shard not in self._files:
            self._files[shard] = safe_open(self._path(shard), framework="pt")
        return self._files[shard]

    def __getstate__(self):
        return {**self.__dict__, "_files": {}}  # open files do not travel to worker processes
