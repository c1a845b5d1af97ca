"""The size of each round's trees: fixed, or the one that pays.

A drafted node is worth the probability that it is accepted, and costs the time by which it prolongs the verification.
A level of the head's tree costs a forward of the head. Both are compared at the rate at which recent rounds have
turned time into tokens: of all trees, the one with the greatest `tokens - rate * time` makes the whole text come
soonest. So a round keeps the `n` best nodes that maximise this, and the head grows another level while what its
frontier promises exceeds the level's cost. `n = 0` is a plain step.

Probabilities are those of the head and of the lookup source, corrected level by level by what was accepted. All times
are in plain steps: how many of them a tree costs is measured (see `costs.py`), but not how long one takes, so that a
machine that is slower for a while changes nothing. If the head's own nodes have cost more than they gave, it is left
out for a while, and only lookup goes on. The text does not depend on any of this. Seconds are passed in, so that tests
need no clock.

Calls with the same head and target share a sizer (see `known_sizes.py`). Threads that draft at the same time share it
too: then rounds of different threads are compared as neighbours, as if one thread had made them.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch

from ...model.tree_settings import TreeSettings
from ...utils.logging import get_logger
from .costs import DraftCosts, VerifyCosts
from .mixture import HEAD, Candidates


logger = get_logger(__name__)

_T = TypeVar("_T")

# At first, this share of the nodes of the first level that the head expects to be accepted is believed to be, and this
# belief counts for so many expected nodes. Each level is believed to be like the one above it.
_TRUST, _EXPECTED = 0.67, 3.0
_KEPT_SHARE = 0.5  # of the first frontier's probability, the part that the next level is believed to give
_KEPT_PRIOR = 8.0  # frontiers for which this belief counts
_ALL_LEVELS = 32  # where levels are chosen ahead, one round in this many has all of them, to learn what they give
_RECENT = 64  # rounds, after which older ones count half as much in what is learnt of probabilities
_RATE_ROUNDS = 32.0  # rounds over which the rate is averaged
_FIRST_RATE = 1.5  # the rate that is believed at first, in plain steps
_PLAIN_AGAIN = 128  # rounds after which a plain step is measured anew while drafting gains little
# If trees seem to cost more than this multiple of what is expected, plain steps are measured after fewer rounds, until
# this many pairs of rounds have compared a tree with a plain step.
_UNEXPECTED, _PLAIN_SOON, _PLAIN_PAIRS = 1.15, 6, 8
# Balance of the head, in plain steps of a sequence: what its nodes gave, less what they cost. Below the lowest one the
# head is left out for a while, and then begins again with the second. The balance never exceeds the greatest, so that
# a head that no longer pays is soon left out.
_LOWEST, _AGAIN, _GREATEST = -1.5, -0.5, 3.0
_FIRST_BALANCE = -0.5
_KNOWN = 16  # rounds of the head, after which what is expected of its nodes counts beside what was accepted
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 192  # steps without the head, doubled each time
_FIRST_DOUBT, _LONGEST_DOUBT = 64, 512  # plain steps in a row after which costs are forgotten, doubled each time
_LEAST_VALUE = 0.01  # nodes that are accepted less often are not even looked at


def _alone(method: Callable[..., _T]) -> Callable[..., _T]:
    """Run a method of a sizer in one thread at a time."""

    @wraps(method)
    def alone(self, *args, **kwargs) -> _T:
        with self._lock:
            return method(self, *args, **kwargs)

    return alone


@dataclass(frozen=True)
class Shape:
    """The expected costs of a round in plain steps of one sequence, until they are measured.

    Attributes:
        tokens: Cost of a target forward, by number of tokens (ascending), relative to one token.
        tree: What a mask adds to a forward with drafted nodes.
        draft: Cost of feeding the head and growing one level.
        level: Cost of each further level.
    """

    tokens: tuple[tuple[int, float], ...]
    tree: float
    draft: float
    level: float

    def forward(self, count: int) -> float:
        """Return the cost of a target forward over `count` tokens: linear between the known numbers."""
        (low, first), *others = self.tokens
        for high, last in others:
            slope = (last - first) / (high - low)
            if count <= high:
                break
            base, start = last, high
            low, first = high, last
        else:
            return base + slope * (count - start)
        return first + slope * (count - low)


# Measured on two cores with SmolLM2-135M-Instruct in bfloat16.
CPU = Shape(((1, 1.0), (8, 1.18), (12, 1.27), (16, 1.35), (24, 1.52), (32, 1.70), (64, 2.56)), 0.0, 0.127, 0.093)
# Counted launches of a model of 32 layers, run eagerly.
ACCELERATOR = Shape(((1, 1.0), (64, 1.02)), 0.12, 0.064, 0.073)


@dataclass
class Plan:
    """What a round may draft.

    Attributes:
        levels: The most levels that the head grows; 0 leaves the head out.
        num_nodes: The most drafted nodes; 0 is a plain step.
        least: Nodes of a lower value are not kept.
    """

    levels: int
    num_nodes: int
    least: float = 0.0


@dataclass
class Proposal:
    """What a round has drafted.

    Attributes:
        candidates: The nodes of each active sequence, best first, by its index.
        num_nodes: How many of them were kept.
        levels: Levels that the head has grown.
        masses: For each level but the last, the probability of the nodes that were expanded there, of all sequences.
        num_fed: Positions that the head was fed before it grew the first level.
    """

    candidates: dict[int, Candidates] = field(default_factory=dict)
    num_nodes: int = 0
    levels: int = 0
    masses: list[float] = field(default_factory=list)
    num_fed: int = 0


class FixedSizes:
    """Every round's trees have the size of the settings."""

    def __init__(self, settings: TreeSettings):
        self._settings = settings

    goes_on = None  # in place of `TreeSizer.goes_on`: the head grows all levels of the plan

    def plan(self, depth: int, context: int) -> Plan:
        """Return the size of the settings, see [`TreeSizer.plan`]."""
        return Plan(min(depth, self._settings.depth), self._settings.num_nodes)

    def keep(self, candidates: Sequence[Candidates]) -> int:
        """Return the number of nodes of the largest tree: all are verified."""
        return max((len(each.tokens) for each in candidates), default=0)

    def observe(self, proposal: Proposal, paths: dict[int, list[int]], draft: float, verify: float) -> None:
        """Learn nothing."""


class TreeSizer:
    """Chooses the size of each round's trees. It lives as long as head and target, so that calls share what it learns.

    Args:
        limits: The largest tree.
        batch_size: Number of sequences.
        shape: What rounds are expected to cost.
        waits: Whether the host reads the head's scores level by level to choose the number of levels, as it does on a
            CPU. On accelerators, where each reading makes it wait, the number is chosen ahead, by earlier rounds.
    """

    def __init__(self, limits: TreeSettings, batch_size: int = 1, shape: Shape = CPU, waits: bool = True):
        self._lock = threading.RLock()  # calls in several threads may share it
        self._limits = limits
        self._batch = batch_size
        self._shape = shape
        self._waits = waits
        alone = shape.forward(batch_size)
        self._verify_shape = lambda nodes: (
            shape.forward(batch_size * (nodes + 1)) / alone + (shape.tree if nodes else 0.0)
        )
        self._verify: dict[int, VerifyCosts] = {}  # by order of magnitude of the context
        self._here = VerifyCosts(self._verify_shape)
        self._draft = DraftCosts(shape.draft, shape.level)
        reach = limits.reach + 1
        self._predicted, self._right = [0.0] * reach, [0.0] * reach  # by level, 1 for children of the root
        self._corrections = self._new_corrections()
        # By number of levels: probability on the frontier, and what a further level gave.
        self._masses, self._gains = [0.0] * (limits.depth + 1), [0.0] * (limits.depth + 1)
        self._mean_masses = [0.9 * 0.75**level for level in range(limits.depth + 1)]
        # Tokens and costs of the last rounds.
        self._costs = _RATE_ROUNDS / 4
        self._tokens = self._costs * _FIRST_RATE * batch_size
        self._rounds = self._since_plain = self._since_tree = 0
        self._doubt_after = _FIRST_DOUBT
        self._balance, self._left, self._pause, self._judged = _FIRST_BALANCE, 0, _FIRST_PAUSE, 0
        self._was_off = False

    # ----- a round --------------------------------------------------------------------------------------------------

    @_alone
    def plan(self, depth: int, context: int) -> Plan:
        """Return what the next round may draft.

        Args:
            depth: The deepest level that can still be used.
            context: Number of tokens before the round.
        """
        self._here = self._costs_at(context)
        self._corrections = self._new_corrections()
        if not self._here.is_known or self._wants_plain():
            return Plan(0, 0)
        levels = min(depth, self._limits.depth)
        if self._left > 0:
            self._left -= 1
            levels = 0
        elif not self._waits:
            levels = self._levels_ahead(levels)
        return Plan(levels, self._limits.num_nodes, _LEAST_VALUE)

    @_alone
    def goes_on(self, level: int, scores: torch.Tensor) -> bool:
        """Return whether a further level pays.

        Args:
            level: Number of levels grown.
            scores: (B, R) cumulative log-probabilities of the nodes that the next one would expand.
        """
        if not self._waits:
            return True
        return self._pays(level, float(scores.exp().sum()))

    @_alone
    def keep(self, candidates: Sequence[Candidates]) -> int:
        """Return how many of the best nodes of each sequence to verify."""
        rate, best, most = self._rate(), 0, 0.0
        longest = max((len(each.tokens) for each in candidates), default=0)
        promised = 0.0
        for count in range(1, longest + 1):
            for each in candidates:
                if count <= len(each.values):
                    promised += each.values[count - 1] * self._corrections[each.depths[count - 1]]
            gain = promised - rate * (self._here.of(count) - 1.0)
            if gain > most:
                best, most = count, gain
        return best

    @_alone
    def observe(self, proposal: Proposal, paths: dict[int, list[int]], draft: float, verify: float) -> None:
        """Learn from a round.

        Args:
            proposal: What was drafted.
            paths: Index of a sequence -> the visited nodes of its tree, for the sequences that were to advance.
            draft: Seconds of drafting.
            verify: Seconds of the target's forward and the walk.
        """
        nodes = proposal.num_nodes
        self._here.add(nodes, verify)
        self._since_plain = self._since_plain + 1 if nodes else 0
        self._doubt_costs(nodes)
        self._rounds += 1
        if proposal.levels and proposal.num_fed <= self._limits.reach + 1 and verify > 0:
            self._draft.add(proposal.levels, draft * self._here.of(nodes) / verify)
        self._learn_rate(sum(len(path) for path in paths.values()), self._drafting(proposal) + self._here.of(nodes))
        if self._rounds % _RECENT == 0:
            self._forget()
        for index, candidates in proposal.candidates.items():
            self._learn_values(candidates, nodes, len(paths.get(index, ())) - 1)
        self._learn_levels(proposal)
        if proposal.levels:
            self._weigh_head(proposal, paths)

    # ----- what is kept for later processes -------------------------------------------------------------------------

    @property
    def num_rounds(self) -> int:
        """Rounds that it has learnt from."""
        return self._rounds

    @_alone
    def state(self) -> dict[str, Any]:
        """Return what is known of costs, as values that JSON can hold; nothing of what was accepted."""
        verify = {str(magnitude): costs.state() for magnitude, costs in self._verify.items() if costs.is_known}
        return {"verify": verify, "draft": self._draft.state()}

    @_alone
    def restore(self, state: Any) -> None:
        """Begin with the costs that `state` returned.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: The state has another form. Nothing is changed.
        """
        verify = {}
        for magnitude, costs in state["verify"].items():
            verify[int(magnitude)] = VerifyCosts(self._verify_shape)
            verify[int(magnitude)].restore(costs)
        self._draft.restore(state["draft"])
        self._verify = verify

    # ----- what is learnt -------------------------------------------------------------------------------------------

    def _costs_at(self, context: int) -> VerifyCosts:
        """Return the costs at contexts of this order of magnitude, which begin like the nearest ones."""
        magnitude = context.bit_length()
        if magnitude not in self._verify:
            near = min(self._verify, key=lambda other: abs(other - magnitude), default=None)
            self._verify[magnitude] = VerifyCosts(self._verify_shape) if near is None else self._verify[near].like()
        return self._verify[magnitude]

    def _wants_plain(self) -> bool:
        """Whether to measure a plain step, to which drafting is compared."""
        if self._since_plain >= _PLAIN_SOON and self._here.num_plain < _PLAIN_PAIRS and self._is_unexpected():
            return True
        return self._since_plain >= _PLAIN_AGAIN and self._balance < _GREATEST

    def _doubt_costs(self, nodes: int) -> None:
        """Forget costs by which nothing was drafted for long: they may be wrong, and are not measured now."""
        self._since_tree = 0 if nodes else self._since_tree + 1
        if self._since_tree >= self._doubt_after:
            self._here.forget()
            self._since_tree, self._doubt_after = 0, min(2 * self._doubt_after, _LONGEST_DOUBT)
        elif nodes and self._balance > 0:
            self._doubt_after = _FIRST_DOUBT

    def _is_unexpected(self) -> bool:
        """Whether trees cost much more than expected, as far as it is known."""
        nodes = self._limits.depth
        return self._here.of(nodes) > _UNEXPECTED * self._verify_shape(nodes)

    def _learn_rate(self, tokens: int, cost: float) -> None:
        kept = 1 - 1 / _RATE_ROUNDS
        self._costs = self._costs * kept + cost
        self._tokens = self._tokens * kept + tokens

    def _rate(self) -> float:
        """Return tokens per plain step of all sequences; at least those of plain decoding."""
        return max(float(self._batch), self._tokens / self._costs)

    def _drafting(self, proposal: Proposal) -> float:
        """Return the expected cost of a round's drafting. The round's own may hold the feeding of a whole prompt."""
        return sum(map(self._draft.another, range(proposal.levels)))

    def _new_corrections(self) -> list[float]:
        """Return by level by how much more often nodes are accepted than their values say."""
        corrections, ratio = [1.0], _TRUST
        for right, predicted in zip(self._right[1:], self._predicted[1:], strict=True):
            ratio = min(1.25, (right + _EXPECTED * ratio) / (predicted + _EXPECTED))
            corrections.append(ratio)
        return corrections

    def _learn_values(self, candidates: Candidates, kept: int, reached: int) -> None:
        for value, depth in zip(candidates.values[:kept], candidates.depths, strict=False):
            self._predicted[depth] += value
        # Of each level one node at most is accepted.
        deepest = max(candidates.depths[:kept], default=0)
        for depth in range(1, min(reached, deepest) + 1):
            self._right[depth] += 1

    def _learn_levels(self, proposal: Proposal) -> None:
        """Compare what the frontiers of the levels promised with what the next levels gave, less its cost."""
        rate, kept = self._rate(), proposal.num_nodes
        price = rate * (self._here.of(kept) - self._here.of(max(0, kept - 1)))
        gave = [0.0] * (proposal.levels + 2)
        for each in proposal.candidates.values():
            for value, depth, source in zip(each.values[:kept], each.depths, each.sources, strict=False):
                if depth <= proposal.levels and source == HEAD:
                    gave[depth] += max(0.0, value - price / self._batch)
        for level, mass in enumerate(proposal.masses, start=1):
            self._mean_masses[level] += (mass / self._batch - self._mean_masses[level]) / _RATE_ROUNDS
            self._masses[level] += mass
            self._gains[level] += gave[level + 1]

    def _pays(self, level: int, mass: float) -> bool:
        share = _KEPT_SHARE
        for nearer in range(1, level + 1):  # each level is believed to be like the one above it
            share = (self._gains[nearer] + _KEPT_PRIOR * share) / (self._masses[nearer] + _KEPT_PRIOR)
        return mass * self._corrections[1] * share > self._rate() * self._draft.another(level)

    def _levels_ahead(self, most: int) -> int:
        """Return the number of levels that pay by the frontiers of earlier rounds."""
        level = 1
        while level < most and self._pays(level, self._batch * self._mean_masses[level]):
            level += 1
        return most if self._rounds % _ALL_LEVELS == 0 else min(level, most)

    def _forget(self) -> None:
        for counts in (self._predicted, self._right, self._masses, self._gains):
            counts[:] = [count / 2 for count in counts]

    # ----- the head on and off --------------------------------------------------------------------------------------

    def _weigh_head(self, proposal: Proposal, paths: dict[int, list[int]]) -> None:
        """Add what the head's nodes gave in a round to the balance, less what they cost. If too low, leave it out."""
        kept = proposal.num_nodes
        self._judged += 1
        gained, most_others = 0.0, 0
        for index, each in proposal.candidates.items():
            owed = _owed_to_head(each, kept)
            came = sum(owed[node - 1] for node in paths.get(index, ())[1:])
            values = zip(each.values, each.depths, owed, strict=False)
            expected = sum(value * self._corrections[depth] for value, depth, is_owed in values if is_owed)
            # A head that is known is judged halfway by what was to be expected, so that luck alone does not decide.
            gained += came if self._judged < _KNOWN else (came + expected) / 2
            most_others = max(most_others, kept - sum(owed))
        cost = self._drafting(proposal) + max(0.0, self._here.of(kept) - self._here.of(most_others))
        active = max(1, len(proposal.candidates))
        self._balance = min(_GREATEST, self._balance + gained / active - cost)
        if self._balance > 0:
            self._pause, self._was_off = _FIRST_PAUSE, False
        elif self._balance < _LOWEST:
            if not self._was_off:
                logger.info(
                    "drafting with the head does not pay here: its drafts cost more time than they save. It is left "
                    f"out, and tried again after {self._pause} steps. The text is the same."
                )
            self._was_off = True
            self._balance = _AGAIN
            self._draft.forget()  # the measurements may have been disturbed by other work
            self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)


def _owed_to_head(candidates: Candidates, kept: int) -> list[bool]:
    """Return which nodes only the head has proposed, or follow such a node."""
    owed: list[bool] = []
    for parent, source in zip(candidates.parents[:kept], candidates.sources, strict=False):
        owed.append(source == HEAD or (parent > 0 and owed[parent - 1]))
    return owed
