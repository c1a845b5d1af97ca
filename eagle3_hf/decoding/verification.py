"""Verification as a walk: at each node the target makes its own choice; the tree only says how far it was foreseen.

Nothing here knows the draft. The tokens are the target's choices, so they are what the target alone would have made
(greedy or sampled, see `noise.py`) whatever the tree holds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from .tree import HostTree


class Walk:
    """
    Follow the target's own choices through each row's tree, all rows a level at a time.

    A row starts at its root (node 0). At each node the target chooses the next token; if a child of the node carries
    it, the row's walk goes on there, else that token is the bonus token and the walk ends. It also ends where the
    caller says that the row has no more to emit.

    Args:
        trees (`Sequence[HostTree]`): real nodes of each row.
        together (`Iterable[int]`): rows that stay at the same step: the first of them that ends, ends all of them.

    Attributes:
        paths (`list[list[int]]`): nodes visited in each row, one for each token chosen there.
        accepted (`list[int]`): right drafts of each row; one more than was used where a text ends at a draft, or where
            another row ended the walk there.
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

    def take_all(self, row: int) -> None:
        """A chain of known tokens, without asking: all of it is right."""
        self.paths[row] = list(range(self._sizes[row]))

    def run(
        self,
        rows: Iterable[int],
        choose: Callable[[dict[int, int]], Mapping[int, int]],
        goes_on: Callable[[int], bool],
    ) -> None:
        """
        Walk `rows`, from their roots.

        Args:
            choose (`Callable[[dict[int, int]], Mapping[int, int]]`): maps each walking row's node to the token that
                the target puts behind it. Called once a level, in order; `paths` already hold the nodes. A row that it
                leaves out chooses nothing yet: its walk ends before the node.
            goes_on (`Callable[[int], bool]`): whether a row may emit another token.
        """
        cursor = dict.fromkeys(rows, 0)
        while cursor:
            for row, node in cursor.items():
                self.paths[row].append(node)
            tokens = choose(cursor)
            following = {}
            for row, node in cursor.items():
                if row not in tokens:
                    self.paths[row].pop()
                    continue
                child = self._children[row].get((node, tokens[row]))
                if child is not None:
                    self.accepted[row] += 1
                    if goes_on(row):
                        following[row] = child
            if not self._together.intersection(cursor) <= following.keys():
                following = {row: node for row, node in following.items() if row not in self._together}
            cursor = following
