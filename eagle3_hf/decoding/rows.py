"""The rows of a call: what each has in the target's cache against what its text says.

A row that is finished has pad tokens for its text. Plain decoding runs these through the model as well, and its cache,
scores and calls of processors show it: they are chains of known tokens, always right.
"""

from contextlib import suppress

import torch

from ..model.features import FeatureReader
from .node_choices import NodeChoices
from .output.emitter import TokenEmitter
from .target.runner import TargetRun
from .tree import DraftTree
from .verification import Walk


class Rows:
    """
    All rows of a call, between their text and their cache.

    Args:
        tokens: Their text.
        target: Their cache.
        reader: Reads features out of the target's forwards.
        in_step: They are at the same step from the first to the last, finished ones too.
    """

    def __init__(self, tokens: TokenEmitter, target: TargetRun, reader: FeatureReader, in_step: bool):
        self._tokens = tokens
        self._target = target
        self._reader = reader
        self._cache_is_seen = target.cache_is_seen
        self._runs_pads = in_step or self._cache_is_seen or tokens.asks_of_pads

    def roots(self) -> torch.Tensor:
        """(B, 1) the last token of each row, whose entry is not in the cache yet."""
        return torch.tensor([self.chain(row, 1) for row in range(self._tokens.rows)], device=self._tokens.device)

    def chain(self, row: int, length: int) -> list[int]:
        """The next tokens of a row that is finished, its root first."""
        return self._tokens.known(row, self._target.ends[row] - self._target.first_end, length)

    def following(self, tree: DraftTree, walking: list[int]) -> dict[int, list[int]]:
        """Chains of pad tokens of the finished rows, as far as any walking row can get with its tree."""
        if not self._runs_pads:
            return {}
        reach = max(
            [self._target.ends[row] + depth_of(tree, row) + 1 for row in walking]
            or [self._target.first_end + max(self._tokens.counts) - 1]
        )
        lengths = {row: reach - end for row, end in enumerate(self._target.ends) if self._tokens.is_closed(row)}
        return {row: self.chain(row, length) for row, length in lengths.items() if length > 0}

    def verify(self, tree: DraftTree):
        """The target's outputs over the trees, and its features (B, N, A * Ht) at the nodes."""
        self._reader.clear()
        columns = self._tokens.prompt_length + max(self._target.ends) - self._target.first_end
        outputs = self._target.verify(tree, self._tokens.columns(columns))
        return outputs, self._reader.take()[:, -tree.tokens.shape[1] :]

    def choices(self, walk: Walk, outputs, num_nodes: int, at_once: bool = False) -> NodeChoices:
        return NodeChoices(self._tokens, self._target, walk, outputs, num_nodes, at_once)

    # ----- what stays in the cache ----------------------------------------------------------------------------------

    def keep(self, walk: Walk, num_nodes: int) -> list[list[int]]:
        """Keep in the cache what the rows have emitted and nobody has taken back; returns these paths."""
        return self._keep(walk, [self._new_end(row, path) for row, path in enumerate(walk.paths)], num_nodes)

    def _new_end(self, row: int, path: list[int]) -> int:
        """Slots of a row that hold what its text now says: of a row that goes on, all but its newest token."""
        if not self._tokens.is_closed(row):
            return self._target.first_end + self._tokens.counts[row] - 1
        return self._end_behind(row, path)

    def _end_behind(self, row: int, path: list[int]) -> int:
        reached, taken_back = self._target.ends[row] + len(path), self._tokens.taken_back_from(row)
        return reached if taken_back is None else min(reached, self._target.first_end + taken_back)

    def _keep(self, walk: Walk, ends: list[int], num_nodes: int) -> list[list[int]]:
        old = self._target.ends
        paths = [path[: max(0, end - begin)] for path, end, begin in zip(walk.paths, ends, old, strict=True)]
        # No row will end before this slot again: not by being taken back, nor for the pads it still lacks.
        needed = min([self._target.first_end + self._tokens.steps - 1, *(ends if self._runs_pads else [])])
        self._target.keep(paths, num_nodes, ends, needed)
        return paths

    def keep_interrupted(self, walk: Walk, num_nodes: int) -> None:
        """Leave the cache as plain decoding would: with all that came before the step at which something raised."""
        ends = [self._end_behind(row, path) for row, path in enumerate(walk.paths)]
        self._keep(walk, ends, num_nodes)
        live = [end for row, end in enumerate(ends) if not self._tokens.is_closed(row)]
        self._end_at(min([self._target.first_end + self._tokens.steps_run, *live]))

    def keep_between_rounds(self) -> None:
        """The same where no step was under way."""
        self._end_at(self._target.first_end + self._tokens.steps - 1)

    def _end_at(self, end: int) -> None:
        if self._target.cache_is_brought:
            # Pad tokens of rows that were finished in this very round, and tokens that a restored cache lacks. The
            # caller is to see the first exception.
            with suppress(Exception):
                if min(self._target.ends) < end:
                    self._catch_up(end, is_recorded=False)
                self._target.catch_up(self._tokens.columns(self._tokens.prompt_length + end - self._target.first_end))
        self._target.cut(end)

    def complete(self) -> None:
        """Bring the cache of a batch to where plain decoding leaves it: every row as long as the longest text."""
        if self._cache_is_seen and self._target.ability.restores:
            self._target.catch_up(self._tokens.input_ids[:, :-1])
        if self._tokens.rows == 1:
            return
        end = self._target.first_end + self._tokens.steps - 1
        if self._cache_is_seen:
            while min(self._target.ends) < end:
                self._catch_up(end, self._tokens.record.keeps_anything)
        self._target.cut(end)

    def _catch_up(self, end: int, is_recorded: bool) -> None:
        """Run the pad tokens of finished rows that plain decoding has run; no text comes of it."""
        behind = [row for row, at in enumerate(self._target.ends) if at < end]
        chains = {row: self.chain(row, max(1, end - at)) for row, at in enumerate(self._target.ends)}
        tree = DraftTree.root_only(self.roots()).with_chains(chains)
        outputs, _ = self.verify(tree)
        walk = Walk(tree.host())
        if is_recorded:
            walk.run(behind, self.choices(walk, outputs, tree.tokens.shape[1]), lambda row: True)
        else:
            for row in behind:
                walk.take_all(row)
        ends = [at + len(path) for at, path in zip(self._target.ends, walk.paths, strict=True)]
        self._target.keep(walk.paths, tree.tokens.shape[1], ends, min(ends))


def depth_of(tree: DraftTree, row: int) -> int:
    return DraftTree._path_length(tree.host()[row].parents)
