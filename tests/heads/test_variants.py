"""Heads that are built otherwise: latent attention, windows, a part of the head rotated, one feature and no `fc`.

`test_modeling`, `test_drafting` and `test_ttt` hold them to the same equalities as all heads. Here: transformers' own
latent attention as an oracle, the way through `generate`, the trainer and the store, and what a new one starts from.
"""

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3_hf import Eagle3Candidate, Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.model.attention import CachedAttention
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.target_modules import text_backbone
from eagle3_hf.training.targets.feature_store import StoredFeatures, write_features
from eagle3_hf.ttt.loss import IGNORE_INDEX
from support.drafts import assert_same_as_plain, new_draft, set_tree, target_of
from support.families import HIDDEN_SIZE, deepseek, prompt, tiny
from support.heads import LATENT, VARIANTS, new_head


NO_HEAD_SIZES = {"num_key_value_heads": None, "head_dim": None}
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 8.0, "original_max_position_embeddings": 32}


# ----- latent attention ----------------------------------------------------------------------------------------------


def transformers_attention(draft, monkeypatch) -> tuple[nn.Module, nn.Module]:
    """transformers' attention and rotary embedding for the head's first layer, with the head's weights."""
    mine = draft.config
    names = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "attention_bias", "rope_interleave", *LATENT)
    sizes = {name: getattr(mine, name) for name in (*names, "max_position_embeddings", "rms_norm_eps")}
    config = DeepseekV3Config(hidden_size=2 * HIDDEN_SIZE, rope_parameters=dict(mine.rope_parameters), **sizes)
    config._attn_implementation = "eager"
    theirs = DeepseekV3Attention(config, 0)
    weights = dict(draft.layers[0].self_attn.state_dict())
    for name in ("o_proj.weight", "o_proj.bias"):  # theirs gives back what it reads, 2H; ours H
        if name in weights:
            weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])])
    theirs.load_state_dict(weights)
    return theirs.eval(), DeepseekV3RotaryEmbedding(config)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"rope_interleave": False},
        {"attention_bias": True},
        {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 0.5}},
    ],
    ids=str,
)
def test_latent_attention_is_that_of_transformers(q_lora_rank, overrides, implementation, monkeypatch):
    # theirs norms its latents with its own default, whatever the config says; engines with the config's
    draft = new_head(**LATENT, **NO_HEAD_SIZES, q_lora_rank=q_lora_rank, rms_norm_eps=1e-6, **overrides)
    draft.set_attn_implementation(implementation)
    theirs, rotary_emb = transformers_attention(draft, monkeypatch)
    inputs, positions = torch.randn(2, 9, 2 * HIDDEN_SIZE), torch.arange(3, 12)[None]
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = theirs(inputs, position_embeddings=rotary_emb(inputs, positions), attention_mask=mask)[0]

    def attend(*args):
        return CachedAttention()(*args, position_ids=positions)

    mine = draft.layers[0].self_attn(inputs, draft.rotary_emb(inputs, positions), attend)
    torch.testing.assert_close(mine, expected[..., :HIDDEN_SIZE], rtol=1e-6, atol=1e-6)


def test_tensors_of_a_latent_head_have_deepseeks_names_and_the_first_layer_reads_twice_the_width():
    overrides = {**LATENT, **NO_HEAD_SIZES, "q_lora_rank": 20, "num_hidden_layers": 2}
    shapes = {name: tuple(tensor.shape) for name, tensor in new_head(**overrides).state_dict().items()}
    for layer, width in ((0, 2 * HIDDEN_SIZE), (1, HIDDEN_SIZE)):
        attention = {
            name.split("self_attn.")[1]: shape
            for name, shape in shapes.items()
            if name.startswith(f"layers.{layer}.self_attn.")
        }
        assert attention == {
            "q_a_proj.weight": (20, width),
            "q_a_layernorm.weight": (20,),
            "q_b_proj.weight": (4 * 20, 20),
            "kv_a_proj_with_mqa.weight": (24 + 8, width),
            "kv_a_layernorm.weight": (24,),
            "kv_b_proj.weight": (4 * 22, 24),
            "o_proj.weight": (HIDDEN_SIZE, 4 * 10),
        }


def test_a_latent_head_starts_from_the_last_block_of_a_latent_target():
    target = deepseek()
    draft = Eagle3DraftModel.from_target(target, **LATENT, q_lora_rank=20)
    mine, theirs = draft.layers[0].self_attn, target.model.layers[-1].self_attn
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        assert torch.equal(getattr(mine, name).weight[:, HIDDEN_SIZE:], getattr(theirs, name).weight)
        assert not torch.equal(getattr(mine, name).weight[:, :HIDDEN_SIZE], getattr(theirs, name).weight)
    for name in ("q_b_proj", "kv_b_proj", "o_proj"):
        assert torch.equal(getattr(mine, name).weight, getattr(theirs, name).weight)
    torch.testing.assert_close(mine.kv_a_layernorm.weight, theirs.kv_a_layernorm.weight)


def test_an_output_projection_as_wide_as_the_pair_is_copied_whole():
    """Qwen3-0.6B: twice as many head numbers as the model is wide, so the shape alone does not tell the two apart."""
    target = tiny("qwen3", num_hidden_layers=4, head_dim=32)
    draft = Eagle3DraftModel.from_target(target)
    block = target.model.layers[-1].self_attn
    assert draft.layers[0].self_attn.o_proj.in_features == 2 * HIDDEN_SIZE
    assert torch.equal(draft.layers[0].self_attn.o_proj.weight, block.o_proj.weight)
    assert torch.equal(draft.layers[0].self_attn.v_proj.weight[:, HIDDEN_SIZE:], block.v_proj.weight)


# ----- windows -------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("reach", [1, 3, 5])
def test_a_row_depends_on_its_window_and_on_nothing_before(reach):
    target, ids = target_of("llama"), prompt(12)
    draft = new_head(layer_types=["sliding_attention"], sliding_window=reach).bind(target)
    with FeatureReader(target, draft.config.target_layer_ids) as reader:
        target(ids)
        features = reader.take()
    logits = draft(ids, features).logits
    features[0, 4] += 1
    changed = (draft(ids, features).logits != logits).any(-1)[0]
    assert changed.tolist() == [4 <= row < 4 + reach for row in range(12)]


@torch.no_grad()
def test_a_window_beyond_the_text_changes_nothing():
    target, ids = target_of("llama"), prompt(12)
    plain = new_head().bind(target)
    windowed = new_head(layer_types=["sliding_attention"], sliding_window=12).bind(target)
    windowed.load_state_dict(plain.state_dict())
    with FeatureReader(target, [1, 2, 4]) as reader:
        target(ids)
        features = reader.take()
    assert torch.equal(windowed(ids, features).logits, plain(ids, features).logits)
    trees = []
    for draft in (plain, windowed):
        trees.append(
            Eagle3Candidate(target, set_tree(draft, (10, 2, 4))).draft_tree(DraftInputs(features[:, :9], ids[:, 1:10]))
        )
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].scores, trees[1].scores)


# ----- one feature and no fc -----------------------------------------------------------------------------------------


def test_a_head_of_one_feature_has_no_fc():
    draft = new_head(use_aux_hidden_state=False, target_layer_ids=None)
    assert draft.config.target_layer_ids == [-1]
    assert not [name for name in draft.state_dict() if name.startswith("fc")]
    features = torch.randn(1, 3, HIDDEN_SIZE)
    assert torch.equal(draft.fuse(features), features)
    assert draft.fuse(features.double()).dtype == torch.float32


def test_it_reads_through_wrappers():
    target = target_of("llama")
    assert text_backbone(target) is target.model
    assert text_backbone(target.model) is target.model
    assert text_backbone(nn.Identity()).__class__ is nn.Identity


def rows_of(lengths: list[int]) -> Dataset:
    ids = [prompt(length, seed=length)[0].tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": row, "labels": [IGNORE_INDEX] * 3 + row[3:]} for row in ids])


def trained(target, dataset, tmp_path) -> tuple[Eagle3DraftModel, float]:
    torch.manual_seed(0)
    draft = Eagle3DraftModel.from_target(target, draft_vocab_size=200, use_aux_hidden_state=False)
    arguments = Eagle3TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=3,
        max_steps=2,
        ttt_steps=3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Eagle3Trainer(model=draft, target_model=target, args=arguments, train_dataset=dataset)
    return draft, trainer.train().training_loss


def test_it_trains_alike_online_and_from_a_store(tmp_path):
    target, rows = tiny("gemma2", num_hidden_layers=4, final_logit_softcapping=None), rows_of([9, 12, 7, 11])
    write_features(target, rows, tmp_path / "store", [-1], dtype=torch.float32, progress=False)
    stored = StoredFeatures(tmp_path / "store")
    assert stored.index["layer_ids"] == [-1]
    for item in stored:
        assert torch.equal(item["features"], item["last_hidden"])
    online, loss = trained(target, rows, tmp_path)
    offline, same_loss = trained(target, stored, tmp_path)
    assert same_loss == pytest.approx(loss, rel=1e-4)
    for (name, tensor), other in zip(online.named_parameters(), offline.parameters(), strict=True):
        # By norms: AdamW makes whole steps of gradients that are nothing but rounding, so single numbers may differ.
        assert (other - tensor).norm() <= 1e-4 * tensor.norm(), name
    with pytest.raises(ValueError, match=r"stores hidden_states indices \[-1\], but the draft reads \[1, 2, 3\]"):
        stored.check(target, [1, 2, 3])


# ----- the target's own text -----------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("name", VARIANTS)
def test_text_is_the_targets(name, family, sampled):
    draft = set_tree(new_draft(target_of(family), half=False, **VARIANTS[name]), "cpu")
    assert_same_as_plain(target_of(family), draft, prompt(9), do_sample=sampled)


@pytest.mark.parametrize("overrides", [{}, VARIANTS["final output alone"], {**LATENT, "q_lora_rank": 20}], ids=str)
def test_text_is_that_of_a_latent_target(overrides):
    target = deepseek()
    assert_same_as_plain(
        target, set_tree(new_draft(target, half=False, **overrides), "cpu"), prompt(9), do_sample=False
    )


def test_transformers_own_loop_gives_the_one_feature():
    target, ids = target_of("llama"), prompt(7)
    draft = new_draft(target, half=False, **VARIANTS["final output alone"])
    candidate = Eagle3Candidate(target, set_tree(draft, "chain"))
    with torch.no_grad(), FeatureReader(target, [-1]) as reader:
        outputs = target(ids, output_hidden_states=True)
        assert torch.equal(candidate._stock_features(outputs.hidden_states), reader.take())
