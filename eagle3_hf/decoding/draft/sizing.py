"""The choice of the tree size by measured speed, for this machine, target, batch and context.

With a tree, decoding yields `(1 + accepted) / seconds` tokens per second and sequence, where `seconds` is the time to
draft and verify it; a plain step yields `1 / seconds`. If no tree is faster than plain steps, nothing is drafted.
Every round measures the time of its own size, and the times of other sizes are interpolated. What a smaller tree would
have accepted is known exactly: it consists of the best nodes of the larger one, so that it follows from the *ranks* of
the accepted nodes. What a larger tree would accept is estimated, rather too high than too low, and a size whose
estimate is clearly better is tried.

The text does not depend on the size. Seconds are passed in, so that tests need no clock.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

from ...model.tree_settings import TreeSettings
from ...utils.logging import get_logger
from ..tree import DraftTree


logger = get_logger(__name__)

_NODES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 59)
_TOKENS_TRIED = 12  # drafted nodes of the first round, of all sequences together
_ENOUGH = 3  # measurements of one kind, so that the median ignores one that was disturbed
_KEPT = 7
_WALKS_TO_STOP, _WALKS_TO_CHANGE = 24, 64  # between two decisions
_BETTER = 1.1  # the gain for which the size is changed; a few dozen walks do not show a smaller one reliably
_HOPELESS = 0.9  # the share of plain decoding's speed below which drafting stops after the fewer walks
_WORTH_IT = 1.04  # the share of plain decoding's speed from which drafting is switched on again
_LARGER = 8  # one round in this many has a larger tree, to measure what that accepts
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 8192  # plain steps before drafting is tried again, doubled each time
_PLAIN_AGAIN = 128  # rounds after which a plain step is measured anew, where the gain is small
_SMALL_GAIN = 1.25
_RECENT = 256  # rounds, after which older ones count half as much
_WATCHED = 8  # on accelerators, one round in this many is watched for what smaller trees would have accepted
# The prior, and the number of rounds that it counts for: how often the best node is right, how often a level is right
# if the level above was, and the power of the number of nodes with which this grows.
_FIRST, _LIKELY, _MORE_NODES, _BELIEF = 0.5, 0.6, 0.15, 2.0


class Costs:
    """Seconds by size, as medians of the last few measurements.

    Args:
        older: Costs to begin with.
    """

    def __init__(self, older: "Costs | None" = None):
        self._verify: dict[int, deque[float]] = {}
        self._draft: dict[tuple[int, int], deque[float]] = {}
        if older is not None:
            self._verify = {nodes: deque(kept, _KEPT) for nodes, kept in older._verify.items()}
            self._draft = {size: deque(kept, _KEPT) for size, kept in older._draft.items()}

    def add(self, nodes: int, verify: float) -> None:
        """Add the seconds of a verification of `nodes` drafted nodes for each sequence; 0 is a plain step."""
        self._verify.setdefault(nodes, deque(maxlen=_KEPT)).append(verify)

    def add_draft(self, depth: int, top_k: int, seconds: float) -> None:
        self._draft.setdefault((depth, top_k), deque(maxlen=_KEPT)).append(seconds)

    def count(self, nodes: int) -> int:
        return len(self._verify.get(nodes, ()))

    def verify(self, nodes: int) -> float:
        """Return the seconds of a verification, measured, or interpolated from the two nearest sizes."""
        if nodes in self._verify:
            return median(self._verify[nodes])
        known = sorted(self._verify, key=lambda other: abs(other - nodes))[:2]
        if len(known) < 2:
            return median(self._verify[known[0]])
        low, high = sorted(known)
        begin, end = median(self._verify[low]), median(self._verify[high])
        slope = max(0.0, (end - begin) / (high - low))
        return max(begin + slope * (nodes - low), min(begin, end))

    def draft(self, depth: int, top_k: int) -> float:
        """Return the seconds of drafting, measured, or in proportion to the levels of the nearest size.

        Wider levels take slightly longer.
        """
        if not self._draft:
            return 0.0
        near = min(self._draft, key=lambda other: (abs(other[1] - top_k), abs(other[0] - depth)))
        return median(self._draft[near]) * depth / near[0] * (8 + top_k) / (8 + near[1])


class Acceptance:
    """How often trees of each size are right down to each level.

    Counted are the rounds in which the accepted node of a level is among the best `n` nodes, but not among those of
    the next smaller size. So two sizes are compared by the rounds in which they differ, and how hard a text is to
    predict cancels out.

    Args:
        nodes: The numbers of nodes to tell apart, ascending.
        depth: The greatest number of levels.
    """

    def __init__(self, nodes: Sequence[int], depth: int):
        self._nodes = nodes
        self._depth = depth
        self._tried = [[0.0] * depth for _ in nodes]
        self._right = [[0.0] * depth for _ in nodes]
        self._rounds = 0

    def add(self, nodes: int, depth: int, ranks: Sequence[int]) -> None:
        """Add one walk through a tree.

        Args:
            nodes: Number of drafted nodes of the tree.
            depth: Number of levels of the tree.
            ranks: Rank of the accepted node of each level, from 1, among all nodes by score.
        """
        self._rounds += 1
        if self._rounds % _RECENT == 0:
            self._tried, self._right = (
                [[x / 2 for x in counts] for counts in table] for table in (self._tried, self._right)
            )
        for size, tried in zip(self._nodes, self._tried, strict=True):
            if size <= nodes:
                for level in range(min(depth, self._depth)):
                    tried[level] += 1
        for level, rank in enumerate(ranks[: self._depth]):
            self._right[bisect_left(self._nodes, min(rank, self._nodes[-1]))][level] += 1

    def expected(self) -> dict[int, list[float]]:
        """Return, for each number of nodes, the expected accepted drafts with at most 0, 1, 2, ... levels."""
        table, reach, before = {}, [0.0] * self._depth, 0
        for size, tried, right in zip(self._nodes, self._tried, self._right, strict=True):
            believed = _FIRST if not before else reach[0] * ((size / before) ** _MORE_NODES - 1)
            for level in range(self._depth):
                share = (right[level] + _BELIEF * believed) / (tried[level] + _BELIEF)
                reach[level] = min(reach[level] + share, reach[level - 1] if level else 1.0)
                believed = share * _LIKELY
            table[size] = [sum(reach[:levels]) for levels in range(self._depth + 1)]
            before = size
        return table


class TreeSizer:
    """Chooses the tree size of each round. It lives as long as head and target, so that calls share its results.

    Args:
        limits: The largest tree.
        batch_size: Number of sequences.
        is_chain: Whether the target verifies chains only.
    """

    def __init__(self, limits: TreeSettings, batch_size: int = 1, is_chain: bool = False):
        self.sizes = sizes_within(limits, is_chain)
        nodes = sorted({size.num_nodes for size in self.sizes})
        self.acceptance = Acceptance(nodes, limits.depth)
        self._costs: dict[int, Costs] = {}
        self._here = Costs()
        self._first = _size_tried(self.sizes, max(1, _TOKENS_TRIED // batch_size))
        self._size: TreeSettings | None = None
        self._walks = self._rounds = self._since_plain = self._next_decision = 0
        self._left, self._pause = 0, _FIRST_PAUSE
        self._gain = 1.0
        self._was_off = False

    def choose(self, context: int) -> TreeSettings | None:
        """Return the tree size of the next round; `None` for a plain step.

        Args:
            context: Number of tokens before it.
        """
        self._here = self._costs_at(context)
        if self._here.count(0) < _ENOUGH or (self._since_plain >= _PLAIN_AGAIN and self._gain < _SMALL_GAIN):
            return None
        if self._left > 0:
            self._left -= 1
            return None
        if self._size is None:
            self._start(self._first)
        elif self._rounds >= _ENOUGH and self._walks >= self._next_decision:
            self._decide()
        if self._size is not None and self._rounds % _LARGER == _LARGER - 1:
            return self._larger(self._size)
        return self._size

    def _larger(self, size: TreeSettings) -> TreeSettings:
        more = [other for other in self.sizes if other.num_nodes > size.num_nodes and other.depth >= size.depth]
        return min(more, key=lambda other: (other.num_nodes, abs(other.depth - size.depth - 1)), default=size)

    def _costs_at(self, context: int) -> Costs:
        """Return the costs at contexts of this order of magnitude, which begin as a copy of the nearest ones."""
        magnitude = context.bit_length()
        if magnitude not in self._costs:
            near = min(self._costs, key=lambda other: abs(other - magnitude), default=None)
            self._costs[magnitude] = Costs(None if near is None else self._costs[near])
        return self._costs[magnitude]

    def observe(
        self,
        size: TreeSettings | None,
        nodes: int,
        draft_seconds: float | None,
        verify_seconds: float,
        ranks: Sequence[Sequence[int]] = (),
    ) -> None:
        """Add the measurements of a round.

        Args:
            size: Size of its trees as they were grown; `None` for a plain step.
            nodes: Number of drafted nodes for each sequence that the target has verified. It is larger than in `size`
                if chains of pad tokens were longer.
            draft_seconds: Time of drafting; `None` if the draft was fed more than the tokens of one round.
            verify_seconds: Time of the target's forward and the walk.
            ranks: For each walk, see [`Acceptance.add`].
        """
        self._here.add(nodes, verify_seconds)
        if size is None:
            self._since_plain = 0
            return
        self._since_plain += 1
        self._rounds += 1
        if draft_seconds is not None:
            self._here.add_draft(size.depth, size.top_k, draft_seconds)
        self._walks += len(ranks)
        for own in ranks:
            self.acceptance.add(size.num_nodes, size.depth, own)

    def rates(self) -> dict[TreeSettings, float]:
        """Return the expected tokens per second and sequence of each size."""
        accepted = self.acceptance.expected()
        return {
            size: (1 + accepted[size.num_nodes][size.depth])
            / max(1e-9, self._here.verify(size.num_nodes) + self._here.draft(size.depth, size.top_k))
            for size in self.sizes
        }

    def _decide(self) -> None:
        rates, plain = self.rates(), 1 / max(1e-9, self._here.verify(0))
        best = max(self.sizes, key=rates.__getitem__)
        self._gain = rates[best] / plain
        sure = self._walks >= _WALKS_TO_CHANGE
        if self._gain < (_WORTH_IT if self._was_off else 1.0 if sure else _HOPELESS):
            self._switch_off(best)
            return
        self._was_off, self._pause = False, _FIRST_PAUSE
        if not sure:
            self._next_decision = _WALKS_TO_CHANGE
            return
        now = self._size or best
        self._start(best if rates[best] > _BETTER * rates.get(now, 0.0) else now)

    def _start(self, size: TreeSettings) -> None:
        self._size, self._rounds, self._walks, self._next_decision = size, 0, 0, _WALKS_TO_STOP

    def _switch_off(self, best: TreeSettings) -> None:
        if not self._was_off:
            logger.info(
                f"drafting does not pay here: the best tree, of {best.num_nodes} nodes, is expected to give "
                f"{self._gain:.2f} times the speed of plain decoding. Drafting is switched off, and tried again after "
                f"{self._pause} steps. The text is the same."
            )
        self._was_off, self._size = True, None
        self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)


def sizes_within(limits: TreeSettings, is_chain: bool = False) -> list[TreeSettings]:
    """Return the sizes to choose from: numbers of nodes and levels, with as many children as these nodes can use."""
    if is_chain or limits.top_k == 1:
        return [TreeSettings(depth, depth, 1) for depth in range(1, min(limits.depth, limits.num_nodes) + 1)]
    found = []
    for nodes in _NODES:
        for depth in range(1, min(limits.depth, nodes) + 1):
            size = TreeSettings(nodes, depth, min(limits.top_k, math.isqrt(nodes - 1) + 1))
            if nodes <= limits.num_nodes and size.capped(depth) == size:
                found.append(size)
    return found


def _size_tried(sizes: Sequence[TreeSettings], nodes: int) -> TreeSettings:
    """Return the size to begin with, of about `nodes` nodes, whose levels grow with the logarithm of the nodes."""
    most = max([size.num_nodes for size in sizes if size.num_nodes <= nodes], default=sizes[0].num_nodes)
    same = [size for size in sizes if size.num_nodes == most]
    return min(same, key=lambda size: abs(size.depth - (most + 1).bit_length() + 1))


# head -> target -> key of a kind of call -> its sizer
_found: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Hashable, TreeSizer]]] = WeakKeyDictionary()


def sizer_of(
    draft: Any, target: Any, limits: TreeSettings, batch_size: int, is_chain: bool, kind: Hashable
) -> TreeSizer:
    """Return the sizer that calls of this kind share.

    Args:
        draft: The head.
        target: The target.
        limits: The largest tree.
        batch_size: Number of sequences.
        is_chain: Whether the target verifies chains only.
        kind: Everything else that costs or acceptance depend on (device, dtype, threads, sampling, lock-step).
    """
    sizers = _found.setdefault(draft, WeakKeyDictionary()).setdefault(target, {})
    key = limits, batch_size, is_chain, kind
    if key not in sizers:
        sizers[key] = TreeSizer(limits, batch_size, is_chain)
    return sizers[key]


class RoundSizes:
    """The sizes of one call's trees, fixed or chosen by a sizer.

    Args:
        settings: The fixed size, or the limits of the sizer.
        sizer: Chooses the size of each round; `None` for the fixed size.

    Attributes:
        current: Size of this round's trees; `None` if nothing is drafted.
    """

    def __init__(self, settings: TreeSettings, sizer: TreeSizer | None = None):
        self.current: TreeSettings | None = None
        self._settings = settings
        self._sizer = sizer
        self._rounds = 0

    def choose(self, depth: int, context: int) -> TreeSettings | None:
        """Return the size of the next round's trees, at most `depth` deep, after a context of `context` tokens."""
        size = self._settings if self._sizer is None or depth < 1 else self._sizer.choose(context)
        self.current = None if size is None or depth < 1 else size.capped(depth)
        return self.current

    def observe(
        self,
        tree: DraftTree,
        paths: dict[int, list[int]],
        in_step: bool,
        num_fed: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Pass the measurements of a round to the sizer.

        Args:
            tree: The verified trees.
            paths: Index of a sequence -> its path, for the sequences that were to advance.
            in_step: Whether the round ended for all sequences with the first one whose draft was wrong.
            num_fed: Number of positions that the draft was fed before it drafted the trees.
            draft_seconds: Time of drafting.
            verify_seconds: Time of the target's forward and the walk.
        """
        if self._sizer is None:
            return
        self._rounds += 1
        ranks: list[list[int]] = []
        # This takes another transfer, so on an accelerator it is not done in every round.
        watched = tree.scores.device.type == "cpu" or self._rounds % _WATCHED == 0
        if self.current is not None and watched:
            scores = tree.scores.tolist()
            ranks = [ranks_on_path(scores[index], path) for index, path in paths.items() if path]
            if ranks and in_step:
                ranks = [[max(level) for level in zip(*ranks, strict=False)]]
        usual = draft_seconds if num_fed <= self._settings.depth + 1 else None
        self._sizer.observe(self.current, tree.tokens.shape[1] - 1, usual, verify_seconds, ranks)


def ranks_on_path(scores: Sequence[float], path: Sequence[int]) -> list[int]:
    """Return the ranks by score, from 1, of the drafted nodes of a path; of equal scores the first ranks higher."""
    return [
        sum(
            score > scores[node] or (score == scores[node] and other < node)
            for other, score in enumerate(scores)
            if other
        )
        + 1
        for node in path[1:]
    ]
