"""`eagle3-hf bench --record`, `--replay` and `--count-ops`."""

import json

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main
from eagle3_hf.evaluation.costs import COSTS
from eagle3_hf.evaluation.record import Record
from eagle3_hf.evaluation.replay import FixedTree, Replay, ReplayResult
from eagle3_hf.evaluation.tree_sizes import measured_sizes, modelled_sizes, sizes_up_to
from support.chats import chat_tokenizer, tiny_target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a tiny target, a head for it and questions of two tasks."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    target = tiny_target(tokenizer)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    Eagle3DraftModel.from_target(target).save_pretrained(folder / "head")
    (folder / "questions").mkdir()
    for task in ("talk", "code"):
        lines = [json.dumps({"turns": [f"{task} {number}", "and then"]}) for number in range(2)]
        (folder / "questions" / f"{task}.jsonl").write_text("\n".join(lines))
    return folder


def bench(models, *options) -> int:
    places = [str(models / "target"), str(models / "head"), "--device", "cpu"]
    return main(
        ["bench", *places, "--prompts", str(models / "questions"), "--max-new-tokens", "8", *map(str, options)]
    )


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_record_is_written_and_replayed(models, temperature, tmp_path, capsys):
    file = tmp_path / "record.npz"
    assert bench(models, "--record", file, "--temperature", temperature) == 0
    printed = capsys.readouterr().out
    assert "4 texts" in printed
    assert f"eagle3-hf bench --replay {file}" in printed
    record = Record.load(file)
    assert sorted(record.header.tasks) == ["code", "code", "talk", "talk"]
    assert (record.header.target, record.header.head) == ("target", "head")
    assert record.header.is_coupled is bool(temperature)
    assert max(len(text.text) for text in record) <= 8
    assert main(["bench", "--replay", str(file), "--tree", "3/2/2", "--costs", "gpu-eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("record.npz: head for target, 4 texts")
    assert lines[1] == "costs gpu-eager: tau / modelled speed-up"
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| policy",
        "|---|---|---|---|---|---|",
        "| 3/2/2",
        "| plain",
    ]
    assert lines[-1].startswith("| plain | 1.00 / 1.00 | 1.00 / 1.00 |")


def test_a_replay_as_a_page_with_measured_columns(models, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record, page, measured = tmp_path / "record.npz", tmp_path / "page.html", tmp_path / "bench.json"
    assert bench(models, "--record", record) == 0
    figures = [
        {"column": column, "task": task, "setting": {"batch_size": size}, "tau": {"value": 1.5}}
        | {"speedup": {"value": 1.2, "low": low, "high": 1.4}}
        for column, task, size, low in (
            ("head 3/2/2", None, 1, 1.1),
            ("head 2/2/2", None, 1, None),
            ("head 9/9/9", None, 1, 1.1),
            ("head 1/2/2", "talk", 1, 1.1),
            ("head 1/2/2", None, 2, 1.1),
            ("plain", None, 1, 1.1),
        )
    ]
    measured.write_text(json.dumps({"figures": figures}))
    options = ["--tree", "3/2/2", "--tree", "4/2/1", "--html", str(page), "--measured", str(measured)]
    assert main(["bench", "--replay", str(record), *options]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert [text.count(f"<td>depth 2, top_k {top_k}</td>") for top_k in (1, 2)] == [4, 3]  # sizes 1 to 4, 1 to 3
    found = measured_sizes(measured)
    assert {family: [point.nodes for point in points] for family, points in found.items()} == {
        (2, 2): [2, 3],
        (9, 9): [9],
    }
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"other.json is not a file that `bench --json` has written"):
        measured_sizes(tmp_path / "other.json")


def test_modelled_sizes_are_those_of_the_replay(models, tmp_path):
    file = tmp_path / "record.npz"
    assert bench(models, "--record", file) == 0
    replay = Replay(Record.load(file), COSTS["cpu"])
    (point,) = modelled_sizes(replay, 2, 2, [3])
    whole = ReplayResult.total("", replay.run(FixedTree(3, 2, 2)))
    assert (point.nodes, point.tau, point.speedup) == (3, whole.stats.tau, whole.speedup)
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(59)[:4] == [1, 2, 3, 4]
    assert sizes_up_to(59)[-1] == 59


def test_ops_are_counted_for_each_tree(models, capsys):
    assert bench(models, "--count-ops", "--tree", "3/2/2", "--tree", "2/2/1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| whole round |") for line in lines) == 2
    assert [line.split(",")[0] for line in lines if line.startswith("tree")] == ["tree 3/2/2", "tree 2/2/1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "MODEL and HEAD are missing"),
        (["--record", "r.npz"], "MODEL and HEAD are missing"),
        (["--replay", "r.npz", "--count-ops"], "--replay and --count_ops exclude each other"),
        (["--replay", "r.npz", "--tree", "auto"], "--tree auto is chosen by measured costs"),
        (["--replay", "r.npz"], "r.npz is not a file"),
        (["--replay", "r.npz", "--html", "none/p.html"], "the folder none does not exist"),
        (["--replay", "r.npz", "--measured", "b.json"], "--measured adds dots to the page of a replay"),
    ],
)
def test_what_does_not_go_together_is_rejected(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *options]) == 1
    assert message in capsys.readouterr().err


def test_costs_and_lists_are_checked(models, tmp_path, capsys):
    file = tmp_path / "record.npz"
    assert bench(models, "--record", file) == 0
    assert main(["bench", "--replay", str(file), "--costs", str(tmp_path / "none.json")]) == 1
    assert "none.json cannot be read" in capsys.readouterr().err
    assert bench(models, "--count-ops", "--temperature", "0", "1") == 1
    assert "--temperature takes one value here, got 0.0 1.0" in capsys.readouterr().err
