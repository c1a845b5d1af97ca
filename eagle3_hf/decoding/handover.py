"""What the cache holds of each sequence behind a round, at the end of a call, and where something was raised.

A finished sequence writes pad tokens. Plain decoding runs these through the model as well, and its cache, scores and
calls of processors show it. Whoever gets the cache after the call finds in it what plain decoding would have left.
"""

from contextlib import suppress

from .output.emitter import TokenEmitter
from .sequence import Batch
from .target.runner import TargetRun
from .tree import DraftTree
from .verification import Walk


class CacheHandover:
    """Keeps the cache in line with what the sequences say.

    Args:
        target: Has the cache.
        batch: The sequences.
        tokens: Emits their tokens.
    """

    def __init__(self, target: TargetRun, batch: Batch, tokens: TokenEmitter):
        self._target = target
        self._batch = batch
        self._tokens = tokens
        self._has_begun = False
        self._runs_pads = False

    def begin(self, in_step: bool) -> None:
        """The prefill, which is plain decoding's, is over.

        Args:
            in_step: All sequences are at the same step from the first to the last, finished ones too.
        """
        self._has_begun = True
        self._runs_pads = in_step or self._target.cache_is_seen or self._tokens.asks_of_pads

    def pad_chains(self, tree: DraftTree, active: list[int]) -> dict[int, list[int]]:
        """Pad tokens of the finished sequences, as far as any active one can get with its tree, roots first."""
        if not self._runs_pads:
            return {}
        furthest = [self._batch[index].cache_len + tree.host()[index].depth + 1 for index in active]
        reach = max(furthest or [each.slot_of(len(each.token_ids) - 1) for each in self._batch])
        padding = [each for each in self._batch if each.is_padding and each.cache_len < reach]
        return {each.index: each.upcoming(reach - each.cache_len) for each in padding}

    def keep(self, walk: Walk, num_nodes: int) -> list[list[int]]:
        """Keep in the cache what the sequences have emitted and nobody has taken back; returns these paths."""
        lens = [each.committed_len(path) for each, path in zip(self._batch, walk.paths, strict=True)]
        return self._keep(walk, lens, num_nodes)

    def _keep(self, walk: Walk, lens: list[int], num_nodes: int) -> list[list[int]]:
        grown = [new - each.cache_len for new, each in zip(lens, self._batch, strict=True)]
        paths = [path[: max(0, count)] for path, count in zip(walk.paths, grown, strict=True)]
        # No sequence will end before this slot again: not by being rewound, nor for the pad tokens it still lacks.
        needed = min([self._batch.slot_of(self._batch.steps - 1), *(lens if self._runs_pads else [])])
        self._target.keep(paths, num_nodes, lens, needed)
        return paths

    def complete(self) -> None:
        """Bring the cache to where plain decoding leaves it: every sequence as long as the longest text."""
        if self._target.cache_is_seen and self._target.capability.restores:
            self._target.catch_up(self._batch.input_ids[:, :-1])
        if len(self._batch) == 1:
            return
        end = self._batch.slot_of(self._batch.steps - 1)
        if self._target.cache_is_seen:
            while min(self._batch.cache_lens) < end:
                self._catch_up(end, self._tokens.record.keeps_anything)
        self._target.cut(end)

    def interrupted(self, under_way: tuple[Walk, int] | None) -> None:
        """Something was raised: leave the cache with all that came before the step at which it was.

        Args:
            under_way: The walk whose tree, of so many nodes, is in the cache.
        """
        if not self._has_begun:
            return
        if under_way is None:
            self._end_at(self._batch.steps - 1)
            return
        walk, num_nodes = under_way
        lens = [each.verified_len(path) for each, path in zip(self._batch, walk.paths, strict=True)]
        self._keep(walk, lens, num_nodes)
        live = [each.root_step for each in self._batch if not each.is_padding]
        self._end_at(min([self._tokens.steps_run, *live]))

    def _end_at(self, step: int) -> None:
        end = self._batch.slot_of(step)
        if self._target.cache_is_brought:
            # Pad tokens of sequences that finished in this very round, and tokens that a restored cache lacks. The
            # caller is to see the first exception.
            with suppress(Exception):
                if min(self._batch.cache_lens) < end:
                    self._catch_up(end, is_recorded=False)
                self._target.catch_up(self._batch.ids_until(step))
        self._target.cut(end)

    def _catch_up(self, end: int, is_recorded: bool) -> None:
        """Run the pad tokens of finished sequences that plain decoding has run; no text comes of it."""
        behind = [each.index for each in self._batch if each.cache_len < end]
        chains = {each.index: each.upcoming(max(1, end - each.cache_len)) for each in self._batch}
        tree = DraftTree.root_only(self._batch.roots()).with_chains(chains)
        outputs, num_nodes = self._target.verify(tree), tree.tokens.shape[1]
        walk = Walk(tree.host())
        if is_recorded:
            choose = self._tokens.chooser(walk, outputs, num_nodes, self._target.key_columns)
            walk.run(behind, choose, lambda index: True)
        else:
            for index in behind:
                walk.take_all(index)
        lens = [each.cache_len + len(path) for each, path in zip(self._batch, walk.paths, strict=True)]
        self._target.keep(walk.paths, num_nodes, lens, min(lens))
