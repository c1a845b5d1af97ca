"""Heads of other depths, widths, vocabularies, features and starts than the usual: they train, and decode the text."""

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt.settings import TTTSettings
from support.chats import chat_tokenizer, tiny_target
from support.families import HIDDEN_SIZE, VOCAB_SIZE, prompt, tiny
from support.training_runs import chats, new_draft, trainer_for


LAYERS = 4
SOME_IDS = torch.arange(0, VOCAB_SIZE, 2)
SHAPES = {
    "usual": {},
    "two layers": {"num_hidden_layers": 2},
    "more layers than the target": {"num_hidden_layers": 5},
    "narrow": {"hidden_size": 32},
    "narrower than a head of the target": {"hidden_size": 12},
    "wide": {"hidden_size": 96},
    "narrow MLP": {"intermediate_size": 40},
    "few heads": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "whole vocabulary": {"draft_vocab": None},
    "small vocabulary": {"draft_vocab": torch.arange(0, VOCAB_SIZE, 9)},
    "top feature": {"target_layer_ids": [LAYERS]},
    "five features": {"target_layer_ids": [0, 1, 2, 3, 4]},
    "cold": {"warm_start": False},
    "own embeddings": {"own_embeddings": True},
    "final output": {"use_aux_hidden_state": False},
}


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=LAYERS)


def new(target, **options) -> Eagle3DraftModel:
    return Eagle3DraftModel.from_target(target, **{"draft_vocab": SOME_IDS, **options})


def train(draft, target, settings: TTTSettings, steps: int = 2) -> list[float]:
    """Losses of some optimizer steps on one batch."""
    ids = prompt(24, seed=1, rows=2)
    labels = torch.where(torch.arange(24) > 4, ids, -100)
    teacher = Teacher(
        target, draft.config.target_layer_ids, draft.draft_vocab_ids(), last_features=settings.feature_loss_weight > 0
    )
    taught = teacher({"input_ids": ids, "labels": labels})
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], 2e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = draft(ids, labels=labels, settings=settings, **taught).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("shape", SHAPES)
def test_heads_of_every_shape_train_and_decode_the_targets_text(target, shape):
    draft = new(target, **SHAPES[shape])
    before = {name: parameter.detach().clone() for name, parameter in draft.named_parameters()}
    first, second = train(draft, target, TTTSettings(num_steps=3))
    assert second < first
    for name, parameter in draft.named_parameters():
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, before[name]), f"{name} did not learn"
    ids = prompt(9, seed=3)
    plain = target.generate(ids, max_new_tokens=12, do_sample=False)
    drafted = target.generate(ids, assistant_model=draft.eval(), max_new_tokens=12, do_sample=False)
    assert torch.equal(drafted, plain)


def test_widths_follow_the_hidden_size(target):
    narrow = new(target, hidden_size=32).config
    assert (narrow.hidden_size, narrow.target_hidden_size, narrow.intermediate_size) == (32, HIDDEN_SIZE, 64)
    assert (narrow.num_attention_heads, narrow.num_key_value_heads, narrow.head_dim) == (2, 1, 16)
    assert narrow.own_embeddings
    odd = new(target, hidden_size=48).config
    assert (odd.num_attention_heads, odd.num_key_value_heads) == (3, 3)  # the target's groups of two do not divide it
    chosen = new(target, hidden_size=32, num_attention_heads=4, head_dim=8, intermediate_size=100).config
    assert (chosen.num_attention_heads, chosen.num_key_value_heads, chosen.head_dim) == (4, 2, 8)
    assert chosen.intermediate_size == 100


def test_deeper_heads_copy_the_last_blocks_in_order(target):
    layers, blocks = new(target, num_hidden_layers=3).layers, target.model.layers[-3:]
    for layer, block in zip(layers, blocks, strict=True):
        assert torch.equal(layer.mlp.down_proj.weight, block.mlp.down_proj.weight)
        assert torch.equal(layer.self_attn.q_proj.weight[:, -HIDDEN_SIZE:], block.self_attn.q_proj.weight)
        assert torch.equal(layer.self_attn.o_proj.weight, block.self_attn.o_proj.weight)
    for layer, block in zip(layers[1:], blocks[1:], strict=True):
        torch.testing.assert_close(layer.input_layernorm.weight, block.input_layernorm.weight)


@pytest.mark.parametrize("draft_vocab", [SOME_IDS, None, "later"])
def test_a_cold_start_copies_nothing(target, draft_vocab):
    later = draft_vocab == "later"
    options = {"draft_vocab": None, "draft_vocab_size": len(SOME_IDS)} if later else {"draft_vocab": draft_vocab}
    cold = new(target, warm_start=False, own_embeddings=True, **options)
    if later:
        cold.set_draft_vocab(SOME_IDS)  # as the trainer does
    rows = target.lm_head.weight[cold.draft_vocab_ids()]
    assert not torch.equal(cold.lm_head.weight, rows)
    assert float(cold.lm_head.weight.detach().std()) < 0.03
    assert torch.equal(cold.norm.weight, torch.ones(HIDDEN_SIZE))
    assert float(cold.embed_tokens.weight.detach().std()) < 0.03
    assert not torch.equal(cold.layers[0].mlp.up_proj.weight, target.model.layers[-1].mlp.up_proj.weight)


# ----- EAGLE-2's way -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_type", ["soft_cross_entropy", "kl", "acceptance"])
def test_every_loss_trains(target, loss_type):
    losses = train(new(target), target, TTTSettings(num_steps=3, loss_type=loss_type), steps=4)
    assert losses[-1] < losses[0]


def test_one_step_on_the_top_feature_with_its_regression_is_eagle_2(target):
    draft = new(target, target_layer_ids=[LAYERS])
    settings = TTTSettings(num_steps=1, feature_loss_weight=1.0)
    losses = train(draft, target, settings, steps=4)
    assert losses[-1] < losses[0]
    torch.manual_seed(0)
    without = train(new(target, target_layer_ids=[LAYERS]), target, TTTSettings(num_steps=1), steps=1)
    torch.manual_seed(0)
    with_it = train(new(target, target_layer_ids=[LAYERS]), target, settings, steps=1)
    assert with_it[0] > without[0]


def test_regression_brings_the_output_to_the_targets_feature(target):
    """Trained by nothing else, the output comes nearer to the feature that it stands for."""
    draft = new(target, target_layer_ids=[LAYERS])
    regression = TTTSettings(num_steps=1, feature_loss_weight=1000.0)
    losses = train(draft, target, regression, steps=12)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 32}, "output of width 32 with the target's feature of width 64"),
        ({"use_aux_hidden_state": False}, "reads the normed output"),
    ],
)
def test_heads_that_cannot_be_compared_with_a_feature_are_refused(target, options, message):
    with pytest.raises(ValueError, match=message):
        train(new(target, **options), target, TTTSettings(num_steps=1, feature_loss_weight=0.1))


# ----- through the trainer -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="module")
def chat_target(tokenizer):
    torch.manual_seed(0)
    return tiny_target(tokenizer)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "kl"},
        {"loss_type": "acceptance", "packing": True, "max_length": 128},
        {"step_weights": [1.0, 0.0, 2.0]},
        {"feature_loss_weight": 0.5},
        {"feature_loss_weight": 0.5, "packing": True, "max_length": 128, "checkpoint_ttt_steps": True},
        {"loss_chunk": 0, "position_share": 0.5},
    ],
    ids=lambda options: " ".join(options),
)
def test_training_arguments_reach_the_loss(chat_target, tokenizer, tmp_path, options):
    trainer = trainer_for(chat_target, chats(), tmp_path, tokenizer, max_steps=4, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_a_width_that_cannot_be_compared_is_refused_before_any_work(chat_target, tokenizer, tmp_path):
    narrow = new_draft(chat_target, hidden_size=32)
    with pytest.raises(ValueError, match="give the head the target's hidden_size, or set feature_loss_weight to 0"):
        trainer_for(chat_target, chats(), tmp_path, tokenizer, narrow, feature_loss_weight=1.0)


def test_frozen_embeddings_stay_as_they_were(chat_target, tokenizer, tmp_path):
    for frozen in (True, False):
        draft = new_draft(chat_target, own_embeddings=True)
        before = draft.embed_tokens.weight.detach().clone()
        trainer_for(chat_target, chats(), tmp_path, tokenizer, draft, freeze_embeddings=frozen).train()
        assert torch.equal(draft.embed_tokens.weight, before) == frozen
