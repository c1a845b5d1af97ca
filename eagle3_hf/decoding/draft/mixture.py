"""Choosing the nodes of a tree among the candidates of the head and those of the lookup source, best first.

Both sources say how likely a candidate is right, given that its parent is. At a node that the head has expanded, they
are combined as a mixture: a guess `y` of the lookup source with probability `a` gets the weight `w = 0.6 a`, and the
head's distribution `q` the rest, so that `p(x) = (1 - w) q(x) + w [x = y]`. Elsewhere `p(y) = a`.

In sampling, the target will choose `argmax(p / e)` with a known `e` (see `coupling.py`), and a candidate's value is
the chance that it wins this race. The head's candidates have `q / (e Z)` with `Z = sum(q / e)`. Under the mixture they
have `(1 - w) q / (e M)` with `M = (1 - w) Z + w / e_y`, and the guess has `w / (e_y M)` more. Without the head, the
other tokens are not known: a guess of probability `a` wins with probability `exp(-e_y (1 - a) / a)`.

A node's value is the product along its path, the probability that it is accepted. So one heap serves both sources, and
a kept node's parent is always kept.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from .lookup import LONGEST_MATCH


# The share of a guess's probability that it keeps beside the head: where both know a position, the head is right more
# often than the guess's past suggests. Shares from 0.5 to 0.7 accept equally much.
_WEIGHT_BESIDE_HEAD = 0.6

HEAD, LOOKUP, BOTH = 1, 2, 3  # what has proposed a node

# Returns (token, probability that it is right) of the lookup source's guesses behind the newest tokens.
Guesses = Callable[[Sequence[int]], list[tuple[int, float]]]
# Returns the noise of a token in the race of a level, 0 for the children of the root.
RaceNoise = Callable[[int, int], float]


class Pool(NamedTuple):
    """The head's candidates for one tree, as Python lists.

    Attributes:
        tokens: Token of each candidate.
        parents: Index of its parent in the pool, -1 for the root.
        scores: Cumulative log-values (see `growth.py`); -inf for what must not be kept.
        log_probs: Cumulative log-probabilities of the draft itself.
        width: Number of children of an expanded node. They follow each other, the best one first.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    log_probs: list[float]
    width: int

    def expanded_masses(self) -> list[float]:
        """Return the head's probability of all expanded nodes of each level, from the children of the root on."""
        masses: list[float] = []
        depths = {-1: 0}
        for first in range(0, len(self.tokens), self.width):
            parent = self.parents[first]
            depth = depths[parent]
            for entry in range(first, first + self.width):
                depths[entry] = depth + 1
            if depth:
                if depth > len(masses):
                    masses.append(0.0)
                masses[depth - 1] += math.exp(self.scores[parent])
        return masses


EMPTY = Pool([], [], [], [], 1)


@dataclass
class Candidates:
    """Nodes in the order in which they are kept, without the root: a prefix of them is a tree too.

    Attributes:
        tokens: Token of each node.
        parents: Its parent, where 0 is the root, and `i + 1` the node at index `i`.
        values: The probability that it is accepted, descending.
        depths: Its level, 1 for children of the root.
        sources: `HEAD`, `LOOKUP` or `BOTH`.
    """

    tokens: list[int]
    parents: list[int]
    values: list[float]
    depths: list[int]
    sources: list[int]


class _Block:
    """The children that the head gives one node, from which the best is taken again and again."""

    __slots__ = ("above", "first", "left", "scale", "skipped")

    def __init__(self, first: int, width: int, scale: float, above: float, skipped: frozenset[int]):
        self.first, self.left, self.scale, self.above, self.skipped = first, width, scale, above, skipped


def best_nodes(
    pool: Pool,
    guesses: Guesses | None,
    tail: Sequence[int],
    num_nodes: int,
    max_depth: int,
    least: float = 0.0,
    is_chain: bool = False,
    noise: RaceNoise | None = None,
) -> Candidates:
    """Return the most valuable nodes of one tree.

    Args:
        pool: The head's candidates.
        guesses: The lookup source; `None` for the head alone.
        tail: The newest tokens of the text, the root last.
        num_nodes: The largest number of nodes.
        max_depth: The deepest level.
        least: Nodes of a lower value are not kept.
        is_chain: Whether every node has at most one child.
        noise: The noise of the race in coupled sampling; `None` otherwise.
    """
    found = Candidates([], [], [], [], [])
    heap: list[tuple] = []
    pushed = 0
    blocks = {pool.parents[first]: first for first in range(0, len(pool.tokens), pool.width)}
    scores, exp = pool.scores, math.exp

    def push(value: float, token: int, parent: int, entry: int, tail: Sequence[int], source: int, block) -> None:
        nonlocal pushed
        if value > least:
            pushed += 1
            heappush(heap, (-value, pushed, token, parent, entry, tail, source, block))

    def push_next(block: _Block, parent: int, tail: Sequence[int]) -> None:
        """Push the best of the head's candidates that are left."""
        while block.left:
            entry = block.first
            block.first, block.left = entry + 1, block.left - 1
            if entry not in block.skipped:
                score = scores[entry]
                value = block.scale * exp(score - block.above)
                push(value, pool.tokens[entry], parent, entry, tail, HEAD, block)
                return

    def expand(node: int, value: float, entry: int, depth: int, tail: Sequence[int]) -> None:
        own = guesses(tail) if guesses is not None else []
        first = blocks.get(entry) if entry >= -1 else None
        if first is None:
            for token, right in own:
                push(value * _wins(right, noise, depth, token), token, node, -2, tail, LOOKUP, None)
            return
        # Scores are cumulative. What they say of the path above is replaced by the node's value.
        above = 0.0 if entry < 0 else scores[entry]
        shares = [_WEIGHT_BESIDE_HEAD * right for _, right in own]
        rest = 1.0 - sum(shares)
        if own and noise is not None:
            # The first child tells Z, since its increment is log q - log e - log Z.
            if scores[first] == -math.inf:
                rest, shares = 0.0, [_wins(right, noise, depth, token) for token, right in own]
            else:
                drafted = pool.log_probs[first] - (0.0 if entry < 0 else pool.log_probs[entry])
                log_z = drafted - math.log(noise(depth, pool.tokens[first])) - (scores[first] - above)
                races = [share / noise(depth, token) for share, (token, _) in zip(shares, own, strict=True)]
                head = rest * exp(min(log_z, 700.0))
                total = head + sum(races)
                rest, shares = head / total, [race / total for race in races]
        scale = value * rest
        skipped = set()
        for (token, _), share in zip(own, shares, strict=True):
            worth, at, source = value * share, -2, LOOKUP
            for entry_of in range(first, first + pool.width):
                if pool.tokens[entry_of] == token:
                    worth += scale * exp(scores[entry_of] - above)
                    at, source = entry_of, BOTH
                    skipped.add(entry_of)
                    break
            push(worth, token, node, at, tail, source, None)
        push_next(_Block(first, pool.width, scale, above, frozenset(skipped)), node, tail)

    expand(0, 1.0, -1, 0, tail)
    has_child: set[int] = set()
    while heap and len(found.tokens) < num_nodes:
        value, _, token, parent, entry, tail, source, block = heappop(heap)
        if is_chain:
            if parent in has_child:
                continue
            has_child.add(parent)
        elif block is not None:
            push_next(block, parent, tail)
        depth = found.depths[parent - 1] + 1 if parent else 1
        found.tokens.append(token)
        found.parents.append(parent)
        found.values.append(-value)
        found.depths.append(depth)
        found.sources.append(source)
        if depth < max_depth:
            expand(len(found.tokens), -value, entry, depth, (*tail, token)[-LONGEST_MATCH:])
    return found


def likeliest_first(candidates: Candidates, count: int) -> Candidates:
    """Return the first `count` nodes, those of one path before all others: that of the most expected accepted tokens.

    If a path is accepted, it is often this one or a part of it. Its entries are then in their slots of the cache
    already. The other nodes keep their order, so that parents still come before their children.
    """
    parents, values = candidates.parents[:count], candidates.values
    expected = [0.0]  # of the path to each node, the root first
    for parent, value in zip(parents, values, strict=False):
        expected.append(expected[parent] + value)
    node, on_path = expected.index(max(expected)), []
    while node:
        on_path.append(node)
        node = parents[node - 1]
    seen = set(on_path)
    order = [0, *on_path[::-1], *(node for node in range(1, len(parents) + 1) if node not in seen)]
    place = [0] * len(order)
    for index, old in enumerate(order):
        place[old] = index
    chosen = [old - 1 for old in order[1:]]
    return Candidates(
        [candidates.tokens[old] for old in chosen],
        [place[parents[old]] for old in chosen],
        [values[old] for old in chosen],
        [candidates.depths[old] for old in chosen],
        [candidates.sources[old] for old in chosen],
    )


def _wins(right: float, noise: RaceNoise | None, level: int, token: int) -> float:
    """Return the probability that a guess is chosen, where nothing is known of the other tokens."""
    if noise is None or right <= 0.0:
        return right
    return math.exp(-noise(level, token) * (1.0 - right) / right)
