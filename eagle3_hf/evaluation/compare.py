"""Decodes one prompt without and with a head, for demonstrations; `bench` measures.

Times include the prefill. A speed-up over several prompts is their tokens per second, divided by those of ordinary
decoding.
"""

from dataclasses import dataclass, field
from time import perf_counter

import torch

from ..acceptance import SpeculationStats
from ..decoding.attachments import without_attachment
from .check import Difference, first_difference


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
    """Comparisons of several prompts."""

    comparisons: list[Comparison] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Tokens per second, divided by those of ordinary decoding."""
        return self._rate("assisted") / self._rate("plain")

    @property
    def tau(self) -> float:
        """Mean acceptance length over all rounds."""
        rounds = sum(item.stats.rounds for item in self.comparisons)
        return sum(item.stats.emitted for item in self.comparisons) / max(1, rounds)

    @property
    def equal(self) -> int:
        """Number of prompts whose answers have the same ids."""
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
    with without_attachment(target):
        plain, _ = _timed(target, inputs, seed, None, **kwargs)
        assisted, stats = _timed(target, inputs, seed, draft, streamer=streamer, **kwargs)
        difference = None
        if plain.tokens != assisted.tokens and not kwargs.get("do_sample"):
            scores = _scores(target, inputs, **kwargs)
            difference = first_difference(plain.tokens, assisted.tokens, scores, target.dtype)
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
