"""The numbers of docs/families.md, measured again: a few families with one prompt always, all when slow tests run."""

import pytest
import torch

from eagle3_hf.decoding.target import capability_probe
from eagle3_hf.decoding.target.capability import TREE, VerifyMode
from support.drafts import new_draft
from support.families import table
from support.families.others import CHAINS, PLAIN, tiny_other


FAST = ["llama", "gemma3", "falcon_alibi", "lfm2"]


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, 1) for name in FAST),
        *(pytest.param(name, table.SEEDS, marks=pytest.mark.slow) for name in table.names()),
    ],
)
def test_a_family(name, seeds):
    row = table.measure(name, seeds)
    assert not row.faults()
    expected = VerifyMode.CHAIN if name in CHAINS else VerifyMode.PLAIN if name in PLAIN else VerifyMode.TREE
    assert row.mode is expected


@pytest.mark.parametrize("name", ["falcon_alibi", "gpt_neo"])
def test_the_measure_sees_a_wrong_tree(name, monkeypatch):
    target = tiny_other(name)
    monkeypatch.setattr("eagle3_hf.decoding.dispatch.capability_of", lambda *args: TREE)
    inputs = table.inputs_of(name, 1, 0)
    found = table.difference(target, new_draft(target, half=False), inputs, table.TREE_PARENTS)
    assert found > 100 * table.MOST


def test_the_measure_sees_a_missing_mask(monkeypatch):
    target = tiny_other("llama")
    monkeypatch.setattr(
        "eagle3_hf.decoding.target.tree_attention.ActiveTree.rewrite",
        lambda self, function, *args: _used(self, function),
    )
    inputs = table.inputs_of("llama", 1, 0)
    assert table.difference(target, new_draft(target, half=False), inputs, table.TREE_PARENTS) > 100 * table.MOST


def _used(tree, function):
    tree.used = True
    return function


def test_paths():
    assert list(table.paths_of(table.TREE_PARENTS)) == [[0, 3], [0, 1, 5], [0, 2, 6, 8], [0, 1, 4, 7, 9]]


def test_the_page_has_a_row_for_every_family():
    lines = table.PAGE.read_text().splitlines()
    rows = {line.split("|")[1].strip(): line.split("|")[5].strip() for line in lines if line.count("|") > 8}
    assert list(rows)[2:] == table.names()
    assert set(rows.values()) == {"way", "---", *(mode.value for mode in VerifyMode)}


def test_the_way_is_logged_once_per_reason(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(capability_probe.logger, "warning_once", lines.append)
    capability_probe.capability_of(tiny_other("falcon_alibi"))
    assert len(lines) == 1
    assert "verified as chains, not as trees" in lines[0]
    assert torch.is_grad_enabled()
