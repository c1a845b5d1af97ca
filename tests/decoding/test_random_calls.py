"""Random calls of `generate`, with a draft and without: all that a caller can see is the same, or refused by name.

`pytest --random-calls N tests/decoding/test_random_calls.py` makes N; `--first-call S` begins at seed S.
"""

import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from eagle3_hf import LookupDraft, attach
from support.drafts import ForetellingDraft, assert_close, assert_same_cache, cache_of, set_tree, target_of
from support.families import FAMILIES
from support.random_calls import REFUSED, Call, Outcome, draw, head_of, hooked, run, run_as_it_is


REFUSAL = re.compile(r"with a draft head|draft tree|draft head")


class NearTie(Exception):
    """Two candidates closer than rounding can tell apart: the one excuse."""


def made(call: Call) -> tuple[str, object]:
    """What became of a call, `equal`, `near-tie`, `raised` (as vanilla's) or `refused`; and the draft's counters."""
    vanilla = run(call)
    draft = told_head(call, vanilla)
    ours = run(call, draft)
    return judged(call, ours, vanilla), draft.stats


def made_beside(call: Call, other: Call) -> list[tuple[str, object]]:
    """The same of two calls on one target, made at once in two threads."""
    calls = [call, other]
    with hooked(target_of(call.family), call.hook):
        vanillas = [run_as_it_is(one) for one in calls]
        drafts = [
            told_head(one, vanilla, place) for place, (one, vanilla) in enumerate(zip(calls, vanillas, strict=True))
        ]
        with ThreadPoolExecutor(2) as pool:
            ours = list(pool.map(run_as_it_is, calls, drafts))
    for one, vanilla in zip(ours, vanillas, strict=True):
        one.generator = vanilla.generator  # both threads seed and move the one that there is
    results = [judged(*three) for three in zip(calls, ours, vanillas, strict=True)]
    return list(zip(results, [draft.stats for draft in drafts], strict=True))


def told_head(call: Call, vanilla: Outcome, copy: int = 0) -> ForetellingDraft | LookupDraft:
    if call.seed % 9 == 0:
        return LookupDraft("auto" if call.is_auto else 9, is_chain=call.seed % 2 == 0)
    draft = set_tree(head_of(call.family, call.head, copy), call.tree)
    draft.generation_config.assistant_window = call.window
    draft.generation_config.assistant_lookup = call.seed % 4 > 0
    if call.is_auto:
        draft.generation_config.num_assistant_tokens = "auto"
    told = [] if vanilla.error else vanilla.sequences[:, vanilla.sequences.shape[1] - new_tokens(call, vanilla) :]
    return draft.foretell(told, call.seed, call.favourite)


def judged(call: Call, ours: Outcome, vanilla: Outcome) -> str:
    if ours.error is not None and (vanilla.error is None or is_refusal(ours.error)):
        if not is_refusal(ours.error):
            raise AssertionError(f"{call}\n{ours.error!r}") from ours.error
        assert not ours.log, f"{call}: refused behind a call of a callback"
        assert len(ours.streamed) <= 1, f"{call}: refused behind the first token"
        return "refused"
    try:
        assert_same_outcome(call, ours, vanilla)
    except NearTie as tie:
        print("near-tie:", tie)  # noqa: T201 - shown by pytest -rA
        return "near-tie"
    except AssertionError as difference:
        raise AssertionError(f"{call}\n{difference}") from difference
    return "raised" if vanilla.error else "equal"


def is_refusal(error: Exception) -> bool:
    return isinstance(error, (ValueError, NotImplementedError)) and bool(REFUSAL.search(str(error)))


def new_tokens(call: Call, vanilla: Outcome) -> int:
    if "inputs_embeds" in call.inputs:
        return vanilla.sequences.shape[1]
    given = call.inputs["inputs"].shape[1]
    return vanilla.sequences.shape[1] - given - (5 + call.second_turn if call.second_turn else 0)


def assert_same_outcome(call: Call, ours: Outcome, vanilla: Outcome) -> None:
    if vanilla.error is not None:
        assert type(ours.error) is type(vanilla.error), f"{ours.error!r} is not {vanilla.error!r}"
    else:
        assert isinstance(ours.out, torch.Tensor) == isinstance(vanilla.out, torch.Tensor)
        excuse(call, ours.sequences, vanilla.sequences)
        assert ours.sequences.shape == vanilla.sequences.shape
        assert torch.equal(ours.sequences, vanilla.sequences)
    assert ours.streamed == vanilla.streamed
    assert ours.log == vanilla.log, "callbacks were called otherwise"
    assert torch.equal(ours.generator, vanilla.generator), "the generator was left elsewhere"
    if ours.cache is not None:
        assert_same_cache(ours.cache, vanilla.cache)
    if vanilla.out is None or isinstance(vanilla.out, torch.Tensor):
        return
    assert list(ours.out.keys()) == list(vanilla.out.keys())
    # This penalty multiplies a logit, and its rounding, by a power of the length.
    amplified = "exponential_decay_length_penalty" in call.kwargs
    excuse_cutoffs(call, ours.out.scores or (), vanilla.out.scores or ())
    assert_close_or_none(ours.out.scores, vanilla.out.scores, 1e-3 if amplified else 1e-5)
    assert_close_or_none(ours.out.logits, vanilla.out.logits)
    for name in ("hidden_states", "attentions"):
        mine, theirs = getattr(ours.out, name), getattr(vanilla.out, name)
        assert len(mine or ()) == len(theirs or ()), name
        for one, other in zip(mine or (), theirs or (), strict=True):
            assert_close_or_none(one, other)
    if cache_of(vanilla.out) is None:  # use_cache=False
        assert cache_of(ours.out) is None
        return
    if call.kwargs.get("cache_implementation") != "static" and call.static_slots is None:
        assert_same_cache(cache_of(ours.out), cache_of(vanilla.out))
    assert int(cache_of(ours.out).get_seq_length()) == int(cache_of(vanilla.out).get_seq_length())


def assert_close_or_none(mine, theirs, tolerance: float = 1e-5) -> None:
    assert (mine is None) == (theirs is None)
    assert_close(mine or (), theirs or (), tolerance)


def excuse(call: Call, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise `NearTie` if the first difference is one, by vanilla's own scores of both candidates."""
    shared = min(mine.shape[1], theirs.shape[1])
    difference = (mine[:, :shared] != theirs[:, :shared]).nonzero()
    if not len(difference):
        return
    column = int(difference[:, 1].min())
    row = int(difference[difference[:, 1] == column][0, 0])
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    again = run(call, **wanted).out
    step = column - (again.sequences.shape[1] - len(again.scores))
    values = again.scores[step][row]
    if call.kwargs.get("do_sample"):
        torch.manual_seed(call.seed)
        noise = [torch.empty_like(again.scores[0]).exponential_() for _ in range(step + 1)][-1]
        values = values.log_softmax(-1) - noise[row].log()
    one, other = (float(values[ids[row, column]]) for ids in (theirs, mine))
    logits = again.logits[step][row]
    apart = abs(one - other)
    if other == float("-inf"):  # cut off in the plain call, by less than rounding can tell?
        apart = abs(float(logits[torch.isfinite(values)].min() - logits[mine[row, column]]))
    if apart <= 1e-5 * max(1.0, logits.abs().max().item()):
        raise NearTie(f"{call}: row {row}, step {step}, {apart:.2e} apart")
    raise AssertionError(f"row {row} differs at step {step}: {int(mine[row, column])} for {int(theirs[row, column])}")


def excuse_cutoffs(call: Call, mine: tuple, theirs: tuple) -> None:
    """Raise `NearTie` if cutoffs left in another token here than there, the last one before the cut.

    Either two equal tokens have changed places, or the sum up to the cut is the limit itself, up to rounding.
    """
    for step, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        moved = is_cut(one) != is_cut(other)
        for row in moved.any(-1).nonzero().flatten().tolist():
            here, there = one[row][moved[row] & ~is_cut(one[row])], other[row][moved[row] & ~is_cut(other[row])]
            same = here.shape == there.shape and torch.allclose(here, there, rtol=0, atol=1e-4)
            kept, odd = (one[row], here) if len(here) else (other[row], there)
            if same or (len(here) + len(there) == 1 and kept[~is_cut(kept)].min() == odd):
                raise NearTie(f"{call}: step {step}, cutoffs between {here.tolist()} and {there.tolist()}")


def is_cut(scores: torch.Tensor) -> torch.Tensor:
    """Cut off, by infinity or, as some processors have it, by the least number."""
    return scores <= torch.finfo(scores.dtype).min


def make_calls(seeds, tokenizer) -> Counter:
    counts: Counter = Counter()
    for seed in seeds:
        call = draw(seed, tokenizer)
        for result, stats in made_beside(call, beside(call, tokenizer)) if call.is_beside else [made(call)]:
            count(counts, call, result, stats)
    return counts


def beside(call: Call, tokenizer) -> Call:
    """Another greedy call of the same family, with the same code in the target."""
    others = (draw(seed, tokenizer) for seed in range(10**9 + call.seed, 2 * 10**9))
    other = next(one for one in others if one.family == call.family and not one.kwargs.get("do_sample"))
    return replace(other, hook=call.hook)


def count(counts: Counter, call: Call, result: str, stats) -> None:
    counts[result] += 1
    for name in ("static_slots", "hook", "counts_steps", "is_beside"):
        counts[name] += getattr(call, name) not in (None, False)
    if result in ("equal", "near-tie"):
        counts["tokens"] += stats.emitted
        counts["accepted"] += sum(stats.accepted)
        counts["rejected"] += sum(stats.reached) - sum(stats.accepted)
        counts["batches"] += next(iter(call.inputs.values())).shape[0] > 1


def assert_varied(counts: Counter, number: int) -> None:
    print(dict(counts))  # noqa: T201 - shown by pytest -rA
    if number < 20:
        return  # to look at single calls
    assert counts["equal"] > 0.8 * number
    assert counts["near-tie"] <= max(1, counts["tokens"] / 100_000)
    assert min(counts["accepted"], counts["rejected"]) > 2 * number, "drafts were right and wrong in plenty"
    assert counts["batches"] > 0.5 * number


def test_random_calls(pytestconfig, tokenizer):
    number, first = pytestconfig.getoption("--random-calls"), pytestconfig.getoption("--first-call")
    assert_varied(make_calls(range(first, first + number), tokenizer), number)


@pytest.mark.parametrize(
    "seed",
    [
        305,  # a sequence was ahead when a stop string ended it, one step before the other reached its last: no end
        311,  # processors made NaN of a row that is not in use, and the next one would not have it
    ],
)
def test_calls_that_once_failed(tokenizer, seed):
    assert make_calls([seed], tokenizer)["equal"] == 1


@pytest.mark.slow
def test_many_random_calls(tokenizer):
    assert_varied(make_calls(range(1000, 1300), tokenizer), 300)


# ----- the same calls with an attached draft -------------------------------------------------------------------------


def made_attached(call: Call) -> str:
    """What became of a call of a target with an attached draft: `drafted`, `left out`, `near-tie` or `raised`."""
    target = target_of(call.family)
    vanilla = run(call)
    draft = told_head(call, vanilla)
    draft.stats = None
    left = everything_on(target)
    with attach(target, draft) as attachment:
        ours = run(call, **overrides_of(call, draft))
    assert everything_on(target) == left, f"{call}: something was left on the target"
    result = judged(call, ours, vanilla)
    assert result != "refused", f"{call}: {ours.error}"
    if result in ("raised", "near-tie"):
        return result
    if attachment._left_out:
        assert is_refusal(run(call, draft).error), f"{call}: left out ({attachment._left_out}), but could be served"
        return "left out"
    assert draft.stats is not None or "prompt_lookup_num_tokens" in call.kwargs, f"{call}: left out silently"
    return "drafted"


def overrides_of(call: Call, draft) -> dict[str, object]:
    """Settings of the draft, in some of the calls."""
    rng = random.Random(call.seed)
    options = {"assistant_tree_depth": 2, "assistant_tree_top_k": 3, "assistant_window": 7, "assistant_lookup": True}
    if isinstance(draft, LookupDraft):
        del options["assistant_window"]
    return {name: value for name, value in options.items() if rng.random() < 0.2}


def everything_on(target) -> tuple:
    """What a draft could leave on a target."""
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules()]
    return sorted(vars(target)), hooks, target.generation_config.to_dict(), type(target)


def test_random_calls_with_an_attached_draft(tokenizer):
    results = Counter(made_attached(draw(seed, tokenizer)) for seed in (*range(50_000, 50_006), *left_out(4)))
    assert results["drafted"] >= 4
    assert results["left out"] >= 1


@pytest.mark.slow
def test_many_random_calls_with_an_attached_draft(tokenizer):
    results = Counter(made_attached(draw(seed, tokenizer)) for seed in (*range(51_000, 51_470), *left_out(30)))
    print(dict(results))  # noqa: T201 - shown by pytest -rA
    assert results["drafted"] > 350
    assert results["left out"] > 15
    assert results["near-tie"] <= 2


def left_out(number: int) -> list[int]:
    """Seeds of calls that no draft can serve."""
    reasons = set(REFUSED) - {"prompt_lookup_num_tokens"}
    seeds = (seed for seed in range(52_000, 60_000) if reasons & set(draw(seed).kwargs))
    return [seed for seed, _ in zip(seeds, range(number), strict=False)]


def test_a_seed_gives_one_call(tokenizer):
    calls = [draw(7, tokenizer) for _ in range(2)]
    assert str(calls[0]) == str(calls[1])
    assert all(torch.equal(calls[0].inputs[name], calls[1].inputs[name]) for name in calls[0].inputs)
    assert len({str(draw(seed, tokenizer)) for seed in range(50)}) == 50
    assert {draw(seed, tokenizer).family for seed in range(200)} == set(FAMILIES)
