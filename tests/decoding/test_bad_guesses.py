"""Guesses that are no numbers, or of no use, cost speed and never the text; a head of no use is named once."""

import logging

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from support.drafts import draft_of, half_vocabulary, new_draft, set_tree, target_of
from support.families import VOCAB_SIZE, prompt


class Broken(Eagle3DraftModel):
    """A head whose logits are spoilt at some rows of some levels."""

    value = float("nan")
    levels: tuple[int, ...] = (0,)
    rows: slice = slice(None)
    columns: slice = slice(3, 4)
    _level = 0

    def fuse(self, features):
        self._level = 0
        return super().fuse(features)

    def compute_logits(self, hidden, borrowed=None):
        logits = super().compute_logits(hidden, borrowed)
        if self._level in self.levels:
            logits[:, self.rows, self.columns] = self.value
        self._level += 1
        return logits


@pytest.fixture(scope="module")
def broken() -> Broken:
    return set_tree(Broken.from_target(target_of("llama"), draft_vocab=half_vocabulary()).eval(), (20, 4, 5))


WARPED = {"top_k": 30, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3}


@pytest.mark.pairwise
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize(
    ("levels", "rows", "columns"),
    [
        ((0,), slice(None), slice(3, 4)),
        ((0,), slice(None), slice(None)),
        ((1, 2, 3), slice(1, 3), slice(7, 9)),
        ((0, 1, 2, 3), slice(None), slice(None)),
    ],
    ids=["one score of the first level", "the first level", "some branches", "everything"],
)
@pytest.mark.parametrize(
    "mode",
    [{}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "temperature": 0.7, **WARPED}],
    ids=["greedy", "sampled", "cutoffs"],
)
def test_scores_that_are_not_numbers_prune_their_branch(broken, mode, levels, rows, columns, value):
    broken.value, broken.levels, broken.rows, broken.columns = value, levels, rows, columns
    target, results = target_of("llama"), []
    for assistant in (None, broken):
        torch.manual_seed(0)
        out = target.generate(prompt(6), max_new_tokens=16, assistant_model=assistant, **mode)
        results.append((out, torch.get_rng_state()))
    assert torch.equal(results[1][0], results[0][0])
    assert torch.equal(results[1][1], results[0][1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_feature_that_overflows_costs_no_more_than_its_round(value, monkeypatch):
    """Every later row attends to the draft's row of that token, which must be finite again."""
    target, draft = target_of("llama"), set_tree(draft_of("llama", half=False), "cpu")
    text, fused = target.generate(prompt(6), max_new_tokens=40), draft.fuse

    def overflowing(features):
        hidden = fused(features)
        if features.shape[1] == 6:
            hidden[:, 3] = value
        return hidden

    monkeypatch.setattr(draft, "fuse", overflowing)
    ours = target.generate(prompt(6), max_new_tokens=40, assistant_model=draft.foretell(text[0, 6:]))
    assert torch.equal(ours, text)
    assert draft.stats.mean_accepted > 0.5


def test_a_tree_without_any_guess_is_one_plain_step(broken):
    broken.value, broken.levels, broken.rows, broken.columns = float("nan"), (0, 1, 2, 3), slice(None), slice(None)
    target, sizes = target_of("llama"), []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    target.generate(prompt(6), max_new_tokens=5, assistant_model=broken)
    handle.remove()
    assert sizes == [6, 1, 1, 1, 1]
    assert (broken.stats.tau, broken.stats.reached) == (1.0, [])


def test_cutoffs_leave_no_nodes_that_they_rule_out():
    """With top-k 1 the draft may say one token a level, however many children the tree has room for."""
    target, draft = target_of("llama"), set_tree(draft_of("llama", half=False), (59, 5, 10))
    sizes = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    target.generate(
        prompt(6),
        max_new_tokens=20,
        assistant_model=draft.foretell([]),
        assistant_lookup=False,
        do_sample=True,
        top_k=1,
        temperature=0.9,
    )
    handle.remove()
    assert max(sizes[1:]) == 6


def test_what_vanilla_refuses_to_sample_from_is_refused_the_same_way():
    target, draft = target_of("llama"), draft_of("llama", half=False)
    text = target.generate(prompt(6), max_new_tokens=12)[0, 6:]
    for spoilt in (0, 3):
        states = []
        for assistant in (None, draft.foretell(text, favourite=1.0)):
            calls = 0

            def spoil(ids, scores, at=spoilt):
                nonlocal calls
                calls += 1
                return scores * float("nan") if calls == at + 1 else scores

            torch.manual_seed(0)
            with pytest.raises(RuntimeError, match="probability tensor contains"):
                target.generate(
                    prompt(6), max_new_tokens=12, do_sample=True, assistant_model=assistant, logits_processor=[spoil]
                )
            states.append(torch.get_rng_state())
        assert torch.equal(*states)


# ----- the warning about a head that is of no use --------------------------------------------------------------------


def low_acceptance_warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "drafts accepted in its first" in record.getMessage()]


def useless() -> Eagle3DraftModel:
    """Its few words are ones that the target does not say."""
    target = target_of("llama")
    said = set(target.generate(prompt(6), max_new_tokens=100)[0].tolist())
    unsaid = [token for token in range(VOCAB_SIZE) if token not in said]
    return set_tree(Eagle3DraftModel.from_target(target, draft_vocab=unsaid).eval(), "cpu")


def test_low_acceptance_warns_once(caplog):
    draft, target = useless(), target_of("llama")
    for _ in range(3):
        target.generate(prompt(6), max_new_tokens=50, assistant_model=draft, num_assistant_tokens=11)
    warnings = low_acceptance_warnings(caplog)
    assert len(warnings) == 1
    for words in ("0 drafts accepted", "first 64 rounds", "target_layer_ids", "[1, 2, 3]", "rope_parameters"):
        assert words in warnings[0]


def test_rounds_without_a_tree_say_nothing_about_a_head(caplog):
    draft, target = useless(), target_of("llama")
    for _ in range(70):
        target.generate(prompt(2), max_new_tokens=2, assistant_model=draft)
    assert not low_acceptance_warnings(caplog)


def test_a_head_that_helps_is_not_warned_about(caplog):
    draft, target = set_tree(new_draft(target_of("llama")), "cpu"), target_of("llama")
    text = target.generate(prompt(6), max_new_tokens=100)
    for _ in range(3):
        target.generate(prompt(6), max_new_tokens=100, assistant_model=draft.foretell(text[0, 6:]))
    assert draft.stats.rounds > 25
    assert not low_acceptance_warnings(caplog)


def test_a_plain_run_warns_about_nothing(caplog):
    target, draft = target_of("llama"), draft_of("llama")
    caplog.clear()
    target.generate(prompt(6), max_new_tokens=20, assistant_model=draft.foretell([]))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
