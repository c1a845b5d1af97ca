"""Verification as a walk: at each node the target makes its own choice; the tree only says how far it was foreseen.

Nothing here knows the draft. The tokens are the target's choices, so they are what the target alone would have made
(greedy or sampled, see `noise.py`) whatever the tree holds.
"""

from collections.abc import Callable, Iterator, Sequence

import torch


def walk(
    tree_tokens: Sequence[int], tree_parents: Sequence[int], choose: Callable[[int], int]
) -> Iterator[tuple[int, int]]:
    """
    Follow the target's own choices through one row's tree.

    Starts at the root (node 0). At each node the target chooses the next token; if a child of the node carries it, the
    walk goes on there, else that token is the bonus token and the walk ends. The caller may stop earlier (end of
    sequence, length): `choose` is called only when the next pair is asked for, once per visited node, in order.

    Args:
        tree_tokens (`Sequence[int]` of length N): token of each node.
        tree_parents (`Sequence[int]` of length N): parent of each node, -1 for the root.
        choose (`Callable[[int], int]`): maps a node to the token the target puts behind it.

    Yields:
        `(node, token)`: a visited node and the token chosen there. All tokens but the last of a full walk are accepted
        drafts.
    """
    children: dict[tuple[int, int], int] = {}
    for child in range(1, len(tree_tokens)):
        children.setdefault((tree_parents[child], tree_tokens[child]), child)
    node: int | None = 0
    while node is not None:
        token = choose(node)
        yield node, token
        node = children.get((node, token))


def foreseen(tree_tokens: Sequence[int], tree_parents: Sequence[int], node: int, token: int) -> bool:
    """Whether a child of `node` carries `token`: the draft was right there, although the walk may have ended."""
    return any(parent == node and drafted == token for parent, drafted in zip(tree_parents, tree_tokens, strict=True))


def greedy_choices(logits: torch.Tensor) -> torch.Tensor:
    """The target's greedy choice at every node: `logits` `(B, N, V)` to ids `(B, N)` (first of equals, as vanilla)."""
    return logits.argmax(dim=-1)
