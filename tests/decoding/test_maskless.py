"""Attention that takes no masks, as flash kernels: trees are verified with another one, and it is put back."""

import threading

import pytest
import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from eagle3_hf.decoding.target import capability_probe
from eagle3_hf.decoding.target.capability import VerifyMode
from eagle3_hf.decoding.target.tree_attention import maskable_attention
from support.drafts import assert_same_as_plain, new_draft, padded, set_tree
from support.families import prompt, tiny
from support.families.others import IS_OLD
from support.families.vision import image_prompt, tiny_vision


NAME = "no_masks"
queries: list[int] = []


def kernel(module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, **kwargs):
    """What a flash kernel computes: causal with the last keys in line with the queries, windows, padding, no masks."""
    assert attention_mask is None or attention_mask.dim() == 2, "a kernel without masks was given one"
    queries.append(query.shape[2])
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    place = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    distance = place - torch.arange(key.shape[2])
    seen = (distance >= 0) if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    if attention_mask is not None:
        seen = seen & attention_mask[:, None, None, -key.shape[2] :].bool()
    weights = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        weights = softcap * torch.tanh(weights / softcap)
    weights = weights.masked_fill(~seen, torch.finfo(weights.dtype).min)
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        weights = torch.cat([weights, sinks.view(1, -1, 1, 1).expand(*weights.shape[:3], 1)], dim=-1)
    weights = weights.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The kernel under its name, and masks as flash kernels have them, for the time of a test."""
    queries.clear()
    monkeypatch.setattr(capability_probe, "_found", type(capability_probe._found)())
    attentions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    monkeypatch.setitem(attentions, NAME, kernel)
    monkeypatch.setitem(masks, NAME, ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])


def maskless(family: str):
    target = tiny(family, num_hidden_layers=4)
    target.set_attn_implementation(NAME)
    return target, set_tree(new_draft(target, half=False), "cpu")


def implementations(target) -> set[str]:
    return {module.config._attn_implementation for module in target.modules() if hasattr(module, "config")}


@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma2", "gemma3", "gpt_oss"])
def test_trees_are_verified_with_another_kernel(family):
    target, draft = maskless(family)
    if IS_OLD and family != "llama":
        pytest.skip("older caches of windows differ in class, and Gemma 2's sdpa ignores its softcap")
    assert capability_probe.capability_of(target).mode is VerifyMode.TREE
    for inputs, kwargs in [(prompt(17), {}), (prompt(5), {"do_sample": True}), (padded([4, 21, 9]), {})]:
        queries.clear()
        assert_same_as_plain(target, draft, inputs, **kwargs)
        assert queries, "the prompt is run with the target's own kernel"
        assert implementations(target) == {NAME}


def test_a_prompt_keeps_its_kernel_and_a_tree_has_another():
    target, draft = maskless("llama")
    told = target.generate(prompt(9), max_new_tokens=12)[0, 9:]
    capability_probe.capability_of(target)
    queries.clear()
    target.generate(prompt(9), assistant_model=draft.foretell(told), max_new_tokens=12)
    assert set(queries) <= {9, 1}, "no tree has reached the kernel, and single steps may"
    assert queries[:4] == [9] * 4


def test_it_is_put_back_when_something_raises(monkeypatch):
    target, draft = maskless("llama")
    capability_probe.capability_of(target)
    calls = []

    def fail(module, args, output):
        calls.append(module.config._attn_implementation)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(
        capability_probe, "custom_code", lambda target: []
    )  # a trial with this hook would find it to raise
    target.model.layers[-1].self_attn.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        target.generate(prompt(9), assistant_model=draft.foretell([1, 2, 3]), max_new_tokens=12)
    assert calls == [NAME, "sdpa"]
    assert implementations(target) == {NAME}


def test_the_last_one_out_puts_it_back():
    target, _ = maskless("llama")
    inside, leave = threading.Event(), threading.Event()

    def other():
        with maskable_attention(target):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with maskable_attention(target):
        assert implementations(target) == {"sdpa"}
    assert implementations(target) == {"sdpa"}, "the other thread is still in a forward"
    leave.set()
    thread.join()
    assert implementations(target) == {NAME}


def test_models_without_sdpa_are_lent_eager():
    for family in ("llama", "gemma2", "gpt_oss"):
        target, _ = maskless(family)
        kind = "sdpa" if target._supports_sdpa else "eager"
        with maskable_attention(target):
            assert implementations(target) == {kind}


def test_configs_within_a_config():
    if IS_OLD:
        pytest.skip("older caches of windows differ in class")
    target = tiny_vision("gemma3_vl")
    target.set_attn_implementation({"text_config": NAME, "vision_config": "sdpa"})
    before = target.config._attn_implementation
    draft = set_tree(new_draft(target, half=False), "cpu")
    assert_same_as_plain(target, draft, image_prompt("gemma3_vl"), max_new_tokens=12)
    assert target.config.get_text_config()._attn_implementation == NAME
    assert target.config._attn_implementation == before


def test_a_kernel_that_computes_something_else_is_not_replaced():
    """Prompt and single steps would then come from another model than the tree: chains keep the target's kernel."""

    def colder(*args, scaling=None, **kwargs):
        return kernel(*args, scaling=scaling * 0.5, **kwargs)

    AttentionInterface._global_mapping[NAME] = colder
    target, draft = maskless("llama")
    assert capability_probe.capability_of(target).mode is VerifyMode.CHAIN
    assert_same_as_plain(target, draft, prompt(11))
