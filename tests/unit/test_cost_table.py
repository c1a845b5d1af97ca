"""Costs on disk: found by later processes, bounded, switched off, and passed over where they cannot be read."""

import json
import threading

import pytest
from huggingface_hub import constants

from eagle3_hf import LookupDraft
from eagle3_hf.decoding.draft import cost_table, known_sizes
from eagle3_hf.decoding.draft.sizing import Proposal, TreeSizer
from eagle3_hf.model.tree_settings import TreeSettings
from support.drafts import target_of
from support.families import prompt


LIMITS = TreeSettings(31, 8, 4, at_most=True)


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_HF_COST_TABLE", "1")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(known_sizes, "_found", type(known_sizes._found)())
    return tmp_path / "home" / "eagle3_hf" / "costs.json"


def taught() -> TreeSizer:
    sizer = TreeSizer(LIMITS)
    for _ in range(20):
        for nodes in (0, 7, 15):
            sizer.plan(8, 100)
            sizer.observe(
                Proposal({}, nodes, 2 if nodes else 0, [0.5] if nodes else []), {0: [0]}, 0.3, 1 + 0.1 * nodes
            )
    return sizer


def test_what_one_sizer_learnt_another_begins_with(table):
    sizer, other = taught(), TreeSizer(LIMITS)
    cost_table.write("key", sizer.state())
    other.restore(cost_table.read("key"))
    assert sizer.plan(8, 100).num_nodes
    assert other.plan(8, 100).num_nodes, "no plain step is needed first"
    for nodes in (3, 7, 15):
        assert other._here.of(nodes) == pytest.approx(sizer._here.of(nodes), rel=0.01)
    assert other._here.of(7) == pytest.approx(1.7, rel=0.1)
    assert other._draft.another(0) == pytest.approx(sizer._draft.another(0), rel=0.01)


def test_a_call_writes_and_a_later_process_reads(table, monkeypatch):
    target, draft = target_of("llama"), LookupDraft()
    target.generate(prompt(9), max_new_tokens=200, assistant_model=draft)
    (state,) = json.loads(table.read_text()).values()
    assert state["verify"]
    monkeypatch.setattr(known_sizes, "_found", type(known_sizes._found)())  # as in another process
    read = []
    monkeypatch.setattr(TreeSizer, "restore", lambda self, state: read.append(state))
    target.generate(prompt(9), max_new_tokens=5, assistant_model=draft)
    assert read == [state]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        '{"key": 3}',
        '{"key": {"verify": {"a": []}, "draft": []}}',
        '{"key": {"verify": 1}}',
        "[" * 99999,
        '{"key": NaN}',
        '{"key": {"verify": {"7": [0, 1' + "0" * 400 + ', 0, 0, 0, 0, 0]}, "draft": []}}',
    ],
)
def test_a_damaged_table_is_passed_over_and_mended(table, content):
    table.parent.mkdir(parents=True)
    table.write_text(content)
    sizer = TreeSizer(LIMITS)
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError, OverflowError)):
        sizer.restore(cost_table.read("key"))
    assert sizer.plan(8, 100).num_nodes == 0, "costs are measured"
    cost_table.write("key", taught().state())
    sizer.restore(cost_table.read("key"))


def test_a_disk_that_cannot_be_written_is_passed_over(table):
    table.parent.parent.mkdir(parents=True)
    table.parent.write_text("a file where the folder should be")
    cost_table.write("key", 1)
    assert cost_table.read("key") is None


def test_nothing_is_read_or_written_if_it_is_switched_off(table, monkeypatch):
    monkeypatch.setenv("EAGLE3_HF_COST_TABLE", "0")
    cost_table.write("key", 1)
    assert cost_table.read("key") is None
    assert not table.exists()


def test_it_is_bounded_and_forgets_the_oldest(table):
    for number in range(cost_table._MOST + 3):
        cost_table.write(str(number), number)
    assert len(json.loads(table.read_text())) == cost_table._MOST
    assert cost_table.read("2") is None
    assert cost_table.read("3") == 3
    assert [path.name for path in table.parent.iterdir()] == ["costs.json"]


def test_readers_beside_writers_see_whole_files(table):
    cost_table.write("key", 0)
    threads = [
        threading.Thread(target=lambda: [cost_table.write("key", number) for number in range(50)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert cost_table.read("key") is not None
    assert [path.name for path in table.parent.iterdir()] == ["costs.json"]
