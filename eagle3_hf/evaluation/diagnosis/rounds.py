"""Rounds on a text: what decoding would draft and accept there, and why each miss was one.

The target's choices are known from one forward over the text. A round grows a tree below a token of the text as
decoding does, and walks it along these choices. It can go on only while they are the text's own tokens: where the
target would have left the text, the round is counted as far as it went, without a miss.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ...acceptance import SpeculationStats
from ...decoding.draft.candidate import Eagle3Candidate
from ...decoding.draft.growth import CandidatePool
from ...decoding.draft.inputs import DraftInputs
from ...decoding.tree import HostTree
from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.tree_settings import TreeSettings
from ..misses import Cause, cause_of_miss
from ..pools import Pool, sorted_pool
from .texts import TrueText


@dataclass(frozen=True)
class Round:
    """A round.

    Attributes:
        root: Index in the text of the token below which it drafted.
        accepted: Number of accepted drafts.
        depth: Deepest level of its tree, or of the text.
        cause: Why the draft behind the accepted ones missed; `None` where none missed.
    """

    root: int
    accepted: int
    depth: int
    cause: Cause | None


@dataclass
class RoundCounts:
    """Counts of rounds.

    Attributes:
        stats: Rounds, emitted tokens and acceptance by depth.
        causes: Number of misses of each cause.
        misses: Number of rounds that ended with a miss.
    """

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    causes: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    misses: int = 0

    def add(self, each: Round) -> None:
        """Count a round."""
        self.stats.record(each.accepted, each.depth, each.accepted + 1)
        if each.cause is not None:
            self.causes[each.cause] += 1
            self.misses += 1


def rounds_of(
    target: PreTrainedModel,
    draft: Eagle3DraftModel,
    settings: TreeSettings,
    text: TrueText,
    features: torch.Tensor,
    choices: torch.Tensor,
    most: int,
) -> Iterator[Round]:
    """Yield the first rounds of a text, at most `most`, those of its first answer first.

    Args:
        target: The target, from which the head borrows.
        draft: The head.
        settings: Size of the trees.
        text: The text.
        features: (1, T, A * Ht) the target's features of the text.
        choices: (T,) the target's choices behind each token.
    """
    vocabulary = _Vocabulary(draft)
    candidate = Eagle3Candidate(target, draft, settings)
    ids, chosen, tokens = text.ids[None].to(features.device), choices.tolist(), text.ids.tolist()
    fed = count = 0
    for first in text.roots:
        root, end = first, text.end(first)
        while root < end and count < most:
            candidate.feed_later(DraftInputs(features[:, fed:root], ids[:, fed + 1 : root + 1]))
            fed = root
            pool = _on_host(candidate.draft_pool(settings))
            each = _walk(pool, settings, chosen, tokens, root, end, vocabulary)
            yield each
            count += 1
            root += each.accepted if _left(each, chosen, tokens) else each.accepted + 1


def _walk(
    pool: Pool,
    settings: TreeSettings,
    chosen: list[int],
    tokens: list[int],
    root: int,
    end: int,
    vocabulary: "_Vocabulary",
) -> Round:
    """Walk a tree along the target's choices, as far as the text does."""
    tree = pool.tree(tokens[root], settings.num_nodes)
    path, at = [0], root
    while at < end:
        child = _child(tree, path[-1], chosen[at])
        if child is None:
            candidates = _Candidates(pool.tokens.tolist(), pool.parents.tolist())
            cause = cause_of_miss(candidates, tree, path, chosen[at], vocabulary)
            return Round(root, len(path) - 1, tree.depth, cause)
        path.append(child)
        at += 1
        if chosen[at - 1] != tokens[at]:
            break
    return Round(root, len(path) - 1, len(path) - 1, None)


def _left(each: Round, chosen: list[int], tokens: list[int]) -> bool:
    """Whether the last accepted draft is not the text's own token, so that the text's takes its place."""
    last = each.root + each.accepted
    return each.cause is None and each.accepted > 0 and chosen[last - 1] != tokens[last]


def _child(tree: HostTree, node: int, token: int) -> int | None:
    nodes = range(node + 1, len(tree.tokens))
    return next((each for each in nodes if tree.parents[each] == node and tree.tokens[each] == token), None)


def _on_host(pool: CandidatePool) -> Pool:
    """Return the candidates of one sequence, best first, without those that can never be kept."""
    tokens, parents, scores, _ = (part[0].cpu().numpy() for part in pool.joined())
    return sorted_pool(tokens, parents, scores)


class _Candidates(NamedTuple):
    """The candidates of a round as lists, see [`cause_of_miss`]."""

    tokens: list[int]
    parents: list[int]


class _Vocabulary:
    """The ids that a head can propose, as a container."""

    def __init__(self, draft: Eagle3DraftModel):
        self._known = draft.t2d.cpu()

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and token < len(self._known) and bool(self._known[token])


__all__ = ["Round", "RoundCounts", "rounds_of"]
