"""Verification as a walk through the draft tree, along the target's own choices.

The tree only determines how far the walk gets. The tokens are the target's choices, greedy or sampled (see
`coupling.py`), so they are those of ordinary decoding, whatever was drafted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from .tree import HostTree


class Walk:
    """Follows the target's own choices through each sequence's tree, level by level for all sequences.

    A walk starts at the root (node 0). At each node the target chooses the next token; if a child of the node carries
    it, the walk goes on there, else that token is the bonus token and the walk ends. It also ends when the caller says
    that the sequence must not emit more.

    Args:
        trees: Each sequence's tree, without padding.
        together: Sequences that stay at the same step: when the walk of one ends, the walks of all of them end.

    Attributes:
        paths: The visited nodes of each tree. One token was chosen at each of them.
        accepted: The number of correct drafts of each sequence. If a text ends at a draft, or another sequence
            ends the walk there, the last correct draft is counted but not visited.
    """

    def __init__(self, trees: Sequence[HostTree], together: Iterable[int] = ()):
        self.paths: list[list[int]] = [[] for _ in trees]
        self.accepted = [0] * len(trees)
        self._together = frozenset(together)
        self._sizes = [len(tree.tokens) for tree in trees]
        self._children: list[dict[tuple[int, int], int]] = [{} for _ in trees]
        for children, (tokens, parents) in zip(self._children, trees, strict=True):
            for child in range(1, len(tokens)):
                children.setdefault((parents[child], tokens[child]), child)

    def take_all(self, index: int) -> None:
        """Visit all nodes of a chain of known tokens, without a choice at each."""
        self.paths[index] = list(range(self._sizes[index]))

    def run(
        self,
        indices: Iterable[int],
        choose: Callable[[dict[int, int]], Mapping[int, int]],
        goes_on: Callable[[int], bool],
    ) -> None:
        """Walk the trees of some sequences, from their roots.

        Args:
            indices: The sequences.
            choose: Maps each walking sequence's node to the token that the target chooses there. It is called once for
                each level, in order, when `paths` already hold the nodes. If it leaves out a sequence, the walk of
                this sequence ends before the node.
            goes_on: Returns whether a sequence may emit another token.
        """
        nodes = dict.fromkeys(indices, 0)
        while nodes:
            for index, node in nodes.items():
                self.paths[index].append(node)
            tokens = choose(nodes)
            following = {}
            for index, node in nodes.items():
                if index not in tokens:
                    self.paths[index].pop()
                    continue
                child = self._children[index].get((node, tokens[index]))
                if child is not None:
                    self.accepted[index] += 1
                    if goes_on(index):
                        following[index] = child
            if not self._together.intersection(nodes) <= following.keys():
                following = {index: node for index, node in following.items() if index not in self._together}
            nodes = following
