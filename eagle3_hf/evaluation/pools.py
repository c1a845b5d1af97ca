"""Pools of candidates on the host, sorted by score, so that the tree of N nodes consists of the first N of them.

A pool that was grown with many levels and children can be reduced to the one that fewer would have grown, since the
candidates below a node depend on its path alone. What fewer would have expanded must have been expanded too: see
[`EveryWidth`].
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

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
        return depths_of(self.parents)

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
        expanded = np.zeros(len(self) + 1, dtype=bool)
        expanded[-1] = True  # the root
        for level in range(1, depth + 1):
            among = (self.depths == level) & (self.sibling_ranks < top_k) & expanded[self.parents]
            kept |= among
            expanded[:] = False
            expanded[np.flatnonzero(among)[:top_k]] = True
        return self._only(kept)

    def tree(self, root: int, num_nodes: int) -> HostTree:
        """Return the tree of the best `num_nodes` nodes below the token `root`."""
        parents = (self.parents[:num_nodes].astype(np.int64) + 1).tolist()
        return HostTree([root, *self.tokens[:num_nodes].tolist()], [-1, *parents])

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


class EveryWidth:
    """Chooses what to expand so that a pool can be reduced to every smaller number of children, for one growth.

    Growing with k children expands the best k nodes of a level among the best k children of each node that it has
    expanded before. These need not be among those that a wider growth expands: the best four nodes of a level may have
    few good children, and six nodes behind them many. So what is expanded is the union over all k.

    Args:
        top_k: The greatest number of children.
    """

    def __init__(self, top_k: int):
        self._widths = range(1, top_k + 1)
        # For each k, which nodes of the level above a growth with k children expands; it begins with the root's.
        self._expanded = [np.arange(top_k) < k for k in self._widths]

    def __call__(self, scores: torch.Tensor, children: int) -> torch.Tensor:
        """Return the nodes (1, R) to expand, best first; the arguments are those of `growth.Expansion`."""
        table = scores[0].cpu().numpy()
        among = table.reshape(-1, children)
        best = []
        for k, above in zip(self._widths, self._expanded, strict=True):
            restricted = np.flatnonzero(above[:, None] & (np.arange(children) < k) & np.isfinite(among))
            best.append(restricted[np.argsort(-table[restricted], kind="stable")][:k])
        chosen = np.unique(np.concatenate(best))
        chosen = chosen[np.argsort(-table[chosen], kind="stable")]
        self._expanded = [np.isin(chosen, own) for own in best]
        return torch.as_tensor(chosen, device=scores.device)[None]


def sorted_pool(tokens: np.ndarray, parents: np.ndarray, scores: np.ndarray, log_z: np.ndarray | None = None) -> Pool:
    """Return a pool as it was grown, level by level, with its finite nodes, best first.

    Args:
        tokens, parents: (M,) See [`Pool`].
        scores: (M,) float32. No score exceeds its parent's.
        log_z: (M + 1,) that of the root and of each node, anything for nodes without children; or `None`.
    """
    order = np.argsort(-scores, kind="stable")
    order = order[np.isfinite(scores[order])]
    place = np.full(len(tokens) + 1, -1)  # the last entry is the root's
    place[order] = np.arange(len(order))
    above = np.where(parents < 0, np.float32(0), scores[parents])
    pool = Pool(tokens[order], place[parents[order]], scores[order] - above[order])
    if log_z is None:
        return pool
    return replace(pool, log_z=np.r_[log_z[0], log_z[1:][order][pool.has_children]])


def depths_of(parents: np.ndarray) -> np.ndarray:
    """Return (M,) the level of each node; 1 for the children of the root. Parents may be in any place."""
    depths = np.where(parents < 0, 1, 0)
    level = 1
    while (depths == level).any():
        depths[(parents >= 0) & (depths[parents] == level)] = level + 1
        level += 1
    return depths
