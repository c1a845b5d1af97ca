"""What a run tells the world: tau by decoding at every evaluation, trackers, the Hub."""

import json

import pytest
import torch
from accelerate import cpu_offload
from huggingface_hub import HfApi, ModelCard
from transformers import TrainerCallback

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.training.callbacks import MeasureTau, prompt_ids, sample_prompts
from support.chats import tiny_target
from support.training_runs import assert_same_weights, chats, history, new_draft, trainer_for, weights


def measuring(tokenizer) -> MeasureTau:
    return MeasureTau(chats()[:2], tokenizer, max_new_tokens=10)


# ----- tau -----------------------------------------------------------------------------------------------------------


def test_tau_is_what_generate_says(target, tokenizer, rows, tmp_path):
    """Logged with the other metrics of each evaluation; tokens over rounds of all prompts."""
    trainer = trainer_for(target, rows, tmp_path, tokenizer, eval_dataset=rows, eval_strategy="steps", eval_steps=2)
    callback = measuring(tokenizer)
    trainer.add_callback(callback)
    trainer.train()
    metrics = trainer.evaluate()
    emitted = rounds = 0
    for ids in callback.prompts:
        output = target.generate(
            ids[None],
            assistant_model=trainer.model,
            assistant_lookup=False,
            num_assistant_tokens=11,
            max_new_tokens=10,
            do_sample=False,
            return_dict_in_generate=True,
        )
        emitted, rounds = emitted + output.speculation.emitted, rounds + output.speculation.rounds
    assert metrics["eval_tau"] == pytest.approx(emitted / rounds)
    assert len(history(trainer, "eval_tau")) == len(history(trainer, "eval_loss")) == 3  # steps 2 and 3, and once more
    assert trainer.evaluate(metric_key_prefix="test")["test_tau"] == metrics["eval_tau"]


def test_measuring_leaves_training_as_it_was(target, tokenizer, rows, tmp_path):
    """Neither weights, nor losses, nor modes know of it."""
    runs = []
    for measured in (False, True):
        options = {"eval_dataset": rows, "eval_strategy": "steps", "eval_steps": 1, "position_share": 0.5}
        trainer = trainer_for(target, rows, tmp_path, tokenizer, **options)
        if measured:
            trainer.add_callback(measuring(tokenizer))
        trainer.train()
        runs.append(trainer)
    assert history(runs[0], "loss") == history(runs[1], "loss")
    assert_same_weights(weights(runs[0].model), weights(runs[1].model), atol=0)
    assert not target.training


def test_the_best_checkpoint_by_tau(target, tokenizer, rows, tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    trainer = trainer_for(
        target,
        rows,
        tmp_path,
        tokenizer,
        eval_dataset=rows,
        load_best_model_at_end=True,
        metric_for_best_model="eval_tau",
        greater_is_better=True,
        **options,
    )
    trainer.add_callback(measuring(tokenizer))
    trainer.train()
    assert trainer.state.best_metric == max(history(trainer, "eval_tau"))


def test_several_evaluation_sets_measure_once(target, tokenizer, rows, tmp_path, monkeypatch):
    trainer = trainer_for(
        target, rows, tmp_path, tokenizer, eval_dataset={"a": rows, "b": rows}, eval_strategy="steps", eval_steps=3
    )
    callback, calls = measuring(tokenizer), []
    trainer.add_callback(callback)
    measure = callback.measure
    monkeypatch.setattr(callback, "measure", lambda *args: calls.append(1) or measure(*args))
    trainer.train()
    assert len(calls) == 1
    assert len(set(history(trainer, "eval_tau"))) == 1


def test_processes_share_the_prompts(target, tokenizer, rows, tmp_path):
    trainer, callback = trainer_for(target, rows, tmp_path, tokenizer), MeasureTau(chats()[:3], tokenizer, 10)
    alone = callback.measure(trainer.draft, target)
    shared = [callback.measure(trainer.draft, target, rank, 2) for rank in range(2)]
    assert tuple(map(sum, zip(*shared, strict=True))) == alone


def test_an_offloaded_target_measures_too(tokenizer):
    torch.manual_seed(0)
    target = tiny_target(tokenizer)
    callback, draft = MeasureTau([[5, 6, 7]], max_new_tokens=6), new_draft(target, None)
    expected = callback.measure(draft, target)
    assert callback.measure(draft.bind(cpu_offload(target, torch.device("cpu"))), target) == expected


def test_prompts_of_every_kind(tokenizer):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The sea."}]}
    ids = prompt_ids(chat, tokenizer)
    text = tokenizer.decode(ids)
    assert text.endswith("<|start|>user\nHi<|end|>\n<|start|>assistant\n")
    assert ids.tolist() == prompt_ids(chat["messages"], tokenizer).tolist()
    assert prompt_ids([1, 2, 3]).tolist() == prompt_ids({"input_ids": torch.tensor([1, 2, 3])}).tolist() == [1, 2, 3]
    assert prompt_ids("The sea", tokenizer).tolist() == tokenizer("The sea")["input_ids"]
    with pytest.raises(ValueError, match="prompts that are texts or chats need a tokenizer"):
        prompt_ids("The sea")
    with pytest.raises(ValueError, match="a chat without a user turn gives no prompt"):
        prompt_ids([{"role": "system", "content": "Be kind."}], tokenizer)
    with pytest.raises(ValueError, match="there are no prompts"):
        MeasureTau([])
    assert sample_prompts(range(100), 5, seed=1) == sample_prompts(range(100), 5, seed=1)
    assert sample_prompts(range(3), 5) == [0, 1, 2]


# ----- trackers ------------------------------------------------------------------------------------------------------


def test_names_of_the_metrics(target, tokenizer, rows, tmp_path):
    """What a tracker's callback is given: training plain, evaluation behind `eval_`, every value a number."""
    given: list[dict] = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            given.append(dict(logs))

    trainer = trainer_for(target, rows, tmp_path, tokenizer, eval_dataset=rows, eval_strategy="steps", eval_steps=3)
    for callback in (measuring(tokenizer), Tracker()):
        trainer.add_callback(callback)
    trainer.train()
    training, evaluation = given[0], next(logs for logs in given if "eval_loss" in logs)
    steps = {f"accuracy_step_{i}" for i in range(3)}
    assert steps | {"loss", "grad_norm", "learning_rate", "simulated_acceptance_length"} <= set(training)
    assert not any(name.startswith("eval_") for name in training)
    wanted = {f"eval_{name}" for name in steps | {"loss", "simulated_acceptance_length", "tau"}}
    assert wanted <= set(evaluation)
    assert {name for name in evaluation if not name.startswith("eval_")} == {"epoch"}
    assert all(isinstance(value, (int, float)) for logs in given for value in logs.values())


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_trackers_that_are_installed(target, rows, tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    trainer_for(target, rows, tmp_path, report_to=name, run_name="test").train()
    if name == "tensorboard":
        assert list(tmp_path.rglob("events.out.tfevents*"))


# ----- the Hub -------------------------------------------------------------------------------------------------------


class Uploads:
    """In place of the calls that would reach the Hub: what was uploaded, as it was on the disk then."""

    def __init__(self, monkeypatch):
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        monkeypatch.setattr(HfApi, "create_repo", self.create_repo)
        monkeypatch.setattr(HfApi, "upload_folder", self.upload_folder)

    def create_repo(self, repo_id, **kwargs):
        from huggingface_hub import RepoUrl

        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message=None, run_as_future=False, **kwargs):
        from pathlib import Path

        files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir() if path.is_file()}
        self.commits.append((commit_message, files))

        class Done:
            def done(self):
                return True

            def result(self):
                return None

        return Done()


def test_push_to_hub_with_card(target, tokenizer, rows, tmp_path, monkeypatch):
    """At every save and at the end: a head that loads, with the head's own card."""
    uploads = Uploads(monkeypatch)
    trainer = trainer_for(
        target,
        rows,
        tmp_path,
        tokenizer,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        push_to_hub=True,
        hub_model_id="someone/head",
        hub_token="none",
        eval_dataset=rows,
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.add_callback(measuring(tokenizer))
    trainer.train()
    trainer.push_to_hub()
    messages = [message for message, _ in uploads.commits]
    assert messages[0] == "Training in progress, step 1"
    assert messages[-1] == "End of training"
    for _, files in uploads.commits:
        assert {"model.safetensors", "config.json", "generation_config.json", "README.md"} <= set(files)
        assert b"A draft head for speculative decoding" in files["README.md"]
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, content in uploads.commits[-1][1].items():
        (folder / name).write_bytes(content)
    head = Eagle3DraftModel.from_pretrained(folder)
    assert_same_weights(weights(head), weights(trainer.model), atol=0)
    card = ModelCard.load(folder / "README.md")
    assert "eagle3" in card.data.tags
    assert f"| held-out prompts, greedy | {trainer.evaluate()['eval_tau']:.2f} |" in card.text
    assert "% of the training targets" in card.text
    assert json.loads((folder / "config.json").read_text())["model_type"] == "eagle3_draft"
