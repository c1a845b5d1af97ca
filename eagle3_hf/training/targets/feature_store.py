"""Target features on disk, so that the target runs once however long a head trains. `stored` reads them.

Shards are written whole or not at all: into a file of another name, synced, then renamed. So an interrupted run goes
on where it stopped, and what is there can be trusted.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm.auto import tqdm

from ...model.features import FeatureReader
from ...model.target_modules import target_vocab_size
from ...ttt.loss import IGNORE_INDEX
from .output_layer import OutputLayer
from .stored_features import FP8, SCALES, StoredFeatures, check_first_choices, is_whole, shard_path, to_fp8


def projected_bytes(num_tokens: int, hidden_size: int, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Size of a store: `A` features and the last hidden state of every token, plus three small integers.

    With eight-bit floats every feature has a scale, and the last hidden state stays in bfloat16.
    """
    values = num_layers * hidden_size * dtype.itemsize + hidden_size * _last_dtype(dtype).itemsize
    return num_tokens * (values + (num_layers * 4 if dtype == FP8 else 0) + 3 * 4)


def _last_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the last hidden state: what is learnt is made of it, so it is never rounded to eight bits."""
    return torch.bfloat16 if dtype == FP8 else dtype


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
        dtype: Of the stored features. With `torch.float8_e4m3fn` the features take half the room of bfloat16 and
            are off by 1/16 of themselves at most; the last hidden state stays in bfloat16.
        part: `(i, n)` writes every n-th shard from the i-th on, for n processes side by side.

    Raises:
        ValueError: the folder holds a store of other data or of another target, or the target's logits cannot be
            computed again from its last hidden state.
        OSError: the disk has no room for what is still to be written, or filled up meanwhile.
    """
    target.eval()
    if not len(dataset):
        raise ValueError("there are no rows to store features of: the dataset is empty")
    if shard_rows < 1:
        raise ValueError(f"shard_rows is {shard_rows}; a file needs at least 1 row")
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is {part}; it must be (i, n) with 0 <= i < n")
    FeatureReader(target, layer_ids)  # rejects what it cannot read, before the folder is bound to it
    output = _output_layer(target, torch.as_tensor(dataset[0]["input_ids"], device=target.device)[None, :32])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    index = _index(dataset, layer_ids, shard_rows, dtype, target)
    _check_index(directory, index)
    count = -(-len(dataset) // shard_rows)
    done = [path for path in (shard_path(directory, i) for i in range(count)) if is_whole(path)]
    if done:
        _check_shard(target, done[0], directory)
    size = _require_room(index, directory, sum(path.stat().st_size for path in done))
    _write_index(directory, index)
    shards = range(part[0], count, part[1])
    for shard in tqdm(shards, desc=f"Storing features ({size / 1e9:.3g} GB)", unit="shard", disable=not progress):
        path = shard_path(directory, shard)
        if path in done:
            continue
        start = shard * shard_rows
        rows = [dataset[i] for i in range(start, min(start + shard_rows, len(dataset)))]
        with FeatureReader(target, layer_ids) as reader:
            tensors = _run_rows(output, reader, rows, batch_tokens, dtype)
        _write_shard(tensors, path)


def _write_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """All of the file under its name, or nothing: also after a kill, a full disk or a power cut."""
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, partial)
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free
        raise OSError(
            f"{path.name} could not be written ({error}); {path.parent} has {free / 1e9:.3g} GB free. The shards "
            "before it are whole: make room and run the same call again, it goes on from there"
        ) from error


def _output_layer(target: nn.Module, input_ids: torch.Tensor) -> OutputLayer:
    """The target's output layer; raises unless its logits can be computed again from what is to be stored."""
    output = OutputLayer(target, torch.arange(target_vocab_size(target)))
    if not output.fits(input_ids):
        raise ValueError(
            f"the logits of {type(target).__name__} cannot be computed from its last hidden state alone (compared on "
            "the first row): train it online, pass the tokenised data itself to Eagle3Trainer"
        )
    return output


def _require_room(index: dict[str, Any], directory: Path, written: int) -> int:
    """Bytes that the store will take; raises when the disk lacks room for those not yet written."""
    size = projected_bytes(
        index["tokens"], index["hidden_size"], len(index["layer_ids"]), getattr(torch, index["dtype"])
    )
    missing, free = size - written, shutil.disk_usage(directory).free
    if missing > free:
        raise OSError(
            f"the features of {index['tokens']} tokens take {size / 1e9:.3g} GB, of which {missing / 1e9:.3g} GB are "
            f"still to be written, but {directory} has {free / 1e9:.3g} GB free: store fewer chats, or train online"
        )
    return size


def _run_rows(
    output: OutputLayer, reader: FeatureReader, rows: list[dict], batch_tokens: int, dtype
) -> dict[str, torch.Tensor]:
    """One shard's tensors: the rows' tokens one after the other, in the rows' order.

    No mask: rows are padded on the right, causality keeps the padding out.
    """
    target = output.target
    parts: list[dict[str, torch.Tensor] | None] = [None] * len(rows)
    for batch in _length_batches([len(row["input_ids"]) for row in rows], batch_tokens):
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(rows[i]["input_ids"]) for i in batch], batch_first=True)
        hidden = output.hidden(input_ids=ids.to(target.device))
        features = reader.take()
        for position, i in enumerate(batch):
            length = len(rows[i]["input_ids"])
            labels = torch.as_tensor(rows[i]["labels"])
            parts[i] = {
                "input_ids": ids[position, :length].int(),
                "labels": labels.int(),
                **_stored(features[position, :length], len(reader.layer_ids), dtype),
                "last_hidden": hidden[position, :length].to(_last_dtype(dtype)).cpu(),
                "top1": _first_choices(output, hidden[position, :length], labels),
            }
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    joined["lengths"] = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int32)
    return joined


def _stored(features: torch.Tensor, num_layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if dtype != FP8:
        return {"features": features.to(dtype).cpu()}
    values, scales = to_fp8(features, num_layers)
    return {"features": values.cpu(), SCALES: scales.cpu()}


def _length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices grouped by similar length, each group at most `batch_tokens` when padded."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _first_choices(output: OutputLayer, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(T,) int32: the target's argmax at `j` where token `j + 1` is supervised, else -1."""
    choices = torch.full(labels.shape, -1, dtype=torch.int32)
    taught = (labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
    if len(taught):
        choices[taught] = output.choices(hidden[taught.to(hidden.device)]).int().cpu()
    return choices


def _check_shard(target, shard: Path, directory: Path) -> None:
    with safe_open(shard, framework="pt") as file:
        check_first_choices(target, file.get_slice("last_hidden")[:512], file.get_slice("top1")[:512], directory)


def _fingerprint(dataset) -> tuple[int, str]:
    """Tokens of a dataset, and a short SHA-256 of all its ids and labels; one row in memory at a time."""
    tokens, digest = 0, hashlib.sha256()
    for row in dataset:
        tokens += len(row["input_ids"])
        for name in ("input_ids", "labels"):
            digest.update(np.asarray(row[name], dtype=np.int32).tobytes())
            digest.update(b"|")
    return tokens, digest.hexdigest()[:16]


def _index(dataset, layer_ids: list[int], shard_rows: int, dtype: torch.dtype, target) -> dict[str, Any]:
    """What the store holds."""
    tokens, fingerprint = _fingerprint(dataset)
    return {
        "rows": len(dataset),
        "tokens": tokens,
        "data": fingerprint,
        "layer_ids": list(layer_ids),
        "shard_rows": shard_rows,
        "hidden_size": target.config.get_text_config().hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "target": getattr(target.config, "_name_or_path", ""),
    }


def _check_index(directory: Path, index: dict[str, Any]) -> None:
    """Refuse a folder that holds something else."""
    path = directory / "index.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    different = [key for key in known if key != "target" and known[key] != index.get(key)]
    if different:
        words = {"data": "other chats, or the same encoded otherwise"}  # hashes tell nobody anything
        pairs = ", ".join(words.get(key, f"{key} {known[key]} (now {index.get(key)})") for key in different)
        raise ValueError(f"{directory} holds a store of something else: {pairs}. Store into another folder")


def _write_index(directory: Path, index: dict[str, Any]) -> None:
    path = directory / "index.json"
    if path.exists():
        return
    partial = path.with_suffix(f".{os.getpid()}")  # several processes may start side by side
    partial.write_text(json.dumps(index, indent=1))
    partial.rename(path)


__all__ = ["StoredFeatures", "projected_bytes", "write_features"]
