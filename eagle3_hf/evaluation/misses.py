"""Why a round's guesses missed the target's next token: the causes, defined once.

A round ends where the target chooses a token that no child of the last accepted node carries. Every such miss has
exactly one cause, so that the causes add up to the misses. A round whose accepted path reaches the deepest level that
was drafted has no miss: nothing was guessed behind it.
"""

from collections.abc import Container, Iterable, Sequence
from enum import Enum
from typing import Protocol

from ..decoding.tree import HostTree


class Cause(str, Enum):
    """The cause of a miss. Each points at another remedy.

    Attributes:
        OUTSIDE_VOCABULARY: The head cannot propose the token: it is not in the draft vocabulary. A draft vocabulary
            that fits the data would help.
        NOT_A_CANDIDATE: The head could have proposed the token here, but did not: too many tokens seemed likelier, or
            the node was not expanded. A better head would help, or one that is fed correctly.
        PRUNED: The token was a candidate here, and others took its place in the tree. More nodes would help.
        WRONG_ANCESTOR: The tree has the token at this level, but behind another node than the accepted one: the head
            knew the word, and not the way to it.
    """

    OUTSIDE_VOCABULARY = "outside_vocabulary"
    NOT_A_CANDIDATE = "not_a_candidate"
    PRUNED = "pruned"
    WRONG_ANCESTOR = "wrong_ancestor"

    @property
    def words(self) -> str:
        """The cause in words, to follow "the token is" or "it was"."""
        return _WORDS[self]


_WORDS = {
    Cause.OUTSIDE_VOCABULARY: "outside the draft vocabulary",
    Cause.NOT_A_CANDIDATE: "not among the candidates",
    Cause.PRUNED: "a candidate, pruned by the budget of nodes",
    Cause.WRONG_ANCESTOR: "drafted at this level, but behind a wrong ancestor",
}


class CandidatePool(Protocol):
    """Candidates of a round; [`pools.Pool`] is one.

    Attributes:
        tokens: Token of each candidate. Candidates that can never be kept (a score of -inf) are left out.
        parents: Index of each candidate's parent in the pool, -1 for the root. Parents may be in any place.
    """

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def parents(self) -> Sequence[int]: ...


def cause_of_miss(
    pool: CandidatePool,
    tree: HostTree,
    path: Sequence[int],
    token: int,
    vocabulary: Container[int] | None = None,
    max_depth: int | None = None,
) -> Cause | None:
    """Return why a round did not accept the target's next token behind its accepted path.

    Args:
        pool: All candidates of the round, those of the kept tree among them. Nodes of the tree that it lacks (such as
            those of another source) have no candidates below them.
        tree: The kept tree, whose node 0 is the root.
        path: The accepted nodes of the tree, the root first, as [`Walk`] visits them.
        token: The token that the target chose behind the last node of the path.
        vocabulary: The ids that the head can propose; `None` for all.
        max_depth: The deepest level that was drafted; `None` for the deepest one of pool and tree.

    Returns:
        The cause. `None` if there is no miss, because the path reaches the deepest level.

    Raises:
        ValueError: the path is not one from the root, or a child of its last node carries the token, so that the
            round has accepted it.
    """
    _check_path(tree, path)
    node, depth = path[-1], len(path)  # the depth of the missed token
    children = [child for child in range(1, len(tree.tokens)) if tree.parents[child] == node]
    if any(tree.tokens[child] == token for child in children):
        raise ValueError(
            f"token {token} is a child of node {node}: it was accepted, expected the token behind the path"
        )
    if max_depth is None:
        max_depth = max(tree.depth, _depth(pool))
    if depth > max_depth:
        return None
    if token in _candidates_behind(pool, [tree.tokens[each] for each in path[1:]]):
        return Cause.PRUNED
    if vocabulary is not None and token not in vocabulary:
        return Cause.OUTSIDE_VOCABULARY
    return Cause.WRONG_ANCESTOR if token in _level(tree, depth) else Cause.NOT_A_CANDIDATE


def count_causes(causes: Iterable[Cause | None]) -> dict[Cause, int]:
    """Return how often each cause occurs, all causes in the order of their definition; `None` is not counted."""
    listed = list(causes)
    return {cause: listed.count(cause) for cause in Cause}


def _check_path(tree: HostTree, path: Sequence[int]) -> None:
    expected = -1
    for node in path:
        if not 0 <= node < len(tree.parents) or tree.parents[node] != expected:
            break
        expected = node
    else:
        if path:
            return
    raise ValueError(f"{list(path)} is not a path from the root of a tree with the parents {tree.parents}")


def _candidates_behind(pool: CandidatePool, tokens: Sequence[int]) -> list[int]:
    """Return the tokens of the pool's candidates behind a path of tokens; none if the pool lacks the path."""
    parents = [int(parent) for parent in pool.parents]
    at = -1
    for token in tokens:
        below = [each for each, parent in enumerate(parents) if parent == at and int(pool.tokens[each]) == token]
        if not below:
            return []
        at = below[0]
    return [int(pool.tokens[each]) for each, parent in enumerate(parents) if parent == at]


def _level(tree: HostTree, depth: int) -> set[int]:
    """Return the tokens of the tree at a depth."""
    depths = [0] * len(tree.parents)
    for node in range(1, len(tree.parents)):
        depths[node] = depths[tree.parents[node]] + 1
    return {token for token, own in zip(tree.tokens, depths, strict=True) if own == depth}


def _depth(pool: CandidatePool) -> int:
    """Return the deepest level of a pool; 0 for an empty one."""
    parents = [int(parent) for parent in pool.parents]
    depths: dict[int, int] = {-1: 0}
    for first in range(len(parents)):
        way, at = [], first
        while at not in depths:
            way.append(at)
            at = parents[at]
        for each in reversed(way):
            depths[each] = depths[parents[each]] + 1
    return max(depths.values())
