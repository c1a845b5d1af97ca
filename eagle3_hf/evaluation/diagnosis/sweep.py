"""Which of several settings a head hits more with, told from chance.

All settings are asked at the same positions, so they are compared position by position. Hits of neighbouring positions
are not independent, so blocks of them are: under chance, the sign of a block's gain is as likely to be one as the
other. The p-value is the share of random signs whose total gain is at least the observed one, times the number of
settings that were tried (Bonferroni).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .settings import HeadSetting


BLOCK = 8  # positions
_DRAWS = 20_000
_MANY = 200  # blocks
SIGNIFICANT = 0.01
_LEAST_GAIN = 0.02  # of the share of hits: what is less than this is no cause of low acceptance
_LEAST_RATIO = 1.05


@dataclass(frozen=True)
class TriedSetting:
    """A setting that was tried.

    Attributes:
        setting: The setting.
        accuracy: Share of positions at which the head's first choice is the target's.
        gain: By how much this exceeds the share under the present setting.
        p_value: Probability that chance gives such a gain, corrected for the number of settings.
    """

    setting: HeadSetting
    accuracy: float
    gain: float
    p_value: float

    @property
    def is_better(self) -> bool:
        """Whether it beats the present setting, by more than chance explains and by enough to matter."""
        present = self.accuracy - self.gain
        matters = self.gain >= _LEAST_GAIN and self.accuracy >= _LEAST_RATIO * present
        return matters and self.p_value < SIGNIFICANT


def judge(
    present: Sequence[np.ndarray], others: Sequence[tuple[HeadSetting, Sequence[np.ndarray]]], seed: int = 0
) -> list[TriedSetting]:
    """Compare settings with the present one, the best first.

    Args:
        present: Hits (n,) of each text under the present setting.
        others: The same under other settings.
        seed: Seed of the random signs.
    """
    total = sum(map(len, present))
    tried = []
    for setting, hits in others:
        gains = block_gains(present, hits)
        p_value = min(1.0, p_of_gain(gains, seed) * len(others))
        accuracy = sum(int(own.sum()) for own in hits) / max(1, total)
        tried.append(TriedSetting(setting, accuracy, float(gains.sum()) / max(1, total), p_value))
    return sorted(tried, key=lambda each: -each.gain)


def block_gains(present: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> np.ndarray:
    """Return (m,) how many more hits each block of neighbouring positions of a text has."""
    parts = []
    for before, after in zip(present, other, strict=True):
        difference = after.astype(np.int64) - before.astype(np.int64)
        parts.append(
            np.add.reduceat(difference, np.arange(0, len(difference), BLOCK)) if len(difference) else difference
        )
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def p_of_gain(gains: np.ndarray, seed: int = 0) -> float:
    """Return the share of random signs of the blocks' gains whose sum is at least the observed one."""
    changed = gains[gains != 0]
    if not len(changed):
        return 1.0
    if len(changed) > _MANY:  # their sum is normally distributed
        return 0.5 * math.erfc(float(changed.sum()) / math.sqrt(2 * float((changed**2).sum())))
    signs = np.random.default_rng(seed).integers(0, 2, size=(_DRAWS, len(changed))) * 2 - 1
    reached = int((signs @ changed >= changed.sum()).sum())
    return (1 + reached) / (1 + _DRAWS)


__all__ = ["TriedSetting", "block_gains", "judge", "p_of_gain"]
