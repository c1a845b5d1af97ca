"""The first rounds of a head are watched, and too low an acceptance is said once, with the command to explain it."""

import copy

import pytest

from eagle3_hf.decoding.draft import trial
from eagle3_hf.decoding.draft.trial import ROUNDS, watch
from support.drafts import draft_of, set_tree, target_of
from support.families import prompt


@pytest.fixture
def said(monkeypatch) -> list[str]:
    """What is warned of, whatever the verbosity is."""
    lines: list[str] = []
    monkeypatch.setattr(trial.logger, "warning", lines.append)
    return lines


@pytest.fixture
def draft():
    draft = copy.deepcopy(draft_of("llama", half=False))
    draft._trial = None  # other tests have drafted with it
    return draft


def warnings(said: list[str]) -> list[str]:
    return [line for line in said if "eagle3-hf diagnose" in line]


def rounds(draft, accepted, number=ROUNDS, is_greedy=True) -> None:
    for at in range(number):
        watch(draft, accepted if isinstance(accepted, int) else int(at < accepted * number), is_greedy)


def test_almost_nothing_accepted(draft, said):
    rounds(draft, 0, ROUNDS - 1)
    assert not warnings(said)
    rounds(draft, 0, 200)
    (said,) = warnings(said)
    assert "had 0 drafts accepted in its first 64 rounds" in said
    assert "target_layer_ids (now [1, 2, 3])" in said


@pytest.mark.parametrize(
    ("recorded", "share", "is_greedy", "warns"),
    [
        ([0.6, 0.5], 0.25, True, True),
        ([0.6, 0.5], 0.4, True, False),
        ([0.6, 0.5], 0.25, False, False),
        (None, 0.25, True, False),
    ],
)
def test_less_than_the_head_records(draft, said, recorded, share, is_greedy, warns):
    draft.config.held_out_accuracy = recorded
    rounds(draft, share, is_greedy=is_greedy)
    assert len(warnings(said)) == warns
    if warns:
        assert "accepted in 25% of its first 64 rounds, but records that its first choice was right at 60%" in said[0]


def test_generate_warns(draft, said):
    target = target_of("llama")
    draft.foretell([])
    draft.generation_config.assistant_lookup = False
    set_tree(draft, (1, 1, 1))
    target.generate(prompt(5, 0), assistant_model=draft, max_new_tokens=80, do_sample=False)
    assert draft.stats.rounds > ROUNDS
    assert len(warnings(said)) == 1
