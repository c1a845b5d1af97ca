"""Pools of candidates on the host, sorted by score, so that the tree of N nodes consists of the first N of them.

A pool that was grown with many levels and children can be reduced to the one that fewer would have grown, since a
node's candidates depend on its path alone. Growing with k children expands the best k nodes of a level *among the best
k children of each node that it has expanded before*. These need not be among those that a wider growth has expanded
(six nodes behind the best four may have more than ten good children together), so `GrownPool.widths_missing` says for
which k a pool lacks something, and `merged` adds what another growth has found.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..decoding.tree import HostTree


@dataclass(frozen=True, eq=False)
class Pool:
    """The candidates below one root, best first; of equal scores the one that was found first.

    Args:
        tokens: (M,) int32 token of each node.
        parents: (M,) int16 index of each node's parent in the pool, always smaller than the node's own; -1 for the
            root.
        increments: (M,) by which each score differs from the parent's, at most 0.
        log_z: (E,) of the root and then of each node that has children, in their order: the logarithm of the sum of
            `q / e` over the draft's vocabulary, where `q` are its probabilities and `e` the noise of the step. `None`
            without coupled sampling.
    """

    tokens: np.ndarray
    parents: np.ndarray
    increments: np.ndarray
    log_z: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> np.ndarray:
        """(M,) level of each node; 1 for the children of the root."""
        return _depths(self.parents)

    @cached_property
    def scores(self) -> np.ndarray:
        """(M,) float32 sums of the increments on each path, in descending order."""
        scores = self.increments.astype(np.float32)
        for level in range(2, int(self.depths.max(initial=0)) + 1):
            nodes = self.depths == level
            scores[nodes] += scores[self.parents[nodes]]
        # Increments are stored with few digits: the order of the nodes, which is exact, takes precedence.
        return np.minimum.accumulate(scores)

    @cached_property
    def has_children(self) -> np.ndarray:
        """(M,) bool: the nodes that the head has expanded."""
        found = np.zeros(len(self), dtype=bool)
        found[self.parents[self.parents >= 0]] = True
        return found

    @cached_property
    def sibling_ranks(self) -> np.ndarray:
        """(M,) rank of each node among the children of its parent, from 0."""
        order = np.argsort(self.parents, kind="stable")
        grouped = self.parents[order]
        begins = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]]) if len(self) else np.zeros(0, dtype=int)
        ranks = np.empty(len(self), dtype=np.int64)
        ranks[order] = np.arange(len(self)) - np.repeat(begins, np.diff(np.r_[begins, len(self)]))
        return ranks

    def log_z_of(self, node: int) -> float:
        """Return `log_z` of a node that has children, or of the root (-1)."""
        assert self.log_z is not None
        return float(self.log_z[0 if node < 0 else 1 + int(self.has_children[:node].sum())])

    def reduced(self, depth: int, top_k: int) -> "Pool":
        """Return the pool that growing with `depth` levels and `top_k` children would have given."""
        kept = np.zeros(len(self), dtype=bool)
        for candidates, _ in self.levels(depth, top_k):
            kept[candidates] = True
        return self._only(kept)

    def tree(self, root: int, num_nodes: int) -> HostTree:
        """Return the tree of the best `num_nodes` nodes below the token `root`."""
        parents = (self.parents[:num_nodes].astype(np.int64) + 1).tolist()
        return HostTree([root, *self.tokens[:num_nodes].tolist()], [-1, *parents])

    def levels(self, depth: int, top_k: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield each level's candidates, best first, and the `top_k` of them that the next level expands."""
        is_expanded = np.zeros(len(self) + 1, dtype=bool)
        is_expanded[-1] = True  # the root
        for level in range(1, depth + 1):
            among = (self.depths == level) & (self.sibling_ranks < top_k) & is_expanded[self.parents]
            candidates = np.flatnonzero(among)
            expanded = candidates[self.has_children[candidates]][:top_k]
            is_expanded[:] = False
            is_expanded[expanded] = True
            yield candidates, expanded

    def _only(self, kept: np.ndarray) -> "Pool":
        """Return the pool of some nodes, among which is the parent of each."""
        index = np.cumsum(kept) - 1
        parents = self.parents[kept]
        parents = np.where(parents < 0, -1, index[parents])
        pool = Pool(self.tokens[kept], parents, self.increments[kept])
        if self.log_z is None:
            return pool
        still = np.zeros(len(self), dtype=bool)
        still[np.flatnonzero(kept)[pool.has_children]] = True
        return Pool(pool.tokens, parents, pool.increments, self.log_z[np.r_[True, still[self.has_children]]])


@dataclass(frozen=True, eq=False)
class GrownPool:
    """A pool as it was grown, level by level, in full precision: (M,) each.

    Args:
        tokens, parents, scores: See [`Pool`]; parents come before their children.
        widths: With how many children each node was expanded, 0 for none.
        log_z: See [`Pool`], for each node: NaN where it has no children. Its first entry belongs to the root, so it
            has M + 1 entries. `None` without coupled sampling.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    widths: np.ndarray
    log_z: np.ndarray | None = None

    @cached_property
    def depths(self) -> np.ndarray:
        """(M,) level of each node; 1 for the children of the root."""
        return _depths(self.parents)

    def merged(self, other: "GrownPool") -> "GrownPool":
        """Return this pool with the nodes that only the other one has."""
        known = {pair: node for node, pair in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True))}
        place = {-1: -1}
        tokens, parents, scores = self.tokens.tolist(), self.parents.tolist(), self.scores.tolist()
        widths = self.widths.tolist()
        log_z = None if self.log_z is None else self.log_z.tolist()
        for node, (token, parent) in enumerate(zip(other.tokens.tolist(), other.parents.tolist(), strict=True)):
            pair = place[parent], token
            if pair not in known:
                known[pair] = len(tokens)
                tokens.append(token)
                parents.append(pair[0])
                # Rounding differs between two growths: a child must not rank before its parent.
                score = float(other.scores[node])
                scores.append(min(score, scores[pair[0]]) if pair[0] >= 0 else score)
                widths.append(0)
                if log_z is not None:
                    log_z.append(float("nan"))
            own = place[node] = known[pair]
            if other.widths[node] > widths[own]:
                if log_z is not None and other.log_z is not None and widths[own] == 0:
                    log_z[own + 1] = float(other.log_z[node + 1])
                widths[own] = int(other.widths[node])
        return GrownPool(
            np.array(tokens),
            np.array(parents),
            np.array(scores, dtype=np.float32),
            np.array(widths),
            None if log_z is None else np.array(log_z, dtype=np.float32),
        )

    def sorted(self) -> Pool:
        """Return the pool with its finite nodes, best first."""
        order = self._order
        place = np.full(len(self.tokens) + 1, -1)
        place[order] = np.arange(len(order))
        above = np.where(self.parents < 0, np.float32(0), self.scores[self.parents])
        pool = Pool(self.tokens[order], place[self.parents[order]], self.scores[order] - above[order])
        if self.log_z is None:
            return pool
        return replace(pool, log_z=np.r_[self.log_z[0], self.log_z[1:][order][pool.has_children]])

    def widths_missing(self, depth: int, top_k: int) -> list[int]:
        """Return the numbers of children below `top_k` to which the pool cannot be reduced yet.

        Args:
            depth: Number of levels with which it was grown.
            top_k: Number of children.
        """
        pool, widths, scores = self.sorted(), self.widths[self._order], self.scores[self._order]

        def reduces_to(k: int) -> bool:
            for candidates, expanded in pool.levels(depth - 1, k):
                # Of nodes with equal scores a growth may have expanded any.
                if not np.array_equal(scores[candidates[:k]], scores[expanded]) or (widths[expanded] < k).any():
                    return False
            return True

        return [k for k in range(1, top_k) if not reduces_to(k)]

    @cached_property
    def _order(self) -> np.ndarray:
        order = np.argsort(-self.scores, kind="stable")
        return order[np.isfinite(self.scores[order])]


def _depths(parents: np.ndarray) -> np.ndarray:
    depths = np.where(parents < 0, 1, 0)
    level = 1
    while (depths == level).any():
        depths[(parents >= 0) & (depths[parents] == level)] = level + 1
        level += 1
    return depths
