"""Plain runs that are remembered are those that would be made anew."""

import pytest
import torch

from support import plain_runs
from support.drafts import LAYERS, SAMPLED, assert_same, cache_of, observe, padded
from support.families import prompt, tiny


@pytest.fixture
def target():
    return plain_runs.share(tiny("gemma3", num_hidden_layers=LAYERS))


@pytest.fixture
def forwards(target, monkeypatch):
    """Grows with every forward. Counted where it is not taken for a change of the target."""
    calls = []
    forward = type(target).forward
    monkeypatch.setattr(type(target), "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    return calls


@pytest.mark.parametrize("kwargs", [{}, SAMPLED, {"no_repeat_ngram_size": 2, "bad_words_ids": [[5]]}], ids=str)
def test_a_remembered_run_is_the_run_itself(target, forwards, kwargs):
    inputs = padded([7, 4])
    first = observe(target, inputs, 3, max_new_tokens=5, **kwargs)
    made = len(forwards)
    torch.manual_seed(9)
    second = observe(target, inputs, 3, max_new_tokens=5, **kwargs)
    assert len(forwards) == made, "remembered"
    assert_same(second, first)
    assert torch.equal(torch.get_rng_state(), first.generator)
    cache_of(second.out).layers[0].keys.zero_()
    assert_same(observe(target, inputs, 3, max_new_tokens=5, **kwargs), first)
    assert_same(observe(tiny("gemma3", num_hidden_layers=LAYERS), inputs, 3, max_new_tokens=5, **kwargs), first)


CHANGES = {
    "prompt": lambda target: {"inputs": prompt(5, 2)},
    "seed": lambda target: {"seed": 1},
    "argument": lambda target: {"top_k": 7},
    "weights": lambda target: target.lm_head.weight.data.mul_(-1) is None or {},
    "weights in place": lambda target: torch.nn.init.normal_(target.lm_head.weight) is None or {},
    "dtype": lambda target: target.bfloat16() and {},
    "config": lambda target: setattr(target.generation_config, "temperature", 2.0) or {},
    "attention": lambda target: target.set_attn_implementation("eager") or {},
    "hook": lambda target: target.lm_head.register_forward_hook(lambda *args: -args[2]) and {},
    "forward": lambda target: setattr(target.lm_head, "forward", target.lm_head.forward) or {},
    "mode": lambda target: target.train() and {},
    "unknown argument": lambda target: {"prefix_allowed_tokens_fn": lambda row, ids: [1, 2]},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_could_change_a_run_makes_it_anew(target, forwards, change):
    call = {"inputs": prompt(5), "max_new_tokens": 3, **SAMPLED}
    observe(target, **call)
    made = len(forwards)
    call |= CHANGES[change](target)
    observe(target, **call)
    assert len(forwards) == 2 * made


def test_targets_that_are_not_shared_are_run_every_time(forwards, target):
    other = tiny("gemma3", num_hidden_layers=LAYERS)
    for _ in range(2):
        forwards.clear()
        observe(other, prompt(5), max_new_tokens=3)
        assert len(forwards) == 3


def test_only_some_runs_are_kept(target, monkeypatch):
    monkeypatch.setattr(plain_runs, "KEPT", 3)
    for seed in range(6):
        observe(target, prompt(3, seed), max_new_tokens=1)
    assert len(plain_runs._shared[target]) == 3
