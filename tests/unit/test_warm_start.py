"""A new head starts from its target: what is copied, found by calling the target's modules, and what is left alone."""

import pytest
import torch
from torch import nn

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.model.warm_start import dense_rows, special_ids
from support.families import FAMILIES, HIDDEN_SIZE, VOCAB_SIZE, prompt, tiny


LAYERS = 4
IDS = torch.arange(0, VOCAB_SIZE, 3)


def from_target(target, draft_vocab=IDS, **overrides) -> Eagle3DraftModel:
    return Eagle3DraftModel.from_target(target, draft_vocab=draft_vocab, **overrides)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_final_norm_and_head_together_are_the_targets(family):
    """On the target's own last feature the new head says what the target says, up to a monotone soft cap."""
    target = tiny(family, num_hidden_layers=LAYERS)
    draft = from_target(target)
    features = torch.randn(1, 5, HIDDEN_SIZE)
    expected = target.lm_head(target.get_decoder().norm(features))
    torch.testing.assert_close(draft.compute_logits(features), expected[..., IDS], rtol=1e-4, atol=1e-4)
    whole = from_target(target, None)
    torch.testing.assert_close(whole.compute_logits(features), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_fc_passes_the_high_feature():
    draft = from_target(tiny("llama", num_hidden_layers=LAYERS), initializer_range=0.0)
    features = torch.randn(1, 5, 3 * HIDDEN_SIZE)
    assert torch.equal(draft.fuse(features), features[..., -HIDDEN_SIZE:])


def test_the_layer_copies_the_last_block():
    target = tiny("llama", num_hidden_layers=LAYERS)
    layer, block = from_target(target).layers[0], target.model.layers[-1]
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert torch.equal(getattr(layer.mlp, name).weight, getattr(block.mlp, name).weight)
    for name in ("q_proj", "k_proj", "v_proj"):
        mine, theirs = getattr(layer.self_attn, name).weight, getattr(block.self_attn, name).weight
        assert torch.equal(mine[:, HIDDEN_SIZE:], theirs)
    assert torch.equal(layer.self_attn.o_proj.weight, block.self_attn.o_proj.weight)
    torch.testing.assert_close(layer.post_attention_layernorm.weight, block.post_attention_layernorm.weight)
    assert layer.mlp.gate_proj.weight.data_ptr() != block.mlp.gate_proj.weight.data_ptr()


@pytest.mark.parametrize(("family", "norm"), [("gemma2", "pre_feedforward_layernorm"), ("olmo2", None)])
def test_the_norm_before_the_mlp_goes_by_other_names(family, norm):
    target = tiny(family, num_hidden_layers=LAYERS)
    mine, block = from_target(target).layers[0].post_attention_layernorm.weight, target.model.layers[-1]
    expected = 1 + getattr(block, norm).weight if norm else torch.ones(HIDDEN_SIZE)
    torch.testing.assert_close(mine, expected)


def test_shapes_that_do_not_agree_are_left_as_they_were():
    target = tiny("llama", num_hidden_layers=LAYERS)
    draft = from_target(target, hidden_size=32, head_dim=8, own_embeddings=True, intermediate_size=48)
    assert draft.embed_tokens.weight.shape == (VOCAB_SIZE, 32)
    assert torch.equal(draft.norm.weight, torch.ones(32))
    assert float(draft.lm_head.weight.detach().std()) < 0.1
    narrow = from_target(target, intermediate_size=48)
    assert narrow.layers[0].mlp.gate_proj.weight.shape == (48, HIDDEN_SIZE)
    assert torch.equal(narrow.layers[0].self_attn.o_proj.weight, target.model.layers[-1].self_attn.o_proj.weight)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_embedding_of_its_own_starts_as_what_it_would_borrow(family):
    """Gemma scales its rows when called."""
    target = tiny(family, num_hidden_layers=LAYERS)
    draft, ids = from_target(target, own_embeddings=True), prompt(7)
    torch.testing.assert_close(draft.borrow().embed(ids), target.get_input_embeddings()(ids))
    torch.testing.assert_close(draft.borrow().embed(ids), from_target(target).borrow().embed(ids))


def test_config_of_a_new_head():
    target = tiny("qwen3", num_hidden_layers=LAYERS)
    config = from_target(target, target_layer_ids=[0, 4], num_hidden_layers=2).config
    assert config.target_layer_ids == [0, 4]
    assert config.num_hidden_layers == 2
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (HIDDEN_SIZE, 16, 2)
    assert (config.vocab_size, config.draft_vocab_size) == (VOCAB_SIZE, len(IDS))
    assert (config.target_num_hidden_layers, config.target_model_type) == (LAYERS, "qwen3")
    assert config.rms_norm_eps == target.config.rms_norm_eps


@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_shallow_targets(layers):
    target = tiny("llama", num_hidden_layers=layers)
    draft = from_target(target)
    plain = target.generate(prompt(5), max_new_tokens=8, do_sample=False)
    assert torch.equal(target.generate(prompt(5), assistant_model=draft, max_new_tokens=8, do_sample=False), plain)


def test_rope_is_shared_where_it_depends_on_the_position_alone():
    target = tiny("llama", num_hidden_layers=LAYERS)
    for rope, kept in (
        ({"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, True),
        ({"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0}, False),
        ({"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}, False),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e6}}, False),
    ):
        target.config.rope_parameters = rope
        expected = rope if kept else {"rope_type": "default", "rope_theta": 10000.0}
        assert from_target(target).config.rope_parameters == expected


def test_mixture_of_experts_gets_a_dense_width():
    target = tiny("gpt_oss", num_hidden_layers=LAYERS, intermediate_size=32)
    assert from_target(target).config.intermediate_size == 2 * HIDDEN_SIZE


def test_parameters_are_new_float32_and_trainable_whatever_the_target():
    target = tiny("llama", num_hidden_layers=LAYERS).to(torch.bfloat16).requires_grad_(False)
    draft = from_target(target)
    assert draft.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in draft.parameters())
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[IDS].float())
    assert from_target(target, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_special_ids_are_always_worth_drafting():
    target = tiny("llama", num_hidden_layers=LAYERS)
    target.generation_config.eos_token_id = [7, 300]
    target.generation_config.bos_token_id = 5
    assert special_ids(target) == [0, 5, 7, 300]
    counts = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
    counts[100:200] = 9
    draft = Eagle3DraftModel.from_target(target, draft_vocab=counts, draft_vocab_size=50)
    assert {0, 5, 7, 300} < set(draft.draft_vocab_ids().tolist())


# ----- head rows --------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Stands for a quantised layer: eight-bit weights that nobody outside may look at."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, inputs):
        return inputs @ (self.packed.to(inputs.dtype) * self.scale).T


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_rows_are_the_weight(bias, dtype):
    linear = nn.Linear(20, 30, bias=bias).to(dtype)
    ids = torch.tensor([0, 7, 29])
    rows = dense_rows(linear, ids, 20, chunk=8)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3 if bias else 0
    torch.testing.assert_close(rows, linear.weight[ids].float(), rtol=tolerance, atol=tolerance)


def test_dense_rows_of_a_layer_without_float_weights():
    packed = Packed(nn.Linear(20, 30, bias=False))
    rows = dense_rows(packed, torch.tensor([3, 4]), 20)
    torch.testing.assert_close(rows, packed.packed[3:5].float() * packed.scale)


def test_quantised_head_of_a_target():
    target = tiny("llama", num_hidden_layers=LAYERS)
    target.lm_head = Packed(target.lm_head)
    draft = from_target(target)
    torch.testing.assert_close(draft.lm_head.weight, target.lm_head.packed[IDS].float() * target.lm_head.scale)
