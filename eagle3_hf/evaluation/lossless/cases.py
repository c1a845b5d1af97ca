"""The calls that are compared: arguments of every kind, and callbacks of the caller that would notice a difference."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ...decoding.target.runner import CACHE_KEY


GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

# Makes the arguments of one call that keep a state, from the target and a list in which callbacks log their calls.
Make = Callable[[Any, list], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
        name: What is special about it.
        options: Arguments of `generate`.
        batch_size: Number of prompts; 1, or as many as there are at most.
        share: Which part of the check's new tokens are asked for.
        make: Gives arguments that keep a state, new for each call.
        stops: Whether a token from the middle of the text is the end of the text.
        lookup: Whether the lookup source drafts; `None` as the draft is set.
    """

    name: str
    options: dict[str, Any] = field(default_factory=lambda: GREEDY)
    batch_size: int = 1
    share: float = 1.0
    make: Make = lambda target, log: {}
    stops: bool = False
    lookup: bool | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled."""
        return bool(self.options["do_sample"])


class CountingProcessor(LogitsProcessor):
    """Changes scores by the number of its calls and by the sequence, and logs its calls."""

    def __init__(self, log: list):
        self._log = log
        self._calls = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._calls += 1
        self._log.append(("processor", input_ids.tolist()))
        size = scores.abs().mean()  # so that it changes choices of any model, and hardly more than that
        across = torch.arange(scores.shape[1], device=scores.device) * self._calls
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        return scores + 0.5 * size * torch.sin(across + rows)  # type: ignore[return-value]


class EndsEachApart(StoppingCriteria):
    """Ends each sequence at a length of its own, and logs its calls."""

    def __init__(self, log: list, lengths: tuple[int, ...]):
        self._log = log
        self._lengths = lengths
        self._first: int | None = None

    def __call__(self, input_ids, scores, **kwargs) -> torch.Tensor:
        self._log.append(("criterion", input_ids.tolist()))
        length = input_ids.shape[1]
        self._first = length if self._first is None else self._first
        new = length - self._first + 1
        ends = [new >= self._lengths[index % len(self._lengths)] for index in range(len(input_ids))]
        return torch.tensor(ends, device=input_ids.device)


def _processor(target: Any, log: list) -> dict[str, Any]:
    return {"logits_processor": LogitsProcessorList([CountingProcessor(log)])}


def _criterion(target: Any, log: list) -> dict[str, Any]:
    return {"stopping_criteria": StoppingCriteriaList([EndsEachApart(log, (7, 12, 5))])}


def _own_cache(target: Any, log: list) -> dict[str, Any]:
    return {CACHE_KEY: DynamicCache(config=target.config.get_text_config(decoder=True))}


_MANY = 3  # sequences of a batch

CASES = (
    Case("greedy"),
    Case("greedy, one token", share=0.0),
    Case("greedy, few tokens", share=0.2),
    Case("greedy, without lookup", lookup=False),
    Case("greedy, a batch of prompts", batch_size=_MANY),
    Case("greedy, end of text within", stops=True, batch_size=_MANY),
    Case("greedy, penalties", {**GREEDY, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}),
    Case("greedy, penalties, a batch", {**GREEDY, "repetition_penalty": 1.2}, batch_size=_MANY),
    Case("greedy, a processor with a state", make=_processor),
    Case("greedy, a stopping criterion, a batch", make=_criterion, batch_size=_MANY),
    Case("greedy, static cache", {**GREEDY, "cache_implementation": "static"}),
    Case("greedy, a cache of the caller's", make=_own_cache),
    Case("sampled", SAMPLED),
    Case("sampled, temperature 0.6, top-k, top-p", {**SAMPLED, "temperature": 0.6, "top_k": 50, "top_p": 0.95}),
    Case("sampled, temperature 1.3, min-p", {**SAMPLED, "temperature": 1.3, "min_p": 0.05}),
    Case("sampled, a batch of prompts", SAMPLED, batch_size=_MANY),
    Case("sampled, end of text within", {**SAMPLED, "temperature": 0.8}, stops=True, batch_size=_MANY),
    Case("sampled, penalties, a batch", {**SAMPLED, "repetition_penalty": 1.2}, batch_size=_MANY),
    Case("sampled, a processor with a state", SAMPLED, make=_processor),
    Case("sampled, a processor with a state, a batch", SAMPLED, make=_processor, batch_size=_MANY),
    Case("sampled, static cache", {**SAMPLED, "cache_implementation": "static"}),
)
