"""What a target can verify is known or found out, and what it cannot is done otherwise with the same text."""

import re

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache

from eagle3_hf.decoding.target import capability_probe
from eagle3_hf.decoding.target.capability import VerifyMode, known_capability
from eagle3_hf.decoding.target.capability_probe import capability_of
from eagle3_hf.decoding.target.recurrent_cache import Snapshot, has_states, require_restorable
from eagle3_hf.decoding.target.runner import CACHE_KEY
from support.drafts import Recorder, new_draft, padded, set_tree, tensors_of
from support.families import prompt, tiny
from support.families.others import CHAINS, IS_OLD, PLAIN, TREES, chain_target, tiny_or_skip


NEW_TOKENS = 20
FAST_CHAINS = ["bloom", "lfm2", "qwen3_next"]


def chains():
    return [name if name in FAST_CHAINS else pytest.param(name, marks=pytest.mark.slow) for name in CHAINS]


@pytest.fixture
def lines(monkeypatch):
    """What was logged about a target's capability."""
    found: list[str] = []
    monkeypatch.setattr(capability_probe.logger, "warning_once", found.append)
    return found


@pytest.fixture
def untried(monkeypatch):
    monkeypatch.setattr(capability_probe, "_found", type(capability_probe._found)())


def forwards(model):
    """The number of tokens of each forward from now on, as it grows."""
    sizes: list[int] = []

    def note(module, args, kwargs):
        sizes.append((args[0] if args else kwargs["input_ids"]).shape[1])

    model.register_forward_pre_hook(note, with_kwargs=True)
    return sizes


def like(kind: type, **overrides) -> LlamaForCausalLM:
    """A tiny Llama of another class, with the same weights."""
    model = tiny("llama", num_hidden_layers=4, **overrides)
    model.__class__ = kind
    return model


class SlotBound(LlamaForCausalLM):
    """Adds to a logit something of the slot that its token stands in."""

    def forward(self, *args, position_ids=None, **kwargs):
        past = kwargs[CACHE_KEY].get_seq_length()
        out = super().forward(*args, position_ids=position_ids, **kwargs)
        slots = torch.arange(past, past + kwargs["input_ids"].shape[1])[-out.logits.shape[1] :]
        out.logits[..., 7] += 0.05 * slots
        return out


class OneByOne(LlamaForCausalLM):
    """Is wrong by a little wherever it gets several tokens behind others."""

    def forward(self, *args, **kwargs):
        several = kwargs["input_ids"].shape[1] > 1 and kwargs[CACHE_KEY].get_seq_length() > 0
        out = super().forward(*args, **kwargs)
        out.logits += 0.05 * several * torch.linspace(-1, 1, out.logits.shape[-1])
        return out


class Refusing(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        if kwargs["input_ids"].shape[1] > 1 and kwargs[CACHE_KEY].get_seq_length() > 0:
            raise NotImplementedError("only one token at a time")
        return super().forward(*args, **kwargs)


class AnyCallerOf(LlamaForCausalLM):
    """Nothing special, but nobody knows that."""


# ----- finding out ---------------------------------------------------------------------------------------------------


def test_known_targets_are_not_tried(untried, lines, monkeypatch):
    monkeypatch.setattr(capability_probe, "try_out", None)
    assert capability_of(tiny("llama", num_hidden_layers=4)).mode is VerifyMode.TREE
    assert capability_of(tiny_or_skip("bloom")).mode is VerifyMode.CHAIN
    assert ["cache slots" in line for line in lines] == [True], "one line, of the chain alone"


@pytest.mark.parametrize(
    ("kind", "way", "reason"),
    [
        (AnyCallerOf, VerifyMode.TREE, ""),
        (SlotBound, VerifyMode.CHAIN, "computes a tree otherwise than its paths .logits differ by"),
        (OneByOne, VerifyMode.PLAIN, "several tokens at once otherwise than one by one .logits differ by"),
        (Refusing, VerifyMode.PLAIN, "NotImplementedError: only one token at a time"),
    ],
)
def test_unknown_targets_are_tried(untried, lines, kind, way, reason):
    target = like(kind)
    capability = capability_of(target)
    assert capability.mode is way
    assert len(lines) == (way is not VerifyMode.TREE)

    assert re.search(reason, capability.reason)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3", "gpt2", *(pytest.param(n, marks=pytest.mark.slow) for n in TREES)]
)
def test_the_trial_agrees_with_what_is_known_of_trees(name):
    target = tiny_or_skip(name)
    assert known_capability(target).mode is VerifyMode.TREE
    assert capability_probe.try_out(target, target.device).mode is VerifyMode.TREE


@pytest.mark.parametrize("name", [*CHAINS, *PLAIN])
def test_the_trial_finds_what_cannot_take_a_tree(name):
    target = chain_target(name) if name in CHAINS else tiny_or_skip(name)
    capability = capability_probe.try_out(target, target.device)
    assert capability.mode is (VerifyMode.CHAIN if name in CHAINS else VerifyMode.PLAIN)
    assert known_capability(target) is None or known_capability(target).mode is capability.mode
    assert capability.restores == (
        capability.mode is VerifyMode.CHAIN and has_states(DynamicCache(config=target.config))
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rounding_is_told_from_mistakes_in_other_dtypes(dtype):
    for kind, way in [(AnyCallerOf, VerifyMode.TREE), (OneByOne, VerifyMode.PLAIN)]:
        target = like(kind).to(dtype)
        if kind is OneByOne:
            target.lm_head.weight.data.mul_(0.1)  # what is wrong must stand out of this dtype's rounding
        assert capability_probe.try_out(target, target.device).mode is way


@pytest.mark.each_choice
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["granitemoe", "gemma4_text", "falcon_alibi", "gpt_neo", "granitemoehybrid", "mamba"])
def test_half_precision_changes_nothing(name, dtype):
    """Small mistakes that come near to rounding (ALiBi, Mamba's dropped state), and rounding that looks like more."""
    target = chain_target(name) if name in CHAINS else tiny_or_skip(name)
    way = VerifyMode.CHAIN if name in CHAINS else VerifyMode.PLAIN if name in PLAIN else VerifyMode.TREE
    assert capability_probe.try_out(target.to(dtype), target.device).mode is way


def test_a_target_is_tried_once_per_class_and_config(untried, monkeypatch):
    tried = []
    original = capability_probe.try_out
    monkeypatch.setattr(
        capability_probe, "try_out", lambda target, *more: tried.append(target) or original(target, *more)
    )
    target, other = like(AnyCallerOf), like(AnyCallerOf)
    capability_of(target)
    capability_of(target)
    capability_of(other)
    assert tried == [target], "same class, same config"
    other.config.rms_norm_eps = 1e-3
    capability_of(other)
    assert tried == [target, other], "another config is another target"


def test_the_trial_leaves_no_trace(untried):
    target = like(OneByOne)
    target.train()
    target.model.layers[0].eval()
    modes = [module.training for module in target.modules()]
    state = torch.get_rng_state()
    capability_of(target)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in target.modules()] == modes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in target.parameters())


# ----- plain decoding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OneByOne, Refusing])
def test_targets_that_cannot_verify_decode_plainly(kind):
    target = like(kind)
    draft = set_tree(new_draft(target, half=False), "cpu")
    for sampled in (False, True):
        results = []
        for assistant in (None, draft):
            torch.manual_seed(0)
            streamer = Recorder()
            kwargs = {"do_sample": sampled, "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True}
            out = target.generate(prompt(9, rows=2), assistant_model=assistant, **kwargs)
            target.generate(prompt(9), assistant_model=assistant, streamer=streamer, max_new_tokens=3)
            results.append((out.sequences.tolist(), streamer.calls, torch.get_rng_state().tolist()))
        assert results[0] == results[1]
        assert out.speculation.rounds == draft.stats.rounds == 0


# ----- chains --------------------------------------------------------------------------------------------------------


def assert_same_chains(target, draft, inputs, seed=0, **kwargs):
    """Ids, generator, logits and returned cache of a call with the draft are vanilla's."""
    kwargs = {
        "max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_logits": True, **inputs, **kwargs,
    }  # fmt: skip
    torch.manual_seed(seed)
    vanilla = target.generate(**kwargs)
    state = torch.get_rng_state()
    draft.foretell(vanilla.sequences[:, inputs["inputs"].shape[1] :], seed)
    torch.manual_seed(seed)
    ours = target.generate(assistant_model=draft, **kwargs)
    assert ours.sequences.tolist() == vanilla.sequences.tolist()
    assert torch.equal(torch.get_rng_state(), state)
    # A chain goes through a recurrent layer in chunks, a token alone does not; both round differently on each CPU.
    largest = torch.cat(vanilla.logits).abs().max().item()
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(vanilla.logits), rtol=0, atol=2e-4 * largest)
    assert ours.speculation.mean_accepted > 0.5
    mine, theirs = getattr(ours, CACHE_KEY), getattr(vanilla, CACHE_KEY)
    for my_layer, their_layer in zip(mine.layers, theirs.layers, strict=True):
        for one, other in zip(tensors_of(my_layer), tensors_of(their_layer), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    return ours, vanilla


@pytest.mark.each_choice
@pytest.mark.parametrize("name", chains())
@pytest.mark.parametrize("sampled", [False, True])
def test_chains_of_one_text(name, sampled):
    target = chain_target(name)
    draft = set_tree(new_draft(target, half=False), "cpu")
    for seed in range(2):
        assert_same_chains(target, draft, padded([5 + 16 * seed], seed), seed, do_sample=sampled)


@pytest.mark.parametrize("name", chains())
def test_chains_of_a_batch(name):
    target = chain_target(name)
    draft = set_tree(new_draft(target, half=False), "cpu")
    for seed, kwargs in enumerate([{}, {"do_sample": True}, {"eos_token_id": list(range(1, 30))}]):
        assert_same_chains(target, draft, padded([13, 6, 19], seed), seed, **kwargs)


@pytest.mark.parametrize("name", ["bloom", "lfm2", "qwen3_next"])
def test_a_returned_cache_can_be_continued(name):
    target = chain_target(name)
    draft = set_tree(new_draft(target, half=False), "cpu")
    ours, vanilla = assert_same_chains(target, draft, padded([11]))
    more = {"max_new_tokens": 10}
    expected = target.generate(vanilla.sequences, **{CACHE_KEY: getattr(vanilla, CACHE_KEY)}, **more)
    draft.foretell(expected[0, vanilla.sequences.shape[1] :])
    cache = getattr(ours, CACHE_KEY)
    found = target.generate(ours.sequences, assistant_model=draft, **{CACHE_KEY: cache}, **more)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["bloom", "qwen3_next"])
@pytest.mark.parametrize("call", [3, 7, 12])
def test_an_exception_leaves_a_cache_that_can_be_continued(name, call):
    target = chain_target(name)
    draft = set_tree(new_draft(target, half=False), "cpu")
    text = target.generate(prompt(9), max_new_tokens=NEW_TOKENS)
    cache = DynamicCache(config=target.config)
    kwargs = {"max_new_tokens": NEW_TOKENS, CACHE_KEY: cache, "streamer": Recorder(raise_at=call)}
    with pytest.raises(ValueError, match="raised by the streamer"):
        target.generate(prompt(9), assistant_model=draft.foretell(text[0, 9:]), **kwargs)
    assert cache.get_seq_length() <= 9 + call
    more = target.generate(text[:, : 9 + call + 1], max_new_tokens=NEW_TOKENS - call - 1, **{CACHE_KEY: cache})
    assert torch.equal(more, text)


def test_a_chain_is_as_long_as_the_tree_is_deep():
    for name, again in [("bloom", 0), ("qwen3_next", 16)]:
        target = chain_target(name)
        draft = set_tree(new_draft(target, half=False), (30, 4, 10))
        capability_of(target)
        sizes = forwards(target)
        told = target.generate(prompt(8), max_new_tokens=60)[0, 8:]
        sizes.clear()
        target.generate(prompt(8), assistant_model=draft.foretell(told, favourite=0.6), max_new_tokens=60)
        assert max(sizes[1:]) <= 5 + again
        assert 5 in sizes[1:]
        if again:
            assert max(sizes[1:]) > 5, "accepted tokens are fed again"


def test_a_snapshot_can_be_restored_more_than_once():
    target = chain_target("qwen3_next")
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(prompt(9), **{CACHE_KEY: cache})
        before = [[part.clone() for part in tensors_of(layer)] for layer in cache.layers]
        snapshot = Snapshot(cache)
        for seed in (1, 2):
            target(prompt(4, seed), **{CACHE_KEY: cache})
            assert not torch.equal(tensors_of(cache.layers[0])[0], before[0][0])
            snapshot.restore(cache)
            for layer, saved in zip(cache.layers, before, strict=True):
                assert all(torch.equal(part, other) for part, other in zip(tensors_of(layer), saved, strict=True))
    assert cache.get_seq_length() == 9


def test_what_cannot_be_restored_is_refused():
    cache = DynamicCache(config=tiny("llama").config)
    require_restorable(cache)
    cache.layers[2] = StaticCache(config=tiny("llama").config, max_cache_len=64).layers[2]
    with pytest.raises(ValueError, match="layer 2 is a StaticLayer, which cannot be restored"):
        require_restorable(cache)


@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "qwen3_next"])
def test_chains_on_static_caches_are_plain_decoding(name, lines):
    target = chain_target(name)
    draft = set_tree(new_draft(target, half=False), "cpu")
    lines.clear()
    kwargs = {"max_new_tokens": NEW_TOKENS, "cache_implementation": "static"}
    if IS_OLD:
        pytest.skip("beside an assistant, older versions make a dynamic cache of it")
    vanilla = target.generate(prompt(9), **kwargs)
    assert torch.equal(target.generate(prompt(9), assistant_model=draft.foretell([]), **kwargs), vanilla)
    assert draft.stats.rounds == 0
    assert "chains need a cache that grows" in lines[0]
