"""Measures the speed-up: ordinary and assisted decoding in turn on the same prompts, in one process.

On a noisy machine the ratios of such pairs are reliable where single times are not. Times include the prefill. A
task's speed-up is its tokens per second, over all questions, divided by those of ordinary decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from ..acceptance import SpeculationStats
from .check import Difference, first_difference


# Where a tree (nodes, depth, top_k) is set on a head.
TREE_FIELDS = ("num_assistant_tokens", "assistant_tree_depth", "assistant_tree_top_k")


@dataclass
class Run:
    """The new tokens and the duration of one `generate` call."""

    tokens: list[int]
    seconds: float


@dataclass
class Comparison:
    """The same prompt without and with a draft; `difference` is set only for greedy decoding."""

    plain: Run
    assisted: Run
    stats: SpeculationStats
    difference: Difference | None = None

    @property
    def equal(self) -> bool:
        """Whether both runs gave the same ids."""
        return self.plain.tokens == self.assisted.tokens


@dataclass
class TaskResult:
    """All comparisons of one task."""

    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Tokens per second, divided by those of ordinary decoding."""
        return self._rate("assisted") / self._rate("plain")

    @property
    def tau(self) -> float:
        """Mean acceptance length over all rounds of the task."""
        rounds = sum(item.stats.rounds for item in self.comparisons)
        return sum(item.stats.emitted for item in self.comparisons) / max(1, rounds)

    @property
    def equal(self) -> int:
        """Number of questions whose answers have the same ids."""
        return sum(item.equal for item in self.comparisons)

    @property
    def overhead(self) -> float:
        """Share of the decoding time spent neither in the draft nor in the target."""
        stats = [item.stats for item in self.comparisons]
        other = sum(item.other_seconds for item in stats)
        return other / max(1e-9, other + sum(item.draft_seconds + item.verify_seconds for item in stats))

    @property
    def differences(self) -> list[Difference]:
        """The differences of greedy answers."""
        return [item.difference for item in self.comparisons if item.difference is not None]

    def _rate(self, kind: str) -> float:
        runs = [getattr(item, kind) for item in self.comparisons]
        return sum(len(run.tokens) for run in runs) / sum(run.seconds for run in runs)


def encode(tokenizer, question: str, device) -> dict[str, torch.Tensor]:
    """Encode a question as the first user turn of a chat, followed by the generation prompt."""
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return {name: value.to(device) for name, value in inputs.items()}


def compare(target, draft, inputs: dict[str, torch.Tensor], seed: int = 0, streamer=None, **kwargs) -> Comparison:
    """Generate without and with the draft from the same seed, and judge a difference of greedy texts.

    Args:
        target: The target model.
        draft: The draft head.
        inputs: `input_ids` and `attention_mask` of one prompt.
        seed: Seed of both runs.
        streamer: Streamer for the assisted run.
        kwargs: Further arguments of `generate`.
    """
    plain, _ = _timed(target, inputs, seed, None, **kwargs)
    assisted, stats = _timed(target, inputs, seed, draft, streamer=streamer, **kwargs)
    difference = None
    if plain.tokens != assisted.tokens and not kwargs.get("do_sample"):
        difference = first_difference(plain.tokens, assisted.tokens, _scores(target, inputs, **kwargs), target.dtype)
    return Comparison(plain, assisted, stats, difference)


def _scores(target, inputs, **kwargs) -> tuple[torch.Tensor, ...]:
    """Return the scores of the run without a draft, by running it again."""
    return target.generate(**inputs, **kwargs, return_dict_in_generate=True, output_scores=True).scores


def _timed(target, inputs, seed: int, draft, **kwargs) -> tuple[Run, SpeculationStats]:
    torch.manual_seed(seed)
    start = perf_counter()
    output = target.generate(**inputs, **({"assistant_model": draft} if draft is not None else {}), **kwargs)
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()  # waits for the device
    seconds = perf_counter() - start
    return Run(tokens, seconds), draft.stats if draft is not None else SpeculationStats()


class _RoundClock:
    """A streamer that records when each ordinary step, or each round of a draft, ends. It prints nothing."""

    def __init__(self, rounds: bool):
        self._rounds = rounds
        self._times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if not self._rounds:
            self._times.append(perf_counter())

    def end_round(self, accepted: int) -> None:
        self._times.append(perf_counter())

    def end(self) -> None:
        pass

    def gaps(self, skip: int = 2) -> list[float]:
        """Return the duration of each step or round, except for the first `skip`, which warm up."""
        return [after - before for before, after in zip(self._times, self._times[1:], strict=False)][skip:]


def round_cost(
    target, draft, trees: Sequence[tuple[int, int, int]], context: int = 128, rounds: int = 50, turns: int = 5
) -> tuple[float, list[float]]:
    """Measure the median time of an ordinary step and of one round of each tree.

    The kinds take turns, so that a drift of the machine's speed affects all of them alike. The head should be one of
    which nothing is accepted (a random one), so that the contexts have equal lengths.

    Args:
        target: The target model.
        draft: The draft head.
        trees: Sizes as (nodes, depth, top_k).
        context: Length of the prompt in tokens.
        rounds: Number of rounds to measure of each kind.
        turns: Number of turns in which they are measured.

    Returns:
        Seconds of an ordinary step, and of a round of each tree.
    """
    prompt = torch.randint(5, target.config.get_text_config().vocab_size, (1, context), device=target.device)
    common = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False}
    common |= {"eos_token_id": None, "max_new_tokens": -(-rounds // turns) + 16}
    gaps: list[list[float]] = [[] for _ in range(1 + len(trees))]
    for _ in range(turns):
        clock = _RoundClock(rounds=False)
        target.generate(**common, streamer=clock)
        gaps[0] += clock.gaps()
        for kind, tree in enumerate(trees, start=1):
            for name, value in zip(TREE_FIELDS, tree, strict=True):
                setattr(draft.generation_config, name, value)
            clock = _RoundClock(rounds=True)
            target.generate(**common, streamer=clock, assistant_model=draft)
            gaps[kind] += clock.gaps()[:-8]  # trees become smaller near the length limit
    plain, *costs = (median(found) for found in gaps)
    return plain, costs
