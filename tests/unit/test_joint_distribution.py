"""Sampled text has the target's exact joint distribution: chi-square over all texts of three tokens, words being few.

Equal seeds give equal ids (test_lossless), so this can only fail where that fails too; it needs no plain call and no
seed to compare with, and so is the test for anyone who doubts that argument. A batch draws many texts at once.
"""

import itertools

import pytest
import torch

from support.chi_square import p_value
from support.drafts import new_draft, set_tree
from support.families import prompt, tiny


WORDS, LENGTH, ROWS, CALLS = 8, 3, 400, 6
SETTINGS = {
    "T=1": {"top_k": 0},
    "T=1.5": {"top_k": 0, "temperature": 1.5},
    "top-k": {"top_k": 3, "temperature": 0.8},
    "top-p and a penalty": {"top_k": 0, "top_p": 0.8, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=4, vocab_size=WORDS, pad_token_id=None)


@torch.no_grad()
def exact(target, ids: torch.Tensor, settings: dict) -> torch.Tensor:
    """Probabilities of all `WORDS ** LENGTH` texts, from the target's own scores at every prefix."""
    probabilities = torch.ones(1, dtype=torch.float64)
    prefixes = ids
    for _ in range(LENGTH):
        out = target.generate(
            prefixes, do_sample=True, max_new_tokens=1, return_dict_in_generate=True, output_scores=True,
            pad_token_id=0, attention_mask=torch.ones_like(prefixes), **settings,
        )  # fmt: skip
        step = out.scores[0].double().softmax(-1)
        probabilities = (probabilities[:, None] * step).flatten()
        words = torch.arange(WORDS).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(WORDS, dim=0), words], dim=1)
    return probabilities


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("coupled_sampling", [True, False], ids=["coupled sampling", "unknown noise"])
def test_texts_are_as_frequent_as_they_should_be(target, name, coupled_sampling):
    settings, ids = SETTINGS[name], prompt(4, vocab_size=WORDS)
    draft = set_tree(new_draft(target, half=False), (6, 3, 2)).foretell([])
    draft.generation_config.assistant_coupled_sampling = coupled_sampling
    counts = torch.zeros(WORDS**LENGTH, dtype=torch.float64)
    place = torch.tensor([WORDS**power for power in reversed(range(LENGTH))])
    torch.manual_seed(0)
    for _ in range(CALLS):
        out = target.generate(
            ids, do_sample=True, max_new_tokens=LENGTH, num_return_sequences=ROWS, assistant_model=draft,
            pad_token_id=0, **settings,
        )  # fmt: skip
        counts += torch.bincount((out[:, ids.shape[1] :] * place).sum(-1), minlength=len(counts))
    probabilities = exact(target, ids, settings)
    assert abs(float(probabilities.sum()) - 1) < 1e-5
    assert p_value(counts, probabilities) > 1e-4
    # And the test can tell: the same counts against the distribution of another temperature.
    assert p_value(counts, (probabilities**0.8) / (probabilities**0.8).sum()) < 1e-4


def test_the_statistic_is_the_textbooks():
    counts, even = torch.tensor([44.0, 56.0], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert p_value(counts, even) == pytest.approx(0.2301, abs=1e-3)  # chi-square 1.44, one degree of freedom


@pytest.mark.parametrize("rows", [1, 3])
def test_the_best_of_one_is_greedy(rows):
    target = tiny("llama", num_hidden_layers=4)
    draft = set_tree(new_draft(target, half=False), "cpu")
    greedy = target.generate(prompt(9, rows=rows), max_new_tokens=24)
    for settings in ({"top_k": 1}, {"top_k": 0, "temperature": 0.1, "top_p": 1e-6}):
        draft.foretell(greedy[:, 9:])
        out = target.generate(
            prompt(9, rows=rows), max_new_tokens=24, do_sample=True, assistant_model=draft, **settings
        )
        assert torch.equal(out, greedy)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_two_hundred_tokens_of_fifty_prompts(family):
    target = tiny(family, num_hidden_layers=4)
    draft = set_tree(new_draft(target, half=False), "cpu")
    for seed, length in itertools.islice(enumerate(itertools.cycle(range(1, 41))), 50):
        vanilla = target.generate(prompt(length, seed), max_new_tokens=200)
        draft.foretell(vanilla[0, length:])
        ours = target.generate(prompt(length, seed), max_new_tokens=200, assistant_model=draft)
        assert torch.equal(ours, vanilla), seed
