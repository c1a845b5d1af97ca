"""Ids with a draft against those of plain decoding, over a table of settings and trees, with a judge of near-ties.

The one excuse for a difference is a near-tie: at the first difference plain decoding's own one-token scores of the two
candidates are closer than rounding can tell apart. Near-ties are counted and printed, and more than one in 100,000
float32 tokens of the whole session fails; a single one says nothing about the rate of a smaller suite.
"""

from dataclasses import dataclass, field

import torch

from eagle3_hf.acceptance import SpeculationStats
from support.drafts import TREES, set_tree, total


NEW_TOKENS, MANY_NEW_TOKENS = 32, 64  # past every window; of the slow tests

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
    """What a family's runs, of so many new tokens each, came to."""

    new_tokens: int = NEW_TOKENS
    tokens: int = 0
    near_ties: list[str] = field(default_factory=list)
    stats: list[SpeculationStats] = field(default_factory=list)

    def assert_few_near_ties(self, dtype: torch.dtype = torch.float32) -> None:
        for line in self.near_ties:
            print("near-tie:", line)  # noqa: T201 - shown by pytest -rA, and in the report of a failure
        print(f"{self.tokens} tokens, {len(self.near_ties)} near-ties, {total(self.stats)}")  # noqa: T201
        if dtype == torch.float32:
            SUITE.tokens += self.tokens
            SUITE.near_ties += len(self.near_ties)
            assert SUITE.near_ties <= max(1, SUITE.tokens / 100_000), f"{SUITE}, the last ones {self.near_ties}"

    def assert_same_ids(self, target, draft, ids: torch.Tensor, seed: int, setting: str, tree: str) -> None:
        """One prompt, with and without the draft; fails where the ids differ and no near-tie excuses it."""
        kwargs = {"max_new_tokens": self.new_tokens, **SETTINGS[setting]}
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
