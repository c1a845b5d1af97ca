"""`Eagle3Trainer`: a tiny head learns, from chats and from stored features, and nothing but the head changes."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from peft import PromptTuningConfig, get_peft_model
from transformers import HfArgumentParser, TrainerCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

from eagle3_hf import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from eagle3_hf.training.data.encoding import count_tokens, special_token_ids
from eagle3_hf.training.targets.feature_store import StoredFeatures, write_features
from eagle3_hf.ttt.loss import IGNORE_INDEX
from eagle3_hf.ttt.settings import TTTSettings
from support.chats import chat_tokenizer, tiny_target
from support.families import tiny
from support.processes import run_in_two
from support.training_runs import (
    Gradients,
    StopAfter,
    arguments,
    assert_same_weights,
    chats,
    history,
    new_draft,
    trainer_for,
    weights,
)


@pytest.fixture(scope="module")
def stored(target, rows, tmp_path_factory) -> StoredFeatures:
    directory = tmp_path_factory.mktemp("features")
    write_features(target, rows, directory, [0, 1, 2], dtype=torch.float32, shard_size=3, progress=False)
    return StoredFeatures(directory)


# ----- learning ------------------------------------------------------------------------------------------------------


def test_a_tiny_head_learns(target, tokenizer, tmp_path):
    """Loss falls and accuracy rises, at every step of the unroll. From stored features, the next test says."""
    trainer = trainer_for(target, chats(), tmp_path, tokenizer, max_steps=60, logging_steps=5, learning_rate=5e-3)
    trainer.train()
    losses, lengths = history(trainer, "loss"), history(trainer, "simulated_acceptance_length")
    assert losses[-1] < 0.85 * losses[0]
    assert lengths[-1] > lengths[0] + 0.6
    for step in range(3):
        accuracies = history(trainer, f"accuracy_step_{step}")
        assert accuracies[-1] > accuracies[0] + 0.3
        assert all(0 <= accuracy <= 1 for accuracy in accuracies)


def test_online_and_stored_training_are_the_same(target, rows, stored, tmp_path):
    """In float32, every loss and the final weights."""
    runs = [trainer_for(target, data, tmp_path, max_steps=4) for data in (rows, stored)]
    for trainer in runs:
        trainer.train()
    torch.testing.assert_close(*(history(trainer, "loss") for trainer in runs), rtol=1e-5, atol=1e-5)
    assert_same_weights(*(weights(trainer.model) for trainer in runs), atol=1e-5)
    for step in range(3):
        assert history(runs[0], f"accuracy_step_{step}") == history(runs[1], f"accuracy_step_{step}")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-3), (torch.float8_e4m3fn, 5e-3)])
def test_stores_of_fewer_bits_train_as_online_does(tokenizer, rows, tmp_path, dtype, bound):
    """With a bfloat16 target: the losses of four steps, off by at most `bound` of themselves."""
    torch.manual_seed(0)
    target = tiny_target(tokenizer).to(torch.bfloat16)
    write_features(target, rows, tmp_path / "store", [0, 1, 2], dtype=dtype, progress=False)
    losses = []
    for data in (rows, StoredFeatures(tmp_path / "store")):
        trainer = trainer_for(target, data, tmp_path, max_steps=4)
        trainer.train()
        losses.append(history(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=bound)


def test_rows_held_out_of_a_store_are_for_evaluation(target, stored, tmp_path):
    train, held = (StoredFeatures(stored.directory, indices=part) for part in (range(6), range(6, 8)))
    trainer = trainer_for(target, train, tmp_path, eval_dataset=held, eval_strategy="steps", eval_steps=2)
    trainer.train()
    losses = history(trainer, "eval_loss")
    assert len(losses) == 2  # after the second step and at the end
    assert losses[1] != losses[0]
    assert losses[1] == trainer.evaluate(held)["eval_loss"] != trainer.evaluate(train)["eval_loss"]


def test_stored_rows_are_grouped_by_length_without_reading_features(target, stored, tmp_path, monkeypatch):
    trainer = trainer_for(target, stored, tmp_path, train_sampling_strategy="group_by_length")
    monkeypatch.setattr(StoredFeatures, "__getitem__", lambda *_: pytest.fail("a row was read"))
    assert sorted(trainer._get_train_sampler()) == list(range(len(stored)))
    assert sorted(trainer._get_eval_sampler(stored)) == list(range(len(stored)))


# ----- the arguments -------------------------------------------------------------------------------------------------


def test_defaults_are_the_papers(tmp_path):
    args = Eagle3TrainingArguments(output_dir=str(tmp_path), report_to="none")
    assert (args.adam_beta1, args.adam_beta2) == (0.9, 0.95)
    assert (args.max_grad_norm, args.weight_decay) == (0.5, 0.0)
    assert (args.ttt_steps, args.step_decay, args.position_share) == (7, 0.8, 1.0)
    assert "adamw" in str(args.optim).lower()


def test_the_optimizer_has_them(target, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, learning_rate=5e-5)
    optimizer = trainer.create_optimizer()
    assert type(optimizer).__name__ == "AdamW"
    assert {(group["lr"], tuple(group["betas"])) for group in optimizer.param_groups} == {(5e-5, (0.9, 0.95))}


def test_hf_argument_parser_reads_them(tmp_path):
    (args,) = HfArgumentParser(Eagle3TrainingArguments).parse_args_into_dataclasses(
        ["--output_dir", str(tmp_path), "--ttt_steps", "4", "--step_decay", "0.9", "--position_share", "0.33"]
        + ["--max_length", "512", "--learning_rate", "1e-3", "--report_to", "none"]
        + ["--step_weights", "1", "0.7", "0.5", "0.3", "--loss_type", "kl", "--ttt_attention", "eager", "--packing"]
        + ["--checkpoint_ttt_steps", "--loss_chunk", "0", "--feature_loss_weight", "0.1", "--last_turn_only"]
    )
    assert (args.ttt_steps, args.step_decay, args.position_share, args.max_length) == (4, 0.9, 0.33, 512)
    assert (args.learning_rate, args.adam_beta2, args.remove_unused_columns) == (1e-3, 0.95, False)
    assert (args.packing, args.last_turn_only, args.mask_reasoning, args.freeze_embeddings) == (
        True,
        True,
        False,
        False,
    )
    settings = args.ttt_settings()
    assert settings == TTTSettings(4, 0.9, (1.0, 0.7, 0.5, 0.3), 0.33, "kl", 0.1, "eager", True, None)
    assert args.ttt_settings(training=False) == replace(settings, position_share=1.0)


CHECKPOINTING = next(  # its name in later versions, and in earlier ones
    name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ttt_steps", 0, "at least 1, got 0"),
        ("position_share", 0.0, "above 0 and at most 1, got 0.0"),
        ("position_share", 1.5, "got 1.5"),
        ("max_length", 2, "at least 3 .*, got 2"),
        ("loss_type", "mse", "loss_type must be one of"),
        ("step_weights", [1.0], "1 weights, but there are 3 steps"),
        (CHECKPOINTING, True, "for a head set checkpoint_ttt_steps"),
        ("neftune_noise_alpha", 5.0, "a head gets its target's input"),
        ("label_smoothing_factor", 0.1, "a head learns its target's distribution"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **{field: value})


# ----- the target ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own call
def test_a_target_with_virtual_tokens_is_rejected_before_anything_runs(target, rows, tmp_path):
    adapted = get_peft_model(
        tiny("llama", num_hidden_layers=4), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    )
    draft = Eagle3DraftModel.from_target(target, draft_vocab_size=64)
    arguments = Eagle3TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match=r"virtual tokens \(PROMPT_TUNING\).*get_base_model"):
        Eagle3Trainer(model=draft, target_model=adapted, args=arguments, train_dataset=rows)
    with pytest.raises(ValueError, match=r"virtual tokens \(PROMPT_TUNING\)"):
        write_features(adapted, rows, tmp_path / "store", [1, 2, 3])


def test_the_target_is_frozen_and_unchanged(tokenizer, tmp_path):
    torch.manual_seed(0)
    target = tiny_target(tokenizer).train()
    before, modes = weights(target), []
    trainer = trainer_for(target, chats(), tmp_path, tokenizer)

    class Watch(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            modes.append((target.training, trainer.model.training))

    trainer.add_callback(Watch())
    trainer.train()
    assert modes == [(False, True)] * 3
    assert not target.training
    assert all(not parameter.requires_grad and parameter.grad is None for parameter in target.parameters())
    assert_same_weights(before, weights(target), atol=0)
    trained = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in trainer.model.parameters()}


def test_checkpoints_hold_the_head_alone_and_load(target, tokenizer, tmp_path):
    trainer = trainer_for(target, chats(), tmp_path, tokenizer, max_steps=4, save_strategy="steps", save_steps=2)
    seen = {}

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            seen[state.global_step] = weights(model)

    trainer.add_callback(Watch())
    trainer.train()
    size = sum(tensor.numel() * tensor.element_size() for tensor in trainer.model.state_dict().values())
    for step in (2, 4):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        assert size <= (folder / "model.safetensors").stat().st_size <= size + 4096
        # What Trainer adds: two moments of every weight, and the state of schedule and generators.
        assert sum(path.stat().st_size for path in folder.iterdir()) < 3 * size + 200_000
        head = Eagle3DraftModel.from_pretrained(folder)
        assert_same_weights(weights(head), seen[step], atol=0)
        assert head.has_draft_vocab
        prompt = torch.tensor([tokenizer("What is the capital of France?")["input_ids"]])
        ids = target.generate(prompt, assistant_model=head, max_new_tokens=12, do_sample=False)
        assert torch.equal(ids, target.generate(prompt, max_new_tokens=12, do_sample=False))


# ----- the loss ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [[], [{"input_ids": [5, 6, 7, 8, 9], "labels": [IGNORE_INDEX] * 5}]])
def test_loss_and_gradients_do_not_depend_on_the_micro_batches(target, rows, tmp_path, extra):
    """8 rows of unequal lengths as 1 x 8, 2 x 4 and 8 x 1; also where one micro-batch has nothing to learn."""
    data = [*list(rows)[: 8 - len(extra)], *extra]
    results = []
    for size in (1, 2, 8):
        trainer = trainer_for(
            target,
            data,
            tmp_path,
            draft=new_draft(target, 200),
            max_steps=2,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            max_grad_norm=1e9,
        )
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        results.append((history(trainer, "loss"), history(trainer, "accuracy_step_1"), gradients.steps))
    for losses, accuracies, gradients in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        assert accuracies == pytest.approx(results[0][1])
        for mine, first in zip(gradients, results[0][2], strict=True):
            assert_same_weights(mine, first, atol=1e-5)


def test_the_loss_is_the_mean_over_the_supervised_tokens_of_the_step(target, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, max_steps=1, per_device_train_batch_size=8, learning_rate=0.0)
    trainer.train()
    batch = trainer.data_collator(list(rows))
    with torch.no_grad():
        output = trainer.model(**trainer.draft_inputs(batch), num_items_in_batch=1)
    count = sum(label != IGNORE_INDEX for row in rows["labels"] for label in row)
    assert history(trainer, "loss") == pytest.approx([float(output.loss) / count], rel=1e-5)
    accuracies = (output.step_hits / output.step_counts).tolist()
    a, b, c = accuracies
    assert [history(trainer, f"accuracy_step_{step}")[0] for step in range(3)] == pytest.approx(accuracies)
    assert history(trainer, "simulated_acceptance_length") == pytest.approx([1 + a + a * b + a * b * c])


def test_labels_that_no_row_can_learn_are_not_counted(target, tmp_path):
    """Rows of other makers may label their first two tokens."""
    ids = list(range(5, 25))
    losses = []
    for labels in (ids, [IGNORE_INDEX] * 2 + ids[2:]):
        trainer = trainer_for(target, [{"input_ids": ids, "labels": labels}] * 4, tmp_path, max_steps=1)
        trainer.train()
        losses.append(history(trainer, "loss"))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("source", ["online", "stored"])
def test_packed_rows_teach_what_chats_do(target, rows, stored, tmp_path, source):
    """All chats in one batch, one row each or packed: one loss, one gradient, and other rows per batch than chats."""
    data = stored if source == "stored" else rows
    results = []
    for packing, size in ((False, 8), (True, 8)):
        options = {"packing": packing, "max_length": 160, "per_device_train_batch_size": size, "max_grad_norm": 1e9}
        trainer = trainer_for(target, data, tmp_path, max_steps=1, eval_dataset=data, **options)
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        results.append((history(trainer, "loss"), trainer.evaluate()["eval_loss"], gradients.steps[0]))
        assert (len(trainer.train_dataset) < 8) == packing
    assert results[1][:2] == (pytest.approx(results[0][0], rel=1e-5), pytest.approx(results[0][1], rel=1e-4))
    assert_same_weights(results[1][2], results[0][2], atol=1e-5)


def test_checkpointed_steps_may_be_the_first_of_a_process(target, rows, tmp_path):
    """Fused attention is tried out at its first call, which must not disturb the checkpoint around it."""
    from eagle3_hf.ttt import fused

    fused._trial.cache_clear()
    runs = []
    for checkpointed in (True, False):
        trainer = trainer_for(target, rows, tmp_path, checkpoint_ttt_steps=checkpointed)
        trainer.train()
        runs.append(history(trainer, "loss"))
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)


def test_an_embedding_of_its_own_can_be_frozen(target, rows, tmp_path):
    for freeze in (False, True):
        draft = new_draft(target, own_embeddings=True)
        before = draft.embed_tokens.weight.detach().clone()
        trainer_for(target, rows, tmp_path, draft=draft, freeze_embeddings=freeze).train()
        assert torch.equal(draft.embed_tokens.weight, before) == freeze


def test_turns_of_rows_that_are_tokens_cannot_be_chosen_any_more(target, rows, stored, tmp_path):
    for data, option in ((rows, "last_turn_only"), (stored, "mask_reasoning")):
        with pytest.raises(
            ValueError, match="these examples are tokens already: set them where the chats are encoded"
        ):
            trainer_for(target, data, tmp_path, **{option: True})


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_is_weighted_by_tokens(target, rows, tmp_path, batch_size):
    trainer = trainer_for(target, rows, tmp_path, eval_dataset=rows, per_device_eval_batch_size=batch_size)
    metrics = trainer.evaluate()
    batch = trainer.data_collator(list(rows))
    with torch.no_grad():
        output = trainer.model(**trainer.draft_inputs(batch))
    assert metrics["eval_loss"] == pytest.approx(float(output.loss), rel=1e-5)
    for step in range(3):
        expected = float(output.step_hits[step] / output.step_counts[step])
        assert metrics[f"eval_accuracy_step_{step}"] == pytest.approx(expected)
    assert 1 <= metrics["eval_simulated_acceptance_length"] <= 4


def test_training_and_evaluation_are_counted_apart(target, rows, tmp_path):
    together = trainer_for(target, rows, tmp_path, eval_dataset=rows, eval_strategy="steps", eval_steps=1)
    together.train()
    alone = trainer_for(target, rows, tmp_path)
    alone.train()
    for name in ("loss", "accuracy_step_0", "accuracy_step_2", "simulated_acceptance_length"):
        assert history(together, name) == history(alone, name)
        assert len(history(together, f"eval_{name}")) == 3


def test_several_evaluation_sets_by_name(target, rows, tmp_path, tokenizer):
    sets = {"chats": chats(), "rows": rows}
    metrics = trainer_for(target, rows, tmp_path, tokenizer, eval_dataset=sets).evaluate()
    assert metrics["eval_chats_loss"] == pytest.approx(metrics["eval_rows_loss"])
    assert "eval_rows_simulated_acceptance_length" in metrics


def test_the_best_checkpoint_can_be_chosen_by_acceptance(target, rows, tmp_path):
    trainer = trainer_for(
        target,
        rows,
        tmp_path,
        eval_dataset=rows,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_simulated_acceptance_length",
        greater_is_better=True,
    )
    trainer.train()
    assert trainer.state.best_metric == max(history(trainer, "eval_simulated_acceptance_length"))


# ----- interruption --------------------------------------------------------------------------------------------------


@pytest.mark.each_choice
@pytest.mark.parametrize("position_share", [1.0, 0.15])
@pytest.mark.parametrize("source", ["online", "stored"])
def test_interrupted_and_resumed_equals_uninterrupted(target, rows, stored, tmp_path, source, position_share):
    """Stopped in the middle of an epoch; a new process would build everything anew, and so does this."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "position_share": position_share}
    options["per_device_train_batch_size"] = 2
    data = stored if source == "stored" else rows
    whole = trainer_for(target, data, tmp_path / "whole", **options)
    whole.train()

    first = trainer_for(target, data, tmp_path / "parts", **options)
    first.add_callback(StopAfter(3))
    first.train()
    torch.rand(7)  # whatever happens between the two
    second = trainer_for(target, data, tmp_path / "parts", **options)
    second.train(resume_from_checkpoint=True)

    assert len(history(whole, "loss")) == 6
    assert history(second, "loss") == history(whole, "loss")
    assert history(second, "accuracy_step_1") == history(whole, "accuracy_step_1")
    assert_same_weights(weights(second.model), weights(whole.model), atol=0)


def test_rows_grouped_by_length_come_in_the_order_of_their_epoch_when_resumed(target, rows, tmp_path):
    options = {"per_device_train_batch_size": 2, "train_sampling_strategy": "group_by_length"}
    options |= {"max_steps": 10, "save_strategy": "steps", "save_steps": 5}  # 4 steps an epoch
    whole = trainer_for(target, rows, tmp_path / "whole", **options)
    whole.train()
    first = trainer_for(target, rows, tmp_path / "parts", **options)
    first.add_callback(StopAfter(5))
    first.train()
    second = trainer_for(target, rows, tmp_path / "parts", **options)
    second.train(resume_from_checkpoint=True)
    assert history(second, "loss") == history(whole, "loss")
    sampler = whole._get_train_sampler()
    orders = []
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        torch.rand(7)
        orders.append(list(sampler))
    assert orders[0] != orders[1] == orders[2]


def test_fewer_rows_train_on_other_rows_every_batch(target, rows, tmp_path):
    """The control of the test above: with another state of the generator the losses differ."""
    runs = []
    for seed in (1, 2):
        trainer = trainer_for(target, rows, tmp_path, position_share=0.15, max_steps=1, per_device_train_batch_size=8)
        torch.manual_seed(seed)
        batch = trainer.data_collator(list(rows))
        trainer.model.train()
        runs.append(trainer.compute_loss(trainer.model, batch).item())
    assert runs[0] != runs[1]


# ----- the vocabulary ------------------------------------------------------------------------------------------------


def test_the_vocabulary_is_built_before_the_first_step(target, tokenizer, rows, tmp_path):
    draft = new_draft(target, 120)
    assert not draft.has_draft_vocab
    trainer_for(target, rows, tmp_path, tokenizer, draft=draft)
    ids = set(draft.draft_vocab_ids().tolist())
    assert len(ids) == 120
    assert set(special_token_ids(tokenizer, target.generation_config)) <= ids
    counts = count_tokens(rows, draft.config.vocab_size)
    assert set(counts.nonzero()[:, 0].tolist()) <= ids  # fewer than 120 tokens occur
    # The head's rows are the target's, of these very tokens.
    torch.testing.assert_close(draft.lm_head.weight, target.lm_head.weight[draft.draft_vocab_ids()], atol=1e-6, rtol=0)


def test_without_a_tokenizer_the_targets_own_special_ids_are_kept(target, rows, tmp_path):
    draft = trainer_for(target, rows, tmp_path, draft=new_draft(target, 100)).model
    assert {0, 1, 2} <= set(draft.draft_vocab_ids().tolist())


def test_chats_and_stored_features_build_the_same_vocabulary(target, tokenizer, stored, tmp_path):
    ids = [
        trainer_for(target, data, tmp_path, tokenizer, draft=new_draft(target, 100)).model.draft_vocab_ids().tolist()
        for data in (chats(), stored)
    ]
    assert ids[0] == ids[1]


def test_a_vocabulary_is_never_rebuilt(target, tokenizer, rows, tmp_path):
    """Fine-tuning on other data keeps the meaning of every row of the head."""
    trainer_for(target, rows, tmp_path, tokenizer).model.save_pretrained(tmp_path / "head")
    head = Eagle3DraftModel.from_pretrained(tmp_path / "head")
    before = weights(head)
    other = [{"input_ids": list(range(300, 340)), "labels": list(range(300, 340))}] * 4
    trainer = trainer_for(target, other, tmp_path, tokenizer, draft=head)
    assert_same_weights(before, weights(head), atol=0)
    trainer.train()
    assert torch.equal(head.d2t, before["d2t"])
    assert torch.equal(head.t2d, before["t2d"])


def test_a_resumed_run_teaches_the_vocabulary_of_its_checkpoint(target, rows, tmp_path):
    """Also when the data has changed since, so that the new head was given another vocabulary at first."""
    first = trainer_for(target, rows, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    ids = list(range(250, 340))
    other = [{"input_ids": ids, "labels": [IGNORE_INDEX] * 3 + ids[3:]}] * 4
    second = trainer_for(target, other, tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
    assert not torch.equal(second._teacher._output.draft_ids, first._teacher._output.draft_ids)
    second.train(resume_from_checkpoint=True)
    assert torch.equal(second.model.draft_vocab_ids(), first.model.draft_vocab_ids())
    assert torch.equal(second._teacher._output.draft_ids, first._teacher._output.draft_ids)


# ----- refusals ------------------------------------------------------------------------------------------------------


def test_features_of_other_layers_are_refused(target, stored, tmp_path):
    draft = new_draft(target, 100, target_layer_ids=[0, 2])
    with pytest.raises(ValueError, match=r"indices \[0, 1, 2\], but the draft reads \[0, 2\]: store .* or create"):
        trainer_for(target, stored, tmp_path, draft=draft)


def test_features_of_another_target_are_refused(tokenizer, stored, tmp_path):
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="features of another target"):
        trainer_for(tiny_target(tokenizer), stored, tmp_path)


def test_a_head_of_another_target_is_refused(target, rows, tmp_path):
    from support.families import tiny

    other = tiny("llama", num_hidden_layers=2, hidden_size=32)
    with pytest.raises(ValueError, match="width 64, but LlamaForCausalLM has hidden_size 32"):
        trainer_for(other, rows, tmp_path, draft=new_draft(target, 100))


@pytest.mark.parametrize("vocabulary", ["set", "unset"])
def test_data_without_anything_to_learn_is_refused_before_the_first_step(target, tokenizer, tmp_path, vocabulary):
    draft = new_draft(target, None if vocabulary == "set" else 100)
    empty = {"input_ids": list(range(9)), "labels": [IGNORE_INDEX] * 9}
    early = {"input_ids": list(range(9)), "labels": [0, 1] + [IGNORE_INDEX] * 7}
    good = {"input_ids": list(range(9)), "labels": [IGNORE_INDEX] * 6 + [6, 7, 8]}
    for data in ([empty] * 3, Dataset.from_list([early, empty, good]), [empty, early, good]):
        with pytest.raises(
            ValueError, match=rf"{len(data) - (good in list(data))} of 3 examples have no token to learn"
        ):
            trainer_for(target, data, tmp_path, tokenizer, draft=draft)
    only_users = [{"messages": [{"role": "user", "content": "The sea is wide."}]}] * 3
    with pytest.raises(ValueError, match="3 of 3 chats have no token to learn"):
        trainer_for(target, only_users, tmp_path, tokenizer, draft=draft)
    trainer_for(target, [empty, good], tmp_path, tokenizer, draft=draft)


def test_stored_rows_without_anything_to_learn_are_refused(target, tmp_path):
    rows = Dataset.from_list([{"input_ids": list(range(9)), "labels": [IGNORE_INDEX] * 9}] * 3)
    write_features(target, rows, tmp_path / "store", [0, 1, 2], progress=False)
    with pytest.raises(ValueError, match="3 of 3 examples have no token to learn"):
        trainer_for(target, StoredFeatures(tmp_path / "store"), tmp_path)


def test_chats_to_evaluate_on_may_come_later(target, tokenizer, tmp_path):
    data = Dataset.from_list(chats(6))
    trainer = trainer_for(target, data, tmp_path, tokenizer, eval_dataset=data, packing=True, max_length=64)
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss)
    assert trainer.evaluate({"a": data})["eval_a_loss"] == pytest.approx(loss)


def test_several_splits_to_train_on_are_refused(target, tokenizer, tmp_path):
    splits = {"train": chats(6), "test": chats(2)}
    with pytest.raises(ValueError, match=r"train_dataset has the splits train, test: pass one of them"):
        trainer_for(target, splits, tmp_path, tokenizer)


def test_chats_without_a_tokenizer_and_rows_without_labels_are_refused(target, tmp_path):
    with pytest.raises(ValueError, match="pass processing_class=tokenizer"):
        trainer_for(target, chats(), tmp_path)
    with pytest.raises(ValueError, match="examples with input_ids need labels too"):
        trainer_for(target, [{"input_ids": [1, 2, 3, 4]}], tmp_path)
    with pytest.raises(ValueError, match="no train_dataset to build it from"):
        trainer_for(target, None, tmp_path)


# ----- precision, processes, noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_mixed_precision_on_cpu(tokenizer, rows, tmp_path, target_dtype):
    torch.manual_seed(0)
    target = tiny_target(tokenizer).to(target_dtype)
    trainer = trainer_for(target, rows, tmp_path, bf16=True, eval_dataset=rows)
    trainer.train()
    plain = trainer_for(target, rows, tmp_path)
    plain.train()
    assert trainer.model.dtype == torch.float32
    assert history(trainer, "loss") == pytest.approx(history(plain, "loss"), rel=0.02)
    assert trainer.evaluate()["eval_loss"] > 0


DISTRIBUTED = """
import json, os, sys
from pathlib import Path
import torch
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import Gradients, chats, history, trainer_for
from eagle3_hf.training.data.encoding import prepare_dataset

tokenizer = chat_tokenizer()
torch.manual_seed(0)
target = tiny_target(tokenizer)
rows = prepare_dataset(chats(), tokenizer, max_length=None)
trainer = trainer_for(target, rows, Path(sys.argv[1]), tokenizer, eval_dataset=rows, max_steps=2,
                      per_device_train_batch_size=4, per_device_eval_batch_size=3, ddp_backend="gloo")
assert trainer.args.world_size == 2
gradients = Gradients()
trainer.add_callback(gradients)
trainer.train()
assert not trainer.model_wrapped.find_unused_parameters
metrics = trainer.evaluate()
if trainer.args.process_index == 0:
    names = ("loss", "accuracy_step_0", "accuracy_step_2", "simulated_acceptance_length", "grad_norm")
    result = {name: history(trainer, name) for name in names} | {"eval": metrics}
    Path(sys.argv[1], "result.json").write_text(json.dumps(result))
# Neither process may be gone while the other still talks to it. Then out at once: now and then a thread of gloo's
# aborts while the interpreter is taken down ("terminate called without an active exception"), when all is done.
trainer.accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_equal_one(target, rows, tokenizer, tmp_path):
    """DDP without a search for unused parameters: 2 processes x 4 rows give what 8 rows give."""
    run = run_in_two(DISTRIBUTED, tmp_path)
    assert "find_unused_parameters" not in run.stderr
    result = json.loads((tmp_path / "result.json").read_text())

    single = trainer_for(
        target, rows, tmp_path, tokenizer, eval_dataset=rows, max_steps=2, per_device_train_batch_size=8
    )
    single.train()
    for name in ("loss", "accuracy_step_0", "accuracy_step_2", "simulated_acceptance_length", "grad_norm"):
        assert result[name] == pytest.approx(history(single, name), rel=1e-4), name
    for name, value in single.evaluate().items():
        if name.startswith(("eval_loss", "eval_accuracy", "eval_simulated")):
            assert result["eval"][name] == pytest.approx(value, rel=1e-4), name


def test_several_devices_in_one_process_are_not_used(target, rows, tmp_path):
    """DataParallel would split the teacher's rows at the wrong places."""
    args = arguments(tmp_path)
    args._n_gpu = 2
    trainer = Eagle3Trainer(model=new_draft(target), target_model=target, args=args, train_dataset=rows)
    assert trainer.args.n_gpu == 1


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ids", ["of the model", "of the tokenizer only"])
def test_a_plain_run_says_nothing_that_a_user_need_not_see(tokenizer, tmp_path, ids):
    torch.manual_seed(0)
    target = tiny_target(tokenizer)
    if ids != "of the model":
        for config in (target.config, target.generation_config):
            config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    handler = Lines()
    handler.setLevel(logging.WARNING)
    root, library = logging.getLogger(), transformers_logging.get_logger("transformers")
    for logger in (root, library):
        logger.addHandler(handler)
    try:
        trainer = trainer_for(
            target,
            chats(),
            tmp_path,
            tokenizer,
            eval_dataset=chats(),
            save_strategy="epoch",
            # A user on a CPU machine does not say so; with an accelerator the target would have to be moved.
            use_cpu=torch.accelerator.is_available(),
        )
        trainer.train()
        trainer.evaluate()
        trainer.model.save_pretrained(tmp_path / "head")
    finally:
        for logger in (root, library):
            logger.removeHandler(handler)
    assert handler.lines == []
    head = Eagle3DraftModel.from_pretrained(tmp_path / "head")
    assert (head.config.eos_token_id, head.generation_config.eos_token_id) == (1, 1)


def test_a_processor_lends_its_tokenizer_and_one_without_is_refused(target, tokenizer, tmp_path):
    class Processor:
        def __init__(self, **parts):
            self.__dict__.update(parts)

        def save_pretrained(self, folder):
            pass

    with_template, without = chat_tokenizer(), chat_tokenizer(None)
    losses = []
    for processor in (with_template, Processor(tokenizer=without, chat_template=with_template.chat_template)):
        trainer = trainer_for(target, chats(), tmp_path, processor)
        batch = trainer.data_collator([trainer.train_dataset[i] for i in range(4)])
        with torch.no_grad():
            losses.append(float(trainer.model(**trainer.draft_inputs(batch)).loss))
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match="Processor has no tokenizer for text: pass the target's tokenizer"):
        trainer_for(target, chats(), tmp_path, Processor(feature_extractor=None))


def test_the_tokenizer_is_recorded_and_another_one_refused(tmp_path):
    from eagle3_hf.model.vocab import tokenizer_hashes

    tokenizer = chat_tokenizer()
    target = tiny_target(tokenizer)
    rows = [{"input_ids": list(range(5, 15)), "labels": [-100] * 5 + list(range(10, 15))}] * 2
    draft = Eagle3DraftModel.from_target(target)
    args = Eagle3TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    Eagle3Trainer(draft, target, args, rows, processing_class=tokenizer)
    assert (draft.config.target_vocab_hash, draft.config.target_chat_template_hash) == tokenizer_hashes(tokenizer)
    draft.config.target_vocab_hash = "another"
    with pytest.raises(ValueError, match="vocabulary of hash another"):
        Eagle3Trainer(draft, target, args, rows, processing_class=tokenizer)
