"""One call of `generate` from a seed, and all that is compared of it. The generators are left as they were."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ...acceptance import SpeculationStats
from .cases import Case


@dataclass
class Observed:
    """What a caller can see of a call.

    Attributes:
        ids: (B, T) the new tokens, on the host.
        generator: State of the device's generator after the call.
        log: Calls of the callbacks.
        stats: Statistics of the draft; `None` without one.
        scores, logits: Processed scores and logits (B, V) of each step, on the host; empty if they were not asked for.
    """

    ids: torch.Tensor
    generator: torch.Tensor
    log: list = field(default_factory=list)
    stats: SpeculationStats | None = None
    scores: tuple[torch.Tensor, ...] = ()
    logits: tuple[torch.Tensor, ...] = ()


def observe(
    target: Any,
    inputs: Mapping[str, torch.Tensor],
    case: Case,
    options: Mapping[str, Any],
    seed: int,
    draft: Any = None,
    outputs: bool = True,
) -> Observed:
    """Make one call.

    Args:
        target: The target model.
        inputs: `input_ids` and `attention_mask`.
        case: The kind of call.
        options: Arguments of `generate` besides those of the case.
        seed: Seed of the call.
        draft: The draft; `None` for ordinary decoding.
        outputs: Whether scores and logits are asked for.
    """
    log: list = []
    arguments = {**inputs, **options, **case.options, **case.make(target, log)}
    if draft is not None:
        arguments["assistant_model"] = draft
        if case.lookup is not None:
            arguments["assistant_lookup"] = case.lookup
    if outputs:
        arguments |= {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    with generators_kept(target.device):
        torch.manual_seed(seed)
        result = target.generate(**arguments)
        state = generator_state(target.device)
    sequences = result.sequences if outputs else result
    seen = Observed(sequences[:, inputs["input_ids"].shape[1] :].cpu(), state, log)
    if draft is not None:
        seen.stats = draft.stats
    if outputs:
        seen.scores = tuple(step.float().cpu() for step in result.scores)
        seen.logits = tuple(step.float().cpu() for step in result.logits)
    return seen


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Restore the states of the default generators behind the block."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            yield


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of the default generator from which a target on this device samples."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return getattr(torch, device.type).get_rng_state(device)


def noise_of(device: torch.device, shape: torch.Size, steps: int, seed: int) -> list[torch.Tensor]:
    """Return the noise (B, V) that ordinary sampling draws at each of the first steps from a seed, on the host.

    It chooses `argmax(p / noise)`; see `decoding/coupling.py`.
    """
    with generators_kept(device):
        torch.manual_seed(seed)
        return [torch.empty(shape, device=device).exponential_().cpu() for _ in range(steps)]
