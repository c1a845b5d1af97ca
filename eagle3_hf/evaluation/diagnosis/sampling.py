"""Acceptance in sampling, from the distributions of target and head at depth 1."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


_NUMBERS = 2**24  # probabilities that exist at a time


@dataclass(frozen=True)
class AtTemperature:
    """What can be accepted at a temperature, at depth 1.

    Attributes:
        temperature: The temperature; 0 for greedy decoding.
        first: Probability that the target chooses the head's first choice.
        children: The same for any of the head's best tokens, as many as a node of the tree has children.
        overlap: What both distributions have in common, `sum(min(p, q))`: the most that one draft can be accepted
            with.
    """

    temperature: float
    first: float
    children: float
    overlap: float


def shares_at(
    temperature: float, target_logits: torch.Tensor, draft_logits: torch.Tensor, draft_ids: torch.Tensor, children: int
) -> torch.Tensor:
    """Return (3,) the sums over n positions of what [`AtTemperature`] has the means of.

    Args:
        temperature: The temperature.
        target_logits: (n, V).
        draft_logits: (n, D).
        draft_ids: (D,) the tokens of the draft vocabulary.
        children: Number of the head's best tokens.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    ids = draft_ids.to(target_logits.device)
    size = max(1, _NUMBERS // target_logits.shape[-1])
    for above, below in zip(target_logits.split(size), draft_logits.split(size), strict=True):
        p = _probabilities(above, temperature)[:, ids]
        q = _probabilities(below.to(above.device), temperature)
        best = below.to(above.device).topk(min(children, q.shape[-1]), dim=-1).indices
        chosen = p.gather(-1, best).double()
        parts = (chosen[:, 0].sum(), chosen.sum(), torch.minimum(p, q).double().sum())
        sums += torch.stack(parts).cpu()
    return sums


def mean_shares(temperatures: Sequence[float], sums: torch.Tensor, count: int) -> list[AtTemperature]:
    """Return the means from sums (temperatures, 3) over `count` positions."""
    means = (sums / max(1, count)).tolist()
    return [AtTemperature(each, *own) for each, own in zip(temperatures, means, strict=True)]


def _probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = logits.float().nan_to_num(nan=-1e30, neginf=-1e30)
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


__all__ = ["AtTemperature", "mean_shares", "shares_at"]
