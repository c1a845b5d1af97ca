"""Targets in training mode: rejected by name where that makes them random, used like any other where it does not."""

import re

import pytest
import torch
from torch import nn

from eagle3_hf.decoding.target.capability import VerifyMode
from eagle3_hf.decoding.target.capability_probe import capability_of
from eagle3_hf.decoding.target.training_mode import check_training_mode
from support.drafts import NEW_TOKENS, Recorder, new_draft, padded, set_tree
from support.families import FAMILIES, prompt, tiny
from support.families.others import CHAINS, IS_OLD, TREES, tiny_or_skip


RANDOM_FIELD = re.compile("drop|jitter|noise")
RANDOM = {
    "llama": {"attention_dropout": 0.1},
    "phi3": {"resid_pdrop": 0.2},
    "falcon": {"hidden_dropout": 0.1},
    "mixtral": {"router_jitter_noise": 0.05},
    "minimax_m2": {"router_jitter_noise": 0.05},
    "opt": {"dropout": 0.0, "layerdrop": 0.3},
    "starcoder2": {"residual_dropout": 0.1},
    "gpt2": {},  # 0.1 is its default
    "qwen3_next": {"attention_dropout": 0.1},
}


def is_random(target) -> bool:
    """Whether a forward draws random numbers."""
    before = torch.get_rng_state()
    with torch.no_grad():
        target(prompt(9))
    return not torch.equal(torch.get_rng_state(), before)


def is_rejected(target) -> bool:
    try:
        check_training_mode(target)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    "name",
    [
        *dict.fromkeys([*FAMILIES, *RANDOM]),
        *(pytest.param(name, marks=pytest.mark.slow) for name in [*TREES, *CHAINS] if name not in RANDOM),
    ],
)
def test_every_random_field_is_found(name):
    """With each of a config's rates alone, and with none: then nothing is rejected.

    (A rate that a model has and does not use under this attention, as Falcon's, is rejected all the same.)
    """
    target = tiny_or_skip(name)
    assert not is_rejected(target)
    config = target.config.to_dict()
    rates = [field for field, value in config.items() if isinstance(value, float) and RANDOM_FIELD.search(field)]
    if IS_OLD and "layerdrop" in rates:
        pytest.skip("earlier versions draw a number for each layer at any rate, which `no_random_numbers` finds")
    for field in [None, *rates]:
        target = tiny_or_skip(name, **{rate: 0.3 * (rate == field) for rate in rates}).train()
        assert is_rejected(target) >= is_random(target), field
        assert field or not is_rejected(target)


@pytest.mark.each_choice
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_random_target_is_rejected_before_a_forward(name, sampled):
    target = tiny_or_skip(name, **RANDOM[name])
    if IS_OLD and capability_of(target).mode is VerifyMode.PLAIN:
        pytest.skip("plain decoding may be as random as it is")
    draft, streamer, forwards = set_tree(new_draft(target), "cpu"), Recorder(), []
    target.generate(prompt(5), assistant_model=draft, max_new_tokens=4)  # evaluation mode; a trial, if one is needed
    state = torch.get_rng_state()
    target.train().register_forward_pre_hook(lambda *args: forwards.append(1))
    number = next((value for value in RANDOM[name].values() if value), 0.1)
    with pytest.raises(ValueError, match=rf"training mode with [\w.]+ = {number}.*target\.eval\(\)"):
        target.generate(prompt(5), assistant_model=draft, max_new_tokens=9, streamer=streamer, do_sample=sampled)
    assert not forwards
    assert streamer.calls[1:] == []  # the prompt is streamed by `generate` itself
    assert torch.equal(torch.get_rng_state(), state)


def test_one_module_left_in_training_mode():
    target = tiny("llama", num_hidden_layers=4, attention_dropout=0.25)
    draft = new_draft(target)
    target.model.layers[2].train()
    with pytest.raises(
        ValueError, match=r"model\.layers\.2\.self_attn\.attention_dropout = 0.25: its forward is random"
    ):
        target.generate(prompt(5), assistant_model=draft)
    target.eval()
    target.model.layers[1].mlp.down_proj = nn.Sequential(target.model.layers[1].mlp.down_proj, nn.Dropout(0.125))
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj\.1\.p = 0.125"):
        target.generate(prompt(5), assistant_model=draft)


class Noisy(nn.Module):
    """Random while training, which no field of it tells."""

    def forward(self, states):
        return states + 0.1 * torch.randn_like(states) if self.training else states


def test_random_numbers_that_no_field_tells_of():
    target = tiny("llama", num_hidden_layers=4)
    draft, streamer = new_draft(target), Recorder()
    target.model.norm = nn.Sequential(target.model.norm, Noisy())
    target.train()
    with pytest.raises(ValueError, match=r"draws random numbers.*target\.eval\(\)"):
        target.generate(prompt(5), assistant_model=draft, streamer=streamer)
    assert streamer.calls[1:] == []


@pytest.mark.each_choice
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "mixtral", "gpt_neox", "bloom", "qwen3_next"])
@pytest.mark.parametrize("mode", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_training_mode_without_a_random_number_is_as_good(name, mode):
    target = tiny_or_skip(name)
    drafts = not IS_OLD or capability_of(target).mode is not VerifyMode.PLAIN
    draft = set_tree(new_draft(target, half=False), "cpu")
    target.train()
    torch.manual_seed(0)
    inputs = padded([9, 6])
    vanilla, state = target.generate(**inputs, max_new_tokens=NEW_TOKENS, **mode), torch.get_rng_state()
    torch.manual_seed(0)
    draft.foretell(vanilla[:, 9:])
    assert torch.equal(target.generate(**inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode), vanilla)
    assert torch.equal(torch.get_rng_state(), state)
    assert draft.stats.mean_accepted > 0.5 or not drafts
    assert target.training


@pytest.mark.parametrize("mode", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_gradient_checkpointing_in_training_mode(mode):
    """Earlier versions of transformers then write no cache: plain decoding forgets its text, and so must this."""
    target = tiny("llama", num_hidden_layers=4)
    draft = set_tree(new_draft(target, half=False), "cpu")
    getattr(target.train(), "activation_checkpointing_enable", target.gradient_checkpointing_enable)()
    inputs = padded([9, 6])
    torch.manual_seed(0)
    text = target.generate(**inputs, max_new_tokens=NEW_TOKENS, **mode)
    for more in ({}, {"eos_token_id": int(text[0, 13])}):
        torch.manual_seed(0)
        vanilla = target.generate(**inputs, max_new_tokens=NEW_TOKENS, **mode, **more)
        torch.manual_seed(0)
        ours = target.generate(
            **inputs, max_new_tokens=NEW_TOKENS, assistant_model=draft.foretell(text[:, 9:]), **mode, **more
        )
        assert torch.equal(ours, vanilla)
