"""The run: what is asked, in which order, what is kept; an interrupted run gives the figures of a whole one."""

import json

import pytest
import torch

from eagle3_hf import Eagle3DraftModel, bench
from eagle3_hf.evaluation.bench import Benchmark, benchmark_columns
from eagle3_hf.evaluation.cells import Setting, batches, plan
from eagle3_hf.evaluation.columns import Column
from eagle3_hf.evaluation.prompts import Question
from support.benchmarks import QUESTIONS


LENGTH = 20  # longer than what warms up


def benchmark(target, head, tokenizer, path, questions=QUESTIONS, columns=None, **settings) -> Benchmark:
    heads = {"head": head}
    columns = benchmark_columns(heads) if columns is None else columns
    settings = {"max_new_tokens": [LENGTH], **settings}
    return Benchmark(target, heads, tokenizer, questions, columns, path, **settings)


def figures(result) -> dict:
    """All that a run without a clock repeats exactly."""
    values = result.as_dict()
    return {name: values[name] for name in ("figures", "calls", "differences", "cells", "columns")}


# ----- order ---------------------------------------------------------------------------------------------------------


def test_all_columns_of_a_cell_get_the_same_prompts_and_seed(pretended, target, head, tokenizer, tmp_path):
    run = benchmark(target, head, tokenizer, tmp_path / "a")
    run.run(progress=False)
    calls = pretended.measured(LENGTH)
    names = [column.name for column in run.columns]
    assert len(calls) == 7 * len(names)
    cells = [calls[start : start + len(names)] for start in range(0, len(calls), len(names))]
    for cell in cells:
        assert sorted(call[0] for call in cell) == sorted(names)
        assert len({(str(call[1]), call[2]) for call in cell}) == 1
    assert len({cell[0][2] for cell in cells}) == len(cells), "each cell has its own seed"
    assert len({tuple(call[0] for call in cell) for cell in cells}) > 1, "the order is shuffled"


def test_turns_follow_what_ordinary_decoding_told(pretended, target, head, tokenizer, tmp_path):
    run = benchmark(target, head, tokenizer, tmp_path / "a", questions=QUESTIONS[:1])
    run.run(progress=False)
    first, second = (call for call in pretended.measured(LENGTH) if call[0] == "plain")
    told = next(iter(run.store.answers.values()))["plain"].tokens[0]
    messages = [
        {"role": "user", "content": QUESTIONS[0].turns[0]},
        {"role": "assistant", "content": tokenizer.decode(told, skip_special_tokens=True)},
        {"role": "user", "content": QUESTIONS[0].turns[1]},
    ]
    for asked, call in ((messages[:1], first), (messages, second)):
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert call[1] == [ids]


def test_a_system_prompt_and_a_tokenizer_without_template(pretended, target, head, tokenizer, tmp_path, monkeypatch):
    questions = [Question("a", "x", ("Sing.",), "You are a helpful assistant.")]
    benchmark(target, head, tokenizer, tmp_path / "a", questions).run(progress=False)
    assert "helpful assistant" in tokenizer.decode(pretended.measured(LENGTH)[0][1][0])
    monkeypatch.setattr(tokenizer, "chat_template", None)
    benchmark(target, head, tokenizer, tmp_path / "b", questions).run(progress=False)
    assert tokenizer.decode(pretended.calls[-1][1][0]) == "<bos>You are a helpful assistant.\n\nSing."


def test_every_combination_of_lists_is_measured(pretended, target, head, tokenizer, tmp_path):
    lists = {"temperatures": [0, 0.7], "batch_sizes": [1, 2], "max_new_tokens": [LENGTH, 30]}
    result = benchmark(target, head, tokenizer, tmp_path / "a", **lists).run(progress=False)
    settings = list(dict.fromkeys(each.setting for each in result.figures))
    assert len(settings) == 8
    for setting in settings:
        names = {each.column for each in result.figures if each.setting == setting}
        lookup = {"prompt lookup"} if setting.batch_size == 1 else set()
        assert names == {"plain", "head"} | lookup
    options = [call[3] for call in pretended.measured(30)]
    assert {str(each) for each in options} == {
        "{'do_sample': False, 'max_new_tokens': 30}",
        "{'do_sample': True, 'max_new_tokens': 30, 'temperature': 0.7, 'top_k': 0}",
    }


def test_batches_are_full_and_of_one_task_first():
    asked = [
        Question(str(index), task, ("q",) * turns)
        for index, (task, turns) in enumerate([("x", 1)] * 5 + [("y", 1)] * 3 + [("z", 2)] * 2)
    ]
    found = batches(asked, 2)
    assert [[question.id for question in group] for group in found] == [
        ["0", "1"],
        ["2", "3"],
        ["5", "6"],
        ["8", "9"],
        ["4", "7"],
    ]
    assert all(len({len(question.turns) for question in group}) == 1 for group in found)
    assert len(batches(asked, 1)) == 10
    with pytest.raises(ValueError, match="batch size 9 needs that many questions"):
        plan(asked, [0.0], [9], [8], 0)


def test_a_plan_is_shuffled_and_repeatable():
    made = plan(QUESTIONS, [0.0, 1.0], [1], [8, 16], 0)
    assert made == plan(QUESTIONS, [0.0, 1.0], [1], [8, 16], 0)
    assert made != plan(QUESTIONS, [0.0, 1.0], [1], [8, 16], 1)
    assert len({each.key for each in made}) == len(made) == 20


def test_every_column_warms_up_in_every_setting(pretended, target, head, tokenizer, tmp_path):
    benchmark(target, head, tokenizer, tmp_path / "a", temperatures=[0, 1]).run(progress=False)
    before = pretended.calls[: next(i for i, call in enumerate(pretended.calls) if "eos_token_id" in call[3])]
    assert sorted((call[0], call[3]["do_sample"]) for call in before) == sorted(
        (name, sampled)
        for name in ("plain", "prompt lookup 10", "prompt lookup 4", "head")
        for sampled in (False, True)
    )


def test_a_turn_that_exceeds_the_targets_positions_is_left_out(pretended, target, head, tokenizer, tmp_path, caplog):
    questions = [
        Question("a", "x", ("Sing.", "sea " * 800, "more")),
        Question("b", "x", ("sea " * 800,)),
        QUESTIONS[4],
    ]
    run = benchmark(target, head, tokenizer, tmp_path / "a", questions)
    result = run.run(progress=False)
    assert {(call.questions[0], call.turn) for call in result.calls} == {("a", 1), ("e", 1)}
    assert result.cells == (2, 2)
    assert "exceeds the target's 512 positions" in caplog.text


# ----- interrupted and resumed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [3, 17, 34, 36])
def test_an_interrupted_run_gives_the_figures_of_a_whole_one(call, pretended, target, head, tokenizer, tmp_path):
    """While it warms up, in a first turn, between the turns of a conversation, and near the end."""
    whole = benchmark(target, head, tokenizer, tmp_path / "whole").run(progress=False)
    calls = len(pretended.calls)
    pretended.calls.clear()
    pretended.interrupt_at = call
    stopped = benchmark(target, head, tokenizer, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):
        stopped.run(progress=False)
    partial = stopped.result()
    assert partial.cells[0] < 7
    assert bool(partial.figures) == (call > 10)
    stopped.store.close()
    pretended.interrupt_at = None
    resumed = benchmark(target, head, tokenizer, tmp_path / "a").run(progress=False)
    assert figures(resumed) == figures(whole)
    assert len(pretended.calls) < 2 * calls, "what was measured is not measured again"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_file_that_ends_in_the_middle_of_a_line(share, pretended, target, head, tokenizer, tmp_path):
    """As after a kill or a power cut."""
    run = benchmark(target, head, tokenizer, tmp_path / "a")
    whole = run.run(progress=False)
    run.store.close()
    content = (tmp_path / "a").read_bytes()
    cut = int(len(content) * share)
    assert content[cut - 1 : cut] != b"\n"
    (tmp_path / "a").write_bytes(content[:cut])
    assert figures(benchmark(target, head, tokenizer, tmp_path / "a").run(progress=False)) == figures(whole)


def test_a_complete_run_measures_nothing_again(pretended, target, head, tokenizer, tmp_path):
    first = benchmark(target, head, tokenizer, tmp_path / "a")
    whole = first.run(progress=False)
    first.store.close()
    pretended.calls.clear()
    again = benchmark(target, head, tokenizer, tmp_path / "a").run(progress=False)
    assert pretended.calls == []
    assert figures(again) == figures(whole)


def test_changed_settings_are_named(pretended, target, head, tokenizer, tmp_path):
    path = tmp_path / "a"
    benchmark(target, head, tokenizer, path).store.close()
    other = Eagle3DraftModel.from_target(target)
    for changed, words in (
        ({"seed": 5}, r"another seed \(0\) than this run's \(5\)"),
        ({"temperatures": [0, 1]}, r"another temperatures \(\[0.0\]\) than this run's \(\[0.0, 1.0\]\)"),
        ({"max_new_tokens": [9]}, "another max new tokens"),
        ({"questions": QUESTIONS[1:]}, "another questions"),
        ({"columns": [Column("head", "head", {"num_assistant_tokens": 3})]}, "another columns: head: head settings"),
        ({"columns": [Column("more", "head")]}, "another columns: more"),
        ({"template_kwargs": {"mood": 1}}, "another template kwargs: mood"),
    ):
        with pytest.raises(ValueError, match=words):
            benchmark(target, head, tokenizer, path, **changed)
    other.generation_config = head.generation_config
    with pytest.raises(ValueError, match="another heads: head"):
        benchmark(target, other, tokenizer, path)
    benchmark(target, head, tokenizer, path).store.close()


def test_files_that_are_none_of_a_benchmark(target, head, tokenizer, tmp_path):
    for content in ('{"kind": "else"}\n', "[1]\n", "text\n", "text", '{"kind": "header", "format": 99}\n'):
        (tmp_path / "a").write_text(content)
        with pytest.raises(ValueError, match="not a (file|line) of a benchmark"):
            benchmark(target, head, tokenizer, tmp_path / "a")
        assert (tmp_path / "a").read_text() == content


def test_a_file_belongs_to_one_run_at_a_time(target, head, tokenizer, tmp_path):
    first = benchmark(target, head, tokenizer, tmp_path / "a")
    with pytest.raises(ValueError, match="another process is writing to"):
        benchmark(target, head, tokenizer, tmp_path / "a")
    first.store.close()
    benchmark(target, head, tokenizer, tmp_path / "a").store.close()


# ----- with a real target --------------------------------------------------------------------------------------------


def test_a_real_run(target, head, tokenizer, tmp_path):
    state = torch.get_rng_state()
    columns = [
        *benchmark_columns({"head": head}),
        Column("again"),
        Column("tired", call_settings={"repetition_penalty": 9.0}),
    ]
    path = tmp_path / "a"
    run = benchmark(target, head, tokenizer, path, QUESTIONS[1:3], columns, temperatures=[0, 1], max_new_tokens=[10])
    result = run.run(progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.cells == (6, 6)
    assert result.columns == ["plain", "prompt lookup", "head", "again", "tired"]
    for temperature in (0.0, 1.0):
        setting = Setting(temperature, 1, 10)
        for column in ("plain", "head", "again", "prompt lookup"):
            each = result.of(column, setting=setting)
            if column != "prompt lookup" or not temperature:
                assert dict(each.texts) == {"equal": 3, "near-tie": 0, "different": 0}, column
            assert each.tokens <= 30
            assert each.speedup.value > 0
        drafted = result.of("head", setting=setting)
        assert drafted.tau.value == pytest.approx(drafted.stats.emitted / drafted.stats.rounds)
        assert sum(drafted.split.shares().values()) == pytest.approx(1)
        assert min(drafted.split.shares().values()) > 0
        assert result.of("plain", setting=setting).split.shares().keys() == {"prefill", "rest"}
        assert result.of("prompt lookup", setting=setting).tau.value >= 1
    different = [each for each in result.differences if each.column == "tired"]
    assert different
    assert {each.kind for each in different} == {"different"}
    greedy = [each for each in different if each.margin is not None]
    assert all(each.margin > each.bound for each in greedy)
    assert len(run.store.probes) == 4
    assert result.ratio("head", "again").value == pytest.approx(
        result.of("head").tokens_per_second / result.of("again").tokens_per_second
    )


def test_texts_are_equal_in_batches(target, head, tokenizer, tmp_path):
    run = benchmark(
        target,
        head,
        tokenizer,
        tmp_path / "a",
        QUESTIONS[:4],
        [Column("head", "head")],
        batch_sizes=[2],
        max_new_tokens=[8],
    )
    result = run.run(progress=False)
    assert result.cells == (3, 3)
    assert dict(result.of("head").texts) == {"equal": 6, "near-tie": 0, "different": 0}
    assert result.of("head").answers == 6


def test_in_python(target, head, tokenizer):
    result = bench(
        target,
        head,
        tokenizer,
        ["What is the sea?", "Sing."],
        trees=["4/2/2", "3/3/1"],
        columns=["again:"],
        max_new_tokens=[6],
        progress=False,
    )
    assert result.columns == ["plain", "prompt lookup", "head 4/2/2", "head 3/3/1", "again"]
    assert result.chains == ["head 3/3/1"]
    assert len(result.of("head 3/3/1").stats.per_depth) <= 3
    with pytest.raises(KeyError, match="no figures of nothing"):
        result.of("nothing")
    json.dumps(result.as_dict(), allow_nan=False)
