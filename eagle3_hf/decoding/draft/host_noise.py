"""The sampler's noise on the host, where the continuations that lookup finds are valued."""

from collections.abc import Callable

import numpy as np
import torch

from .. import transfers
from ..coupling import Noise
from .mixture import RaceNoise


_LEAST_NOISE = 1e-30  # noise is positive; this keeps its inverse finite


class HostNoise:
    """Copies of the noise of coming steps.

    On an accelerator the copies are begun in the background, before the head's candidates are read. When those have
    arrived, the copies have too. Steps are kept from round to round, so that a round copies few of them.

    Args:
        noise: The noise of the call.
    """

    def __init__(self, noise: Noise):
        self._noise = noise
        # id of a step's noise -> this noise (which keeps the id from being used again), a function that returns the
        # copies that were made together, and the place among them
        self._copies: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor], int]] = {}

    def begin(self, steps: int) -> None:
        """Begin to copy the noise of the coming `steps`, if reading it step by step would make the host wait."""
        if not transfers.makes_host_wait(self._noise.peek(0).device):
            return
        coming = self._noise.peek_at(range(steps))
        kept = {id(step): self._copies[id(step)] for step in coming if id(step) in self._copies}
        new = [step for step in coming if id(step) not in kept]
        if new:
            copies = transfers.download(torch.stack(new))
            kept |= {id(step): (step, copies, place) for place, step in enumerate(new)}
        self._copies = kept

    def race(self, index: int, lead: int) -> RaceNoise:
        """Return the noise of a token at a level of one sequence's tree.

        Args:
            index: The sequence.
            lead: The number of steps by which it is ahead of the generator.
        """
        rows: dict[int, np.ndarray] = {}

        def at(level: int, token: int) -> float:
            if level not in rows:
                rows[level] = self._row(lead + level, index)
            row = rows[level]
            return max(float(row[token]), _LEAST_NOISE) if token < len(row) else float("inf")

        return at

    def _row(self, step: int, index: int) -> np.ndarray:
        noise = self._noise.peek(step)
        if id(noise) not in self._copies:
            return noise[index].float().cpu().numpy()
        _, copies, place = self._copies[id(noise)]
        return copies()[place, index].float().numpy()
