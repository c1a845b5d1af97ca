"""`examples/ablation.py` on a tiny target: four heads from the same start, trained and decoded, in a table."""

import argparse

import pytest
import torch

from support.chats import chat_tokenizer, tiny_target
from support.examples import load_example
from support.training_runs import chats


@pytest.fixture(scope="module")
def ablation():
    return load_example("ablation")


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return tiny_target(chat_tokenizer())


def options(workdir, **overrides) -> argparse.Namespace:
    fields = {
        "workdir": workdir,
        "draft_vocab_size": 200,
        "max_length": 64,
        "held_out": 2,
        "prompts": 2,
        "new_tokens": 8,
        "max_steps": 2,
        "batch_size": 3,
        "ttt_steps": 3,
        "learning_rate": 1e-3,
        "seed": 0,
    }
    return argparse.Namespace(**{**fields, **overrides})


def test_every_row_is_trained_and_decoded(ablation, target, tmp_path, monkeypatch):
    tokenizer, trained = chat_tokenizer(), []
    original = ablation.new_trainer

    def new_trainer(draft, *args, **kwargs):
        trainer = original(draft, *args, **kwargs)
        if kwargs.get("train_dataset") is not None:
            arguments = trainer.args
            trained.append((draft.config.target_layer_ids, arguments.ttt_steps, arguments.feature_loss_weight))
        return trainer

    monkeypatch.setattr(ablation, "new_trainer", new_trainer)
    results = ablation.ablate(target, tokenizer, chats(), options(tmp_path))
    layers = target.config.num_hidden_layers
    fused = trained[-1][0]
    assert len(fused) > 1
    assert trained == [([layers], 1, 10.0), ([layers], 1, 0.0), ([layers], 3, 0.0), (fused, 3, 0.0)]
    for _, tau, promised in results:
        assert 1 <= tau <= 9
        assert 1 <= promised <= 4
    lines = ablation.table(results).splitlines()
    assert len(lines) == 2 + 4
    assert lines[-1].startswith("| + fused features (EAGLE-3) | ")
    again = ablation.ablate(target, tokenizer, chats(), options(tmp_path))  # from the folders that are there
    assert again == results
    assert len(trained) == 4
    with pytest.raises(ValueError, match=r"heads of another run: max_steps 2 \(now 3\)"):
        ablation.ablate(target, tokenizer, chats(), options(tmp_path, max_steps=3))


def test_nothing_left_to_train_on(ablation, target, tmp_path):
    with pytest.raises(ValueError, match="there are 8 chats, of which 8 are to be held out"):
        ablation.ablate(target, chat_tokenizer(), chats(), options(tmp_path, held_out=8))
