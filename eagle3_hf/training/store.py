"""Target features on disk, so that the target runs once however long a head trains.

A store is a folder of safetensors shards plus `index.json`. Each token has its features (A * Ht), the input of the
target's output layer (Ht), and, where the next token is supervised, the target's own first choice. Shards are written
whole or not at all, so an interrupted run goes on where it stopped.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
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
    """Run the target over a tokenised dataset and store what training needs; the progress bar names the size first.

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
        ValueError: the folder holds a store of other data or of another target, or the target post-processes its
            logits (soft-capping, scaling), so that they cannot be recomputed from its last hidden state.
        OSError: the disk has no room for what is still to be written.
    """
    target.eval()
    if not len(dataset):
        raise ValueError("there are no rows to store features of: the dataset is empty")
    check_plain_logits(target, torch.as_tensor(dataset[0]["input_ids"], device=target.device)[None])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    index = _write_index(directory, dataset, layer_ids, shard_rows, dtype, target)
    done = sorted(directory.glob("shard-*.safetensors"))
    if done:
        with safe_open(done[0], framework="pt") as file:
            _check_target(target, file.get_slice("last_hidden")[:512], file.get_slice("top1")[:512], directory)
    size = _require_room(index, directory, sum(path.stat().st_size for path in done))
    shards = range(part[0], -(-len(dataset) // shard_rows), part[1])
    for shard in tqdm(shards, desc=f"Storing features ({size / 1e9:.3g} GB)", unit="shard", disable=not progress):
        path = _shard(directory, shard)
        if path.exists():
            continue
        start = shard * shard_rows
        rows = [dataset[i] for i in range(start, min(start + shard_rows, len(dataset)))]
        with FeatureReader(target, layer_ids) as reader:
            tensors = _run_rows(target, reader, rows, batch_tokens, dtype)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        partial.rename(path)


def check_plain_logits(target: nn.Module, input_ids: torch.Tensor) -> None:
    """Raise unless the target's logits are its output layer applied to its last hidden state."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    head = target.get_output_embeddings()
    handle = head.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    try:
        logits = target(input_ids=input_ids).logits
    finally:
        handle.remove()
    hidden, raw = seen[-1]
    again = _last_hidden(target, input_ids)  # a second forward, so not equal to the last bit
    for name, difference, bound in (
        ("logits", _difference(logits, raw), 1e-5),
        ("last hidden state", _difference(hidden, again), 1e-2),
    ):
        if difference > bound:
            raise ValueError(
                f"{type(target).__name__} post-processes its {name} (soft-capping or scaling), by up to "
                f"{difference:.2%} on the first row: what it says cannot be recomputed from stored features. Train it "
                "online: pass the tokenised data itself to Eagle3Trainer"
            )


def _difference(given: torch.Tensor, plain: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    plain = plain.float()
    return float((given.to(plain) - plain).abs().max() / plain.abs().max())


def _last_hidden(target: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """(B, T, Ht), the input of the output layer. No mask: rows are right-padded, causality keeps the padding out."""
    return target.base_model(input_ids=input_ids, use_cache=False)[0]


def _shard(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def _require_room(index: dict[str, Any], directory: Path, written: int) -> int:
    """Bytes that the store will take; raises when the disk lacks room for those not yet written."""
    size = projected_bytes(
        index["tokens"], index["hidden_size"], len(index["layer_ids"]), getattr(torch, index["dtype"]).itemsize
    )
    missing, free = size - written, shutil.disk_usage(directory).free
    if missing > free:
        raise OSError(
            f"the features of {index['tokens']} tokens take {size / 1e9:.3g} GB, of which {missing / 1e9:.3g} GB are "
            f"still to be written, but {directory} has {free / 1e9:.3g} GB free: store fewer chats, or train online"
        )
    return size


def _run_rows(target, reader: FeatureReader, rows: list[dict], batch_tokens: int, dtype) -> dict[str, torch.Tensor]:
    """One shard's tensors: the rows' tokens one after the other, in the rows' order."""
    parts: list[dict[str, torch.Tensor] | None] = [None] * len(rows)
    for batch in _length_batches([len(row["input_ids"]) for row in rows], batch_tokens):
        ids = nn.utils.rnn.pad_sequence([torch.tensor(rows[i]["input_ids"]) for i in batch], batch_first=True)
        hidden = _last_hidden(target, ids.to(target.device))
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


def _write_index(
    directory: Path, dataset, layer_ids: list[int], shard_rows: int, dtype: torch.dtype, target
) -> dict[str, Any]:
    """What the store holds, written on the first call and compared on the others."""
    rows = [[torch.as_tensor(row[name]).tolist() for name in ("input_ids", "labels")] for row in dataset]
    index = {
        "rows": len(rows),
        "tokens": sum(len(ids) for ids, _ in rows),
        "data": hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16],
        "layer_ids": list(layer_ids),
        "shard_rows": shard_rows,
        "hidden_size": target.config.get_text_config().hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "target": getattr(target.config, "_name_or_path", ""),
    }
    path = directory / "index.json"
    if path.exists():
        known = json.loads(path.read_text())
        different = [key for key in known if key != "target" and known[key] != index.get(key)]
        if different:
            pairs = ", ".join(f"{key} {known[key]} (now {index.get(key)})" for key in different)
            raise ValueError(f"{directory} holds a store of something else: {pairs}. Store into another folder")
        return index
    partial = path.with_suffix(f".{os.getpid()}")  # two processes may start side by side
    partial.write_text(json.dumps(index, indent=1))
    partial.rename(path)
    return index


def _check_target(target, last_hidden: torch.Tensor, top1: torch.Tensor, directory: Path) -> None:
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
            f"with {agreement:.0%} of the first choices stored there. Store into another folder"
        )


class StoredFeatures(Dataset):
    """The rows of a store, read on demand (memory-mapped), for `Eagle3Trainer(train_dataset=...)`.

    Items have `input_ids`, `labels`, `top1` (T,) int64, `features` (T, A * Ht) and `last_hidden` (T, Ht).

    Args:
        directory: What `write_features` filled.
        rows: Only these rows of the store, such as `range(1000)`; the others can be held out for evaluation.

    Raises:
        ValueError: shards are missing, or `rows` reaches beyond the store.
    """

    def __init__(self, directory: str | os.PathLike, rows: range | None = None):
        self.directory = Path(directory)
        self.index: dict[str, Any] = json.loads((self.directory / "index.json").read_text())
        total = self.index["rows"]
        self.rows = range(total) if rows is None else rows
        if len(self.rows) and (min(self.rows) < 0 or max(self.rows) >= total):
            raise ValueError(f"{self.rows} was asked for, but {directory} has the rows 0 to {total - 1}")
        self._files: dict[int, Any] = {}
        self._offsets: list[list[int]] = []
        shards = -(-total // self.index["shard_rows"])
        missing = [i for i in range(shards) if not _shard(self.directory, i).exists()]
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
        item = {name: file.get_slice(name)[start:end] for name in (*_TOKEN_FIELDS, *_WIDE_FIELDS)}
        return {name: value.long() if name in _TOKEN_FIELDS else value for name, value in item.items()}

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row, for grouping by length."""
        places = (self._place(i) for i in range(len(self)))
        return [end - start for _, start, end in places]

    def label_rows(self) -> Iterator[dict[str, torch.Tensor]]:
        """All rows' `labels` only, for counting tokens without touching the features."""
        for i in range(len(self)):
            shard, start, end = self._place(i)
            yield {"labels": self._open(shard).get_slice("labels")[start:end].long()}

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
            _check_target(target, first["last_hidden"], first["top1"], self.directory)

    def _place(self, i: int) -> tuple[int, int, int]:
        """Shard of the i-th row, and its first and past-the-last token there."""
        shard, row = divmod(self.rows[int(i)], self.index["shard_rows"])
        start, end = self._offsets[shard][row : row + 2]
        return shard, start, end

    def _open(self, shard: int):
        if shard not in self._files:
            self._files[shard] = safe_open(_shard(self.directory, shard), framework="pt")
        return self._files[shard]

    def __getstate__(self):
        return {**self.__dict__, "_files": {}}  # open files do not travel to worker processes
