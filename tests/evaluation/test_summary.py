"""Figures by hand, and what a report says of them."""

import csv
import io
import json

import pytest

from eagle3_hf import SpeculationStats
from eagle3_hf.evaluation.cells import Cell, Conversation, Setting
from eagle3_hf.evaluation.columns import PLAIN, Column, lookup_columns
from eagle3_hf.evaluation.differences import TextDifference, first_difference_index
from eagle3_hf.evaluation.measure import Answer
from eagle3_hf.evaluation.prompts import Question
from eagle3_hf.evaluation.report import to_csv, to_markdown
from eagle3_hf.evaluation.results import TimeSplit
from eagle3_hf.evaluation.summary import MeasuredCell, running, summarize


GREEDY = Setting(0.0, 1, 40)
COLUMNS = [PLAIN, *lookup_columns(), Column("head", "head"), Column("chain", "head", {"assistant_tree_top_k": 1})]
HEADER = {
    "machine": {
        "device": "cpu (2 threads), float32",
        "processor": "Some CPU",
        "cores": 4,
        "threads": 2,
        "python": "3.12",
        "torch": "2",
        "transformers": "5",
        "eagle3_hf": "0",
    },
    "settings": {"seed": 0, "questions": "2", "trees": {"head": "2/2/2"}},
}


def drafted(accepted: list[int], depth: int, seconds: float, extra: int = 1) -> Answer:
    """An answer of a head whose rounds accepted so many tokens, behind `extra` tokens of the prefill."""
    stats = SpeculationStats(prefill_seconds=0.1, draft_seconds=0.2, verify_seconds=0.6)
    for count in accepted:
        stats.record(count, depth, count + 1)
    return Answer([[7] * (stats.emitted + extra)], seconds, 0.1, None, stats, 300)


def cell(task: str, name: str, turn: int, answers: dict, differences=(), turns: int = 1) -> MeasuredCell:
    question = Question(name, task, ("q",) * turns)
    return MeasuredCell(Cell(Conversation(GREEDY, (question,)), turn), answers, differences)


def cells() -> list[MeasuredCell]:
    plain = {"plain": Answer([[7] * 20], 4.0, 0.5, None, None, 100)}
    longer = {"plain": Answer([[7] * 40], 8.0, 0.5, None, None, 200)}
    near = TextDifference("head", "x/a", 3, "near-tie", "one", "two", "three", 0.1, 0.2)
    wrong = TextDifference("head", "y/b", 5, "different", "one", "two", "three", 9.0, 0.2)
    return [
        cell("x", "a", 0, {
            **plain,
            "prompt lookup 10": Answer([[7] * 20], 5.0, 0.5, 19),
            "prompt lookup 4": Answer([[7] * 20], 2.0, 0.5, 10),
            "head": drafted([2, 0, 1, 2], 2, 1.0, extra=11),
            "chain": drafted([1, 1], 3, 2.0),
        }, [near], turns=2),
        cell("x", "a", 1, {**plain, "head": drafted([2, 2, 2], 2, 2.0)}, turns=2),
        cell("y", "b", 0, {**longer, "head": drafted([0], 2, 4.0)}, [wrong]),
    ]  # fmt: skip


def summary(measured=None, probes=(), progress=(3, 3)):
    return summarize(
        cells() if measured is None else measured,
        COLUMNS,
        header=HEADER,
        models={"target": "T", "head": "H"},
        chains=["chain"],
        probes=list(probes),
        progress=progress,
        seed=0,
    )


def test_rates_and_speedups():
    result = summary()
    plain, head = result.of("plain"), result.of("head")
    assert (plain.tokens, plain.seconds, plain.tokens_per_second) == (80, 16.0, 5.0)
    assert plain.speedup.value == plain.tau.value == 1
    tokens = 9 + 11 + 10 + 2
    assert (head.tokens, head.seconds, head.answers, head.conversations) == (tokens, 7.0, 3, 2)
    assert head.speedup.value == pytest.approx((tokens / 7) / 5)
    assert head.speedup.low < head.speedup.value < head.speedup.high
    of_a, of_b = (30 / 3) / 5, (2 / 4) / 5
    assert head.median_speedup == pytest.approx((of_a + of_b) / 2)
    assert head.tau.value == pytest.approx((9 + 9 + 1) / (4 + 3 + 1))
    assert result.of("head", task="y").speedup.value == pytest.approx(of_b)
    assert result.of("head", task="y").speedup.low is None
    # Only the turn that the chain has answered counts for it, of ordinary decoding too.
    assert result.of("chain").speedup.value == pytest.approx((5 / 2) / (20 / 4))
    assert result.ratio("chain", "head").value == pytest.approx((5 / 2) / (20 / 1))


def test_of_prompt_lookup_the_better_setting_is_reported():
    found = summary().of("prompt lookup")
    assert found.chosen == "prompt lookup 4"
    assert found.speedup.value == pytest.approx(2)
    assert found.tau.value == pytest.approx(19 / 10)


def test_counters_and_times_are_added_up():
    head = summary().of("head")
    assert head.stats.rounds == 8
    assert head.stats.histogram == [2, 1, 5]
    assert head.stats.per_depth == pytest.approx([6 / 8, 5 / 6])
    assert head.split == TimeSplit(*map(pytest.approx, (0.3, 0.6, 1.8, 7 - 2.7)))
    assert sum(head.split.shares().values()) == pytest.approx(1)
    assert head.peak_memory == 300
    assert summary().of("plain").split == TimeSplit(1.5, None, None, None, 14.5)


def test_texts_are_counted_once_they_have_been_compared():
    assert summary().of("head").texts == {"equal": 1, "near-tie": 1, "different": 1}
    first, second, third = cells()
    result = summary([first, second, MeasuredCell(third.cell, third.answers, None)])
    assert result.of("head").texts == {"equal": 1, "near-tie": 1, "different": 0}


def test_each_call_is_listed():
    calls = {(call.column, call.questions[0], call.turn): call for call in summary().calls}
    assert len(calls) == 9
    assert calls["head", "a", 2].tau == 3.0
    assert calls["head", "a", 2].per_depth == [1.0, 1.0]
    assert calls["plain", "b", 1].tau is None


def test_a_machine_that_is_not_quiet_is_told():
    quiet = [{"seconds": 1.0 + 0.001 * index, "others": 0.1} for index in range(9)]
    assert summary(probes=quiet).warnings == []
    loud = [{"seconds": 1.0 + 0.1 * index, "others": None} for index in range(9)]
    (warning,) = summary(probes=loud).warnings
    assert "was not quiet" in warning
    busy = [{"seconds": 1.0, "others": 3.0}] * 9
    (warning,) = summary(probes=busy).warnings
    assert warning.startswith("Other processes used 3.0 of 4 cores")


def test_figures_so_far_in_a_few_words():
    words = "prompt lookup 2.00x (tau 1.90), head 0.91x (tau 2.38), chain 0.50x (tau 2.00)"
    assert running(cells(), COLUMNS) == words
    assert running([], COLUMNS) == ""


def test_markdown():
    text = to_markdown(summary(progress=(3, 9)), differences=1)
    assert "measured so far: 3 of 9 turns" in text
    assert "target: T; head: H" in text
    assert "| prompt lookup (best: prompt lookup 4) |" in text
    assert "| chain (chain: n-alpha) |" in text
    assert "y/b: different at new token 5 (scores 9 apart, rounding explains 0.2): 'one' then 'two' or 'three'" in text
    assert "and 1 more differences" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table}) == 1


def test_csv_and_json():
    result = summary()
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert len(rows) == len(result.figures)
    (head,) = [row for row in rows if (row["column"], row["task"]) == ("head", "all")]
    assert float(head["speedup"]) == pytest.approx(result.of("head").speedup.value)
    assert head["accepted_histogram"] == "2 1 5"
    assert head["near_tie"] == "1"
    values = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert values["figures"][0]["column"] == "plain"
    infinite = TextDifference("head", "x/a", 0, "different", "", "a", "b", float("inf"), 0.1)
    first = cells()[0]
    result = summary([MeasuredCell(first.cell, first.answers, [infinite])])
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["differences"][0]["margin"] is None


@pytest.mark.parametrize(
    ("one", "other", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_first_difference(one, other, index):
    assert first_difference_index(one, other) == index
