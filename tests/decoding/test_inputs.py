"""Every kind of input and of target: padding, holes, embeddings, chunks, images, positions; the text is vanilla's."""

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from support.drafts import NEW_TOKENS, assert_same, assert_same_as_plain, new_draft, observe, pair, set_tree
from support.families import COMMON, VOCAB_SIZE, WINDOW, prompt, tiny


SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.9}
MODES = pytest.mark.parametrize("mode", [{}, SAMPLED], ids=["greedy", "sampled"])
# Full layers, windows, both, and eager attention with sinks.
FOUR = pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3", "gpt_oss"])


@pytest.mark.each_choice
@FOUR
@MODES
@pytest.mark.parametrize("padding", [1, 7, WINDOW + 3])
def test_left_padding(family, mode, padding):
    target, draft = pair(family)
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.int64), prompt(9)], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    ours, _ = assert_same_as_plain(target, draft, {"input_ids": ids, "attention_mask": mask}, **mode)
    if not mode:
        unpadded = target.generate(prompt(9), max_new_tokens=NEW_TOKENS)
        assert ours.ids[padding:] == unpadded[0].tolist()


@pytest.mark.each_choice
@FOUR
@MODES
def test_holes_in_the_mask(family, mode):
    ids, mask = prompt(16), torch.ones(1, 16, dtype=torch.int64)
    mask[0, [0, 4, 5, 11]] = 0
    assert_same_as_plain(*pair(family), {"input_ids": ids, "attention_mask": mask}, **mode)


def test_the_draft_reads_attended_tokens_only():
    """Padding and holes leave the draft's rows, their positions and their next tokens as if they were not there."""
    target, draft = pair("llama")
    ids, mask = prompt(8), torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]])
    fed: list = []
    embed = target.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    rotary = draft.rotary_emb.register_forward_pre_hook(lambda module, args: fed.append(args[1]))
    out = target.generate(ids, attention_mask=mask, max_new_tokens=3, assistant_model=draft.foretell([]))
    embed.remove()
    rotary.remove()
    # The target's prompt; then the draft's rows: the token after each attended one, at positions without gaps.
    assert torch.equal(fed[0], ids)
    # (The positions of the tree's levels follow theirs, and are computed with them.)
    positions, tokens = fed[1], fed[2]
    assert positions.tolist() == [list(range(positions.shape[1]))]
    assert positions.shape[1] >= 5
    assert tokens.tolist() == [[*ids[0, [3, 5, 6, 7]].tolist(), int(out[0, 8])]]


def test_a_prompt_that_is_all_padding():
    ids, mask = prompt(5), torch.zeros(1, 5, dtype=torch.bool)
    target, draft = pair("llama")
    vanilla = target.generate(ids, attention_mask=mask, max_new_tokens=6)
    draft.foretell(vanilla[0, 5:])
    assert torch.equal(target.generate(ids, attention_mask=mask, max_new_tokens=6, assistant_model=draft), vanilla)
    assert not mask.any(), "the user's mask is the user's"


@pytest.mark.each_choice
@FOUR
@MODES
@pytest.mark.parametrize("length", [1, 15])
def test_inputs_embeds(family, mode, length):
    target, draft = pair(family)
    embeds = target.get_input_embeddings()(prompt(length)).detach()
    vanilla = observe(target, {"inputs_embeds": embeds}, max_new_tokens=NEW_TOKENS, **mode)
    draft.foretell(vanilla.ids)
    ours = observe(target, {"inputs_embeds": embeds}, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert_same(ours, vanilla)


def test_inputs_embeds_beside_their_ids():
    target, draft = pair("llama")
    embeds = target.get_input_embeddings()(prompt(15)).detach()
    assert_same_as_plain(target, draft, {"inputs_embeds": embeds, "input_ids": prompt(15)})


@FOUR
def test_position_ids_of_the_user(family):
    assert_same_as_plain(*pair(family), {"input_ids": prompt(9), "position_ids": torch.arange(9)[None] * 2 + 5})


@pytest.mark.each_choice
@FOUR
@MODES
@pytest.mark.parametrize("chunk", [1, 5, 16, 40])
def test_chunked_prefill(family, mode, chunk):
    target, draft = pair(family)
    ours, _ = assert_same_as_plain(target, draft, prompt(21), prefill_chunk_size=chunk, **mode)
    draft.foretell(ours.ids[21:])
    whole = observe(target, prompt(21), max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert whole.ids == ours.ids
    assert draft.stats.histogram == ours.out.speculation.histogram, "the draft starts from the same features"


def test_a_prompt_of_one_token_and_an_int32_prompt():
    assert_same_as_plain(*pair("llama"), torch.tensor([[7]]))
    assert_same_as_plain(*pair("llama"), prompt(6).to(torch.int32))


def longrope_target():
    """A Phi-3 whose frequencies change at 40 tokens, where it also runs the whole text again without its cache."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    }  # fmt: skip
    return tiny("phi3", num_hidden_layers=4, original_max_position_embeddings=40, rope_parameters=rope)


@pytest.mark.each_choice
@MODES
@pytest.mark.parametrize("length", [15, 37, 39, 40, 41, 42, 60])
def test_frequencies_that_change_with_the_length(mode, length):
    """A tree looks ahead of the text; where that would change the target's rotary frequencies there must be none."""
    target = longrope_target()
    draft = set_tree(new_draft(target, half=False), (8, 4, 3))
    assert_same_as_plain(target, draft, prompt(length), max_new_tokens=40, **mode)


def test_a_text_that_is_run_again_is_shown_whole():
    """Where Phi-3 runs the whole text again, the hidden states and attentions of that step are those of the text."""
    target = longrope_target()
    target.set_attn_implementation("eager")
    draft = set_tree(new_draft(target, half=False), (8, 4, 3))
    ours, _ = assert_same_as_plain(
        target, draft, prompt(30), max_new_tokens=20, output_attentions=True, output_hidden_states=True
    )
    lengths = [step[0].shape[2] for step in ours.out.attentions]
    assert lengths == [30] + [1] * 10 + [41] + [1] * 8
    assert ours.out.speculation.mean_accepted > 0.5


@MODES
def test_frequencies_that_change_with_every_token(mode):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny("llama", num_hidden_layers=4, max_position_embeddings=40, rope_parameters=rope)
    draft = set_tree(new_draft(target, half=False), (8, 4, 3))
    assert_same_as_plain(target, draft, prompt(15), max_new_tokens=20, **mode)
    vanilla = target.generate(prompt(25), max_new_tokens=40)
    assert torch.equal(target.generate(prompt(25), max_new_tokens=40, assistant_model=draft.foretell([])), vanilla)


def test_layers_that_skip_the_prompt():
    """Gemma 4 runs its key-sharing layers over the last prompt token only, unless asked; the head reads them all."""
    target = causal_lm(
        "gemma4_text", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB_SIZE,
        global_head_dim=16,
    )  # fmt: skip
    draft = set_tree(new_draft(target, half=False), "cpu")
    vanilla = target.generate(prompt(20), max_new_tokens=NEW_TOKENS)
    draft.foretell(vanilla[0, 20:])
    assert torch.equal(target.generate(prompt(20), max_new_tokens=NEW_TOKENS, assistant_model=draft), vanilla)
    assert draft.stats.mean_accepted > 0.5


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("llama4_text", {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64}),
        ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@MODES
def test_other_families(model_type, fields, mode):
    target = causal_lm(model_type, **fields)
    assert_same_as_plain(target, set_tree(new_draft(target, half=False), "cpu"), prompt(20), **mode)


def causal_lm(model_type: str, **fields):
    config = AutoConfig.for_model(model_type, **{**COMMON, "num_hidden_layers": 4, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.mark.each_choice
@MODES
@pytest.mark.parametrize("padding", [0, 3])
def test_images_and_three_dimensional_positions(mode, padding):
    text = {**COMMON, "num_hidden_layers": 4}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    image, start = 300, 302
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=301, vision_start_token_id=start
    )
    torch.manual_seed(0)
    target = Qwen2_5_VLForConditionalGeneration(config).eval()
    target.generation_config = GenerationConfig(pad_token_id=0)
    ids = prompt(20) % 299
    ids[0, 3:8] = torch.tensor([start, *[image] * 4])
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.int64), ids], dim=1)
    inputs = {
        "input_ids": ids,
        "attention_mask": (torch.arange(20 + padding) >= padding).long()[None],
        "mm_token_type_ids": (ids == image).long(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    assert_same_as_plain(target, set_tree(new_draft(target, half=False), "cpu"), inputs, **mode)


def test_generation_config_objects():
    target, draft = pair("llama")
    switches = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    config = GenerationConfig(
        max_new_tokens=9, do_sample=True, top_k=12, repetition_penalty=1.2, pad_token_id=0, **switches
    )
    before = config.to_dict()
    outs = []
    for assistant in (None, draft.foretell([])):
        torch.manual_seed(0)
        outs.append(target.generate(prompt(7), generation_config=config, assistant_model=assistant))
    assert torch.equal(outs[1].sequences, outs[0].sequences)
    assert outs[1].keys() == outs[0].keys()
    torch.testing.assert_close(outs[1].scores, outs[0].scores)
    assert config.to_dict() == before


def test_sampling_that_the_model_itself_asks_for():
    target = tiny("llama", num_hidden_layers=4)
    target.generation_config.update(do_sample=True, temperature=0.8, top_k=12)
    assert_same_as_plain(target, new_draft(target, half=False), prompt(7))
