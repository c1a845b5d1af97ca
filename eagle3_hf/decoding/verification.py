"""Verification as a walk: at each node the target makes its own choice; the tree only says how far it was foreseen.

Nothing here knows the draft. The tokens are the target's choices, so they are what the target alone would have made
(greedy or sampled, see `coupling.py`) whatever the tree holds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from .tree import HostTree


class Walk:
    """Follows the target's own choices through each sequence's tree, all sequences a level at a time.

    A walk starts at the root (node 0). At each node the target chooses the next token; if a child of the node carries
    it, the walk goes on there, else that token is the bonus token and the walk ends. It also ends where the caller
    says that the sequence has no more to emit.

    Args:
        trees: Real nodes of each sequence's tree.
        together: Sequences that stay at the same step: the first of them that ends, ends all of them.

    Attributes:
        paths: Nodes visited in each tree, one for each token chosen there.
        accepted: Right drafts of each sequence; one more than was used where a text ends at a draft, or where another
            sequence ended the walk there.
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
        """Accept a chain of known tokens without asking: all of it is right."""
        self.paths[index] = list(range(self._sizes[index]))

    def run(
        self,
        indices: Iterable[int],
        choose: Callable[[dict[int, int]], Mapping[int, int]],
        goes_on: Callable[[int], bool],
    ) -> None:
        """Walk the trees of some sequences, from their roots.

        Args:
            indices: These sequences.
            choose: Maps each walking sequence's node to the token that the target puts behind it. It is called once a
                level, in order; `paths` already hold the nodes. A sequence that it leaves out chooses nothing yet: its
                walk ends before the node.
            goes_on: Whether a sequence may emit another token.
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
