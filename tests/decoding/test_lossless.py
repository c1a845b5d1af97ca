"""The text is vanilla's, id for id: greedy, and sampled with the same seed, over families, settings and trees.

The one excuse is a near-tie: at the first difference vanilla's own one-token scores of the two candidates are closer
than rounding can tell apart. Near-ties are counted and printed, and more than one in 100,000 float32 tokens of the
whole suite fails; a single one says nothing about the rate of a smaller suite.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch

from eagle3_hf.acceptance import SpeculationStats
from support.drafts import TREES, draft_of, new_draft, set_tree, target_of, total
from support.families import FAMILIES, prompt, tiny


NEW_TOKENS = 64
FAST_PROMPTS, ALL_PROMPTS = 16, 56  # per family; multiples of neither table, so that the rows rotate over families

SAMPLED = {"do_sample": True, "top_k": 0}
SETTINGS = {
    "greedy": {},
    "greedy, repetition penalty": {"repetition_penalty": 1.3},
    "greedy, no repeated 2-grams": {"no_repeat_ngram_size": 2},
    "T=0.6": {**SAMPLED, "temperature": 0.6},
    "T=1": {**SAMPLED, "temperature": 1.0},
    "T=1.3": {**SAMPLED, "temperature": 1.3},
    "top-k": {**SAMPLED, "top_k": 12},
    "top-p": {**SAMPLED, "top_p": 0.85},
    "min-p": {**SAMPLED, "min_p": 0.05},
    "typical": {**SAMPLED, "typical_p": 0.9},
    "sampled, repetition penalty": {**SAMPLED, "repetition_penalty": 1.2},
    "sampled, no repeated 2-grams": {**SAMPLED, "no_repeat_ngram_size": 2, "temperature": 0.6},
    "T=0.6, top-k, top-p": {**SAMPLED, "temperature": 0.6, "top_k": 50, "top_p": 0.95},
    "T=1.3, min-p, penalties": {
        **SAMPLED, "temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3,
    },
    "T=0.6, top-k, typical, epsilon, eta": {
        **SAMPLED, "temperature": 0.6, "top_k": 30, "typical_p": 0.95, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4,
    },
}  # fmt: skip
ROWS = [(setting, tree) for setting in SETTINGS for tree in TREES]


@dataclass
class Tally:
    tokens: int = 0
    near_ties: int = 0


SUITE = Tally()  # of all float32 tests of this session


@dataclass
class Comparison:
    """What a family's runs came to."""

    tokens: int = 0
    near_ties: list[str] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)

    def check(self, dtype: torch.dtype = torch.float32) -> None:
        for line in self.near_ties:
            print("near-tie:", line)  # noqa: T201 - shown by pytest -rA, and in the report of a failure
        print(f"{self.tokens} tokens, {len(self.near_ties)} near-ties, {total(self.stats)}")  # noqa: T201
        if dtype == torch.float32:
            SUITE.tokens += self.tokens
            SUITE.near_ties += len(self.near_ties)
            assert SUITE.near_ties <= max(1, SUITE.tokens / 100_000), f"{SUITE}, the last ones {self.near_ties}"

    def add(self, target, draft, ids: torch.Tensor, seed: int, setting: str, tree: str) -> None:
        """One prompt, with and without the draft; fails where the ids differ and no near-tie excuses it."""
        kwargs = {"max_new_tokens": NEW_TOKENS, **SETTINGS[setting]}
        vanilla, after = seeded(seed, lambda: target.generate(ids, **kwargs))
        continuation = vanilla[0, ids.shape[1] :]
        set_tree(draft, tree).foretell(continuation, seed)
        ours, state = seeded(seed, lambda: target.generate(ids, assistant_model=draft, **kwargs))
        self.stats.append(draft.stats)
        what = f"{type(target).__name__}, prompt {seed} of {ids.shape[1]} tokens, {setting}, {tree} tree"
        assert ours.shape == vanilla.shape, what
        difference = (ours != vanilla).nonzero()
        place = int(difference[0, 1]) if len(difference) else ours.shape[1]
        self.tokens += min(place + 1, ours.shape[1]) - ids.shape[1]
        if len(difference):
            gap, allowed = judge(target, ids, seed, kwargs, place, int(ours[0, place]))
            line = f"{what}: position {place - ids.shape[1]}, {gap:.3g} apart where {allowed:.3g} counts as equal"
            assert gap <= allowed, line
            self.near_ties.append(line)
        assert torch.equal(state, after), f"{what}: the generator was left elsewhere"


def seeded(seed: int, call):
    """The result of `call` under a seed, and the generator's state after it."""
    torch.manual_seed(seed)
    result = call()
    return result, torch.get_rng_state()


def judge(target, ids, seed: int, kwargs: dict, place: int, other: int) -> tuple[float, float]:
    """How far apart vanilla's choice and another token are by vanilla's own one-token scores, and how far they may be.

    For sampling what is compared is `log(p / e)`, with the noise `e` that vanilla drew.
    """
    out, _ = seeded(
        seed,
        lambda: target.generate(ids, return_dict_in_generate=True, output_scores=True, output_logits=True, **kwargs),
    )
    step = place - ids.shape[1]
    scores, logits = out.scores[step][0], out.logits[step][0]
    values = scores
    if kwargs.get("do_sample"):
        torch.manual_seed(seed)
        noise = [torch.empty_like(out.scores[0]).exponential_() for _ in range(step + 1)][-1]
        values = scores.log_softmax(-1) - noise[0].log()
    largest = logits.abs().max().item()
    if target.dtype == torch.float32:
        allowed = 1e-5 * largest
    else:
        allowed = 2 * torch.finfo(target.dtype).eps * 2 ** float(torch.tensor(largest).log2().floor())
    return float(values[out.sequences[0, place]] - values[other]), allowed


def cases(family: str, prompts: int) -> list[tuple[torch.Tensor, int, str, str]]:
    """Prompts of 1 to 40 tokens, each with one row of the table; the rows rotate over families and prompts."""
    rows = random.Random(0).sample(ROWS, len(ROWS))
    first = FAMILIES.index(family) * prompts
    drawn = [rows[(first + i) % len(rows)] for i in range(prompts)]
    # Both ends of the range in every family, the lengths between at random.
    lengths = [1, 40, *random.Random(first).choices(range(1, 41), k=prompts - 2)]
    return [(prompt(lengths[i], first + i), first + i, *drawn[i]) for i in range(prompts)]


def run(family: str, drawn) -> Comparison:
    comparison = Comparison()
    for ids, seed, setting, tree in drawn:
        comparison.add(target_of(family), draft_of(family, half=seed % 2 == 0), ids, seed, setting, tree)
    comparison.check()
    return comparison


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_vanilla(family):
    comparison = run(family, cases(family, FAST_PROMPTS))
    assert 0.5 < total(comparison.stats).mean_accepted < 3, "the trees must accept and reject"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_vanilla_on_many_prompts(family, all_settings):
    drawn = cases(family, ALL_PROMPTS)
    if all_settings:
        drawn = [(ids, seed, setting, tree) for ids, seed, _, _ in drawn for setting, tree in ROWS]
    comparison = run(family, drawn)
    stats = total(comparison.stats)
    assert 0.5 < stats.mean_accepted < 3
    assert all(0 < rate < 1 for rate in stats.per_depth[:7]), "accepted and rejected at every depth"


def test_every_row_of_the_table_is_drawn():
    drawn = {(setting, tree) for family in FAMILIES for _, _, setting, tree in cases(family, FAST_PROMPTS)}
    assert drawn == set(ROWS)


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if target_of(name).config._attn_implementation == "sdpa"]
)
def test_ids_of_vanilla_with_eager_attention(family):
    target = tiny(family, num_hidden_layers=4)
    target.set_attn_implementation("eager")
    draft, comparison = new_draft(target), Comparison()
    draft.set_attn_implementation("eager")
    for seed, (setting, tree) in enumerate([("greedy", "paper"), ("T=1", "cpu"), ("top-p", "chain")]):
        comparison.add(target, draft, prompt(3 + 15 * seed, seed), seed, setting, tree)
    comparison.check()


def test_both_attentions_are_tested():
    found = {target_of(name).config._attn_implementation for name in FAMILIES}
    assert found == {"sdpa", "eager"}


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize(("target_dtype", "draft_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_mixed_dtypes(family, target_dtype, draft_dtype):
    target = tiny(family, num_hidden_layers=4).to(getattr(torch, target_dtype))
    draft, comparison = new_draft(target, dtype=getattr(torch, draft_dtype)), Comparison()
    for seed, (setting, tree) in enumerate([("greedy", "cpu"), ("T=1", "paper")]):
        comparison.add(target, draft, prompt(5 + 20 * seed, seed), seed, setting, tree)
    comparison.check(target.dtype)
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
