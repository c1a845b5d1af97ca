"""Costs of a round, by which policies of trees are compared without a clock."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of the parts of a round, at batch 1.

    Args:
        plain: A step of ordinary decoding.
        verify: Tokens of a tree, the root included -> the target's forward and the walk. Between two numbers of tokens
            it is interpolated linearly, beyond the last by the slope before it, and below the first it is constant.
        draft_first: Feeding the draft and growing the first level.
        draft_further: Each further level.
        other: The rest of a round in which something was drafted or verified.
    """

    plain: float
    verify: Mapping[int, float]
    draft_first: float
    draft_further: float
    other: float = 0.0

    def __post_init__(self) -> None:
        if not self.verify or min(self.verify) < 1:
            raise ValueError(f"verify must map numbers of tokens, from 1 on, to milliseconds, got {self.verify!r}")
        numbers = {"plain": self.plain, "draft_first": self.draft_first, "draft_further": self.draft_further}
        numbers |= {"other": self.other} | {f"verify[{tokens}]": cost for tokens, cost in self.verify.items()}
        for name, cost in numbers.items():
            if not cost >= 0:
                raise ValueError(f"{name} must be a number of milliseconds of at least 0, got {cost!r}")
        if self.plain == 0:
            raise ValueError("plain must be greater than 0 milliseconds")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "CostTable":
        """Read a table from JSON: the arguments by name, `verify` as an object.

        Raises:
            ValueError: the file is not such a table. The message names the field.
        """
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            verify = {int(tokens): float(cost) for tokens, cost in fields.pop("verify").items()}
            return cls(verify=verify, **{name: float(cost) for name, cost in fields.items()})
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        except KeyError as error:
            raise ValueError(f"{path} is no table of costs: it lacks {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no table of costs: {error}") from error

    def verify_ms(self, tokens: int) -> float:
        """Return the cost of verifying a tree of so many tokens, the root included."""
        known = sorted(self.verify)
        above = next((place for place, size in enumerate(known) if size >= tokens), len(known) - 1)
        if above == 0 or len(known) == 1:
            return self.verify[known[above]]
        low, high = known[above - 1], known[above]
        slope = (self.verify[high] - self.verify[low]) / (high - low)
        return self.verify[low] + slope * (tokens - low)

    def draft_ms(self, levels: int) -> float:
        """Return the cost of growing so many levels."""
        return self.draft_first + (levels - 1) * self.draft_further if levels else 0.0

    def round_ms(self, tokens: int, levels: int) -> float:
        """Return the cost of a round; one of the root alone, without a draft, is a plain step.

        Args:
            tokens: Number of tokens that are verified, the root included.
            levels: Number of levels that the head has grown.
        """
        if tokens == 1 and levels == 0:
            return self.plain
        return self.verify_ms(tokens) + self.draft_ms(levels) + self.other


# Where these figures come from is said in docs/replay.md.
COSTS = {
    "cpu": CostTable(
        plain=23.6,
        verify={1: 23.6, 8: 27.9, 12: 30.0, 16: 31.8, 24: 35.8, 32: 40.1, 64: 60.4},
        draft_first=3.0,
        draft_further=2.2,
    ),
    "gpu-eager": CostTable(plain=22.0, verify={1: 25.0}, draft_first=1.4, draft_further=1.6, other=3.0),
    "gpu-graphs": CostTable(plain=6.4, verify={1: 6.4, 65: 7.04}, draft_first=0.4, draft_further=0.4, other=0.3),
}


def costs_of(name: str | os.PathLike) -> CostTable:
    """Return the table of a name of `COSTS`, or the one in a JSON file."""
    return COSTS[str(name)] if str(name) in COSTS else CostTable.load(name)
