"""The draft vocabulary: which target tokens a head can propose, and the two buffers that say so.

A head of draft vocabulary D < V scores only D of the target's V tokens. `d2t (D,)` int64 holds *offsets*
(`target_id = draft_id + d2t[draft_id]`, as in every published head), `t2d (V,)` bool marks the members. Draft
ids follow ascending target ids, so the target's `logits[..., t2d]` and the head's output have the same order.
"""

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from ..utils.logging import get_logger


logger = get_logger(__name__)


def build_draft_vocab(counts: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """Choose the `size` most frequent tokens.

    Args:
        counts: `(V,)` integer, how often each target token is to be predicted.
        size: D, the draft vocabulary size, 1 <= D <= V.
        always: target ids that are members whatever their count (end of turn, special tokens): a token outside the
            draft vocabulary can never be drafted.

    Returns:
        `(D,)` int64 target ids, ascending. Equal counts are settled by the smaller id; where fewer than D distinct
        tokens occur, the smallest unused ids fill up. On the CPU, whatever the device of `counts`.

    Raises:
        ValueError: `size` is above V or below the number of `always` ids; an id or a count is out of range.
    """
    counts = _checked_counts(counts)
    vocab_size = counts.numel()
    if not 1 <= size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size is {size}, but the target's vocabulary has {vocab_size} tokens; "
            f"choose a size from 1 to {vocab_size}"
        )
    forced = _checked_ids(torch.tensor(sorted(set(always)), dtype=torch.int64), vocab_size, "always")
    if forced.numel() > size:
        raise ValueError(
            f"{forced.numel()} ids must always be in the draft vocabulary, but its size is {size}; "
            f"raise draft_vocab_size to at least {forced.numel()} or pass fewer `always` ids"
        )
    rank = counts.clone()
    rank[forced] = torch.iinfo(torch.int64).max
    # A stable sort keeps equal counts, zero included, in ascending id order: ties and padding in one rule.
    return rank.argsort(descending=True, stable=True)[:size].sort().values


def offsets_and_mask(ids: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Turn ascending target ids `(D,)` into `d2t (D,)` int64 offsets and `t2d (V,)` bool membership.

    Raises:
        ValueError: ids are not one-dimensional integers, not strictly ascending, or outside `0..vocab_size-1`.
    """
    ids = _checked_ids(ids, vocab_size, "ids")
    falls = (ids[1:] <= ids[:-1]).nonzero()
    if falls.numel():
        i = int(falls[0]) + 1
        raise ValueError(
            f"draft vocabulary ids must be strictly ascending, but ids[{i}] = {int(ids[i])} follows "
            f"ids[{i - 1}] = {int(ids[i - 1])}; pass `ids.unique()`"
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return ids - torch.arange(ids.numel(), device=ids.device), t2d


def ids_from_offsets(d2t: Tensor) -> Tensor:
    """Target ids `(D,)` int64 of the draft ids `0..D-1`: `arange(D) + d2t`."""
    return torch.arange(d2t.numel(), device=d2t.device) + d2t.long()


def validate(
    d2t: Tensor,
    t2d: Tensor | None,
    vocab_size: int,
    draft_vocab_size: int,
    *,
    allow_identity: bool = False,
) -> None:
    """Check that a vocabulary map means something for this head and this target.

    Args:
        d2t: `(D,)` integer offsets.
        t2d: `(V,)` bool membership, or `None` for a file without it.
        vocab_size: V of the target.
        draft_vocab_size: D of the head.
        allow_identity: accept an all-zero `d2t` although D < V. It reads as "draft ids are the target ids 0..D-1",
            which is almost always a map that was never set.

    Raises:
        ValueError: naming what is wrong and where.
    """
    _check_buffer("d2t", d2t, draft_vocab_size, integer=True)
    if not d2t.any() and draft_vocab_size < vocab_size and not allow_identity:
        raise ValueError(
            f"d2t is all zero although the draft vocabulary ({draft_vocab_size}) is smaller than the target's "
            f"({vocab_size}): the map was never set; load the head's own d2t or build one from training data"
        )
    ids = ids_from_offsets(d2t)
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        i = int(outside[0])
        raise ValueError(
            f"d2t[{i}] = {int(d2t[i])} maps draft id {i} to target id {int(ids[i])}, outside 0..{vocab_size - 1} "
            f"({outside.numel()} such entries); d2t holds offsets, not ids, and must belong to this target"
        )
    _check_unique(ids)
    if t2d is not None:
        _check_mask(t2d, ids, vocab_size)


def offsets_from_file(d2t: Tensor, t2d: Tensor | None, vocab_size: int, draft_vocab_size: int) -> tuple[Tensor, bool]:
    """A file's map as int64 offsets, and whether it held absolute target ids.

    Every published head stores offsets; a list that cannot be offsets, but is one of ascending ids, is read as ids.

    Raises:
        ValueError: it is neither; see [`validate`].
    """
    # All zero means the first ids where the mask marks exactly these, and else a map that was never set.
    first = t2d is not None and t2d.nonzero().flatten().tolist() == list(range(draft_vocab_size))
    try:
        validate(d2t, t2d, vocab_size, draft_vocab_size, allow_identity=first)
    except ValueError as error:
        if not _could_be_ids(d2t, vocab_size, draft_vocab_size):
            raise
        offsets = d2t.long() - torch.arange(d2t.numel(), device=d2t.device)
        try:
            validate(offsets, t2d, vocab_size, draft_vocab_size)
        except ValueError:
            raise error from None  # read as what every published head stores
        return offsets, True
    return d2t.long(), False


def _could_be_ids(d2t: Tensor, vocab_size: int, draft_vocab_size: int) -> bool:
    if d2t.shape != (draft_vocab_size,) or d2t.is_floating_point() or d2t.dtype == torch.bool or not d2t.numel():
        return False
    return bool((d2t[1:] > d2t[:-1]).all()) and int(d2t[0]) >= 0 and int(d2t[-1]) < vocab_size


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens `(V,)` that the ids `(D,)` cover; 1.0 when nothing was counted."""
    counts = _checked_counts(counts)
    ids = _checked_ids(ids, counts.numel(), "ids").cpu()
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0


def resolve(draft_vocab, size: int | None, vocab_size: int, always: Iterable[int] = ()) -> Tensor | None:
    """Target ids (D,) from `from_target`'s arguments: ids, or counts (V,) with a size; `None` for "not yet".

    A tensor of length V is read as counts unless it is `arange(V)`.

    Raises:
        ValueError: counts without a size, ids that are repeated, or ids whose number contradicts the size.
    """
    if draft_vocab is None:
        return None
    given = torch.as_tensor(draft_vocab)
    if given.numel() == vocab_size and not torch.equal(given.cpu(), torch.arange(vocab_size)):
        if size is None:
            raise ValueError(
                f"token counts for {vocab_size} ids were given without draft_vocab_size: how many to keep?"
            )
        return build_draft_vocab(given, size, always)
    if size is not None and given.numel() != size:
        raise ValueError(f"draft_vocab_size is {size}, but {given.numel()} ids were given; leave one of them out")
    ids, order = _checked_ids(given, vocab_size, "draft_vocab").cpu().sort(stable=True)
    twins = (ids[1:] == ids[:-1]).nonzero()[:, 0]
    if twins.numel():
        first, second = order[int(twins[0])], order[int(twins[0]) + 1]
        raise ValueError(
            f"draft_vocab[{int(first)}] and draft_vocab[{int(second)}] are both {int(ids[twins[0]])} ({twins.numel()} "
            f"of {ids.numel()} ids are repeated): pass each id once, `ids.unique()`"
        )
    return ids


def tokenizer_hashes(tokenizer) -> tuple[str, str | None]:
    """Short SHA-256 of a tokenizer's vocabulary (tokens with their ids), and of its chat template if it has one."""
    pairs = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    template = getattr(tokenizer, "chat_template", None)
    return _short_hash(pairs), _short_hash(template) if template else None


def record_tokenizer(config, tokenizer) -> None:
    """Write a tokenizer's hashes into a head's config, where none are recorded yet; check those that are."""
    check_tokenizer(config, tokenizer)
    vocab_hash, template_hash = tokenizer_hashes(tokenizer)
    config.target_vocab_hash = config.target_vocab_hash or vocab_hash
    config.target_chat_template_hash = config.target_chat_template_hash or template_hash


def check_tokenizer(config, tokenizer) -> None:
    """Compare a tokenizer with what a head's config recorded at training; fields that are `None` are not compared.

    Raises:
        ValueError: another vocabulary. Another chat template only warns: the text stays right, acceptance may drop.
    """
    vocab_hash, template_hash = tokenizer_hashes(tokenizer)
    if config.target_vocab_hash not in (None, vocab_hash):
        raise ValueError(
            f"the head was trained with a vocabulary of hash {config.target_vocab_hash}, but this tokenizer's has "
            f"{vocab_hash}: use the tokenizer of the head's target ({config.target_name_or_path})"
        )
    if config.target_chat_template_hash not in (None, template_hash):
        logger.warning(
            "The head was trained with a chat template of hash %s, but this tokenizer's has %s: prompts differ from "
            "those in training, so fewer drafts may be accepted.",
            config.target_chat_template_hash,
            template_hash,
        )


def _short_hash(value) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def _checked_counts(counts: Tensor) -> Tensor:
    if counts.dim() != 1 or counts.is_floating_point() or counts.dtype == torch.bool:
        raise ValueError(f"counts must be a (V,) integer tensor, got {tuple(counts.shape)} {counts.dtype}")
    if counts.numel() and int(counts.min()) < 0:
        i = int(counts.argmin())
        raise ValueError(f"counts must not be negative, but counts[{i}] = {int(counts[i])}")
    return counts.detach().cpu().long()


def _checked_ids(ids: Tensor, vocab_size: int, name: str) -> Tensor:
    if ids.dim() != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"{name} must be a (D,) integer tensor, got {tuple(ids.shape)} {ids.dtype}")
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if outside.numel():
        i = int(outside[0])
        raise ValueError(
            f"{name}[{i}] = {int(ids[i])} is outside the target's vocabulary 0..{vocab_size - 1} "
            f"({outside.numel()} such ids); use the tokenizer of this target"
        )
    return ids.detach().long()


def _check_buffer(name: str, buffer: Tensor, size: int, *, integer: bool) -> None:
    right_kind = buffer.dtype in (torch.int64, torch.int32) if integer else buffer.dtype == torch.bool
    if not right_kind:
        wanted = "int64 offsets" if integer else "a bool mask"
        raise ValueError(f"{name} must be {wanted}, got {buffer.dtype}")
    if buffer.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(buffer.shape)}")


def _check_unique(ids: Tensor) -> None:
    values, order = ids.sort(stable=True)
    twins = (values[1:] == values[:-1]).nonzero()
    if twins.numel():
        first, second = (int(order[int(twins[0]) + k]) for k in (0, 1))
        raise ValueError(
            f"d2t is not one-to-one: draft ids {first} and {second} both map to target id {int(ids[first])} "
            f"({twins.numel()} repeated); the map is corrupt or holds absolute ids instead of offsets"
        )


def _check_mask(t2d: Tensor, ids: Tensor, vocab_size: int) -> None:
    _check_buffer("t2d", t2d, vocab_size, integer=False)
    marked = int(t2d.sum())
    if marked != ids.numel():
        raise ValueError(f"t2d marks {marked} tokens, but d2t maps {ids.numel()}; one of the two is stale")
    missing = (~t2d[ids.to(t2d.device)]).nonzero()
    if missing.numel():
        i = int(missing[0])
        raise ValueError(
            f"d2t maps draft id {i} to target id {int(ids[i])}, which t2d does not mark "
            f"({missing.numel()} such ids); one of the two is stale"
        )
