"""The draft vocabulary of a dataset, kept on disk so that a large dataset is counted only once.

A file's name is a hash of everything that the choice depends on: the dataset's fingerprint, the tokenizer's vocabulary
and chat template, both sizes and the ids that are always included. Its content repeats that key with a checksum, so
that a damaged or renamed file is noticed and made anew.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...model.vocab import build_draft_vocab, coverage, tokenizer_hashes
from ...utils.logging import get_logger
from ..targets.stored_features import StoredFeatures
from .encoding import as_tokenizer, count_tokens
from .packing import PackedDataset, only_labels


logger = get_logger(__name__)


def cached_draft_vocab(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    vocab_size: int,
    size: int,
    always: Iterable[int] = (),
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Tensor, float]:
    """Return the ascending target ids `(D,)` int64 of the tokens learnt most often, and the share that they cover.

    The share, of all supervised tokens, is logged too. The result is read from the cache if the same dataset was
    counted before for the same sizes; a dataset without a fingerprint (a list, say) is counted every time.

    Args:
        dataset: examples with `labels`: a `datasets.Dataset`, `StoredFeatures`, `PackedDataset`, or any list.
        tokenizer: the target's tokenizer, which is a part of the key.
        vocab_size: size V of the target's vocabulary.
        size: size D of the draft vocabulary.
        always: ids that are included whatever their count.
        cache_dir: folder of the cache. Default: `eagle3_draft_vocab` in the cache folder of `datasets`.

    Raises:
        ValueError: see `build_draft_vocab`.
    """
    always = sorted(set(always))
    fingerprint = dataset_fingerprint(dataset)
    if fingerprint is None:
        ids, covered = _count(dataset, vocab_size, size, always)
    else:
        key = {
            "dataset": fingerprint,
            "tokenizer": tokenizer_hashes(as_tokenizer(tokenizer)) if tokenizer is not None else None,
            "vocab_size": vocab_size,
            "draft_vocab_size": size,
            "always": always,
        }
        path = _cache_path(key, cache_dir)
        found = _read(path, key)
        ids, covered = found or _count(dataset, vocab_size, size, always)
        if found is None:
            _write(path, key, ids, covered)
    logger.info("The draft vocabulary of %d tokens covers %.2f%% of the supervised tokens.", len(ids), 100 * covered)
    return ids, covered


def report_coverage(dataset: Any, ids: Tensor, vocab_size: int) -> float:
    """Log and return the share of a dataset's supervised tokens that the vocabulary of an existing head covers.

    A head that is trained further keeps its vocabulary, since the rows of its output matrix belong to those tokens.
    If that covers little of the new data, a new head is the better start, and a warning says so.
    """
    covered = coverage(count_tokens(only_labels(dataset), vocab_size), ids)
    level = logging.WARNING if covered < 0.9 else logging.INFO
    advice = " A new head, with a vocabulary from this data, may do better." if covered < 0.9 else ""
    logger.log(
        level,
        "The head keeps its draft vocabulary of %d tokens, which covers %.2f%% of the supervised tokens.%s",
        len(ids),
        100 * covered,
        advice,
    )
    return covered


def dataset_fingerprint(dataset: Any) -> str | None:
    """Return what changes when the dataset does, without reading it; None where nothing is known of it."""
    if isinstance(dataset, datasets.Dataset):
        return str(dataset._fingerprint)
    if isinstance(dataset, PackedDataset):  # the length decides what is cut off or left out
        inner = dataset_fingerprint(dataset.dataset)
        return None if inner is None else f"{inner}/{dataset.packing_length}"
    if isinstance(dataset, StoredFeatures) and isinstance(dataset.indices, range):
        return f"{dataset.index['data']}/{dataset.indices}"
    return None


def _count(dataset: Any, vocab_size: int, size: int, always: list[int]) -> tuple[Tensor, float]:
    counts = count_tokens(only_labels(dataset), vocab_size)
    ids = build_draft_vocab(counts, size, always)
    return ids, coverage(counts, ids)


def _cache_path(key: dict[str, Any], cache_dir: str | os.PathLike[str] | None) -> Path:
    folder = Path(cache_dir or Path(datasets.config.HF_DATASETS_CACHE) / "eagle3_draft_vocab")
    return folder / f"{_digest(key)[:32]}.json"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read(path: Path, key: dict[str, Any]) -> tuple[Tensor, float] | None:
    """Read ids and coverage from a cache file; None if there is none, or with a warning if it cannot be trusted."""
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if _digest(content["key"]) != _digest(key):
            raise ValueError("it was made for another dataset, tokenizer or size")
        if content["checksum"] != _digest(content["ids"]):
            raise ValueError("its ids were changed after it was written")
        return torch.tensor(content["ids"], dtype=torch.int64), float(content["coverage"])
    except (ValueError, KeyError, TypeError, OSError) as error:
        logger.warning("The cached draft vocabulary %s is not used (%s); it is made anew.", path, error)
        return None


def _write(path: Path, key: dict[str, Any], ids: Tensor, covered: float) -> None:
    content = {"key": key, "coverage": covered, "checksum": _digest(ids.tolist()), "ids": ids.tolist()}
    partial = path.with_suffix(f".{os.getpid()}")  # two processes may write side by side
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        logger.warning("The draft vocabulary could not be cached in %s: %s", path.parent, error)
