"""Resuming after a kill at any moment: torn checkpoints are told from whole ones, and the run ends as if unbroken."""

import json
import logging
import shutil

import pytest
from transformers.utils import logging as transformers_logging

from eagle3_hf.training.resume import last_whole_checkpoint, tear
from support.processes import run_python
from support.training_runs import assert_same_weights, history, trainer_for, weights


OPTIONS = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}


@pytest.fixture(scope="module")
def run(target, rows, tmp_path_factory):
    """An uninterrupted run: its folder, losses and weights."""
    path = tmp_path_factory.mktemp("run")
    trainer = trainer_for(target, rows, path, **OPTIONS)
    trainer.train()
    return path / "out", history(trainer, "loss"), weights(trainer.model)


@pytest.fixture
def warnings():
    class Lines(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    lines: list[str] = []
    handler, logger = Lines(logging.WARNING), transformers_logging.get_logger("eagle3_hf.training.resume")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("left", [0.0, 0.5])
def test_a_torn_file_makes_a_torn_checkpoint(run, tmp_path, name, left, warnings):
    """Whichever file was being written when the power went."""
    for step in (4, 6):
        shutil.copytree(run[0] / f"checkpoint-{step}", tmp_path / f"checkpoint-{step}")
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-6")
    path = tmp_path / "checkpoint-6" / name
    path.write_bytes(path.read_bytes()[: int(left * path.stat().st_size)])
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    assert len(warnings) == 1
    assert f"checkpoint-6 is skipped: {name}" in warnings[0]


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json"])
def test_a_file_that_was_not_begun(run, tmp_path, name):
    shutil.copytree(run[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / name).unlink()
    assert tear(tmp_path / "checkpoint-4") is not None
    assert last_whole_checkpoint(tmp_path) is None


def test_a_run_that_has_none(tmp_path, target, rows):
    assert last_whole_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / "out" / "checkpoint-x").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-7").mkdir()
    assert last_whole_checkpoint(tmp_path / "out") is None
    with pytest.raises(ValueError, match="no complete checkpoint to resume from in"):
        trainer_for(target, rows, tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"checkpoint-7 is not a complete checkpoint: trainer_state\.json is missing"):
        trainer_for(target, rows, tmp_path).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-7"))


def test_steps_are_compared_as_numbers(run, tmp_path):
    shutil.copytree(run[0] / "checkpoint-4", tmp_path / "checkpoint-9")
    shutil.copytree(run[0] / "checkpoint-4", tmp_path / "checkpoint-10")
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")


KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import chats, trainer_for
from eagle3_hf.training.data.encoding import prepare_dataset

where, write, options = sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
torch.manual_seed(0)
target = tiny_target(chat_tokenizer())
rows = prepare_dataset(chats(), chat_tokenizer(), max_length=None)
trainer = trainer_for(target, rows, Path(sys.argv[1]), **options)
calls = 0


def torn(path):
    # As when the process dies while the kernel still has half of the file: what is there is cut off.
    os.truncate(path, Path(path).stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def killing(original, kill):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls < write:
            return original(*args, **kwargs)
        kill(original, *args, **kwargs)
    return call


def after_a_step(original, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def in_the_weights(original, folder, *args, **kwargs):
    original(folder, *args, **kwargs)
    torn(Path(folder) / "model.safetensors")


def in_the_optimizer(original, folder):
    original(folder)
    torn(Path(folder) / "optimizer.pt")


def in_the_state(original, path):
    original(path)
    torn(path)


place = {
    "after a step": (trainer, "training_step", after_a_step),
    "in the weights": (trainer.model, "save_pretrained", in_the_weights),
    "in the optimizer": (trainer, "_save_optimizer_and_scheduler", in_the_optimizer),
    "in the state": (trainer.state, "save_to_json", in_the_state),
}
if where == "in the state":
    from transformers import TrainerState

    def kill(original, state, path):
        in_the_state(lambda path: original(state, path), path)

    TrainerState.save_to_json = killing(TrainerState.save_to_json, kill)
else:
    owner, name, kill = place[where]
    setattr(owner, name, killing(getattr(owner, name), kill))
trainer.train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "write", "resumes_at"),
    [
        ("after a step", 4, 2),
        ("after a step", 6, 4),
        ("in the weights", 2, 2),
        ("in the optimizer", 2, 2),
        ("in the optimizer", 3, 4),
        ("in the state", 2, 2),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(target, rows, run, tmp_path, where, write, resumes_at, warnings):
    """A real process, killed by a real signal; the resumed run takes the last whole checkpoint and ends the same."""
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    result = run_python([script, tmp_path, where, write, json.dumps(OPTIONS)])
    assert result.returncode == -9, result.stderr[-3000:]
    assert last_whole_checkpoint(tmp_path / "out") == str(tmp_path / "out" / f"checkpoint-{resumes_at}")
    torn = where.startswith("in")
    assert len(warnings) == torn
    trainer = trainer_for(target, rows, tmp_path, **OPTIONS)
    trainer.train(resume_from_checkpoint=True)
    assert history(trainer, "loss") == pytest.approx(run[1], rel=1e-5)
    # Another process: a CPU's matrix products round by where in memory their operands happen to lie.
    assert_same_weights(weights(trainer.model), run[2], atol=1e-6)
    assert tear(tmp_path / "out" / "checkpoint-6") is None
