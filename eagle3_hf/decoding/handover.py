"""The content of the target's cache after a round, at the end of a call, and after an exception.

Whoever gets the cache after the call must find in it what plain decoding would have left. This includes the pad tokens
of finished sequences: plain decoding runs them through the model as well, which shows in its cache, its scores and the
calls of processors.
"""

from contextlib import suppress

from .output.emitter import TokenEmitter
from .sequence import Batch
from .target.runner import TargetRun
from .tree import DraftTree
from .verification import Walk


class CacheHandover:
    """Keeps the target's cache in accordance with the tokens of the sequences.

    Args:
        target: Holds the cache.
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
        """Start to keep the cache. Before this, an exception leaves what the prefill of plain decoding would leave.

        Args:
            in_step: Whether all sequences stay at the same step throughout, finished ones included.
        """
        self._has_begun = True
        self._runs_pads = in_step or self._target.cache_is_seen or self._tokens.asks_of_pads

    def pad_chains(self, tree: DraftTree, active: list[int]) -> dict[int, list[int]]:
        """Return index -> the next tokens of finished sequences: as many as an active one can emit in this round.

        Args:
            tree: The trees of this round.
            active: Sequences that advance in this round.
        """
        if not self._runs_pads or not any(each.is_padding for each in self._batch):
            return {}
        furthest = [self._batch[index].cache_len + tree.deepest(index) + 1 for index in active]
        reach = max(furthest or [each.slot_of(len(each.token_ids) - 1) for each in self._batch])
        padding = [each for each in self._batch if each.is_padding and each.cache_len < reach]
        return {each.index: each.upcoming(reach - each.cache_len) for each in padding}

    def keep(self, walk: Walk, num_nodes: int) -> list[list[int]]:
        """Keep the entries of tokens that were emitted and not rewound; return the paths of these nodes."""
        lens = [each.committed_len(path) for each, path in zip(self._batch, walk.paths, strict=True)]
        return self._keep(walk, lens, num_nodes)

    def _keep(self, walk: Walk, lens: list[int], num_nodes: int) -> list[list[int]]:
        grown = [new - each.cache_len for new, each in zip(lens, self._batch, strict=True)]
        paths = [path[: max(0, count)] for path, count in zip(walk.paths, grown, strict=True)]
        # No sequence will be shorter than this again: neither when rewound, nor while it lacks pad tokens.
        needed = min([self._batch.slot_of(self._batch.steps - 1), *(lens if self._runs_pads else [])])
        self._target.keep(paths, num_nodes, lens, needed)
        return paths

    def complete(self) -> None:
        """Make every sequence in the cache as long as the longest text, as plain decoding leaves it."""
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
        """After an exception, keep in the cache all steps before the one in which it was raised.

        Args:
            under_way: The walk whose tree is in the cache, and the tree's number of nodes; `None` between rounds.
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
            # Add pad tokens of sequences that finished in this very round, and tokens that a restored cache lacks. A
            # further exception here must not replace the first one.
            with suppress(Exception):
                if min(self._batch.cache_lens) < end:
                    self._catch_up(end, is_recorded=False)
                self._target.catch_up(self._batch.ids_until(step))
        self._target.cut(end)

    def _catch_up(self, end: int, is_recorded: bool) -> None:
        """Run the pad tokens of finished sequences up to the slot `end`. This emits nothing.

        Args:
            end: The slot at which every sequence ends in plain decoding.
            is_recorded: Whether scores, logits or layers of these steps are returned.
        """
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
