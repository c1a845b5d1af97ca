"""Trees that are told the text: a random part of its continuation, among wrong branches.

A head that accepts little would leave verification almost untested. So the trees of the head are exchanged, once it
has drafted them, for trees whose deep paths the target accepts. Where the text is another one, they are rejected.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...decoding.draft.proposer import Proposer
from ...decoding.draft.sizing import Proposal
from ...decoding.tree import DraftTree, HostTree
from ..watching import wrapped


_NODES, _DEPTH = 16, 5  # of the largest told tree
_WHOLE = 0.4  # the share of trees that tell as much as they can


@contextmanager
def told(texts: Sequence[Sequence[int]], seed: int = 0) -> Iterator[None]:
    """Let the calls of this thread inside the block draft trees that know the texts.

    Args:
        texts: The new tokens of each sequence of the batch.
        seed: Seed of the trees' shapes. No generator of torch is used.
    """
    chance = random.Random(seed)
    words = sorted({token for text in texts for token in text})

    def propose(original: Any, self: Proposer, depth: int, active: Sequence[int]) -> DraftTree:
        drafted: DraftTree = original(self, depth, active)
        settings = self._settings
        most = min(settings.num_nodes, _NODES), min(depth, settings.reach, _DEPTH)
        is_chain = settings.top_k == 1
        trees = []
        for sequence in self._batch:
            root, following = sequence.upcoming(1)[0], texts[sequence.index][sequence.root_step + 1 :]
            if sequence.index not in active:
                following, limits = [], (0, 0)
            else:
                limits = most
            trees.append(told_tree(root, following, words, *limits, is_chain, chance))
        self.proposal = Proposal(num_nodes=max(len(tree.tokens) for tree in trees) - 1)
        return DraftTree.from_nodes(
            [tree.tokens[0] for tree in trees],
            [tree.tokens[1:] for tree in trees],
            [tree.parents[1:] for tree in trees],
            [[0.5] * (len(tree.tokens) - 1) for tree in trees],
            drafted.tokens.device,
        )

    with wrapped(Proposer, "propose", propose):
        yield


def told_tree(
    root: int,
    following: Sequence[int],
    words: Sequence[int],
    num_nodes: int,
    max_depth: int,
    is_chain: bool,
    chance: random.Random,
) -> HostTree:
    """Return a tree below a root: the first of the tokens that follow, and wrong ones around and behind them.

    Args:
        root: Token of the root.
        following: What follows it.
        words: Tokens to be wrong with.
        num_nodes: The largest number of nodes besides the root.
        max_depth: The deepest level.
        is_chain: Whether no node has two children.
        chance: Decides how much is told, and where the rest goes.
    """
    most = min(len(following), max_depth, num_nodes)
    length = most if chance.random() < _WHOLE else chance.randint(0, most)
    # Nodes by name: tokens on the path to each.
    paths: list[tuple[int, ...]] = [tuple(following[:depth]) for depth in range(1, length + 1)]
    known = {(), *paths}
    for _ in range(chance.randint(0, num_nodes - length) if max_depth else 0):
        above = (paths or [()])[-1] if is_chain else chance.choice([(), *paths])
        path = (*above, chance.choice(words))
        # The continuation itself is told by `length` alone.
        if len(path) > max_depth or path in known or path == tuple(following[: len(path)]):
            continue
        paths.append(path)
        known.add(path)
    return _shuffled(root, paths, chance)


def _shuffled(root: int, paths: list[tuple[int, ...]], chance: random.Random) -> HostTree:
    """Return the nodes in random order, each behind its parent."""
    places: dict[tuple[int, ...], int] = {(): 0}
    tree, left = HostTree([root], [-1]), list(paths)
    while left:
        path = left.pop(chance.choice([at for at, each in enumerate(left) if each[:-1] in places]))
        places[path] = len(tree.tokens)
        tree.tokens.append(path[-1])
        tree.parents.append(places[path[:-1]])
    return tree
