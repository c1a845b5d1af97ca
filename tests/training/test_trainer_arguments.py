"""What `transformers.Trainer` and its arguments offer: it works with a head, or is refused by name before the data."""

import logging
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, EarlyStoppingCallback, TrainerCallback, TrainingArguments

from eagle3_hf import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from eagle3_hf.training.arguments import learning_rate_for
from eagle3_hf.training.data.options import EncodingOptions
from eagle3_hf.training.targets.feature_store import StoredFeatures, write_features
from support.chats import chat_tokenizer
from support.training_runs import arguments, assert_same_weights, chats, history, new_draft, trainer_for, weights


@pytest.fixture(scope="module")
def stored(target, rows, tmp_path_factory) -> StoredFeatures:
    directory = tmp_path_factory.mktemp("features")
    write_features(target, rows, directory, [0, 1, 2], dtype=torch.float32, progress=False)
    return StoredFeatures(directory)


def make(target, tmp_path, rows, **kwargs) -> Eagle3Trainer:
    """A trainer with arguments of Trainer's own."""
    given = {"model": new_draft(target), "target_model": target, "args": arguments(tmp_path), "train_dataset": rows}
    return Eagle3Trainer(**{**given, **kwargs})


# ----- evaluation ----------------------------------------------------------------------------------------------------


def thinking(count: int = 8) -> list[dict]:
    made = chats(count)
    for chat in made:
        for turn in chat["messages"]:
            if turn["role"] == "assistant":
                turn["content"] = f"<think>\nLet me think.\n</think>\n\n{turn['content']}"
    return made


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("choice", ["last_turn_only", "mask_reasoning"])
def test_chats_by_name_are_evaluated_as_they_are_trained_on(target, tokenizer, tmp_path, choice, packing):
    """One set or several, given at the start or later, as chats or as the trainer has prepared them: one loss."""
    data = Dataset.from_list(thinking())
    options = {choice: True, "packing": packing, "max_length": 160}
    trainer = trainer_for(target, data, tmp_path, tokenizer, eval_dataset={"a": data}, **options)
    loss = trainer.evaluate()["eval_a_loss"]
    metrics = trainer.evaluate({"b": data, "c": thinking()})
    assert metrics["eval_b_loss"] == pytest.approx(loss)
    assert metrics["eval_c_loss"] == pytest.approx(loss)
    assert trainer.evaluate(thinking())["eval_loss"] == pytest.approx(loss)
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(loss)
    assert trainer.evaluate(trainer.eval_dataset)["eval_a_loss"] == pytest.approx(loss)
    # Without the choice there is more to learn: the loss tells the two apart.
    plain = trainer_for(target, data, tmp_path, tokenizer, packing=packing, max_length=160)
    assert plain.evaluate(data)["eval_loss"] != pytest.approx(loss, rel=1e-3)


def test_what_one_choice_encoded_is_no_data_for_another(target, tokenizer, tmp_path):
    data = trainer_for(target, chats(), tmp_path, tokenizer, last_turn_only=True).train_dataset
    trainer_for(target, data, tmp_path, tokenizer, last_turn_only=True)
    with pytest.raises(ValueError, match="these examples are tokens already"):
        trainer_for(target, data, tmp_path, tokenizer, last_turn_only=True, mask_reasoning=True)


def test_data_of_every_kind_may_be_evaluated_on(target, tokenizer, rows, stored, tmp_path):
    """Whatever the run trains on."""
    trainer = trainer_for(target, rows, tmp_path, tokenizer)
    loss = trainer.evaluate(rows)["eval_loss"]
    for data in (chats(), Dataset.from_list(chats()), list(rows), rows.to_iterable_dataset(), stored):
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(loss, rel=1e-5)


def test_predict_gives_the_metrics_of_chats(target, tokenizer, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, tokenizer)
    result = trainer.predict(chats())
    assert result.predictions is None
    assert result.metrics["test_loss"] == pytest.approx(trainer.evaluate(rows)["eval_loss"])
    with pytest.raises(ValueError, match="test_dataset has the splits a: pass one of them"):
        trainer.predict({"a": chats()})


def test_evaluation_before_the_first_step(target, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, eval_dataset=rows, eval_on_start=True)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [0]


# ----- what is honoured ----------------------------------------------------------------------------------------------


def test_callbacks_and_optimizers(target, rows, tmp_path):
    class Count(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    steps: list[int] = []
    draft = new_draft(target)
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.25)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = make(target, tmp_path, rows, model=draft, callbacks=[Count()], optimizers=(optimizer, constant))
    trainer.train()
    assert steps == [1, 2, 3]
    assert history(trainer, "learning_rate") == [0.25] * 3
    kind = torch.optim.Adagrad, {"lr": 0.5}
    trainer = make(target, tmp_path, rows, optimizer_cls_and_kwargs=kind)
    assert type(trainer.create_optimizer()).__name__ == "Adagrad"


def test_early_stopping(target, rows, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "learning_rate": 0.0}
    trainer = make(
        target, tmp_path, rows, args=arguments(tmp_path, max_steps=9, **options), eval_dataset=rows,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_batch_that_fits_is_looked_for(target, rows, tmp_path):
    """As a run with that batch from the first: what did not fit leaves nothing in the logs."""
    runs = []
    for size, options in ((4, {"auto_find_batch_size": True}), (2, {})):
        trainer = trainer_for(target, rows, tmp_path, per_device_train_batch_size=size, **options)
        step = trainer.training_step

        def training_step(model, inputs, *args, step=step, **kwargs):
            result = step(model, inputs, *args, **kwargs)
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB")
            return result

        trainer.training_step = training_step
        trainer.train()
        runs.append([history(trainer, name) for name in ("loss", "accuracy_step_0", "accuracy_step_1")])
    assert runs[0] == runs[1]


def test_collators_of_others_are_served_or_refused(target, tokenizer, rows, stored, tmp_path):
    right = make(target, tmp_path, rows, data_collator=DataCollatorForSeq2Seq(tokenizer))
    right.train()
    ours = make(target, tmp_path, rows, processing_class=tokenizer)
    ours.train()
    assert history(right, "loss") == history(ours, "loss")
    left = chat_tokenizer()
    left.padding_side = "left"
    with pytest.raises(ValueError, match="the data_collator pads on the left"):
        make(target, tmp_path, rows, data_collator=DataCollatorForSeq2Seq(left)).train()

    def bare(examples):
        batch = ours.data_collator(examples)
        return {name: batch[name] for name in ("input_ids", "labels")}

    with pytest.raises(ValueError, match="a batch without features; it has input_ids, labels"):
        make(target, tmp_path, stored, data_collator=bare).train()
    packed = arguments(tmp_path, packing=True, max_length=160)
    with pytest.raises(ValueError, match="a batch without position_ids"):
        make(target, tmp_path, rows, args=packed, data_collator=bare).train()


# ----- resuming ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [{"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 1}], ids=["steps", "epochs"])
def test_a_checkpoint_with_all_its_steps_is_loaded_and_left_alone(target, rows, tmp_path, ends, caplog):
    options = {"save_strategy": "steps", "save_steps": 1, **ends}
    first = trainer_for(target, rows, tmp_path, **options)
    first.train()
    last = tmp_path / "out" / f"checkpoint-{first.state.global_step}"
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in last.iterdir()}
    logged = len(first.state.log_history)
    again = trainer_for(target, rows, tmp_path, **options)
    with caplog.at_level(logging.WARNING):
        result = again.train(resume_from_checkpoint=last)  # a Path
    assert result.global_step == first.state.global_step
    assert math.isnan(result.training_loss)
    assert result.metrics == {}
    assert f"Nothing was trained: {last} has had {first.state.global_step} steps" in caplog.text
    assert_same_weights(weights(again.model), weights(first.model), atol=0)
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in last.iterdir()} == before
    assert len(again.state.log_history) == logged - 1, "Trainer's summary, which is no part of the checkpoint"


def test_folders_that_cannot_be_resumed_from(target, rows, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, save_strategy="steps", save_steps=2, save_only_model=True)
    with pytest.raises(ValueError, match="nowhere, which is to be resumed from, is not a folder"):
        trainer.train(resume_from_checkpoint=tmp_path / "nowhere")
    trainer.train()
    for resumed in (True, str(Path(tmp_path) / "out" / "checkpoint-2")):
        with pytest.raises(ValueError, match=r"holds weights alone \(save_only_model\)"):
            trainer.train(resume_from_checkpoint=resumed)


# ----- what is refused -----------------------------------------------------------------------------------------------


def never(*args, **kwargs):
    pytest.fail("this was called")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model_init", "so make a new Eagle3Trainer for each head"),
        ("compute_metrics", "keeps no predictions"),
        ("preprocess_logits_for_metrics", "keeps no logits"),
        ("compute_loss_func", "its loss is chosen by args.loss_type"),
    ],
)
def test_functions_that_would_never_be_called_are_refused(target, tmp_path, name, reason):
    """Before the data is read, which may take minutes."""
    with pytest.raises(ValueError, match=f"{name} has no meaning for Eagle3Trainer: .*{reason}"):
        make(target, tmp_path, object(), **{name: never})


def test_model_init_in_place_of_a_model(target, rows):
    with pytest.raises(ValueError, match="model_init has no meaning"):
        Eagle3Trainer(target_model=target, train_dataset=rows, model_init=never)


def test_a_search_over_hyperparameters_is_refused(target, rows, tmp_path):
    with pytest.raises(ValueError, match="hyperparameter_search makes a new model for each trial"):
        make(target, tmp_path, rows).hyperparameter_search()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"evaldataset": None}, "unexpected keyword argument 'evaldataset'"),
        ({"target_model": None}, "target_model must be a model of transformers, got NoneType"),
        ({"model": None}, "model must be an Eagle3DraftModel, or adapters on one, got NoneType"),
    ],
)
def test_arguments_of_another_kind(target, tmp_path, given, message):
    with pytest.raises(TypeError, match=message):
        make(target, tmp_path, object(), **given)


def test_transformers_own_arguments_are_refused(target, tmp_path):
    plain = TrainingArguments(output_dir=str(tmp_path), report_to="none")
    with pytest.raises(TypeError, match="args must be Eagle3TrainingArguments, got TrainingArguments"):
        make(target, tmp_path, object(), args=plain)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_liger_kernel", True, "Liger has no kernels for heads"),
        ("remove_unused_columns", True, "stored features are columns"),
        ("include_for_metrics", ["inputs"], "keeps no predictions"),
        ("batch_eval_metrics", True, "keeps no predictions"),
        ("label_names", ["answer"], "a head's labels are in the column labels alone"),
        ("length_column_name", "tokens", "lengths are read from the examples"),
    ],
)
def test_switches_without_effect_are_refused(tmp_path, field, value, message):
    with pytest.raises(ValueError, match=f"{field} is .*{message}"):
        arguments(tmp_path, **{field: value})


# ----- learning rate and steps ---------------------------------------------------------------------------------------


def test_rates_of_the_two_widths_that_are_known():
    assert learning_rate_for(576) == 1e-3
    assert learning_rate_for(64) == 1e-3
    assert learning_rate_for(4096) == pytest.approx(5e-5, rel=0.1)
    assert learning_rate_for(2048) == 1.5e-4
    rates = [learning_rate_for(width) for width in (576, 1024, 2048, 3072, 4096, 5120, 8192)]
    assert rates == sorted(rates, reverse=True)


def test_a_rate_that_was_not_given_is_that_of_the_heads_width(target, rows, tmp_path):
    args = arguments(tmp_path, learning_rate=None)
    wide = Eagle3DraftModel.from_target(target, draft_vocab=range(200), hidden_size=1024, intermediate_size=64)
    make(target, tmp_path, rows, args=args, model=wide)
    assert args.learning_rate == learning_rate_for(1024) < 1e-3
    trainer = make(target, tmp_path, rows, args=args)  # the same arguments, another head
    assert args.learning_rate == 1e-3
    trainer.train()
    assert history(trainer, "learning_rate")[0] == 1e-3
    given = arguments(tmp_path, learning_rate=5e-5)
    make(target, tmp_path, rows, args=given)
    assert given.learning_rate == 5e-5


def test_few_steps_are_warned_of_unless_they_were_asked_for(target, rows, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer_for(target, rows, tmp_path, max_steps=2).train()
    assert "There are only" not in caplog.text
    with caplog.at_level(logging.WARNING):
        trainer_for(target, rows, tmp_path, max_steps=-1, num_train_epochs=1).train()
    assert "There are only 2 steps, with 4 sequences a step; a new head learns little in fewer than 500" in caplog.text


def test_the_default_is_to_derive_the_rate(tmp_path):
    assert Eagle3TrainingArguments(output_dir=str(tmp_path), report_to="none").learning_rate is None


def test_the_options_of_encoding_are_those_of_the_run(tmp_path):
    choices = {"max_length": 40, "last_turn_only": True, "mask_reasoning": True, "packing": True}
    args = arguments(tmp_path, **choices, chat_template_kwargs='{"a": 1}', dataset_num_proc=2, seed=5)
    expected = EncodingOptions(**choices, template_kwargs={"a": 1}, num_proc=2, seed=5)
    assert args.encoding_options() == expected
    assert arguments(tmp_path, **choices, seed=5, data_seed=7).encoding_options().seed == 7
