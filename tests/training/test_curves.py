"""Training curves: what Trainer has logged, as a picture on the head's card."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from eagle3_hf.training.curves import CURVES_FILE, training_curves, write_curves
from support.training_runs import trainer_for


pytest.importorskip("matplotlib", reason="plots need the extra `plot`")

LOGS = [
    *({"step": step, "loss": 3.0 - step / 20, "accuracy_step_0": step / 50} for step in range(1, 31)),
    *(
        {
            "step": step,
            "eval_loss": 2.0,
            "eval_accuracy_step_0": 0.5,
            "eval_accuracy_step_1": 0.4,
            "eval_tau": step / 9,
        }
        for step in (10, 20)
    ),
    {"step": 30, "train_runtime": 3.0},
]


def labels(picture: str) -> str:
    return " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture))


def test_loss_accuracy_and_tau_against_the_data():
    picture = training_curves(LOGS, 8)
    shown = labels(picture)
    assert shown.count("sequences seen") == 3
    for word in ("loss", "training", "held out", "first choice right", "tau on held-out prompts", "depth 1, held out"):
        assert word in shown
    ElementTree.fromstring(picture)  # well-formed
    assert "prefers-color-scheme: dark" in picture
    assert "#0000a" not in picture


def test_what_was_not_logged_is_left_out():
    shown = labels(training_curves([entry for entry in LOGS if "eval_loss" not in entry], 8))
    assert "held out" not in shown
    assert "tau" not in shown
    assert training_curves(LOGS[:1], 8) is None
    assert training_curves([], 8) is None


def test_nothing_is_raised(tmp_path, caplog):
    assert write_curves(tmp_path / "none", LOGS, 8) is None
    assert "No training curves were written" in caplog.text
    assert write_curves(tmp_path, LOGS, 8) == tmp_path / CURVES_FILE


def test_the_card_shows_them_and_the_config_records_the_accuracy(target, rows, tokenizer, tmp_path):
    trainer = trainer_for(target, rows, tmp_path, tokenizer, eval_dataset=rows.select(range(4)), max_steps=2)
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    folder = tmp_path / "out"
    assert f"]({CURVES_FILE})" in (folder / "README.md").read_text(encoding="utf-8")
    assert "loss" in labels((folder / CURVES_FILE).read_text(encoding="utf-8"))
    recorded = type(trainer.draft.config).from_pretrained(folder).held_out_accuracy
    assert recorded[0] == pytest.approx(metrics["eval_accuracy_step_0"], abs=1e-4)
    assert len(recorded) == 3
