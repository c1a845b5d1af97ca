"""The result of a check: one line for each call that was compared."""

from dataclasses import dataclass, field

from ...acceptance import SpeculationStats
from .judging import BUG, EQUAL, NEAR_TIE, Verdict


SKIPPED, REFUSED = "skipped", "refused"


@dataclass(frozen=True)
class CaseResult:
    """One call with a draft, compared with ordinary decoding.

    Attributes:
        case: What is special about the call.
        way: What drafted: `"draft"`, `"told the text"`, or `"state"` for the comparison of the head's own state.
        prompt: Index of the first prompt.
        kind: `"equal"`, `"near-tie"`, `"bug"`, `"refused"` if the call with a draft is rejected by an error that says
            why, or `"skipped"` if ordinary decoding rejects it.
        detail: What differs, or the error.
        verdict: The judgement, with token and margin; `None` if the call was not made.
        tokens: Number of new tokens compared.
        accepted: Number of accepted drafts.
    """

    case: str
    way: str
    prompt: int
    kind: str
    detail: str = ""
    verdict: Verdict | None = None
    tokens: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        where = f"{self.case} ({self.way}, prompt {self.prompt})"
        return f"{self.kind.upper() if self.kind == BUG else self.kind}: {where}" + (
            f": {self.detail}" if self.detail else ""
        )


@dataclass
class LosslessReport:
    """The results of a check; `str()` returns them as text.

    Attributes:
        cases: One result for each call that was compared.
        stats: Statistics of all calls in which the draft was used as it is.
    """

    cases: list[CaseResult] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def bugs(self) -> list[CaseResult]:
        """The calls that no rounding explains."""
        return self._of(BUG)

    @property
    def near_ties(self) -> list[CaseResult]:
        """The calls whose texts differ by rounding."""
        return self._of(NEAR_TIE)

    @property
    def is_lossless(self) -> bool:
        """Whether something was compared, and no bug was found."""
        return not self.bugs and bool(self._of(EQUAL) or self.near_ties)

    @property
    def tokens(self) -> int:
        """Number of new tokens compared."""
        return sum(result.tokens for result in self.cases)

    @property
    def accepted(self) -> int:
        """Number of accepted drafts, without which little is tested."""
        return sum(result.accepted for result in self.cases)

    def _of(self, kind: str) -> list[CaseResult]:
        return [result for result in self.cases if result.kind == kind]

    def __str__(self) -> str:
        kinds = [kind for kind in (EQUAL, NEAR_TIE, BUG, REFUSED, SKIPPED) if self._of(kind)]
        counts = ", ".join(f"{len(self._of(kind))} {kind}" for kind in kinds) or "nothing was compared"
        lines = [str(result) for kind in kinds if kind != EQUAL for result in self._of(kind)]
        lines.append(f"{counts}; {self.tokens} tokens compared, {self.accepted} drafts accepted")
        if not self.accepted:
            lines.append("no draft was accepted, so that little was tested: the target verifies no drafts")
        lines.append(_conclusion(self))
        return "\n".join(lines)


def _conclusion(report: LosslessReport) -> str:
    if report.bugs:
        return f"NOT lossless: {len(report.bugs)} of {len(report.cases)} comparisons differ by more than rounding"
    if not report.is_lossless:
        return "nothing can be said: no call could be compared"
    if report.near_ties:
        return "lossless up to rounding: where texts differ, two tokens had scores that rounding cannot tell apart"
    return "lossless: every text is that of ordinary decoding"
