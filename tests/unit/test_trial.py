"""The first rounds of a head are watched, and too low an acceptance is said once, with the command to explain it."""

import copy

import pytest

from eagle3_hf.decoding.draft.trial import ROUNDS, watch
from support.drafts import draft_of, set_tree, target_of
from support.families import prompt


@pytest.fixture
def draft():
    return copy.deepcopy(draft_of("llama", half=False))


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "eagle3-hf diagnose" in record.getMessage()]


def rounds(draft, accepted, number=ROUNDS, is_greedy=True) -> None:
    for at in range(number):
        watch(draft, accepted if isinstance(accepted, int) else int(at < accepted * number), is_greedy)


def test_almost_nothing_accepted(draft, caplog):
    rounds(draft, 0, ROUNDS - 1)
    assert not warnings(caplog)
    rounds(draft, 0, 200)
    (said,) = warnings(caplog)
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
def test_less_than_the_head_records(draft, caplog, recorded, share, is_greedy, warns):
    draft.config.held_out_accuracy = recorded
    rounds(draft, share, is_greedy=is_greedy)
    assert len(warnings(caplog)) == warns
    if warns:
        assert (
            "accepted in 25% of its first 64 rounds, but records that its first choice was right at 60%" in caplog.text
        )


def test_generate_warns(draft, caplog):
    target = target_of("llama")
    draft.foretell([])
    draft.generation_config.assistant_lookup = False
    set_tree(draft, (1, 1, 1))
    target.generate(prompt(5, 0), assistant_model=draft, max_new_tokens=80, do_sample=False)
    assert draft.stats.rounds > ROUNDS
    assert len(warnings(caplog)) == 1
