"""Targets that see images: the text is vanilla's, and the draft is fed what the target sees in an image's place."""

import pytest
import torch

from eagle3_hf import Eagle3Candidate
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.target_modules import media_token_ids
from support.drafts import assert_same_as_plain, new_draft, set_tree
from support.families.others import IS_OLD
from support.families.vision import CONFIGS, IMAGE_TOKEN, IMAGE_TOKENS, image_prompt, tiny_vision


FAST = ["gemma3_vl", "qwen2_5_vl", "paligemma2"]


def names():
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


@pytest.mark.parametrize("name", names())
def test_the_image_is_seen(name):
    target, inputs = tiny_vision(name), image_prompt(name)
    blank = {**inputs, "pixel_values": torch.ones_like(inputs["pixel_values"])}
    seen, unseen = (
        target.generate(**given, max_new_tokens=1, output_logits=True, return_dict_in_generate=True).logits[0]
        for given in (inputs, blank)
    )
    assert (seen - unseen).abs().max() > 0.05 * seen.abs().max()


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("rows", [1, 2])
def test_ids_of_vanilla_behind_an_image(name, rows):
    target = tiny_vision(name)
    if IS_OLD and target.config.get_text_config().model_type.startswith("gemma"):
        pytest.skip("older caches of windows differ in class")
    draft = set_tree(new_draft(target, half=False), "cpu")
    for seed, kwargs in enumerate([{}, {"do_sample": True}]):
        assert_same_as_plain(target, draft, image_prompt(name, rows, seed), seed=seed, max_new_tokens=16, **kwargs)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("rows", [1, 2])
def test_the_draft_is_fed_what_stands_for_the_image(name, rows, monkeypatch):
    target = tiny_vision(name)
    draft = set_tree(new_draft(target, half=False), "cpu")
    inputs = image_prompt(name, rows)
    fed = []
    run_layers = draft.run_layers

    def watch(hidden, embeds, *args, **kwargs):
        fed.append(embeds)
        return run_layers(hidden, embeds, *args, **kwargs)

    monkeypatch.setattr(draft, "run_layers", watch)
    target.generate(**inputs, assistant_model=draft.foretell([]), max_new_tokens=4)
    with torch.no_grad(), FeatureReader(target, [1], embeds=True) as reader:
        target(**inputs)
        given = reader.take_embeds()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    own = target.get_input_embeddings()(ids)
    for row in range(rows):
        places = (ids[row] == IMAGE_TOKEN).nonzero().flatten()
        assert len(places) == IMAGE_TOKENS.get(name, 4)
        start = int(mask[row].argmax()) if rows == 1 else 0
        # The token of a place is fed with the feature before it.
        torch.testing.assert_close(fed[0][row, places - 1 - start], given[row, places])
        assert not torch.allclose(given[row, places], own[row, places]), "not the placeholder's own embedding"
        words = ((ids[row] != IMAGE_TOKEN) & mask[row].bool()).nonzero().flatten()
        words = words[words > start + int(mask[row].argmax())]
        torch.testing.assert_close(fed[0][row, words - 1 - start], own[row, words])


def test_a_placeholder_may_lie_outside_the_vocabulary():
    target = tiny_vision("llava")
    draft = set_tree(new_draft(target, half=False), "cpu")
    candidate = Eagle3Candidate(target, draft)
    tokens = torch.tensor([[5, 99_999, 99_999, 7]])
    features = torch.randn(1, 4, draft.config.target_hidden_size * 3)
    embeds = torch.randn(1, 4, draft.config.hidden_size)
    embedded = tokens == 99_999
    tree = candidate.draft_tree(DraftInputs(features, tokens, embeds=embeds, embedded=embedded))
    assert int(tree.tokens[0, 0]) == 7


def test_which_tokens_hold_places():
    assert media_token_ids(tiny_vision("gemma3_vl")) == [IMAGE_TOKEN]
    assert media_token_ids(tiny_vision("qwen2_vl")) == [IMAGE_TOKEN - 1, IMAGE_TOKEN]


def test_text_alone_reads_no_embeddings():
    target = tiny_vision("qwen2_5_vl")
    draft = set_tree(new_draft(target, half=False), "cpu")
    assert_same_as_plain(target, draft, image_prompt("qwen2_5_vl")["input_ids"][:, -5:], max_new_tokens=12)
