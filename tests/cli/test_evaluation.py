"""Small measuring instruments: near-ties told from errors, one prompt compared, the cost of a round."""

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.acceptance import SpeculationStats
from eagle3_hf.cli import main
from eagle3_hf.evaluation.check import first_difference, near_tie_bound
from eagle3_hf.evaluation.columns import parse_tree
from eagle3_hf.evaluation.compare import Comparison, Run, TaskResult, compare
from eagle3_hf.evaluation.round_cost import round_cost
from support.chats import chat_tokenizer, tiny_target
from support.drafts import new_draft
from support.families import tiny


def head(target, seed: int = 0) -> Eagle3DraftModel:
    torch.manual_seed(seed)
    draft = Eagle3DraftModel.from_target(target)
    for name, value in parse_tree("6/3/2").items():
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


# ----- the cost of a round -------------------------------------------------------------------------------------------


def test_round_cost_times_every_tree():
    target = tiny("llama")
    draft = head(target)
    kept = draft.generation_config
    plain, costs = round_cost(target, draft, [parse_tree("4/2/2"), parse_tree("2/2/1")], context=8, rounds=4, turns=2)
    assert len(costs) == 2
    assert min(plain, *costs) > 0
    assert draft.generation_config is kept


def test_round_cost_where_everything_is_accepted():
    """Few rounds then fill the text, and some of each call must still be left to measure."""

    class Foretelling:
        """Passes every call on, after it has told the draft what the target will say."""

        def __init__(self, target, draft):
            self.target, self.draft, self.told = target, draft, 0

        def __getattr__(self, name):
            return getattr(self.target, name)

        def generate(self, input_ids, **options):
            if options.get("assistant_model") is not None:
                plain = {name: value for name, value in options.items() if name not in ("assistant_model", "streamer")}
                self.draft.foretell(self.target.generate(input_ids, **plain)[0, input_ids.shape[1] :], favourite=1.0)
                self.told += 1
            return self.target.generate(input_ids, **options)

    target = tiny("llama")
    draft = new_draft(target, half=False)
    foretelling = Foretelling(target, draft)
    _, costs = round_cost(foretelling, draft, [parse_tree("8/8/1")], context=8, rounds=3, turns=1)
    assert foretelling.told == 1
    assert draft.stats.tau > 5
    assert costs[0] > 0


def test_round_cost_on_the_command_line(tmp_path, capsys):
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    tiny_target(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert main(["bench", str(tmp_path), "random", "--round-cost", "--tree", "4/2/2", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "plain step " in said
    assert "round 4/2/2: " in said
