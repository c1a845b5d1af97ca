"""What a round proposes: the trees that the head and the lookup source draft together, at the size that pays."""

from collections.abc import Callable, Sequence

from ...acceptance import SpeculationStats
from ...model.tree_settings import TreeSettings
from .. import transfers
from ..coupling import Noise
from ..sequence import Batch
from ..tree import DraftTree
from .candidate import Eagle3Candidate
from .host_noise import HostNoise
from .inputs import DraftInputs
from .lookup import Lookup
from .mixture import BOTH, EMPTY, HEAD, LOOKUP, Candidates, Pool, best_nodes, likeliest_first
from .sizing import FixedSizes, Plan, Proposal, TreeSizer


class Proposer:
    """Drafts the trees of one `generate` call.

    Args:
        batch: The sequences.
        settings: The size of the trees, or its limits.
        sizes: Chooses the size of each round.
        head: Drafts with the head; `None` to draft by lookup alone.
        lookup: The lookup source; `None` to draft with the head alone.
        noise: The noise of the sampling steps if drafts are coupled to it; `None` otherwise.
    """

    def __init__(
        self,
        batch: Batch,
        settings: TreeSettings,
        sizes: FixedSizes | TreeSizer,
        head: Eagle3Candidate | None,
        lookup: Lookup | None,
        noise: Noise | None,
    ):
        self.proposal = Proposal()
        self._batch = batch
        self._settings = settings
        self._sizes = sizes
        self._head = head
        self._lookup = lookup
        self._noise = None if noise is None else HostNoise(noise)

    def propose(self, depth: int, active: Sequence[int]) -> DraftTree:
        """Return a tree below the newest token of each sequence.

        Args:
            depth: The deepest level whose tokens can still be emitted.
            active: Sequences that advance in this round; the others get their root alone.
        """
        self.proposal = Proposal()
        plan = self._sizes.plan(depth, self._batch.longest) if depth > 0 else Plan(0, 0)
        if plan.num_nodes < 1 or (not plan.levels and self._lookup is None):
            return self._roots_alone()
        leads = [sequence.lead(self._batch.steps) for sequence in self._batch]
        if self._lookup is None and isinstance(self._sizes, FixedSizes) and self._head is not None:
            tree = self._head.draft_tree(None, depth, self._settings, self._batch.roots(), leads)
            # There may be fewer candidates than asked for (because of cutoffs or NaN). If the host can tell without
            # waiting, it makes the forward smaller.
            if not transfers.makes_host_wait(tree.tokens.device):
                tree = tree.trimmed()
            self.proposal.levels, self.proposal.num_nodes = plan.levels, tree.tokens.shape[1] - 1
            return tree
        if self._noise is not None:
            self._noise.begin(max(leads) + min(depth, self._settings.reach))
        pools = self._pools(plan, leads)
        for index in active:
            self.proposal.candidates[index] = self._best(index, pools[index], plan, depth, leads[index])
        self.proposal.num_nodes = self._sizes.keep(list(self.proposal.candidates.values()))
        if not self.proposal.num_nodes:
            return self._roots_alone()
        for index, found in self.proposal.candidates.items():
            self.proposal.candidates[index] = likeliest_first(found, self.proposal.num_nodes)
        return self._tree()

    def _pools(self, plan: Plan, leads: list[int]) -> list[Pool]:
        """Return the head's candidates of each sequence of the batch, also of those that do not advance."""
        if not plan.levels or self._head is None:
            return [EMPTY] * len(self._batch)
        settings = self._settings.capped(plan.levels)
        pool = self._head.draft_pool(settings, leads, self._sizes.goes_on)
        self.proposal.levels, self.proposal.num_fed = pool.num_levels, self._head.num_fed
        pools = pool.host()
        self.proposal.masses = [sum(level) for level in zip(*(each.expanded_masses() for each in pools), strict=True)]
        return pools

    def _best(self, index: int, pool: Pool, plan: Plan, depth: int, lead: int) -> Candidates:
        sequence, guesses = self._batch[index], None
        tail: Sequence[int] = sequence.upcoming(1)
        if self._lookup is not None:
            self._lookup.extend(index, sequence.token_ids)
            tail = self._lookup.indices[index].tail
            guesses = self._guesses(self._lookup, index)
        return best_nodes(
            pool,
            guesses,
            tail,
            plan.num_nodes,
            min(depth, self._settings.reach),
            plan.least,
            self._settings.top_k == 1,
            None if self._noise is None else self._noise.race(index, lead),
        )

    @staticmethod
    def _guesses(lookup: Lookup, index: int) -> Callable[[Sequence[int]], list[tuple[int, float]]]:
        return lambda tail: lookup.guesses(index, tail)

    def _roots_alone(self) -> DraftTree:
        none: list[list] = [[] for _ in self._batch]
        return DraftTree.from_nodes(self._roots(), none, none, none, self._batch.device)

    def _roots(self) -> list[int]:
        return [sequence.upcoming(1)[0] for sequence in self._batch]

    def _tree(self) -> DraftTree:
        kept = self.proposal.num_nodes
        none = Candidates([], [], [], [], [])
        found = [self.proposal.candidates.get(sequence.index, none) for sequence in self._batch]
        return DraftTree.from_nodes(
            self._roots(),
            [each.tokens[:kept] for each in found],
            [each.parents[:kept] for each in found],
            [each.values[:kept] for each in found],
            self._batch.device,
        )

    # ----- after a round --------------------------------------------------------------------------------------------

    def feed_later(self, inputs: DraftInputs | None) -> None:
        """Keep the head's inputs of a round until it drafts the next time."""
        if self._head is not None and inputs is not None:
            self._head.feed_later(inputs)

    def observe(self, paths: dict[int, list[int]], draft: float, verify: float) -> None:
        """Learn from a round, see [`TreeSizer.observe`]."""
        self._sizes.observe(self.proposal, paths, draft, verify)

    def count(self, stats: SpeculationStats, paths: dict[int, list[int]], tree: DraftTree) -> None:
        """Add what was drafted and accepted in a round.

        Args:
            stats: The counters.
            paths: Index of a sequence -> the visited nodes of its tree, for the sequences that were to advance.
            tree: The trees.
        """
        kept = self.proposal.num_nodes
        if kept and not self.proposal.candidates:  # by the head alone, on its device: some nodes may be padding
            kept = max((len(tree.host()[index].tokens) for index in paths), default=1) - 1
        stats.levels += self.proposal.levels
        stats.plain_rounds += not kept
        stats.headless_rounds += not self.proposal.levels
        for index, path in paths.items():
            own, sources = self.proposal.candidates.get(index), self.sources(index, path)
            if own is None:
                stats.drafted += kept
            else:
                stats.drafted += len(own.tokens[:kept])
                stats.predicted += sum(own.values[:kept])
            stats.from_head += sources.count(HEAD)
            stats.from_lookup += sources.count(LOOKUP)
            stats.from_both += sources.count(BOTH)
            if self._head is not None and self.proposal.levels and kept and path:
                self._head.watch(len(sources) - sources.count(LOOKUP))

    def sources(self, index: int, path: list[int]) -> list[int]:
        """Return what has proposed the drafts on a path through the newest tree of a sequence, root first."""
        own = self.proposal.candidates.get(index)
        if own is None:  # by the head alone, on its device
            return [HEAD] * max(0, len(path) - 1)
        return [own.sources[node - 1] for node in path[1:]]

    def rewind(self, index: int, step: int, position: int | None) -> None:
        """Forget the tokens of a sequence from `step` on.

        Args:
            index: Index of the sequence.
            step: The first step whose token was removed.
            position: The head forgets its positions from this one on; `None` if it has not been fed them.
        """
        if self._lookup is not None:
            self._lookup.rewind(index, step)
        if self._head is not None and position is not None:
            self._head.rewind(index, position)
