"""What `generate` returns: values, shapes, counters and a cache to go on from, all as vanilla's."""

import gc
import re
import weakref

import pytest
import torch
from transformers import (
    DynamicCache,
)

from eagle3_hf.decoding.target.runner import CACHE_KEY
from eagle3_hf.model.tree_settings import tree_settings
from support.drafts import (
    NEW_TOKENS,
    assert_same,
    assert_same_as_plain,
    assert_same_cache,
    cache_of,
    observe,
    padded,
    pair,
    target_of,
)
from support.families import FAMILIES, WINDOW, prompt


SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.9}
MODES = pytest.mark.parametrize("mode", [{}, SAMPLED], ids=["greedy", "sampled"])
# Full layers, windows, both, and eager attention with sinks.
FOUR = pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3", "gpt_oss"])


@pytest.mark.parametrize("family", FAMILIES)
@MODES
def test_everything_returned_equals_vanilla(family, mode):
    ours, _ = assert_same_as_plain(*pair(family), prompt(17, 2), **mode)
    out = ours.out
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == NEW_TOKENS
    assert out.attentions is None
    layers = target_of(family).config.num_hidden_layers
    assert [state.shape for state in out.hidden_states[0]] == [(1, 17, 64)] * (layers + 1)
    assert {state.shape for token in out.hidden_states[1:] for state in token} == {(1, 1, 64)}


@pytest.mark.parametrize("asked", ["output_scores", "output_logits", "output_hidden_states", None])
def test_only_what_was_asked_for(asked):
    switches = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), False)
    ours, vanilla = assert_same_as_plain(*pair("llama"), prompt(5), **{**switches, **({asked: True} if asked else {})})
    present = {name for name in ("scores", "logits", "hidden_states") if getattr(ours.out, name) is not None}
    assert present == ({asked.removeprefix("output_")} if asked else set())
    assert list(ours.out.keys()) == list(vanilla.out.keys())


def test_plain_ids_without_return_dict():
    target, draft = pair("llama")
    vanilla = target.generate(prompt(5), max_new_tokens=8)
    ours = target.generate(prompt(5), max_new_tokens=8, assistant_model=draft.foretell(vanilla[0, 5:]))
    assert type(ours) is torch.Tensor
    assert torch.equal(ours, vanilla)
    # Asking for scores alone returns ids, in vanilla too.
    ours = target.generate(prompt(5), max_new_tokens=8, output_scores=True, assistant_model=draft)
    assert torch.equal(ours, vanilla)


@MODES
@pytest.mark.parametrize("tree", ["paper", "cpu", "chain"])
def test_counters_add_up(mode, tree):
    target, draft = pair("qwen3", tree)
    ours, _ = assert_same_as_plain(target, draft, prompt(6), **mode)
    stats = ours.out.speculation
    assert stats is draft.stats
    assert stats.emitted == NEW_TOKENS - 1, "the first token is the prefill's"
    assert stats.emitted == stats.rounds + sum(stats.accepted), "a bonus token each round"
    assert stats.tau == stats.emitted / stats.rounds
    assert sum(stats.histogram) == stats.rounds
    assert sum(k * n for k, n in enumerate(stats.histogram)) == sum(stats.accepted)
    assert all(hit <= tried for hit, tried in zip(stats.accepted, stats.reached, strict=True))
    assert all(tried <= hit for tried, hit in zip(stats.reached[1:], stats.accepted[:-1], strict=True)), (
        "a depth can be tried only where the one above was accepted"
    )
    assert stats.reached[0] <= stats.rounds
    assert len(stats.reached) <= tree_settings(draft, target).reach
    # A draft that is accepted as the last token of a text has no source.
    assert 0 <= sum(stats.accepted) - (stats.from_head + stats.from_lookup + stats.from_both) <= 1
    assert stats.drafted >= sum(stats.accepted)
    seconds = stats.draft_seconds, stats.verify_seconds, stats.other_seconds
    assert min(seconds) > 0
    assert re.search(rf"{stats.emitted} tokens in {stats.rounds} rounds", str(stats))


def test_an_accepted_end_of_text_counts_as_accepted():
    """The block ends at an end-of-text token that the draft foresaw: right at every depth it reached."""
    target, draft = pair("llama", "chain")
    texts = {seed: target.generate(prompt(6, seed), max_new_tokens=NEW_TOKENS)[0, 6:] for seed in range(4)}
    seed, text = next((seed, text) for seed, text in texts.items() if text[8] not in text[:8])
    draft.foretell(text, favourite=1.0)
    target.generate(prompt(6, seed), max_new_tokens=NEW_TOKENS, assistant_model=draft, eos_token_id=int(text[8]))
    # The prefill emits one token, the first round six, and the second ends at its second drafted token.
    assert (draft.stats.rounds, draft.stats.emitted) == (2, 8)
    assert draft.stats.accepted == draft.stats.reached == [2, 2, 1, 1, 1]


def test_counters_are_of_the_last_call_only():
    target, draft = pair("llama")
    first = assert_same_as_plain(target, draft, prompt(5))[0].out.speculation
    second = assert_same_as_plain(target, draft, prompt(6), max_new_tokens=5)[0].out.speculation
    assert (first.emitted, second.emitted) == (NEW_TOKENS - 1, 4)
    target.generate(prompt(5), max_new_tokens=1, assistant_model=draft)
    assert (draft.stats.rounds, draft.stats.emitted, draft.stats.tau) == (0, 0, 0.0)


# ----- the returned cache --------------------------------------------------------------------------------------------


@pytest.mark.each_choice
@FOUR
@MODES
@pytest.mark.parametrize("first_drafted", [True, False])
@pytest.mark.parametrize("then_drafted", [True, False])
def test_a_returned_cache_can_be_continued(family, mode, first_drafted, then_drafted):
    """A second turn on the first one's cache; positions are absolute, also across a window's edge."""
    target, draft = pair(family)
    first = target.generate(prompt(WINDOW - 3), max_new_tokens=9)[0, WINDOW - 3 :]
    turns = {}
    for name, drafted in {"vanilla": (False, False), "ours": (first_drafted, then_drafted)}.items():
        assistant = draft.foretell(first) if drafted[0] else None
        begun = observe(target, prompt(WINDOW - 3), max_new_tokens=9, assistant_model=assistant)
        ids = torch.cat([begun.out.sequences, prompt(4, 9)], dim=1)
        inputs = {"input_ids": ids, CACHE_KEY: cache_of(begun.out)}
        if name == "vanilla":
            turns[name] = observe(target, inputs, max_new_tokens=NEW_TOKENS, **mode)
            continue
        assistant = draft.foretell(turns["vanilla"].ids[ids.shape[1] :]) if drafted[1] else None
        turns[name] = observe(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=assistant, **mode)
        assert cache_of(turns[name].out) is cache_of(begun.out), "the user's cache is used in place"
    assert_same(turns["ours"], turns["vanilla"])


def test_the_draft_sits_at_absolute_positions_on_a_continued_cache():
    target, draft = pair("llama")
    begun = observe(target, prompt(20), max_new_tokens=4)
    ids = torch.cat([begun.out.sequences, prompt(3, 9)], dim=1)
    seen = []
    handle = draft.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    target.generate(ids, **{CACHE_KEY: cache_of(begun.out)}, assistant_model=draft.foretell([]), max_new_tokens=5)
    handle.remove()
    # 24 ids of which 23 are in the cache, and three more: four features, at the positions of their tokens. Then the
    # levels of the tree, each one further.
    assert seen[0][0, :6].tolist() == [23, 24, 25, 26, 27, 28]
    assert seen[1][0, 0] == 27


def test_only_new_ids_beside_a_cache():
    """The other way to continue: the new ids alone, and a mask over everything."""
    target, draft = pair("llama")
    results = []
    for drafted in (False, True):
        begun = observe(target, prompt(8), max_new_tokens=5)
        new = torch.cat([begun.out.sequences[:, -1:], prompt(3, 5)], dim=1)
        inputs = {"input_ids": new, "attention_mask": torch.ones(1, 16, dtype=torch.int64)}
        inputs[CACHE_KEY] = cache_of(begun.out)
        assistant = draft.foretell(results[0].ids[4:]) if drafted else None
        results.append(observe(target, inputs, max_new_tokens=10, assistant_model=assistant))
    assert_same(results[1], results[0])


def test_a_cache_of_the_user_is_filled_in_place():
    target, draft = pair("gemma3")
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    vanilla = target.generate(prompt(20), **{CACHE_KEY: caches[0]}, max_new_tokens=8)
    draft.foretell(vanilla[0, 20:])
    ours = target.generate(prompt(20), **{CACHE_KEY: caches[1]}, max_new_tokens=8, assistant_model=draft)
    assert torch.equal(ours, vanilla)
    assert_same_cache(caches[1], caches[0])


def test_a_cache_without_a_config_has_full_layers():
    """`DynamicCache()` grows plain layers even for windowed models; the masks must hold the window alone."""
    target, draft = pair("mistral_sw")
    assert_same_as_plain(target, draft, prompt(20), make=lambda: {CACHE_KEY: DynamicCache()})


@MODES
@pytest.mark.parametrize("lengths", [[7], [5, 9]], ids=str)
def test_nothing_of_a_call_outlives_it(lengths, mode):
    """The caches are freed when the call returns, and do not wait for the garbage collector."""
    target, draft = pair("llama")
    caches = []
    hook = target.model.register_forward_pre_hook(
        lambda module, args, kwargs: caches.append(weakref.ref(kwargs[CACHE_KEY])), with_kwargs=True
    )
    gc.collect()
    gc.disable()
    try:
        target.generate(**padded(lengths), max_new_tokens=6, assistant_model=draft.foretell([]), **mode)
        assert len(caches) > 1
        assert {cache() for cache in caches} == {None}
    finally:
        gc.enable()
        hook.remove()
