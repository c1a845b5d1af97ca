"""The result of a diagnosis, with the types of all its figures."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...acceptance import SpeculationStats
from ..misses import Cause
from ..statistics import Interval
from .calibration import Calibration
from .findings import Finding
from .record import RecordCheck
from .sampling import AtTemperature
from .sweep import TriedSetting
from .vocabulary import Coverage, MapCheck


@dataclass(frozen=True)
class Group:
    """Some of the texts.

    Attributes:
        name: What they have in common.
        texts: Number of texts.
        positions: Number of positions at which the head was asked.
        accuracy: Share of them at which the head's first choice is the target's, at depth 1.
        tau: Mean acceptance length of the rounds; `None` without rounds.
    """

    name: str
    texts: int
    positions: int
    accuracy: float
    tau: Interval | None


@dataclass(frozen=True)
class Precision:
    """What the data types cost.

    Attributes:
        dtype, target_dtype: The data types of head and target.
        not_finite: Share of positions at which some number of the head, or of the features that it reads, is not
            finite.
        accuracy: Share of hits at depth 1.
        in_float32: The same of a copy of the head in float32; `None` if the head is not in float16.
    """

    dtype: str
    target_dtype: str
    not_finite: float
    accuracy: float
    in_float32: float | None


@dataclass(frozen=True)
class Diagnosis:
    """Why few of a head's drafts are accepted.

    Accuracies are shares of positions of answers at which the head's first choice is the target's (greedy) choice.

    Attributes:
        target, head: Names of the models.
        own_answers: Whether the target wrote the answers; otherwise they are those of the data.
        texts: Number of texts.
        positions: Number of positions at which the head was asked.
        agreement: Share of these at which the target chooses the text's own next token.
        tree: Size of the trees, as nodes/levels/children.
        stats: The rounds: tau and acceptance by depth.
        misses: Number of rounds that ended with a miss.
        causes: Number of misses of each cause; they add up to `misses`.
        accuracy_by_depth: Accuracy at each depth, with the text's tokens in between.
        coverage: What the draft vocabulary covers.
        map_check: Whether the map of the draft vocabulary leads to the right tokens.
        record: Tokenizer and chat template against the head's record.
        sweep: Other settings of the head, the best first.
        precision: What the data types cost.
        by_task, by_prompt_length: Groups of the texts.
        by_temperature: Acceptance in sampling.
        calibration: Whether the head's probabilities are what they say.
        findings: The faults that were found, the likeliest cause first; empty for a sound head.
        conclusion: The likely cause and what to do.
        missing_words: The most frequent choices outside the draft vocabulary (`coverage.missing`) as text.
    """

    target: str
    head: str
    own_answers: bool
    texts: int
    positions: int
    agreement: float
    tree: str
    stats: SpeculationStats
    misses: int
    causes: dict[Cause, int]
    accuracy_by_depth: list[float]
    coverage: Coverage
    map_check: MapCheck
    record: RecordCheck
    sweep: list[TriedSetting]
    precision: Precision
    by_task: list[Group]
    by_prompt_length: list[Group]
    by_temperature: list[AtTemperature]
    calibration: Calibration
    findings: list[Finding]
    conclusion: str
    missing_words: Sequence[str] = ()

    @property
    def accuracy(self) -> float:
        """Accuracy at depth 1."""
        return self.accuracy_by_depth[0]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers, texts and lists, for JSON."""
        plain = asdict(self)
        plain["stats"] = self.stats.as_dict()
        plain["causes"] = {cause.value: number for cause, number in self.causes.items()}
        for own, tried in zip(plain["sweep"], self.sweep, strict=True):
            own["is_better"] = tried.is_better
        return json.loads(json.dumps(plain))

    def __str__(self) -> str:
        from .report import to_text

        return to_text(self)


__all__ = ["Diagnosis", "Group", "Precision"]
