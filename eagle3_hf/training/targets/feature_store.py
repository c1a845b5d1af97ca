"""Target features on disk, so that the target runs only once, however long a head trains.

`stored_features` reads what is written here.

A shard is written to a file of another name, synced and then renamed, so that it is either complete or absent. An
interrupted run therefore resumes where it stopped, and existing shards can be trusted.
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
from transformers import PreTrainedModel

from ...model.features import FeatureReader
from ...model.target_modules import target_vocab_size
from ...ttt.loss import IGNORE_INDEX
from .output_layer import OutputLayer
from .stored_features import FP8, SCALES, StoredFeatures, check_first_choices, is_whole, shard_path, to_fp8


def projected_bytes(num_tokens: int, hidden_size: int, num_layers: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the size of a store: `A` features and the last hidden state of every token, plus three small integers.

    With eight-bit floats every feature has a scale, and the last hidden state stays in bfloat16.
    """
    values = num_layers * hidden_size * dtype.itemsize + hidden_size * _last_dtype(dtype).itemsize
    return num_tokens * (values + (num_layers * 4 if dtype == FP8 else 0) + 3 * 4)


def _last_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the last hidden state, which is never rounded to eight bits: the teacher is made of it."""
    return torch.bfloat16 if dtype == FP8 else dtype


@torch.no_grad()
def write_features(
    target: PreTrainedModel,
    dataset,
    directory: str | os.PathLike,
    layer_ids: list[int],
    *,
    batch_tokens: int = 1536,
    shard_size: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    part: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> None:
    """Run the target over a tokenised dataset and store what training needs; the progress bar names the size first.

    Args:
        target: The target, in the dtype to run it in; it is put into eval mode here.
        dataset: Examples with `input_ids` and `labels` (see `prepare_dataset`).
        directory: Folder of the store. It is created; finished shards in it are kept, so that the same call resumes.
        layer_ids: `hidden_states` indices, as in the head's config.
        batch_tokens: Number of tokens, with padding, in a forward pass.
        shard_size: Number of examples in a file.
        dtype: Data type of the stored features. With `torch.float8_e4m3fn` the features take half the room of bfloat16
            and are off by 1/16 of their value at most; the last hidden state stays in bfloat16.
        part: `(i, n)` writes every n-th shard from the i-th on, for n processes side by side.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: the folder holds a store of other data or of another target, or the target's logits cannot be
            computed again from its last hidden state.
        OSError: the disk has no room for what is still to be written, or filled up meanwhile.
    """
    target.eval()
    if not len(dataset):
        raise ValueError("there are no examples to store features of: the dataset is empty")
    if shard_size < 1:
        raise ValueError(f"shard_size is {shard_size}; a file needs at least 1 example")
    if not 0 <= part[0] < part[1]:
        raise ValueError(f"part is {part}; it must be (i, n) with 0 <= i < n")
    FeatureReader(target, layer_ids)  # raises for what it cannot read, before the folder belongs to it
    output = _output_layer(target, torch.as_tensor(dataset[0]["input_ids"], device=target.device)[None, :32])
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    index = _index(dataset, layer_ids, shard_size, dtype, target)
    _check_index(directory, index)
    count = -(-len(dataset) // shard_size)
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
        start = shard * shard_size
        examples = [dataset[i] for i in range(start, min(start + shard_size, len(dataset)))]
        with FeatureReader(target, layer_ids) as reader:
            tensors = _run_target(output, reader, examples, batch_tokens, dtype)
        _write_shard(tensors, path)


def _write_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a shard so that a file with its name is complete, even after a kill, a full disk or a power cut."""
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
            "before it are complete: make room and run the same call again, it goes on from there"
        ) from error


def _output_layer(target: PreTrainedModel, input_ids: torch.Tensor) -> OutputLayer:
    """Return the target's output layer.

    Raises:
        ValueError: its logits cannot be computed again from what is to be stored.
    """
    output = OutputLayer(target, torch.arange(target_vocab_size(target)))
    if not output.fits(input_ids):
        raise ValueError(
            f"the logits of {type(target).__name__} cannot be computed from its last hidden state alone (compared on "
            "the first example): train it online, pass the tokenised data itself to Eagle3Trainer"
        )
    return output


def _require_room(index: dict[str, Any], directory: Path, written: int) -> int:
    """Return the bytes that the store will take.

    Raises:
        OSError: the disk lacks room for those that are not written yet.
    """
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


def _run_target(
    output: OutputLayer, reader: FeatureReader, examples: list[dict], batch_tokens: int, dtype
) -> dict[str, torch.Tensor]:
    """Compute one shard's tensors: the tokens of the examples one after the other, in the order of the examples.

    There is no mask: the padding is on the right, where causal attention keeps it out.
    """
    target = output.target
    parts: list[dict[str, torch.Tensor]] = [{} for _ in examples]
    for batch in _length_batches([len(example["input_ids"]) for example in examples], batch_tokens):
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(examples[i]["input_ids"]) for i in batch], batch_first=True)
        hidden = output.hidden(input_ids=ids.to(target.device))
        features = reader.take()
        for position, i in enumerate(batch):
            length = len(examples[i]["input_ids"])
            labels = torch.as_tensor(examples[i]["labels"])
            parts[i] = {
                "input_ids": ids[position, :length].int(),
                "labels": labels.int(),
                **_stored(features[position, :length], len(reader.layer_ids), dtype),
                "last_hidden": hidden[position, :length].to(_last_dtype(dtype)).cpu(),
                "top1": _first_choices(output, hidden[position, :length], labels),
            }
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    joined["lengths"] = torch.tensor([len(example["input_ids"]) for example in examples], dtype=torch.int32)
    return joined


def _stored(features: torch.Tensor, num_layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if dtype != FP8:
        return {"features": features.to(dtype).cpu()}
    values, scales = to_fp8(features, num_layers)
    return {"features": values.cpu(), SCALES: scales.cpu()}


def _length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Group indices by similar length; each group has at most `batch_tokens` tokens when padded."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= batch_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _first_choices(output: OutputLayer, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return (T,) int32: the target's argmax at `j` where token `j + 1` is supervised, else -1."""
    choices = torch.full(labels.shape, -1, dtype=torch.int32)
    taught = (labels[1:] != IGNORE_INDEX).nonzero()[:, 0]
    if len(taught):
        choices[taught] = output.choices(hidden[taught.to(hidden.device)]).int().cpu()
    return choices


def _check_shard(target, shard: Path, directory: Path) -> None:
    with safe_open(shard, framework="pt") as file:
        check_first_choices(target, file.get_slice("last_hidden")[:512], file.get_slice("top1")[:512], directory)


def _fingerprint(dataset) -> tuple[int, str]:
    """Return the number of tokens and a short SHA-256 of all ids and labels, with one example in memory at a time."""
    tokens, digest = 0, hashlib.sha256()
    for example in dataset:
        tokens += len(example["input_ids"])
        for name in ("input_ids", "labels"):
            digest.update(np.asarray(example[name], dtype=np.int32).tobytes())
            digest.update(b"|")
    return tokens, digest.hexdigest()[:16]


def _index(dataset, layer_ids: list[int], shard_size: int, dtype: torch.dtype, target) -> dict[str, Any]:
    """Describe what the store holds."""
    tokens, fingerprint = _fingerprint(dataset)
    return {
        "num_examples": len(dataset),
        "tokens": tokens,
        "data": fingerprint,
        "layer_ids": list(layer_ids),
        "shard_size": shard_size,
        "hidden_size": target.config.get_text_config().hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "target": getattr(target.config, "_name_or_path", ""),
    }


def _check_index(directory: Path, index: dict[str, Any]) -> None:
    """Check that a folder is empty or holds the same store.

    Raises:
        ValueError: it holds something else.
    """
    path = directory / "index.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    different = [key for key in known if key != "target" and known[key] != index.get(key)]
    if different:
        words = {"data": "other chats, or the same chats encoded otherwise"}  # a hash would not help anyone
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
