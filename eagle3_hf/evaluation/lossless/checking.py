"""The check: every case with every prompt, by ordinary decoding and with the draft."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ...acceptance import SpeculationStats
from ...decoding.attachments import without_attachment
from ...decoding.draft.trial import ROUNDS, Trial
from ...model.lookup_draft import LookupDraft
from ...model.modeling_eagle3 import Eagle3DraftModel
from ..measure import left_padded, pad_token_id
from .cases import CASES, Case
from .judging import BUG, Rounding, Verdict, judge, measure_rounding
from .observing import Observed, noise_of, observe
from .report import REFUSED, SKIPPED, CaseResult, LosslessReport
from .state import judge_state, kept_candidates
from .told import told


DRAFT, TOLD, STATE = "draft", "told the text", "state"
# The largest told tree; a fixed one, so that no measured cost decides what is tested.
_TOLD_TREE = {"num_assistant_tokens": 16, "assistant_tree_depth": 5, "assistant_tree_top_k": 4}
_LENGTHS = (7, 19, 4)  # of the random prompts


class LosslessError(AssertionError):
    """A head changes a text. `report` is the [`LosslessReport`]."""

    def __init__(self, report: LosslessReport):
        super().__init__(str(report))
        self.report = report


def assert_lossless(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int] | torch.Tensor] | None = None,
    *,
    max_new_tokens: int = 32,
    seed: int = 0,
    **options: Any,
) -> LosslessReport:
    """Check that a draft changes no text, for test suites.

    Args:
        target, draft, prompts, max_new_tokens, seed, options: See [`check_lossless`].

    Returns:
        The report of what was compared.

    Raises:
        LosslessError: a call with the draft differs from ordinary decoding by more than rounding, or no call could be
            compared. It is an `AssertionError`, whose text is the report.
        ValueError: an argument is invalid.
    """
    report = check_lossless(target, draft, prompts, max_new_tokens=max_new_tokens, seed=seed, **options)
    if not report.is_lossless:
        raise LosslessError(report)
    return report


def check_lossless(
    target: Any,
    draft: Any,
    prompts: Sequence[Sequence[int] | torch.Tensor] | None = None,
    *,
    max_new_tokens: int = 32,
    seed: int = 0,
    cases: Sequence[Case] = CASES,
    show: Callable[[CaseResult], None] | None = None,
    **options: Any,
) -> LosslessReport:
    """Compare calls of many kinds with and without a draft: greedy and sampled, batches, processors, caches.

    Models, their settings and the random generators are left as they were.

    Args:
        target: The target model.
        draft: The draft head, or a `LookupDraft`.
        prompts: Token ids of each prompt; `None` for three random ones.
        max_new_tokens: The greatest length of a text.
        seed: Seed of sampling, and of the random prompts.
        cases: The kinds of calls.
        show: Is called with each result as it comes.
        options: Further arguments of `generate` for all calls.

    Raises:
        ValueError: a prompt is empty or not one of ids, or `max_new_tokens` is below 2.
    """
    check = _Check(target, draft, _ids(target, prompts, seed), max_new_tokens, seed, options, cases, show)
    with _settings_kept(draft), without_attachment(target):
        check.run()
    return check.report


class _Check:
    """A check under way; for the arguments see [`check_lossless`]."""

    def __init__(self, target, draft, prompts, max_new_tokens, seed, options, cases, show):
        if max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, expected at least 2: drafts follow the first token")
        self.report = LosslessReport()
        self._target, self._draft, self._prompts = target, draft, prompts
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self._options = {"pad_token_id": pad_token_id(target), **options}
        self._cases, self._show = cases, show
        self._stop: int | None = None  # a token from the middle of a text

    def run(self) -> None:
        """Compare all cases."""
        self._find_stop()
        for case in self._cases:
            if isinstance(self._draft, LookupDraft) and case.lookup is False:
                continue  # which would leave it nothing
            for first in range(0, len(self._prompts), case.batch_size):
                batch = self._prompts[first : first + case.batch_size]
                self._compare(case, first, batch)
        if isinstance(self._draft, Eagle3DraftModel):
            self._compare_states()

    def _find_stop(self) -> None:
        text = self._observe(Case("greedy"), self._prompts[:1], outputs=False).ids[0].tolist()
        self._stop = text[len(text) // 2]

    def _observe(self, case: Case, batch: list[list[int]], outputs: bool = True, draft: Any = None) -> Observed:
        inputs = left_padded(batch, self._options["pad_token_id"], self._target.device)
        length = max(1, round(case.share * self._max_new_tokens))
        options = {**self._options, "max_new_tokens": length}
        if case.stops:
            options["eos_token_id"] = self._stop
        return observe(self._target, inputs, case, options, self._seed, draft, outputs)

    def _compare(self, case: Case, first: int, batch: list[list[int]]) -> None:
        """Make a call without the draft, with it, and with trees that are told the text."""
        try:
            plain = self._observe(case, batch)
        except Exception as error:
            self._add(CaseResult(case.name, DRAFT, first, SKIPPED, f"ordinary decoding rejects it: {error}"))
            return
        rounding = measure_rounding(self._target, batch, plain)
        noise = None
        if case.is_sampled:
            noise = noise_of(self._target.device, plain.scores[0].shape, len(plain.scores), self._seed)
        own = self._attempt(case, first, DRAFT, lambda: self._observe(case, batch, draft=self._draft, outputs=False))
        if own is not None:
            if own.stats is not None:
                self.report.stats = SpeculationStats.total([self.report.stats, own.stats])
            if not torch.equal(own.ids, plain.ids):  # also false for other shapes
                own = self._with_outputs(case, batch, own)
            self._judge(case, first, DRAFT, plain, own, rounding, noise)
        with _tree(self._draft, _TOLD_TREE), told(plain.ids.tolist(), self._seed):
            taught = self._attempt(case, first, TOLD, lambda: self._observe(case, batch, draft=self._draft))
        if taught is not None:
            self._judge(case, first, TOLD, plain, taught, rounding, noise)

    def _with_outputs(self, case: Case, batch: list[list[int]], own: Observed) -> Observed:
        """Return a call once more with its scores, by which a difference is judged, if it gives the same ids."""
        again = self._observe(case, batch, draft=self._draft)
        return again if torch.equal(again.ids, own.ids) else own

    def _attempt(self, case: Case, first: int, way: str, call: Callable[[], Observed]) -> Observed | None:
        """Return what a call gives; `None`, after a result of its own, if it ends with an error."""
        try:
            return call()
        except ValueError as error:  # a limit that is documented (docs/limits.md), and says what to do
            self._add(CaseResult(case.name, way, first, REFUSED, str(error)))
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            self._add(CaseResult(case.name, way, first, BUG, detail, Verdict(BUG, detail)))
        return None

    def _judge(
        self,
        case: Case,
        first: int,
        way: str,
        plain: Observed,
        assisted: Observed,
        rounding: Rounding,
        noise: Sequence[torch.Tensor] | None,
    ) -> None:
        verdict = judge(plain, assisted, rounding, noise)
        accepted = sum(assisted.stats.accepted) if assisted.stats is not None else 0
        result = CaseResult(case.name, way, first, verdict.kind, verdict.detail, verdict, plain.ids.numel(), accepted)
        self._add(result)

    def _compare_states(self) -> None:
        """Compare the head's own state after greedy calls, of each prompt alone and of all together."""
        batches = [(first, [prompt]) for first, prompt in enumerate(self._prompts)]
        if len(self._prompts) > 1:
            batches.append((0, self._prompts))
        for first, batch in batches:
            self._compare_state(first, batch)

    def _compare_state(self, first: int, batch: list[list[int]]) -> None:
        name = "the head's state" + (", a batch of prompts" if len(batch) > 1 else "")
        case = Case(name, lookup=False)
        texts = self._observe(case, batch, outputs=False).ids.tolist()
        if len(texts[0]) < 2:
            return
        with kept_candidates() as kept, _tree(self._draft, _TOLD_TREE), told(texts, self._seed):
            seen = self._attempt(
                case, first, STATE, lambda: self._observe(case, batch, outputs=False, draft=self._draft)
            )
        if seen is None or not kept or seen.ids.tolist() != texts:
            return  # it drafts nothing, or a difference is reported already
        verdict = judge_state(self._target, self._draft, kept[-1], batch, texts)
        self._add(CaseResult(name, STATE, first, verdict.kind, verdict.detail, verdict))

    def _add(self, result: CaseResult) -> None:
        self.report.cases.append(result)
        if self._show is not None:
            self._show(result)


def _ids(target: Any, prompts: Sequence[Sequence[int] | torch.Tensor] | None, seed: int) -> list[list[int]]:
    """Return the prompts as lists of ids."""
    if prompts is None:
        size = target.config.get_text_config().vocab_size
        chance = torch.Generator().manual_seed(seed)
        # The first ids are often special tokens.
        return [torch.randint(min(5, size - 1), size, (length,), generator=chance).tolist() for length in _LENGTHS]
    found = [torch.as_tensor(prompt).flatten().tolist() for prompt in prompts]
    if not found or any(not prompt for prompt in found):
        raise ValueError(f"expected prompts of at least one token id each, got {list(map(len, found))} ids")
    if any(not isinstance(token, int) for prompt in found for token in prompt):
        raise ValueError("prompts must be token ids, got numbers that are not whole: encode texts with a tokenizer")
    return found


@contextmanager
def _settings_kept(draft: Any) -> Iterator[None]:
    """Restore what calls leave on a draft: its statistics, and what it has counted of its first rounds."""
    kept = {name: getattr(draft, name) for name in ("stats", "_trial", "_warned_of_length") if hasattr(draft, name)}
    if "_trial" in kept:
        draft._trial = Trial(rounds=ROUNDS)  # over: calls with odd arguments say little of how much is accepted
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(draft, name, value)


@contextmanager
def _tree(draft: Any, tree: Mapping[str, Any]) -> Iterator[None]:
    """Set the size of a draft's trees inside the block."""
    kept = draft.generation_config
    draft.generation_config = copy.deepcopy(kept)
    for name, value in tree.items():
        setattr(draft.generation_config, name, value)
    try:
        yield
    finally:
        draft.generation_config = kept
