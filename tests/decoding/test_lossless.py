"""The text is vanilla's, id for id: greedy, and sampled with the same seed, over families, settings and trees.

The one excuse is a near-tie (see `support.losslessness`).
"""

import random

import pytest
import torch

from support.drafts import draft_of, new_draft, target_of, total
from support.families import FAMILIES, prompt, tiny
from support.losslessness import MANY_NEW_TOKENS, NEW_TOKENS, ROWS, SAMPLED, Comparison, judge, seeded


# Per family. The fast tests draw each row of the table once in all; with the slow tests' number, which shares no
# factor with the length of the table, the rows rotate over families.
FAST_PROMPTS, ALL_PROMPTS = 5, 56


def cases(family: str, prompts: int) -> list[tuple[torch.Tensor, int, str, str]]:
    """Prompts of 1 to 40 tokens, each with one row of the table; the rows rotate over families and prompts."""
    rows = random.Random(0).sample(ROWS, len(ROWS))
    first = FAMILIES.index(family) * prompts
    drawn = [rows[(first + i) % len(rows)] for i in range(prompts)]
    # Both ends of the range in every family, the lengths between at random.
    lengths = [1, 40, *random.Random(first).choices(range(1, 41), k=prompts - 2)]
    return [(prompt(lengths[i], first + i), first + i, *drawn[i]) for i in range(prompts)]


def run(family: str, drawn, new_tokens: int = NEW_TOKENS) -> Comparison:
    comparison = Comparison(new_tokens)
    for ids, seed, setting, tree in drawn:
        comparison.assert_same_ids(target_of(family), draft_of(family, half=seed % 2 == 0), ids, seed, setting, tree)
    comparison.assert_few_near_ties()
    return comparison


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_vanilla(family, pytestconfig):
    comparison = run(family, cases(family, pytestconfig.getoption("--prompts") or FAST_PROMPTS))
    assert 0.5 < total(comparison.stats).mean_accepted < 3, "the trees must accept and reject"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_vanilla_on_many_prompts(family, all_settings):
    drawn = cases(family, ALL_PROMPTS)
    if all_settings:
        drawn = [(ids, seed, setting, tree) for ids, seed, _, _ in drawn for setting, tree in ROWS]
    comparison = run(family, drawn, MANY_NEW_TOKENS)
    stats = total(comparison.stats)
    assert 0.5 < stats.mean_accepted < 3
    assert all(0 < rate < 1 for rate in stats.per_depth[:7]), "accepted and rejected at every depth"


def test_every_row_of_the_table_is_drawn():
    drawn = {(setting, tree) for family in FAMILIES for _, _, setting, tree in cases(family, FAST_PROMPTS)}
    # Earlier versions of transformers have fewer families.
    assert len(drawn) == min(len(set(ROWS)), FAST_PROMPTS * len(FAMILIES))


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if target_of(name).config._attn_implementation == "sdpa"]
)
def test_ids_of_vanilla_with_eager_attention(family):
    target = tiny(family, num_hidden_layers=4)
    target.set_attn_implementation("eager")
    draft, comparison = new_draft(target), Comparison()
    draft.set_attn_implementation("eager")
    for seed, (setting, tree) in enumerate([("greedy", "paper"), ("T=1", "chain")]):
        comparison.assert_same_ids(target, draft, prompt(3 + 25 * seed, seed), seed, setting, tree)
    comparison.assert_few_near_ties()


def test_both_attentions_are_tested():
    found = {target_of(name).config._attn_implementation for name in FAMILIES}
    assert found == {"sdpa", "eager"}


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])  # llama is in test_places
@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_mixed_dtypes(family, target_dtype, draft_dtype):
    target = tiny(family, num_hidden_layers=4).to(getattr(torch, target_dtype))
    draft, comparison = new_draft(target, dtype=getattr(torch, draft_dtype)), Comparison()
    for seed, (setting, tree) in enumerate([("greedy", "cpu"), ("T=1", "paper")]):
        comparison.assert_same_ids(target, draft, prompt(5 + 20 * seed, seed), seed, setting, tree)
    comparison.assert_few_near_ties(target.dtype)
    assert draft.dtype == getattr(torch, draft_dtype), "the draft's dtype is its own"
    assert target.dtype == getattr(torch, target_dtype)


def test_the_judge_tells_a_near_tie_from_a_mistake():
    target, ids = target_of("llama"), prompt(7, 0)
    for seed, kwargs in enumerate([{"do_sample": False}, {**SAMPLED, "temperature": 0.7}]):
        kwargs = {**kwargs, "max_new_tokens": 4}
        vanilla, _ = seeded(seed, lambda kwargs=kwargs: target.generate(ids, **kwargs))
        right = int(vanilla[0, 9])
        gap, allowed = judge(target, ids, seed, kwargs, 9, right)
        assert gap == 0.0 < allowed
        gap, allowed = judge(target, ids, seed, kwargs, 9, (right + 1) % 320)
        assert gap > allowed, "vanilla's choice is the best by its own scores, by more than rounding"
