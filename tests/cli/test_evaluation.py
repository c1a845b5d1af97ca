"""The measuring instruments: near-ties told from errors, rates added up right, tables printed."""

import json

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.acceptance import SpeculationStats
from eagle3_hf.evaluation.bench import Comparison, Run, TaskResult, compare, round_cost
from eagle3_hf.evaluation.check import first_difference, near_tie_bound
from eagle3_hf.evaluation.report import parse_tree, print_round_cost, print_tasks
from eagle3_hf.evaluation.tasks import load_tasks
from support.families import tiny


def head(target, seed: int = 0) -> Eagle3DraftModel:
    torch.manual_seed(seed)
    draft = Eagle3DraftModel.from_target(target)
    for name, value in (("num_assistant_tokens", 6), ("assistant_tree_depth", 3), ("assistant_tree_top_k", 2)):
        setattr(draft.generation_config, name, value)
    return draft


def test_equal_texts_have_no_difference():
    assert first_difference([1, 2], [1, 2], [torch.zeros(4)] * 2, torch.float32) is None


def test_a_text_that_ends_early_is_no_tie():
    with pytest.raises(ValueError, match="2 tokens and the assisted one 1"):
        first_difference([1, 2], [1], [torch.zeros(4)] * 2, torch.float32)


@pytest.mark.parametrize(
    ("dtype", "margin", "is_near_tie"),
    [
        (torch.float32, 0.9e-4, True),
        (torch.float32, 1.1e-4, False),
        (torch.bfloat16, 0.125, True),  # two units in the last place of 10: 2 * 2^-7 * 8
        (torch.bfloat16, 0.126, False),
    ],
)
def test_margin_against_what_rounding_explains(dtype, margin, is_near_tie):
    scores = torch.tensor([-10.0, 2.0 + margin, 2.0], dtype=torch.float64)
    found = first_difference([0, 1], [0, 2], [torch.zeros(3), scores], dtype)
    assert (found.index, found.plain, found.assisted) == (1, 1, 2)
    assert found.margin == pytest.approx(margin, rel=1e-2)
    assert found.is_near_tie is is_near_tie
    assert ("NOT" not in str(found)) is is_near_tie


def test_masked_scores_do_not_widen_the_bound():
    assert near_tie_bound(torch.tensor([1.0, -torch.inf]), torch.float32) == pytest.approx(1e-5)


def test_rates_are_totals_over_totals():
    fast = Comparison(Run([1] * 10, 2.0), Run([1] * 10, 1.0), SpeculationStats(rounds=5, emitted=10))
    slow = Comparison(Run([1] * 30, 2.0), Run([1] * 20, 4.0), SpeculationStats(rounds=20, emitted=20))
    result = TaskResult([fast, slow])
    assert result.speedup == pytest.approx((30 / 5.0) / (40 / 4.0))
    assert result.tau == pytest.approx(30 / 25)
    assert result.equal == 1


@pytest.mark.parametrize("sampled", [False, True])
def test_compare_runs_both_from_the_same_seed(sampled):
    target = tiny("llama")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    result = compare(target, head(target), inputs, do_sample=sampled, max_new_tokens=12)
    assert result.equal
    assert result.difference is None
    assert result.stats.emitted == 11  # the first token comes from the prefill


def test_round_cost_times_every_tree(capsys):
    target = tiny("llama")
    trees = [(4, 2, 2), (2, 2, 1)]
    plain, costs = round_cost(target, head(target), trees, context=8, rounds=4)
    assert len(costs) == 2
    assert min(plain, *costs) > 0
    print_round_cost(target, head(target), trees[:1])
    assert "round 4/2/2" in capsys.readouterr().out


def test_tasks_are_read_and_bad_ones_named(tmp_path):
    (tmp_path / "one.jsonl").write_text("\n".join(json.dumps({"turns": [f"q{i}", "next"]}) for i in range(5)))
    assert load_tasks(tmp_path, 3) == {"one": ["q0", "q1", "q2"]}
    (tmp_path / "two.jsonl").write_text('{"question": "q"}\n')
    with pytest.raises(ValueError, match=r"two\.jsonl"):
        load_tasks(tmp_path, 3)
    with pytest.raises(ValueError, match="is not a folder that holds"):
        load_tasks(tmp_path / "nowhere", 3)


def test_table_of_a_folder_of_questions(tmp_path, capsys):
    from support.chats import chat_tokenizer, tiny_target

    tokenizer = chat_tokenizer()
    target = tiny_target(tokenizer)
    (tmp_path / "talk.jsonl").write_text(json.dumps({"turns": ["Hello there"]}))
    options = {"do_sample": False, "max_new_tokens": 6}
    results = print_tasks(target, head(target), tokenizer, tmp_path, 2, (4, 2, 2), False, options)
    assert results["talk"].equal == 1
    printed = capsys.readouterr().out
    assert "tree 4/2/2" in printed
    assert "| talk |" in printed


def test_trees_are_parsed_or_refused():
    assert parse_tree("15/4/3") == (15, 4, 3)
    for bad in ("15/4", "15/4/0", "a/b/c", "15,4,3"):
        with pytest.raises(ValueError, match="nodes/depth/top_k"):
            parse_tree(bad)
