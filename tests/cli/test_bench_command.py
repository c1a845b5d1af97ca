"""`eagle3-hf bench`: two arguments give a table, Ctrl-C too, and the same command resumes."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main
from eagle3_hf.evaluation import runs
from support.chats import chat_tokenizer, tiny_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    target = tiny_target(tokenizer)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    for name in ("first", "second"):
        Eagle3DraftModel.from_target(target, draft_vocab=range(200)).save_pretrained(folder / name)
    (folder / "qa.jsonl").write_text(
        '{"turns": ["What is the sea?", "Sing."]}\n{"turns": ["Hello", "It sings."]}\n', encoding="utf-8"
    )
    return folder


@pytest.fixture
def call(models, tmp_path, monkeypatch):
    """The command on the tiny models, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*options) -> int:
        return main(["bench", str(models / "target"), str(models / "first"), "--device", "cpu", *map(str, options)])

    return run


def test_two_arguments(call, capsys, tmp_path):
    assert call("--questions", 1, "--max-new-tokens", 2) == 0
    out = capsys.readouterr().out
    for words in ("| plain ", "| prompt lookup (best: ", "| head ", "| arithmetic ", "| acceptance by depth "):
        assert words in out
    assert "used by other processes: " in out
    (file,) = (tmp_path / "bench").iterdir()
    assert re.fullmatch(r"target-first-[0-9a-f]{8}\.jsonl", file.name)


def test_ctrl_c_prints_what_there_is_and_the_same_command_resumes(call, models, capsys, monkeypatch, tmp_path):
    options = ["--prompts", models / "qa.jsonl", "--max-new-tokens", 5, "--no-prompt-lookup", "--tree", "2/2/1"]
    calls, measure = [], runs.measure

    def interrupted(*args, **kwargs):
        calls.append(args[2].name)
        if len(calls) == 7:  # two warm up, one probes, two are the first turn, one of the second
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(runs, "measure", interrupted)
    assert call(*options) == 130
    told = capsys.readouterr()
    assert "measured so far: 1 of 4 turns" in told.out
    assert "| head 2/2/1 " in told.out
    assert "interrupted; the same command resumes from what was saved:\neagle3-hf bench " in told.err
    monkeypatch.setattr(runs, "measure", measure)
    assert call(*options) == 0
    out = capsys.readouterr().out
    assert "4 turns, of which 1 have been measured; answers are kept in bench/target-first-" in out
    assert "measured so far" not in out
    monkeypatch.setattr(runs, "measure", None)
    assert call(*options) == 0
    assert "these are the results of that run; --restart measures again" in capsys.readouterr().out
    monkeypatch.setattr(runs, "measure", measure)
    (file,) = (tmp_path / "bench").iterdir()
    before = file.stat().st_mtime_ns
    assert call(*options, "--restart") == 0
    assert file.stat().st_mtime_ns > before
    assert "have been measured" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_gives_the_same_texts_and_acceptance(call, models, tmp_path):
    """Real processes and SIGKILL, at moments that the file's growth gives; only times may differ."""
    options = [
        "--prompts",
        str(models / "qa.jsonl"),
        "--max-new-tokens",
        "30",
        "--tree",
        "4/2/2",
        "--output",
        "answers",
    ]
    words = ["bench", str(models / "target"), str(models / "first"), "--device", "cpu", *options]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # as in this process, which completes the run
    }
    lines = []
    for least in (3, 8, 14):
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3_hf.cli", *words],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and len(_lines(tmp_path / "answers")) < least:
            time.sleep(0.01)
        process.kill()
        assert process.wait() != 0, "it was too quick to be killed"
        lines.append(len(_lines(tmp_path / "answers")))
    assert lines == sorted(lines)
    assert call(*options, "--json", "resumed.json") == 0
    options[-1] = "whole"
    assert call(*options, "--json", "whole.json") == 0
    resumed, whole = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("resumed", "whole"))
    assert resumed["cells"] == {"measured": 4, "all": 4}
    for name in ("tokens", "answers", "conversations", "texts", "tau"):
        assert [each[name] for each in resumed["figures"] if each["column"] != "prompt lookup"] == [
            each[name] for each in whole["figures"] if each["column"] != "prompt lookup"
        ]
    counted = [
        (each["column"], each["turn"], each["tokens"], each["tau"], each["per_depth"]) for each in whole["calls"]
    ]
    assert counted == [
        (each["column"], each["turn"], each["tokens"], each["tau"], each["per_depth"]) for each in resumed["calls"]
    ]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def test_results_as_files(call, models, capsys, tmp_path):
    options = ["--prompts", models / "qa.jsonl", "--max-new-tokens", 3, "--questions", 0, "--output", "answers"]
    options += ["--head", f"other={models / 'second'}", "--column", "again:", "--temperature", 0, 1]
    files = ["--json", "r.json", "--csv", "r.csv"]
    assert call(*options, *files) == 0
    assert "written: r.json" in capsys.readouterr().out
    values = json.loads((tmp_path / "r.json").read_text())
    assert values["columns"] == ["plain", "prompt lookup", "first", "other", "again"]
    assert values["models"] == {"target": "target", "first": "first", "other": "second"}
    assert values["cells"] == {"measured": 8, "all": 8}
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["temperature"] for row in rows} == {"0.0", "1.0"}
    assert {row["column"] for row in rows} == set(values["columns"])
    assert call(*options, "--seed", 1) == 1
    assert "answers was measured with another " in capsys.readouterr().err


def test_a_page(call, models, tmp_path):
    pytest.importorskip("matplotlib")
    assert call("--prompts", models / "qa.jsonl", "--max-new-tokens", 2, "--questions", 1, "--html", "r.html") == 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_mistakes_are_found_before_the_target_is_loaded(call, models, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    (tmp_path / "folder").mkdir()
    for options, words in (
        (["--json", "none/r.json"], "none/r.json: the folder none does not exist"),
        (["--output", "folder"], "folder is a folder: name a file"),
        (["--tree", "1/2"], "nodes/depth/top_k"),
        (["--column", "x:y"], "NAME:FIELD=VALUE"),
        (["--head", str(models / "first")], "two heads have the name first: name this one, --head NAME="),
        (["--head", "x="], "--head x=: expected NAME=HEAD"),
        (["--prompts", str(tmp_path / "nowhere.jsonl")], "nowhere.jsonl"),
    ):
        assert call(*options) == 1
        assert words in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call("--html", "r.html") == 1
    assert 'pip install "eagle3-hf[plot]"' in capsys.readouterr().err
