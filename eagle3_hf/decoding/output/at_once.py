"""Choosing behind all nodes of the trees at once, where the host would otherwise wait for the device at each of them.

Greedy choices are the argmax of the logits. Sampled ones are a race with the noise of each node's step, which is
known (see `coupling.py`), if the scores depend on nothing but the logits: the warpers are then applied to all nodes.
What a node's choice was made with is remembered, so that the walk can tell whether it still holds: callbacks between
the steps, and other threads, may change the noise of a step that has not come yet.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..coupling import Noise


# Stands for a token where the probabilities cannot be sampled from.
INVALID = -1


class NodeChoices:
    """The choices behind all nodes. They can be asked for after `set_host`.

    Args:
        tokens: (B, N) int64 on the device; `INVALID` where nothing can be chosen.
        noise: Step -> the noise (B, V) that its choices were made with; empty for greedy choices.
    """

    def __init__(self, tokens: torch.Tensor, noise: dict[int, torch.Tensor]):
        self.tokens = tokens
        self._noise = noise
        self._host: list[list[int]] = []

    def set_host(self, tokens: list[list[int]]) -> None:
        """Set the tokens as lists, once they have been read."""
        self._host = tokens

    def behind(self, nodes: dict[int, int]) -> dict[int, int] | None:
        """Return the tokens behind the nodes that some sequences have reached; `None` if one of them is invalid."""
        found = {index: self._host[index][node] for index, node in nodes.items()}
        return None if INVALID in found.values() else found

    def hold(self, noise: Noise | None, steps: dict[int, int], committed: int) -> bool:
        """Return whether the choices of some sequences are still those that would be made now.

        Args:
            noise: The noise as it is now.
            steps: Index of a sequence -> the step that is chosen.
            committed: Number of committed steps.
        """
        if noise is None:
            return True
        used = sorted(set(steps.values()))
        coming = noise.peek_at([max(0, step - committed) for step in used])
        return all(self._noise.get(step) is now for step, now in zip(used, coming, strict=True))


def greedy_choices(logits: torch.Tensor) -> NodeChoices:
    """Return the argmax of the logits (B, N, V) of all nodes."""
    return NodeChoices(logits.argmax(-1), {})


def sampled_choices(
    logits: torch.Tensor,
    depths: torch.Tensor,
    levels: int,
    noise: Noise,
    warpers: Sequence[Callable],
    firsts: Sequence[int],
    committed: int,
) -> NodeChoices | None:
    """Return the winners of the race at all nodes; `None` if the noise is not that of these scores.

    Args:
        logits: (B, N, V) of all nodes, in float32; they may be changed.
        depths: (B, N) of the nodes.
        levels: No node is deeper.
        noise: The noise of the call.
        warpers: The call's processors, each of which depends on a token's scores alone.
        firsts: For each sequence the step that is chosen behind its root.
        committed: Number of committed steps.
    """
    batch, count, size = logits.shape
    scores = logits.flatten(0, 1)
    for warper in warpers:
        scores = warper(None, scores)
    probs = nn.functional.softmax(scores, dim=-1)
    if not noise.fits(probs.view(batch, count, -1)[:, 0]):
        return None
    steps = range(min(firsts), max(firsts) + levels + 1)
    drawn = noise.peek_at([max(0, step - committed) for step in steps])
    table = torch.stack(drawn)  # (steps, B, V)
    if batch == 1:
        own = table[:, 0].index_select(0, depths[0])
    else:
        ahead = torch.stack([depths[index] + first - steps[0] for index, first in enumerate(firsts)])
        own = table[ahead, torch.arange(batch, device=table.device)[:, None]].flatten(0, 1)
    race = probs / own
    winners = race.argmax(-1, keepdim=True)
    best = race.gather(-1, winners)
    # As `Noise.race` tests it, but for each node.
    valid = (best > 0) & (best < torch.inf) & (probs.amin(-1, keepdim=True) >= 0)
    tokens = winners.masked_fill(~valid, INVALID).view(batch, count)
    return NodeChoices(tokens, dict(zip(steps, drawn, strict=True)))
