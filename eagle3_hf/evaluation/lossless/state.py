"""Compares what a head has kept over a call with what a fresh one is fed: mistakes that cost acceptance, and no text.

The text cannot tell that the draft reads wrong features, or that its cache holds an entry of a rejected branch: it
merely accepts less. So after a call the target runs once over prompt and text, and a new cache of the head is filled
in one pass. The cache of the call must hold the same entries: as many, at the same positions, with the same keys and
values. And what the head would draft next must be what it computes in one pass over prompt, text and a single path.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...decoding.draft.candidate import Eagle3Candidate
from ...decoding.draft.growth import CandidatePool
from ...decoding.draft.inputs import DraftInputs
from ...decoding.loop import SpeculativeDecoding
from ...model.attention import CachedAttention, DraftCache
from ...model.features import FeatureReader
from ...model.offload import device_of_head
from ...model.tree_settings import TreeSettings, draft_window
from ..watching import wrapped
from .judging import BUG, EQUAL, Verdict


# How far an entry may be from the fresh one, relative to its length. An entry of another token is about 1 away.
_FAR, _FAR_IN_HALF = 1e-2, 0.35
# How far log-probabilities of the head may be apart.
_UNLIKE, _UNLIKE_IN_HALF = 1e-2, 1.0

_LOOK = TreeSettings(num_nodes=16, depth=4, top_k=3)  # of the tree that is drafted once more


@contextmanager
def kept_candidates() -> Iterator[list[Eagle3Candidate]]:
    """Yield a list to which every call of this thread inside the block adds what drafts for it."""
    found: list[Eagle3Candidate] = []

    def keep(original: Any, self: SpeculativeDecoding, *args: Any) -> Eagle3Candidate:
        candidate: Eagle3Candidate = original(self, *args)
        found.append(candidate)
        return candidate

    with wrapped(SpeculativeDecoding, "_new_candidate", keep):
        yield found


@torch.no_grad()
def judge_state(
    target: Any, draft: Any, candidate: Eagle3Candidate, prompts: Sequence[Sequence[int]], texts: Sequence[list[int]]
) -> Verdict:
    """Compare the head's state after a greedy call with a fresh one.

    Args:
        target, draft: The models.
        candidate: What has drafted in the call.
        prompts: The prompts without padding.
        texts: The new tokens of each sequence, none of which has ended before the others.
    """
    pool = candidate.draft_pool(_LOOK)
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        which = f" of sequence {index}" if len(prompts) > 1 else ""
        ids = torch.tensor([[*prompt, *text]], device=target.device)
        features = _features(target, draft, ids)
        problem = _compare_entries(target, draft, candidate, index, features, ids) or _compare_drafts(
            target, draft, pool, index, features, ids
        )
        if problem is not None:
            return Verdict(BUG, f"the text is the same, but {problem}{which}: fewer drafts are accepted than could be")
    return Verdict(EQUAL)


def _is_half(target: Any, draft: Any) -> bool:
    return any(torch.finfo(model.dtype).bits < 32 for model in (target, draft))


def _features(target: Any, draft: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the features (1, T - 1, A * Ht) at all tokens but the last."""
    with FeatureReader(target, draft.config.captured_layer_ids) as reader:
        target(ids[:, :-1], use_cache=False)
        return reader.take()


def _compare_entries(
    target: Any, draft: Any, candidate: Eagle3Candidate, index: int, features: torch.Tensor, ids: torch.Tensor
) -> str | None:
    """Return what is wrong with the cache of a sequence, or `None`."""
    fresh = Eagle3Candidate(target, draft, _LOOK)
    fresh.extend(DraftInputs(features, ids[:, 1:]))
    positions, entries = _entries(candidate.cache, index)
    _, expected = _entries(fresh.cache, 0)
    count = features.shape[1]
    if positions != list(range(count)):
        return f"the draft's cache holds {_in_words(positions)} where {count} positions were committed"
    far = _FAR_IN_HALF if _is_half(target, draft) else _FAR
    for layer, (own, new) in enumerate(zip(entries, expected, strict=True)):
        for mine, theirs in zip(own, new, strict=True):
            apart = (mine - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp(min=1e-6)
            worst = int(apart.argmax())
            if not apart[worst] <= far:
                return (
                    f"the draft's cache entry of position {worst} (layer {layer}) is {float(apart[worst]):.2g} of its "
                    f"length from what a fresh feed gives, rounding explains {far:.2g}"
                )
    return None


def _entries(cache: DraftCache, index: int) -> tuple[list[int], list[list[torch.Tensor]]]:
    """Return the positions of the committed entries of a sequence, ascending, and each layer's states (n, width)."""
    layers = [cache.committed(layer) for layer in range(cache.num_layers)]
    if cache.valid is None or cache.positions is None:
        kept = places = torch.arange(cache.length)
    else:
        kept = cache.valid[index].nonzero()[:, 0]
        places = cache.positions[index, kept]
        kept = kept[places.argsort()]
    states = [[part[index][:, kept].transpose(0, 1).flatten(1).float() for part in own] for own in layers]
    return places.sort().values.tolist(), states


def _in_words(positions: list[int]) -> str:
    twice = sorted({position for position in positions if positions.count(position) > 1})
    return f"{len(positions)} entries" + (f" (twice: {twice})" if twice else "")


def _compare_drafts(
    target: Any, draft: Any, pool: CandidatePool, index: int, features: torch.Tensor, ids: torch.Tensor
) -> str | None:
    """Return what is wrong with the next drafts of a sequence, or `None`."""
    tokens, parents, _, log_probs = (part[index].tolist() for part in pool.joined())
    unlike = _UNLIKE_IN_HALF if _is_half(target, draft) else _UNLIKE
    deepest = len(tokens) - pool.tokens[-1].shape[1]
    best = max(range(deepest, len(tokens)), key=lambda node: log_probs[node])
    for leaf in {best, len(tokens) - 1}:
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        sums = [log_probs[node] for node in path]
        drafted = [after - before for before, after in zip([0.0, *sums], sums, strict=False)]
        alone = _log_probs_along(target, draft, features, ids, [tokens[node] for node in path])
        for depth, (mine, theirs) in enumerate(zip(drafted, alone, strict=True), start=1):
            if not abs(mine - theirs) <= unlike:
                return (
                    f"at depth {depth} of its tree the draft gives a token the log-probability {mine:.3f}, and "
                    f"{theirs:.3f} where its path is computed alone"
                )
    return None


def _log_probs_along(
    target: Any, draft: Any, features: torch.Tensor, ids: torch.Tensor, path: Sequence[int]
) -> list[float]:
    """Return the head's log-probability of each token of a path behind a text, in one pass without a tree."""
    borrowed, device = draft.borrow(target), device_of_head(draft)
    layers, window = draft.config.num_hidden_layers, draft_window(draft)
    hidden = draft.fuse(features.to(device)).nan_to_num()
    tokens, found = ids[:, 1:].to(device), []
    draft_ids = draft.draft_vocab_ids().tolist()
    for token in path:
        positions = torch.arange(tokens.shape[1], device=device)[None]
        attend = CachedAttention(DraftCache(layers, window))
        output = draft.run_layers(hidden, borrowed.embed(tokens), positions, attend)[:, -1:]
        log_probs = draft.compute_logits(output, borrowed).float().log_softmax(-1)
        found.append(float(log_probs[0, 0, draft_ids.index(token)]))
        hidden = torch.cat([hidden, draft.feedback(output)], dim=1)
        tokens = torch.cat([tokens, torch.tensor([[token]], device=device)], dim=1)
    return found
