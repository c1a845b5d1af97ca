"""One timed call of `generate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

from ..acceptance import SpeculationStats
from .columns import Column
from .machine import PeakMemory, synchronize


@dataclass(frozen=True)
class Answer:
    """What one call of `generate` gave, and what it took.

    Attributes:
        tokens: New tokens of each sequence, up to and including its end of text.
        seconds: Wall time of the call, prefill included.
        prefill_seconds: Wall time until the target's pass over the prompt ended.
        passes: Passes of the target after the prefill; `None` where they were not counted.
        stats: Statistics of the head; `None` without one.
        peak_memory: Largest memory in use during the call, in bytes: that of the accelerator, or the resident memory
            of the process; `None` where it cannot be measured.
    """

    tokens: list[list[int]]
    seconds: float
    prefill_seconds: float
    passes: int | None = None
    stats: SpeculationStats | None = None
    peak_memory: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all sequences."""
        return sum(map(len, self.tokens))

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Answer":
        """Return the answer that `as_dict` described."""
        stats = values.get("stats")
        return cls(**{**values, "stats": None if stats is None else SpeculationStats(**stats)})


def measure(
    target,
    heads: Mapping[str, Any],
    column: Column,
    prompts: Sequence[Sequence[int]],
    seed: int,
    clock: Callable[[], float] = perf_counter,
    **options: Any,
) -> Answer:
    """Answer a batch of prompts in the way of a column, and measure it.

    Args:
        target: The target model.
        heads: Heads by name.
        column: The way to decode.
        prompts: Token ids of each prompt; they are padded on the left.
        seed: Seed of the call.
        clock: Returns seconds.
        options: Further arguments of `generate`, the same for all columns.
    """
    inputs = left_padded(prompts, pad_token_id(target), target.device)
    with column.applied(heads) as own, _first_pass(target, clock, count="prompt_lookup_num_tokens" in own) as passes:
        memory = PeakMemory(target.device)
        torch.manual_seed(seed)
        synchronize(target.device)
        start = clock()
        output = target.generate(**inputs, **{**options, **own})
        synchronize(target.device)
        seconds = clock() - start
        peak = memory.peak()
        stats = getattr(heads[column.head], "stats", None) if column.head is not None else None
    new = output[:, inputs["input_ids"].shape[1] :].tolist()
    tokens = [until_end(each, eos_token_ids(target)) for each in new]
    prefill = passes.ended - start if stats is None else stats.prefill_seconds
    return Answer(tokens, seconds, prefill, passes.count, stats, peak)


def left_padded(prompts: Sequence[Sequence[int]], pad_token_id: int, device) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` (B, T), padded on the left."""
    longest = max(map(len, prompts))
    ids = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def until_end(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first that ends a text; pad tokens come behind it."""
    first = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: first + 1])


def eos_token_ids(target) -> list[int]:
    """Return the tokens that end the target's texts."""
    ids = target.generation_config.eos_token_id
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def pad_token_id(target) -> int:
    """Return the token with which the target's prompts are padded."""
    pad = target.generation_config.pad_token_id
    return pad if pad is not None else next(iter(eos_token_ids(target)), 0)


@dataclass
class _Passes:
    """When the target's first pass ended, and how many followed (if they are counted)."""

    ended: float = 0.0
    count: int | None = None


@contextmanager
def _first_pass(target, clock: Callable[[], float], count: bool) -> Iterator[_Passes]:
    """Watch the target's passes. The hook is gone after the first one, unless the others are to be counted."""
    passes = _Passes()

    def hook(*_: Any) -> None:
        if passes.count is not None:
            passes.count += 1
            return
        synchronize(target.device)
        passes.ended = clock()
        if count:
            passes.count = 0
        else:
            handle.remove()

    handle = target.register_forward_hook(hook)
    try:
        yield passes
    finally:
        handle.remove()
