"""Replays policies of trees on a record: the rounds that decoding would make, and what they would cost.

A round that begins at a position of a text proposes a tree; the text itself says which path of it is accepted, and the
next round begins behind the token that ends it. So a policy is evaluated exactly, without a model and without a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..acceptance import SpeculationStats
from ..decoding.tree import HostTree
from ..decoding.verification import Walk
from .costs import CostTable
from .pools import Pool
from .record import Header, Record, RecordedText, RecordError


class ReplayRound:
    """What a policy sees when a round begins.

    Args:
        text: The recorded text.
        position: Number of its tokens before the round. The last of them is the root.
        depth_left: The deepest level whose token can still be emitted.
        costs: What a round costs.
        header: How the record was made.

    Attributes:
        levels: Number of levels of the head that the policy has asked for, which it pays for.
    """

    def __init__(self, text: RecordedText, position: int, depth_left: int, costs: CostTable, header: Header) -> None:
        self.position = position
        self.depth_left = depth_left
        self.costs = costs
        self.levels = 0
        self._text = text
        self._header = header
        self._whole: Pool | None = None

    @property
    def root(self) -> int:
        """The newest token, below which trees grow."""
        return int(self._text.text[self.position - 1])

    @property
    def prompt_length(self) -> int:
        """Number of ids of the prompt."""
        return len(self._text.prompt)

    @property
    def ids(self) -> list[int]:
        """Prompt and text so far, the root included."""
        return [*self._text.prompt.tolist(), *self._text.text[: self.position].tolist()]

    def pool(self, depth: int, top_k: int) -> Pool:
        """Return the pool that the head would grow with so many levels and children.

        A policy may ask for one level after the other; it pays for the deepest.

        Raises:
            RecordError: the record was made with fewer levels or children.
        """
        header = self._header
        top_k = min(top_k, header.draft_vocab_size)
        if depth > header.depth or top_k > header.top_k:
            raise RecordError(
                f"the record has pools of {header.depth} levels and {header.top_k} children, too few for {depth} "
                f"levels and {top_k} children: record again with more"
            )
        if self._whole is None:
            self._whole = self._text.pool(self.position)
        self.levels = max(self.levels, depth)
        return self._whole.reduced(depth, top_k)

    def log_noise(self, level: int, token: int) -> float | None:
        """Return the logarithm of the noise with which the target will choose this token at a level, from 0 on.

        `None`: the text is not sampled with coupling, or the token occurs neither in the prompt nor in the text.
        """
        return self._text.log_noise_of(self.position + level, token)


class Policy(Protocol):
    """Chooses the tree of each round."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text; `prompt` are the ids before it, without its first token."""

    def propose(self, context: ReplayRound) -> HostTree:
        """Return the tree of a round, whose node 0 is `context.root`; that node alone is a plain step."""

    def observe(self, context: ReplayRound, tree: HostTree, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn what the target has chosen.

        Args:
            context: The round.
            tree: Its tree.
            path: The visited nodes, the root first.
            tokens: The tokens chosen at them, the last of which is behind the tree.
        """


class FixedTree:
    """The tree that decoding drafts with fixed settings.

    Args:
        num_nodes: Number of drafted nodes.
        depth: Number of levels.
        top_k: Number of children of an expanded node.
    """

    def __init__(self, num_nodes: int, depth: int, top_k: int):
        self.num_nodes = num_nodes
        self.depth = depth
        self.top_k = top_k

    def begin(self, prompt: Sequence[int]) -> None:
        """Do nothing: the policy has no state."""

    def propose(self, context: ReplayRound) -> HostTree:
        """Return the best nodes of the pool."""
        depth = min(self.depth, context.depth_left)
        if depth < 1:
            return HostTree([context.root], [-1])
        return context.pool(depth, self.top_k).tree(context.root, self.num_nodes)

    def observe(self, context: ReplayRound, tree: HostTree, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Do nothing."""


class PlainSteps:
    """Ordinary decoding: nothing is drafted."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Do nothing: the policy has no state."""

    def propose(self, context: ReplayRound) -> HostTree:
        """Return the root alone."""
        return HostTree([context.root], [-1])

    def observe(self, context: ReplayRound, tree: HostTree, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Do nothing."""


@dataclass
class ReplayResult:
    """The rounds of one text, or of several.

    Attributes:
        task: Name of the task.
        stats: Rounds, emitted tokens, acceptance by depth, and the modelled seconds.
        nodes: Drafted nodes of each round.
        levels: Levels of the head in each round.
        plain_seconds: Modelled seconds of ordinary decoding.
    """

    task: str
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    nodes: list[int] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    plain_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Modelled seconds of all rounds."""
        return self.stats.draft_seconds + self.stats.verify_seconds + self.stats.other_seconds

    @property
    def speedup(self) -> float:
        """Modelled seconds of ordinary decoding, divided by those of the rounds; 1.0 if there was no round."""
        return self.plain_seconds / self.seconds if self.seconds else 1.0

    @property
    def mean_nodes(self) -> float:
        """Drafted nodes per round."""
        return sum(self.nodes) / max(1, len(self.nodes))

    @property
    def mean_levels(self) -> float:
        """Levels of the head per round."""
        return sum(self.levels) / max(1, len(self.levels))

    @classmethod
    def total(cls, task: str, results: Sequence["ReplayResult"]) -> "ReplayResult":
        """Return the sum of several results."""
        whole = cls(task, SpeculationStats.total(one.stats for one in results))
        for one in results:
            whole.nodes += one.nodes
            whole.levels += one.levels
            whole.plain_seconds += one.plain_seconds
        return whole


class Replay:
    """A record, to evaluate policies on.

    ```
    replay = Replay(Record.load("greedy.npz"), COSTS["cpu"])
    results = replay.run(FixedTree(11, 3, 4))
    ```

    Args:
        record: The record. Its texts are kept in memory.
        costs: What a round costs.
    """

    def __init__(self, record: Record, costs: CostTable):
        self.header = record.header
        self.costs = costs
        self.texts = list(record)

    def run(self, policy: Policy) -> list[ReplayResult]:
        """Return the result of each text, in the order of the record.

        Args:
            policy: It sees one text after the other, and may keep what it has learnt.
        """
        return [self.run_text(text, policy) for text in self.texts]

    def by_task(self, policy: Policy) -> dict[str, ReplayResult]:
        """Return the total of each task."""
        results = self.run(policy)
        tasks = dict.fromkeys(result.task for result in results)
        return {task: ReplayResult.total(task, [one for one in results if one.task == task]) for task in tasks}

    def run_text(self, text: RecordedText, policy: Policy) -> ReplayResult:
        """Return the result of one text.

        Raises:
            ValueError: the policy has proposed something that is no tree below the root, or one too deep.
        """
        result = ReplayResult(text.task, plain_seconds=(len(text.text) - 1) * self.costs.plain / 1e3)
        policy.begin(text.prompt.tolist())
        tokens = text.text.tolist()
        position = 1
        while position < len(tokens):
            context = ReplayRound(text, position, text.max_new_tokens - position - 1, self.costs, self.header)
            tree = policy.propose(context)
            _check_tree(tree, context)
            path, accepted = _walk(tree, tokens[position:])
            emitted = tokens[position : position + len(path)]
            self._count(result, tree, context.levels, accepted, len(path))
            policy.observe(context, tree, path, emitted)
            position += len(path)
        return result

    def _count(self, result: ReplayResult, tree: HostTree, levels: int, accepted: int, emitted: int) -> None:
        stats, costs, size = result.stats, self.costs, len(tree.tokens)
        # As in decoding: if the text ends at an accepted draft, deeper levels have not been tried.
        stats.record(accepted, accepted if accepted == emitted else tree.depth, emitted)
        result.nodes.append(size - 1)
        result.levels.append(levels)
        draft = costs.draft_ms(levels) / 1e3
        verify = (costs.plain if size == 1 and not levels else costs.verify_ms(size)) / 1e3
        stats.draft_seconds += draft
        stats.verify_seconds += verify
        stats.other_seconds += costs.round_ms(size, levels) / 1e3 - draft - verify


def _walk(tree: HostTree, following: Sequence[int]) -> tuple[list[int], int]:
    """Return the nodes that the text behind the root visits, and the number of drafts that were right."""
    walk = Walk([tree])
    walk.run(
        [0], lambda nodes: {0: following[len(walk.paths[0]) - 1]}, lambda index: len(walk.paths[0]) < len(following)
    )
    return walk.paths[0], walk.accepted[0]


def _check_tree(tree: HostTree, context: ReplayRound) -> None:
    tokens, parents = tree
    if len(tokens) != len(parents) or not tokens or tokens[0] != context.root or parents[0] != -1:
        raise ValueError(f"a tree must begin with the root {context.root} and its parent -1, got {tree}")
    wrong = [node for node in range(1, len(parents)) if not 0 <= parents[node] < node]
    if wrong:
        raise ValueError(f"node {wrong[0]} has the parent {parents[wrong[0]]}, expected one before it")
    if tree.depth > max(0, context.depth_left):
        raise ValueError(
            f"the tree has {tree.depth} levels where {context.depth_left} tokens can follow: see depth_left"
        )


def markdown_table(rows: dict[str, dict[str, ReplayResult]]) -> str:
    """Return a table of the mean acceptance lengths (tau) and modelled speed-ups of some policies.

    Args:
        rows: Name of a policy -> what [`Replay.by_task`] returned.
    """
    tasks = list(next(iter(rows.values())))
    lines = [f"| policy | {' | '.join(tasks)} | mean | nodes | levels |", "|---" * (len(tasks) + 4) + "|"]
    for name, results in rows.items():
        cells = [f"{results[task].stats.tau:.2f} / {results[task].speedup:.2f}" for task in tasks]
        count = len(tasks)
        tau = sum(results[task].stats.tau for task in tasks) / count
        speedup = sum(results[task].speedup for task in tasks) / count
        whole = ReplayResult.total("", list(results.values()))
        lines.append(
            f"| {name} | {' | '.join(cells)} | {tau:.2f} / {speedup:.2f} | {whole.mean_nodes:.1f} | "
            f"{whole.mean_levels:.2f} |"
        )
    return "\n".join(lines)
