"""From evidence to causes: which faults a diagnosis names, in the order of their likelihood, and the advice."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..misses import Cause
from .record import RecordCheck
from .settings import LAYER_IDS
from .sweep import TriedSetting
from .vocabulary import Coverage, MapCheck


_OVERFLOWS = 0.001  # share of positions with numbers that are not finite
_TRAINED = 0.45  # accuracy at depth 1, among the choices that the head can say; trained heads have 0.6 to 0.8
_KEPT_AT_DEPTH_3 = 0.5  # of the accuracy at depth 1
_FEW_MISSES = 0.5  # of the rounds: most then reach the deepest level
_LARGE_GAIN = 0.1  # of a setting: it is then a cause even if the head is weak with it too
_LEAST_COVERAGE, _LEAST_BETTER, _LEAST_SHARE = 0.9, 0.05, 0.25


class Fault(str, Enum):
    """A cause of low acceptance that can be removed."""

    OVERFLOW = "float16 overflow"
    TOKENIZER = "another tokenizer"
    LAYER_IDS = "wrong layer ids"
    ROPE = "wrong rope base"
    VOCABULARY_MAP = "wrong vocabulary map"
    TEMPLATE = "another chat template"
    COVERAGE = "unfitting draft vocabulary"
    TRAINING = "too little training"
    DEPTH = "not trained on its own output"


@dataclass(frozen=True)
class Finding:
    """A fault with what shows it.

    Attributes:
        fault: Its name.
        evidence: What was measured.
        advice: What to do.
    """

    fault: Fault
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.evidence}. {self.advice}"


@dataclass(frozen=True)
class Evidence:
    """What the findings are drawn from.

    Attributes:
        not_finite: Share of positions with numbers of the head that are not finite.
        dtypes: The data types of head and target.
        accuracy: Accuracy at each depth; of a head in float16, that of a copy in float32.
        coverage, map_check, record, sweep: See [`Diagnosis`].
        causes: Number of misses of each cause.
    """

    not_finite: float
    dtypes: tuple[str, str]
    accuracy: Sequence[float]
    coverage: Coverage
    map_check: MapCheck
    record: RecordCheck
    sweep: Sequence[TriedSetting]
    causes: dict[Cause, int]


def findings(evidence: Evidence) -> list[Finding]:
    """Return the faults, the likeliest cause first."""
    found = [*_overflow(evidence), *_tokenizer(evidence)]
    settings = _settings(evidence)
    wrong_map = _wrong_map(evidence)
    found += wrong_map + settings if wrong_map else settings
    found += _template(evidence)
    weak = _training(evidence)
    if weak and settings and evidence.sweep[0].gain < _LARGE_GAIN:
        found = [each for each in found if each not in settings] + weak + settings
    elif weak and (settings or not found):
        found += weak
    found += _coverage(evidence)
    return found if found else _depth(evidence)


def conclusion(found: Sequence[Finding], causes: dict[Cause, int], rounds: int) -> str:
    """Return the likely cause and what to do.

    Args:
        found: The findings, the likeliest cause first.
        causes: Number of misses of each cause.
        rounds: Number of rounds, with and without a miss.
    """
    if found:
        first = found[0]
        return f"Likely cause: {first.fault.value} ({first.evidence}). {first.advice}"
    misses = sum(causes.values())
    if misses < _FEW_MISSES * rounds:
        return (
            f"No fault was found. {1 - misses / rounds:.0%} of the rounds end without a miss, at the deepest level of "
            "their trees or where the text ends or leaves the target's choices: deeper trees may accept more "
            "(assistant_tree_depth)."
        )
    cause = max(causes, key=lambda each: causes[each])
    return (
        f"No fault was found. Most often ({causes[cause] / misses:.0%} of the misses) the target's token is "
        f"{cause.words}: {_REMEDIES[cause]}"
    )


_REMEDIES = {
    Cause.OUTSIDE_VOCABULARY: "a larger draft vocabulary, or one counted on data like these, would help.",
    Cause.NOT_A_CANDIDATE: "more training, on data like these, would help.",
    Cause.PRUNED: "a tree of more nodes would accept more (num_assistant_tokens), if the device verifies it cheaply.",
    Cause.WRONG_ANCESTOR: "more children per node (assistant_tree_top_k) or more training would help.",
}


def _overflow(evidence: Evidence) -> list[Finding]:
    if evidence.not_finite < _OVERFLOWS:
        return []
    return [
        Finding(
            Fault.OVERFLOW,
            f"at {evidence.not_finite:.1%} of the positions a number of the head, or of the features that it reads, "
            f"is not finite, with the head in {evidence.dtypes[0]} and the target in {evidence.dtypes[1]}",
            "Load the head and its target in bfloat16 or float32.",
        )
    ]


def _tokenizer(evidence: Evidence) -> list[Finding]:
    if not evidence.record.is_other_vocab:
        return []
    return [
        Finding(
            Fault.TOKENIZER,
            f"the head was trained with a vocabulary of hash {evidence.record.recorded_vocab}, and this tokenizer's "
            f"is {evidence.record.vocab}",
            "Use the tokenizer, and the target, that the head was trained with.",
        )
    ]


def _settings(evidence: Evidence) -> list[Finding]:
    """Return the best setting of each kind that beats the present one, the better kind first."""
    found: list[Finding] = []
    for tried in sorted(evidence.sweep, key=lambda each: -each.gain):
        fault = Fault.LAYER_IDS if tried.setting.field == LAYER_IDS else Fault.ROPE
        if tried.is_better and fault not in [each.fault for each in found]:
            found.append(
                Finding(
                    fault,
                    f"with {tried.setting} the accuracy rises from {tried.accuracy - tried.gain:.1%} to "
                    f"{tried.accuracy:.1%} (p = {tried.p_value:.1g}, corrected for {len(evidence.sweep)} settings)",
                    f"Load the head with {tried.setting.field}={tried.setting.value}.",
                )
            )
    return found


def _wrong_map(evidence: Evidence) -> list[Finding]:
    check = evidence.map_check
    if not check.is_wrong:
        return []
    return [
        Finding(
            Fault.VOCABULARY_MAP,
            f"d2t hits {check.present:.1%} of the choices, and a map learnt on the other half of the texts "
            f"{check.learnt:.1%}",
            "Load d2t and t2d from the file that belongs to these weights: they hold offsets, token = draft id + d2t.",
        )
    ]


def _template(evidence: Evidence) -> list[Finding]:
    if not evidence.record.is_other_template:
        return []
    return [
        Finding(
            Fault.TEMPLATE,
            f"the head was trained with a chat template of hash {evidence.record.recorded_template}, and this "
            f"tokenizer's is {evidence.record.template}",
            "Use the chat template of training, with the same variables, or train further on chats in this one.",
        )
    ]


def _coverage(evidence: Evidence) -> list[Finding]:
    found, misses = evidence.coverage, sum(evidence.causes.values())
    outside = evidence.causes.get(Cause.OUTSIDE_VOCABULARY, 0)
    if found.of_choices >= _LEAST_COVERAGE or found.best - found.of_choices < _LEAST_BETTER:
        return []
    if not misses or outside / misses < _LEAST_SHARE:
        return []
    return [
        Finding(
            Fault.COVERAGE,
            f"the draft vocabulary of {found.size} tokens has {found.of_choices:.1%} of the target's choices here, "
            f"which causes {outside / misses:.0%} of the misses",
            "Train a head with a larger draft vocabulary, or with one that is counted on data like these.",
        )
    ]


def _training(evidence: Evidence) -> list[Finding]:
    best = max([evidence.accuracy[0], *(each.accuracy for each in evidence.sweep if each.is_better)])
    reachable = best / evidence.coverage.of_choices if evidence.coverage.of_choices else 1.0
    if reachable >= _TRAINED:
        return []
    return [
        Finding(
            Fault.TRAINING,
            f"the head's first choice is right at {reachable:.1%} of the positions whose token it can say, where "
            "trained heads reach 60 to 80 %",
            "Train it longer, on answers that this target wrote; check that it was made for this target.",
        )
    ]


def _depth(evidence: Evidence) -> list[Finding]:
    if len(evidence.accuracy) < 3 or evidence.accuracy[2] >= _KEPT_AT_DEPTH_3 * evidence.accuracy[0]:
        return []
    return [
        Finding(
            Fault.DEPTH,
            f"its accuracy falls from {evidence.accuracy[0]:.1%} at depth 1 to {evidence.accuracy[2]:.1%} at depth 3",
            "Train it with more steps of training-time test (ttt_steps), or draft shallower trees.",
        )
    ]


__all__ = ["Evidence", "Fault", "Finding", "conclusion", "findings"]
