"""Drafting by lookup, beside a head and without one: the same text, where it may be passed, what it counts."""

import pytest
import torch
from transformers import pipeline

from eagle3_hf import LookupDraft, enabled
from support.drafts import (
    FOUR,
    MODES,
    assert_same,
    assert_same_as_plain,
    new_draft,
    observe,
    padded,
    set_tree,
    target_of,
)
from support.families import prompt, tiny
from support.families.others import tiny_or_skip
from support.tokenizers import words


def repeating(length: int = 24, seed: int = 0) -> torch.Tensor:
    """A prompt that says everything three times."""
    return prompt(length, seed).repeat(1, 3)


def assert_plain_text(target, draft, inputs, seed: int = 0, **kwargs):
    """Compare with plain decoding, and return the statistics."""
    kwargs = {"max_new_tokens": 40, **kwargs}
    vanilla = observe(target, inputs, seed, dict, **kwargs)
    ours = observe(target, inputs, seed, dict, assistant_model=draft, **kwargs)
    assert_same(ours, vanilla)
    return draft.stats


@FOUR
@MODES
def test_lookup_alone_writes_the_same_text(family, mode):
    target = target_of(family)
    for number in ("auto", 9):
        stats = assert_plain_text(target, LookupDraft(number), repeating(), **mode)
        assert stats.from_head == stats.from_both == stats.levels == 0
        assert stats.headless_rounds == stats.rounds
    assert stats.drafted or mode


def test_a_text_that_repeats_itself_comes_in_few_rounds():
    # A target that repeats its newest token for ever: the embedding is its output layer, and layers add nothing.
    copying = tiny("llama", num_hidden_layers=1, tie_word_embeddings=True)
    for parameter in copying.model.layers.parameters():
        parameter.data.zero_()
    stats = assert_plain_text(copying, LookupDraft(9), prompt(8))
    assert stats.tau > 5
    assert stats.from_lookup == sum(stats.accepted) or stats.from_lookup + 1 == sum(stats.accepted)


@MODES
@pytest.mark.parametrize("number", ["auto", 9])
def test_lookup_alone_in_batches(number, mode):
    assert_plain_text(target_of("llama"), LookupDraft(number), padded([30, 9, 17]), **mode)
    # A processor that keeps the sequences in step.
    assert_plain_text(target_of("llama"), LookupDraft(number), padded([30, 9]), prefix_allowed_tokens_fn=even, **mode)


def even(batch_id, ids):
    return list(range(0, 320, 2))


@pytest.mark.parametrize("family", ["mamba", "qwen3_5", "bloom"])
def test_lookup_alone_where_targets_verify_chains_or_plain_steps(family):
    assert_plain_text(tiny_or_skip(family), LookupDraft(), repeating(), max_new_tokens=24)


@MODES
def test_a_head_and_lookup_find_more_than_the_head(mode):
    target = target_of("llama")
    draft, ids, counts = set_tree(new_draft(target, half=True), "cpu"), repeating(), []
    for draft.generation_config.assistant_lookup in (False, True):
        ours, _ = assert_same_as_plain(target, draft, ids, max_new_tokens=60, **mode)
        counts.append(ours.out.speculation)
    alone, both = counts
    assert alone.from_lookup == alone.from_both == 0
    assert alone.from_head + 1 >= sum(alone.accepted) >= alone.from_head
    if not mode:
        assert both.from_lookup > 0, "tokens outside the head's half of the vocabulary"
        assert both.tau > alone.tau


def test_where_lookup_may_be_set():
    target, draft = target_of("llama"), set_tree(new_draft(target_of("llama"), half=False), "cpu")
    ids = repeating()
    plain = target.generate(ids, max_new_tokens=8)
    assert torch.equal(target.generate(ids, max_new_tokens=8, assistant_model=draft, assistant_lookup=True), plain)
    with pytest.raises(ValueError, match="assistant_lookup=False needs a draft as assistant_model"):
        target.generate(ids, max_new_tokens=8, assistant_lookup=False)
    with pytest.raises(ValueError, match="assistant_lookup must be True or False, got 'no'"):
        target.generate(ids, max_new_tokens=8, assistant_model=draft, assistant_lookup="no")
    with pytest.raises(ValueError, match="assistant_lookup=False leaves a LookupDraft nothing to draft"):
        target.generate(ids, max_new_tokens=8, assistant_model=LookupDraft(), assistant_lookup=False)
    assert not hasattr(target.generation_config, "assistant_lookup"), "a call leaves the target as it was"


@pytest.mark.parametrize("number", [0, -1, 2.5, "many", True, None])
def test_wrong_numbers_are_rejected_at_once(number):
    with pytest.raises(
        ValueError, match=f"num_assistant_tokens must be 'auto' or an int of at least 1, got {number!r}"
    ):
        LookupDraft(number)


def test_a_disabled_library_rejects_a_lookup_draft():
    with enabled(False), pytest.raises(ValueError, match="assistant_tokenizer|tokenizer"):
        target_of("llama").generate(prompt(5), max_new_tokens=4, assistant_model=LookupDraft())


def test_a_pipeline_takes_a_bound_one():
    target = target_of("llama")
    draft = LookupDraft().bind(target)
    tokenizer, text = words(), "w3 w9 w7 w3 w9 w7 w3 w9"
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    ours = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    settings = {"max_new_tokens": 12, "do_sample": False}
    assert ours(text, **settings) == plain(text, **settings)
    assert draft.stats.rounds
