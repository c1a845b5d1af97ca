"""A loss that is not finite: the run stops, names the sample, and neither weights nor checkpoints are ruined."""

import pytest
import torch
from transformers import TrainerCallback

from eagle3_hf.training.callbacks import NanGuard
from eagle3_hf.training.callbacks.nan_guard import samples_of
from eagle3_hf.training.targets.feature_store import StoredFeatures, write_features
from support.training_runs import history, new_draft, trainer_for, weights


@pytest.fixture
def poisoned(target, rows, tmp_path):
    """A store of which row 5 has a NaN among its features."""
    from safetensors.torch import load_file, save_file

    write_features(target, rows, tmp_path / "store", [0, 1, 2], dtype=torch.float32, shard_size=3, progress=False)
    path = tmp_path / "store" / "shard-00001.safetensors"
    tensors = load_file(path)
    tensors["features"][-1, 7] = float("nan")
    save_file(tensors, path)
    return StoredFeatures(tmp_path / "store")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_sample_with_the_nan_is_named(target, tokenizer, poisoned, tmp_path, packing, accumulation):
    """By its row in the dataset and its text, also packed and among several micro-batches."""
    trainer = trainer_for(
        target,
        poisoned,
        tmp_path,
        tokenizer,
        max_steps=8,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        packing=packing,
        max_length=128,
        save_strategy="steps",
        save_steps=1,
        logging_steps=50,
    )
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    message = str(raised.value)
    text = tokenizer.decode(poisoned[5]["input_ids"][:40])
    assert f"example 5 of train_dataset ({text[:100]!r}): the target's features are not finite" in message
    assert message.count("of train_dataset") == 1
    assert "in bfloat16" in message
    assert f"step {trainer.state.global_step}" in message
    assert not (tmp_path / "out" / f"checkpoint-{trainer.state.global_step}").exists()
    assert all(tensor.isfinite().all() for tensor in trainer.model.state_dict().values())


def test_the_flag_is_read_a_step_later_and_the_weights_are_spared(target, poisoned, tmp_path):
    """Without logs, evaluations and saves nothing asks earlier: the bad step's gradients must have been zeroed."""
    trainer = trainer_for(target, poisoned, tmp_path, max_steps=2, per_device_train_batch_size=8, logging_steps=50)
    before, seen = weights(trainer.model), []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(state.global_step)

    trainer.add_callback(Watch())
    with pytest.raises(RuntimeError, match="step 1 is not finite"):
        trainer.train()
    assert seen == [1]
    for name, tensor in weights(trainer.model).items():
        assert torch.equal(tensor, before[name]), name


def test_the_last_step_is_checked_too(target, poisoned, tmp_path):
    options = {"max_steps": 1, "per_device_train_batch_size": 8, "logging_steps": 50}
    with pytest.raises(RuntimeError, match="step 1 is not finite"):
        trainer_for(target, poisoned, tmp_path, **options).train()


def test_weights_that_are_not_finite_are_told_from_samples(target, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, draft=new_draft(target, None))
    with torch.no_grad():
        trainer.model.norm.weight[0] = float("nan")
    before = weights(trainer.model)
    with pytest.raises(RuntimeError, match=r"every chat .* lower learning_rate \(now 0.002\) or raise warmup_steps"):
        trainer.train()
    for name, tensor in weights(trainer.model).items():
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num())


def test_an_infinite_gradient_under_a_finite_loss_stops_too(target, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, max_grad_norm=0.0)
    trainer.model.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(trainer.model)
    with pytest.raises(RuntimeError, match="no chat of the batch is the cause alone"):
        trainer.train()
    for name, tensor in weights(trainer.model).items():
        assert torch.equal(tensor, before[name]), name


def test_nothing_waits_for_the_device_between_steps(target, rows, tmp_path, monkeypatch):
    """A number is read off a tensor of this step nowhere: not for the loss, not for the gradient."""
    trainer = trainer_for(target, rows, tmp_path, max_steps=3, logging_steps=50)
    assert not trainer.args.logging_nan_inf_filter
    read = []
    monkeypatch.setattr(NanGuard, "check", lambda self: read.append(self._closed.number))
    trainer.train()
    assert read == [0, 1, 2, 3]  # before each update the step before it; the last at the end
    assert len(history(trainer, "train_loss")) == 1


def test_samples_of_a_batch():
    """Padding is cut off, packed chats come apart."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 0, 0], [6, 7, 8, 9, 10, 11, 12]])
    batch = {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": (ids > 0).long(),
        "position_ids": torch.tensor([[0, 1, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6]]),
    }
    assert [s.input_ids.tolist() for s in samples_of(batch)] == [[1, 2], [3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]
    del batch["position_ids"]
    assert [s.input_ids.tolist() for s in samples_of(batch)] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12]]
