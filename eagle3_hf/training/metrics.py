"""Metrics of training and evaluation: sums over the supervised pairs of every step, kept on the device."""

from typing import Any

import torch

from ..acceptance import simulated_acceptance_length
from ..model.modeling_eagle3 import Eagle3DraftOutput


class StepSums:
    """Sums of loss, hits and supervised pairs of every step, kept on the device until `collect` reads them."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self.reset()

    def reset(self) -> None:
        self._sums = torch.zeros(3, self._num_steps)

    def add(self, output: Eagle3DraftOutput) -> None:
        sums: Any = output.step_losses, output.step_hits, output.step_counts
        new = torch.stack(sums).float()
        self._sums = self._sums.to(new.device) + new

    def collect(self, accelerator) -> list[list[float]]:
        """Return `[losses, hits, counts]`, S numbers each, summed over all processes, and start anew."""
        sums = accelerator.reduce(self._sums.to(accelerator.device), "sum").tolist()
        self.reset()
        return sums


def step_metrics(hits: list[float], counts: list[float], prefix: str = "") -> dict[str, float]:
    """Return the accuracy of every step, and the tokens a round that a chain with these accuracies would emit."""
    accuracies = [hit / max(count, 1.0) for hit, count in zip(hits, counts, strict=True)]
    named = {f"{prefix}accuracy_step_{step}": value for step, value in enumerate(accuracies)}
    return {**named, f"{prefix}simulated_acceptance_length": simulated_acceptance_length(accuracies)}
