"""`eagle3-hf train`, run again where it has run before: a finished run is left as it is, however it was to end."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import chats


# As in test_train_command.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OPTIONS = ["--draft_vocab_size", "200", "--per_device_train_batch_size", "3", "--ttt_steps", "2", "--held_out", "2"]
OPTIONS += ["--learning_rate", "2e-3", "--report_to", "none", "--use_cpu", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a head for it, and chats as a user has them; 8 chats to train on are 3 steps an epoch."""
    path = tmp_path_factory.mktemp("user")
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    target = tiny_target(tokenizer)
    target.save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    Eagle3DraftModel.from_target(target, draft_vocab=range(200)).save_pretrained(path / "head")
    (path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats(10)))
    return path


@pytest.fixture
def train(folder, tmp_path):
    """Runs the command into `tmp_path / out`; its exit status."""

    def run(*options: str) -> int:
        data = ["--target", str(folder / "target"), "--train_data", str(folder / "chats.jsonl")]
        return main(["train", *data, "--output_dir", str(tmp_path / "out"), *OPTIONS, *options])

    return run


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("ends", "steps"),
    [
        (["--max_steps", "4"], "4 steps (1.33333 epochs)"),  # inside an epoch: Trainer would make a fifth
        (["--num_train_epochs", "1"], "3 steps (1 epochs)"),
        (["--num_train_epochs", "0.5"], "2 steps (0.666667 epochs)"),
        (["--max_steps", "2", "--save_strategy", "no"], "2 steps"),
        (["--max_steps", "2", "--save_only_model", "true"], "2 steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_finished_run_is_not_touched(train, tmp_path, capsys, monkeypatch, ends, steps):
    assert train(*ends) == 0
    out = tmp_path / "out"
    before = contents(out)
    capsys.readouterr()
    monkeypatch.setattr("eagle3_hf.training.run.load_target", lambda *_: pytest.fail("the target was loaded"))
    assert train(*ends) == 0
    assert f"the run in {out} is finished, after {steps}" in capsys.readouterr().out
    assert contents(out) == before


def test_finished_adapters_are_not_touched(train, folder, tmp_path, capsys):
    ends = ["--head", str(folder / "head"), "--lora_r", "2", "--max_steps", "2"]
    assert train(*ends) == 0
    before = contents(tmp_path / "out")
    assert train(*ends) == 0
    assert "is finished, after 2 steps" in capsys.readouterr().out
    assert contents(tmp_path / "out") == before


def test_stopped_between_its_last_step_and_its_end(train, tmp_path, capsys):
    """All steps are made, nothing else is: no step more; the head of the last checkpoint is evaluated and saved."""
    assert train("--max_steps", "4") == 0
    out = tmp_path / "out"
    expected, results = load_file(out / "model.safetensors"), (out / "train_results.json").read_text()
    for name in ("model.safetensors", "trainer_state.json", "eval_results.json", "README.md"):
        (out / name).unlink()
    assert train("--max_steps", "4") == 0
    saved = load_file(out / "model.safetensors")
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    assert json.loads((out / "trainer_state.json").read_text())["global_step"] == 4
    assert (out / "train_results.json").read_text() == results, "no zeros in place of what was measured"
    assert (out / "eval_results.json").exists()
    assert (out / "README.md").exists()
    before = contents(out)
    assert train("--max_steps", "4") == 0
    assert contents(out) == before


def test_more_steps_go_on(train, tmp_path, capsys):
    assert train("--max_steps", "4") == 0
    assert train("--max_steps", "5") == 0
    assert f"resumes from {tmp_path / 'out' / 'checkpoint-4'}" in capsys.readouterr().out
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 5


def test_a_head_without_checkpoints_is_not_overwritten(train, tmp_path, capsys):
    ends = ["--save_strategy", "no", "--max_steps"]
    assert train(*ends, "2") == 0
    before = contents(tmp_path / "out")
    assert train(*ends, "3") == 1
    assert f"{tmp_path / 'out'} holds a head after 2 steps, and no checkpoint to go on from" in capsys.readouterr().err
    assert contents(tmp_path / "out") == before


def test_weights_alone_are_not_gone_on_with(train, tmp_path, capsys):
    """Optimizer and schedule would begin anew, without a word."""
    assert train("--save_only_model", "true", "--max_steps", "2") == 0
    assert train("--save_only_model", "true", "--max_steps", "3") == 1
    assert "checkpoint-2 holds weights alone (save_only_model), so optimizer and learning rate would start anew" in (
        capsys.readouterr().err
    )
