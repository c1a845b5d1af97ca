"""Draft trees: the nodes a round proposes, and what follows from their parents.

A tree of a batch row is two lists: `tokens` and `parents`. Node 0 is the root (the last committed token), every parent
stands before its children, and everything else (depths, ancestors, paths) is derived from the parents on demand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


class HostTree(NamedTuple):
    """The real nodes (no padding) of one batch row as plain Python lists; `parents[0]` is -1."""

    tokens: list[int]
    parents: list[int]

    @property
    def depth(self) -> int:
        """Drafted tokens of the longest path; 0 for the root alone."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return max(depths)


@dataclass(frozen=True, eq=False)
class DraftTree:
    """
    A batch of draft trees with `N` nodes each (B rows).

    Rows with fewer real nodes are padded at the end: a padding node is a child of the root carrying the pad token. It
    sees the root and itself, so that no attention row is empty, nobody sees it, and its scores are -inf.

    Args:
        tokens (`torch.Tensor` of shape `(B, N)`, int64):
            Token of each node, in the target's vocabulary. Node 0 is the root.
        parents (`torch.Tensor` of shape `(B, N)`, int64):
            Index of each node's parent; -1 for the root, smaller than the node's own index for all others.
        num_nodes (`torch.Tensor` of shape `(B,)`, int64):
            Real nodes of each row, the root included.
        scores (`torch.Tensor` of shape `(B, N)`, float32):
            Cumulative rank score, 0 for the root (EAGLE-2, arXiv 2406.16858, section 4.1: the value of a node).
        log_probs (`torch.Tensor` of shape `(B, N)`, float32):
            Cumulative log-probability that the draft itself gives to the path, 0 for the root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    num_nodes: torch.Tensor
    scores: torch.Tensor
    log_probs: torch.Tensor

    @classmethod
    def chain(cls, tokens: torch.Tensor) -> "DraftTree":
        """
        The tree without branches: each token of `tokens` (`(B, N)`, the root first) is the child of the one before.
        Scores and log-probabilities are 0: a chain ranks nothing.
        """
        rows, length = tokens.shape
        parents = torch.arange(-1, length - 1, device=tokens.device).expand(rows, length)
        num_nodes = torch.full((rows,), length, dtype=torch.int64, device=tokens.device)
        zeros = torch.zeros((rows, length), dtype=torch.float32, device=tokens.device)
        return cls(tokens.to(torch.int64), parents, num_nodes, zeros, zeros)

    @classmethod
    def root_only(cls, tokens: torch.Tensor) -> "DraftTree":
        """The tree that drafts nothing: `tokens` (`(B, 1)`) are the roots. Verifying it is one plain decoding step."""
        if tokens.shape[1] != 1:
            raise ValueError(
                f"a tree of the root alone takes tokens of shape (B, 1), got {tuple(tokens.shape)}; use "
                "`DraftTree.chain` for more than one token a row"
            )
        return cls.chain(tokens)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """`(B, N, N)` bool: `[b, i, j]` is true iff node j is node i or one of its ancestors."""
        rows, size = self.tokens.shape
        device = self.tokens.device
        # All rows in one flat table, so that following a parent pointer is one row-wise copy.
        first = torch.arange(0, rows * size, size, device=device)[:, None]
        jump = (self.parents.clamp(min=0) + first).view(-1)
        seen = torch.eye(size, dtype=torch.bool, device=device).expand(rows, size, size).reshape(rows * size, size)
        # Pointer doubling: after k rounds a node knows its nearest 2^k ancestors. The root is its own parent here.
        for _ in range((size - 1).bit_length()):
            seen = seen | seen.index_select(0, jump)
            jump = jump.index_select(0, jump)
        return seen.view(rows, size, size)

    @cached_property
    def depths(self) -> torch.Tensor:
        """`(B, N)` int64: edges between the root and each node (root 0, padding 1)."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        """Longest drafted path of the batch, in tokens; 0 when only roots are there. Waits for the device."""
        return max(tree.depth for tree in self.host())

    def host(self) -> list[HostTree]:
        """Each row's real nodes as Python lists. One transfer for the whole tree, at the first call only."""
        return self._host

    @cached_property
    def _host(self) -> list[HostTree]:
        size = self.tokens.shape[1]
        table = torch.cat((self.num_nodes[:, None], self.tokens, self.parents), dim=1).tolist()
        return [HostTree(row[1 : 1 + row[0]], row[1 + size : 1 + size + row[0]]) for row in table]

    def trimmed(self) -> "DraftTree":
        """The same trees without the nodes that are padding in every row. Waits for the device."""
        size = max(len(tree.tokens) for tree in self.host())
        if size == self.tokens.shape[1]:
            return self
        parts = (part[:, :size] for part in (self.tokens, self.parents, self.scores, self.log_probs))
        tokens, parents, scores, log_probs = parts
        return DraftTree(tokens, parents, self.num_nodes, scores, log_probs)

    def with_chains(self, chains: Mapping[int, Sequence[int]]) -> "DraftTree":
        """The same trees, but some rows' replaced by chains of known tokens, roots first. Waits for the device."""
        if not chains:
            return self
        trees = [
            HostTree(list(chains[row]), list(range(-1, len(chains[row]) - 1))) if row in chains else tree
            for row, tree in enumerate(self.host())
        ]
        size = max(len(tree.tokens) for tree in trees)
        grown = max(0, size - self.tokens.shape[1])
        pads = [size - len(tree.tokens) for tree in trees]
        tokens = [tree.tokens + tree.tokens[:1] * pad for tree, pad in zip(trees, pads, strict=True)]
        parents = [tree.parents + [0] * pad for tree, pad in zip(trees, pads, strict=True)]
        device = self.tokens.device
        scores, log_probs = (
            torch.nn.functional.pad(part, (0, grown), value=-torch.inf)[:, :size]
            for part in (self.scores, self.log_probs)
        )
        replaced = torch.tensor([row in chains for row in range(len(trees))], device=device)[:, None]
        return DraftTree(
            torch.tensor(tokens, device=device),
            torch.tensor(parents, device=device),
            torch.tensor([len(tree.tokens) for tree in trees], device=device),
            scores.masked_fill(replaced, 0.0),
            log_probs.masked_fill(replaced, 0.0),
        )

    def path(self, row: int, node: int) -> list[int]:
        """Node indices from the root to `node` (both included) in batch row `row`."""
        parents = self.host()[row].parents
        if not 0 <= node < len(parents):
            raise IndexError(f"node {node} is not one of the {len(parents)} nodes of row {row}")
        path = [node]
        while node:
            node = parents[node]
            path.append(node)
        return path[::-1]


def select(
    pool_tokens: torch.Tensor,
    pool_parents: torch.Tensor,
    pool_scores: torch.Tensor,
    pool_log_probs: torch.Tensor,
    root_tokens: torch.Tensor,
    num_nodes: int,
    pad_token_id: int,
) -> DraftTree:
    """
    Keep the best `num_nodes` of each row's candidates as a tree (reranking, EAGLE-2, arXiv 2406.16858, section 4.2).

    Candidates are ranked by score with a stable sort, so that of equals the earlier one wins; NaN counts as -inf, and
    -inf is never kept. Kept nodes stand in pool order behind the root. A kept node's parent is always kept, provided
    that parents stand before their children and no score exceeds its parent's. The host never waits for the device.

    Args:
        pool_tokens (`torch.Tensor` of shape `(B, M)`): candidates of each row, shallow ones first.
        pool_parents (`torch.Tensor` of shape `(B, M)`): index of each one's parent in the pool, -1 for the root.
        pool_scores (`torch.Tensor` of shape `(B, M)`): cumulative rank scores.
        pool_log_probs (`torch.Tensor` of shape `(B, M)`): cumulative log-probabilities of the draft.
        root_tokens (`torch.Tensor` of shape `(B,)` or `(B, 1)`): last committed token of each row.
        num_nodes (`int`): drafted nodes to keep per row, the root not counted.
        pad_token_id (`int`): token of padding nodes, where a row has fewer candidates.

    Returns:
        `DraftTree` with `N = num_nodes + 1` nodes a row.
    """
    rows, pool_size = pool_tokens.shape
    if num_nodes < 1 or pool_size == 0:
        return DraftTree.root_only(root_tokens.view(rows, 1))
    scores = pool_scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    # What is not kept gets the index `pool_size`: it sorts behind every kept node.
    kept = order[:, :num_nodes].masked_fill(best[:, :num_nodes] == -torch.inf, pool_size).sort(dim=-1).values
    if pool_size < num_nodes:
        kept = torch.nn.functional.pad(kept, (0, num_nodes - pool_size), value=pool_size)
    padding = kept == pool_size
    source = kept.clamp(max=pool_size - 1)

    pool_parent = pool_parents.gather(1, source)
    # The node of a pool entry is its rank among the kept entries, which are sorted, plus one for the root.
    parents = torch.searchsorted(kept, pool_parent) + 1
    parents = parents.masked_fill(padding | (pool_parent < 0), 0)
    return DraftTree(
        tokens=_behind_root(root_tokens, pool_tokens.gather(1, source).masked_fill(padding, pad_token_id)),
        parents=torch.nn.functional.pad(parents, (1, 0), value=-1),
        num_nodes=num_nodes + 1 - padding.sum(-1),
        scores=torch.nn.functional.pad(scores.gather(1, source).masked_fill(padding, -torch.inf), (1, 0)),
        log_probs=torch.nn.functional.pad(
            pool_log_probs.float().gather(1, source).masked_fill(padding, -torch.inf), (1, 0)
        ),
    )


def _behind_root(root_tokens: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat((root_tokens.view(-1, 1), tokens), dim=1)
