"""Draft trees: the nodes that a round proposes, and what follows from their parents.

A sequence's tree is two lists: `tokens` and `parents`. Node 0 is the root (the last committed token), every parent
comes before its children, and everything else (depths, ancestors, paths) is derived from the parents on demand.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from .transfers import upload_parts


class HostTree(NamedTuple):
    """The nodes of one tree, without padding, as Python lists; `parents[0]` is -1."""

    tokens: list[int]
    parents: list[int]

    @property
    def depth(self) -> int:
        """The number of drafted tokens of the longest path; 0 for the root alone."""
        return max(self.depths())

    def depths(self) -> list[int]:
        """Return the number of edges between the root and each node."""
        depths = [0] * len(self.parents)
        for node in range(1, len(self.parents)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def ancestors(self) -> bytes:
        """Return for each node a row of N truth values: whether a node is this one, or one of its ancestors."""
        size = len(self.parents)
        rows: list[bytearray] = []
        for node, parent in enumerate(self.parents):
            row = bytearray(rows[parent]) if node else bytearray(size)
            row[node] = 1
            rows.append(row)
        return b"".join(rows)

    def padded(self, size: int) -> "HostTree":
        """Return the tree with padding up to `size` nodes."""
        missing = size - len(self.tokens)
        return HostTree(self.tokens + self.tokens[:1] * missing, self.parents + [0] * missing) if missing else self


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of B draft trees with N nodes each.

    Smaller trees are padded at the end. A padding node is a child of the root with the pad token. It attends to the
    root and itself, no other node attends to it, and its scores are -inf.

    Args:
        tokens: (B, N) int64, token of each node, in the target's vocabulary. Node 0 is the root.
        parents: (B, N) int64, index of each node's parent; -1 for the root, else smaller than the node's own.
        num_nodes: (B,) int64, number of nodes of each tree, the root included, without padding.
        scores: (B, N) float32, cumulative rank score, 0 for the root (EAGLE-2, arXiv 2406.16858, section 4.1: the
            value of a node).
        log_probs: (B, N) float32, cumulative log-probability that the draft itself gives to the path, 0 for the root.
        most_levels: No node is deeper; `None` if that is not known. It bounds the work of finding ancestors.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    num_nodes: torch.Tensor
    scores: torch.Tensor
    log_probs: torch.Tensor
    most_levels: int | None = None

    @classmethod
    def chain(cls, tokens: torch.Tensor) -> "DraftTree":
        """Return trees without branches: each of the `tokens` (B, N), the root first, is the child of the one before.

        Scores and log-probabilities are 0.
        """
        batch, length = tokens.shape
        parents = torch.arange(-1, length - 1, device=tokens.device).expand(batch, length)
        num_nodes = torch.full((batch,), length, dtype=torch.int64, device=tokens.device)
        zeros = torch.zeros((batch, length), dtype=torch.float32, device=tokens.device)
        return cls(tokens.to(torch.int64), parents, num_nodes, zeros, zeros)

    @classmethod
    def root_only(cls, tokens: torch.Tensor) -> "DraftTree":
        """Return trees of the roots (B, 1) alone. Verifying them is one step of plain decoding."""
        if tokens.shape[1] != 1:
            raise ValueError(
                f"a tree of the root alone takes tokens of shape (B, 1), got {tuple(tokens.shape)}; use "
                "`DraftTree.chain` for longer ones"
            )
        return cls.chain(tokens)

    @classmethod
    def from_nodes(
        cls,
        roots: Sequence[int],
        tokens: Sequence[list[int]],
        parents: Sequence[list[int]],
        values: Sequence[list[float]],
        device: torch.device,
    ) -> "DraftTree":
        """Return trees that were chosen on the host.

        Args:
            roots: The last committed token of each sequence.
            tokens: Tokens of the drafted nodes of each tree, parents before their children.
            parents: Their parents, where 0 is the root, and `i + 1` the node at index `i`.
            values: The probability that each node is accepted; its logarithm becomes score and log-probability.
            device: Device of the trees.
        """
        logs = [[math.log(max(value, 1e-300)) for value in own] for own in values]
        host = [HostTree([first, *own], [-1, *up]) for first, own, up in zip(roots, tokens, parents, strict=True)]
        return cls._of_host(host, logs, device)

    @classmethod
    def _of_host(cls, host: list[HostTree], scores: list[list[float]], device: torch.device) -> "DraftTree":
        """Return trees whose nodes are known on the host. All that follows from them is moved in one transfer.

        Args:
            host: The trees.
            scores: Score and log-probability of each drafted node.
            device: Device of the trees.
        """
        batch, size = len(host), max(len(tree.tokens) for tree in host)
        padded = [tree.padded(size) for tree in host]
        ints = [number for tree in padded for number in tree.tokens]
        ints += [parent for tree in padded for parent in tree.parents]
        ints += [depth for tree in padded for depth in tree.depths()]
        ints += [len(tree.tokens) for tree in host]
        floats: list[float] = []
        for own in scores:
            floats += [0.0, *own, *[-math.inf] * (size - 1 - len(own))]
        moved = upload_parts(device, ints, floats, b"".join(tree.ancestors() for tree in padded))
        nodes, values = moved.ints[: 3 * batch * size].view(3, batch, size), moved.floats.view(batch, size)
        tree = cls(nodes[0], nodes[1], moved.ints[3 * batch * size :], values, values)
        # What the cached properties would compute, or bring back from the device.
        tree.__dict__.update(_host=host, depths=nodes[2], ancestors=moved.flags.view(batch, size, size))
        return tree

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """(B, N, N) bool: `[b, i, j]` says whether node j is node i or one of its ancestors."""
        batch, size = self.tokens.shape
        device = self.tokens.device
        jump = self.parents.clamp(min=0)
        if batch > 1:  # all trees in one flat table of nodes, so that following the parents is one copy
            jump = jump + torch.arange(0, batch * size, size, device=device)[:, None]
        jump = jump.view(-1)
        seen = torch.eye(size, dtype=torch.bool, device=device).repeat(batch, 1)
        # Pointer doubling: after k iterations a node has its nearest 2^k ancestors. The root is its own parent here.
        deepest = size - 1 if self.most_levels is None else min(self.most_levels, size - 1)
        for left in reversed(range(deepest.bit_length())):
            seen = seen | seen.index_select(0, jump)
            if left:
                jump = jump.index_select(0, jump)
        return seen.view(batch, size, size)

    @cached_property
    def depths(self) -> torch.Tensor:
        """(B, N) int64: number of edges between the root and each node (root 0, padding 1)."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def max_depth(self) -> int:
        """Length of the batch's longest drafted path, in tokens; 0 if there are only roots. Waits for the device."""
        return max(tree.depth for tree in self.host())

    def deepest(self, index: int) -> int:
        """Return the depth of a tree, or a bound of it where waiting for the device would be needed to tell."""
        if "_host" in self.__dict__ or self.most_levels is None:
            return self.host()[index].depth
        return min(self.most_levels, self.tokens.shape[1] - 1)

    def host(self) -> list[HostTree]:
        """Return each tree as Python lists. The first call makes one transfer for the whole batch."""
        return self._host

    @cached_property
    def _host(self) -> list[HostTree]:
        self.read_with(self.num_nodes[:, None])
        return self.__dict__["_host"]

    def read_with(self, more: torch.Tensor) -> list[list[int]]:
        """Return `more` (B, K) int64 as lists. Unless the nodes are on the host already, they come along with it.

        Waits for the device, once for both.
        """
        if "_host" in self.__dict__:
            return more.tolist()
        size = self.tokens.shape[1]
        parts = (part.to(more.device) for part in (self.num_nodes[:, None], self.tokens, self.parents))
        table = torch.cat((*parts, more), dim=1).tolist()
        self.__dict__["_host"] = [
            HostTree(line[1 : 1 + line[0]], line[1 + size : 1 + size + line[0]]) for line in table
        ]
        return [line[1 + 2 * size :] for line in table]

    def __repr__(self) -> str:
        """Return the shape alone, which needs nothing from the device."""
        batch, size = self.tokens.shape
        return f"DraftTree(B={batch}, N={size}, device='{self.tokens.device}')"

    def __str__(self) -> str:
        """Return the trees as text: each node's token and the chance that its path is accepted, the best child first.

        Waits for the device. Where the tensors have no values (on the meta device), the shape alone is returned.
        """
        if self.tokens.is_meta:
            return repr(self)
        scores = self.scores.detach().float().cpu()
        return "\n\n".join(
            _tree_in_words(tree, scores[index].exp().tolist()) for index, tree in enumerate(self.host())
        )

    def trimmed(self) -> "DraftTree":
        """Return the trees without the nodes that are padding in all of them. Waits for the device."""
        size = max(len(tree.tokens) for tree in self.host())
        if size == self.tokens.shape[1]:
            return self
        parts = (part[:, :size] for part in (self.tokens, self.parents, self.scores, self.log_probs))
        tokens, parents, scores, log_probs = parts
        trimmed = DraftTree(tokens, parents, self.num_nodes, scores, log_probs, self.most_levels)
        trimmed.__dict__["_host"] = self.host()
        return trimmed

    def likeliest_first(self) -> "DraftTree":
        """Return the trees with the nodes of one path before all others: that of the most expected accepted tokens.

        If a path is accepted, it is often this one or a part of it. Its entries are then in their slots of the cache
        already. All other nodes keep their order. Scores are taken for the logarithms of probabilities. The host
        never waits for the device.
        """
        size = self.tokens.shape[1]
        if size < 3:
            return self
        expected = (self.ancestors.float() @ self.scores.exp()[..., None]).squeeze(-1)
        leaf = expected.argmax(-1)
        on_path = self.ancestors.gather(1, leaf[:, None, None].expand(-1, 1, size)).squeeze(1)
        # The root is on the path, so that it stays the first. A stable sort keeps parents before children.
        order = on_path.view(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
        parents = order.argsort(-1).gather(1, self.parents.gather(1, order)[:, 1:])
        scores = self.scores.gather(1, order)
        tree = DraftTree(
            self.tokens.gather(1, order),
            torch.nn.functional.pad(parents, (1, 0), value=-1),
            self.num_nodes,
            scores,
            scores if self.log_probs is self.scores else self.log_probs.gather(1, order),
            self.most_levels,
        )
        rows = self.ancestors.gather(1, order[..., None].expand(-1, -1, size))
        tree.__dict__["ancestors"] = rows.gather(2, order[:, None].expand(-1, size, -1))
        return tree

    def with_chains(self, chains: Mapping[int, Sequence[int]]) -> "DraftTree":
        """Return the trees, some of them replaced by chains of known tokens. The host never waits for the device.

        Args:
            chains: Index of a sequence -> the tokens of its chain, the root first.
        """
        if not chains:
            return self
        batch, before = self.tokens.shape
        size = max(before, *map(len, chains.values()))
        trees = {index: HostTree(list(own), list(range(-1, len(own) - 1))) for index, own in chains.items()}
        none = HostTree([0], [0])
        lines = [trees.get(index, none).padded(size) for index in range(batch)]
        ints = [number for line in lines for number in (*line.tokens, *line.parents)]
        ints += [len(trees.get(index, none).tokens) for index in range(batch)]
        moved = upload_parts(self.tokens.device, ints, flags=bytes(index in chains for index in range(batch)))
        tokens, parents = moved.ints[: 2 * batch * size].view(batch, 2, size).unbind(1)
        replaced = moved.flags[:, None]
        pad, longest = torch.nn.functional.pad, max(map(len, chains.values()))
        own_tokens, own_parents, scores, log_probs = self.tokens, self.parents, self.scores, self.log_probs
        if size > before:
            grown = (0, size - before)
            own_tokens = torch.cat([own_tokens, own_tokens[:, :1].expand(-1, size - before)], 1)
            own_parents = pad(own_parents, grown)
            scores, log_probs = (pad(part, grown, value=-torch.inf) for part in (scores, log_probs))
        tree = DraftTree(
            torch.where(replaced, tokens, own_tokens),
            torch.where(replaced, parents, own_parents),
            torch.where(moved.flags, moved.ints[2 * batch * size :], self.num_nodes),
            scores.masked_fill(replaced, 0.0),
            log_probs.masked_fill(replaced, 0.0),
            None if self.most_levels is None else max(self.most_levels, longest - 1),
        )
        if "_host" in self.__dict__:
            tree.__dict__["_host"] = [trees.get(index, own) for index, own in enumerate(self.host())]
        return tree

    def path(self, index: int, node: int) -> list[int]:
        """Return the nodes from the root to `node`, both included, in the tree of the sequence at `index`."""
        parents = self.host()[index].parents
        if not 0 <= node < len(parents):
            raise IndexError(f"node {node} is not one of the {len(parents)} nodes of tree {index}")
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
    most_levels: int | None = None,
) -> DraftTree:
    """Keep the best candidates of each sequence as a tree (reranking, EAGLE-2, arXiv 2406.16858, section 4.2).

    Candidates are ranked by score with a stable sort, so that of equals the earlier one wins; NaN counts as -inf, and
    -inf is never kept. Kept nodes are in pool order behind the root. A kept node's parent is always kept, provided
    that parents come before their children and no score exceeds its parent's. The host never waits for the device.

    Args:
        pool_tokens: (B, M) candidates of each sequence, shallow ones first.
        pool_parents: (B, M) index of each one's parent in the pool, -1 for the root.
        pool_scores: (B, M) cumulative rank scores.
        pool_log_probs: (B, M) cumulative log-probabilities of the draft.
        root_tokens: (B,) or (B, 1) last committed token of each sequence.
        num_nodes: Number of drafted nodes to keep of each tree, without the root.
        pad_token_id: Token of the padding nodes, if there are fewer candidates.
        most_levels: Levels of the pool, if known.

    Returns:
        Trees of `num_nodes + 1` nodes.
    """
    batch, pool_size = pool_tokens.shape
    if num_nodes < 1 or pool_size == 0:
        return DraftTree.root_only(root_tokens.view(batch, 1))
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

    def of_nodes(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values.gather(1, source).masked_fill(padding, -torch.inf), (1, 0))

    node_scores = of_nodes(scores)
    return DraftTree(
        tokens=_behind_root(root_tokens, pool_tokens.gather(1, source).masked_fill(padding, pad_token_id)),
        parents=torch.nn.functional.pad(parents, (1, 0), value=-1),
        num_nodes=num_nodes + 1 - padding.sum(-1),
        scores=node_scores,
        log_probs=node_scores if pool_log_probs is pool_scores else of_nodes(pool_log_probs.float()),
        most_levels=most_levels,
    )


def _behind_root(root_tokens: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat((root_tokens.view(-1, 1), tokens), dim=1)


def _tree_in_words(tree: HostTree, chances: list[float]) -> str:
    """Return a tree as text, one line for each node."""
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node in range(1, len(tree.tokens)):
        children[tree.parents[node]].append(node)
    lines = [f"{tree.tokens[0]} (root; drafted nodes: {len(tree.tokens) - 1}, levels: {tree.depth})"]
    left = [(node, "", node == last) for node, last in _as_stack(children[0], chances)]
    while left:
        node, indent, is_last = left.pop()
        lines.append(f"{indent}{'└─' if is_last else '├─'} {tree.tokens[node]}  {chances[node]:.3f}")
        below = indent + ("   " if is_last else "│  ")
        left += [(child, below, child == last) for child, last in _as_stack(children[node], chances)]
    return "\n".join(lines)


def _as_stack(nodes: list[int], chances: list[float]) -> list[tuple[int, int]]:
    """Return siblings in the order of a stack, from which the best comes first, each with the least likely one."""
    ordered = sorted(nodes, key=lambda node: chances[node])
    return [(node, ordered[0]) for node in ordered]
