"""`assistant_window`: how far the draft looks back in a call; the text is the same, its guesses may differ."""

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from support.drafts import MODES, assert_same_as_plain, new_draft, padded, set_tree, target_of
from support.families import prompt


def drafts(window: int | None, sliding: int | None) -> Eagle3DraftModel:
    """The same weights, once with a window of the call's and once with one of the layers' own."""
    own = {} if sliding is None else {"layer_types": ["sliding_attention"], "sliding_window": sliding}
    draft = set_tree(new_draft(target_of("llama"), half=False, **own), "cpu")
    draft.generation_config.assistant_window = window
    return draft


@MODES
@pytest.mark.parametrize("lengths", [[30], [25, 4, 12]], ids=str)
@pytest.mark.parametrize("window", [1, 4])
def test_a_calls_window_is_that_of_a_sliding_head(window, lengths, mode):
    seen = []
    for draft in (drafts(window, None), drafts(None, window)):
        assert_same_as_plain(target_of("llama"), draft, padded(lengths), accepts=False, **mode)
        seen.append((draft.stats.accepted, draft.stats.reached, draft.places_seen))
    assert seen[0] == seen[1]


def outputs(draft, monkeypatch) -> list[torch.Tensor]:
    """What the draft's layers gave in a call that drafts the same tokens whatever they give."""
    found, run_layers = [], type(draft).run_layers

    def kept(self, *args, **kwargs):
        found.append(run_layers(self, *args, **kwargs))
        return found[-1]

    with monkeypatch.context() as patch:
        patch.setattr(type(draft), "run_layers", kept)
        target_of("llama").generate(prompt(20), max_new_tokens=3, assistant_model=draft.foretell([]))
    return found


def test_the_window_reaches_the_layers(monkeypatch):
    own, windowed, wide = (outputs(drafts(*pair), monkeypatch) for pair in ((None, 4), (4, None), (64, None)))
    full = outputs(drafts(None, None), monkeypatch)
    for one, other in zip(own, windowed, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(full, wide, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(full[0], windowed[0])


def test_the_narrower_of_two_windows_counts(monkeypatch):
    narrow = outputs(drafts(3, 9), monkeypatch)
    for one, other in zip(narrow, outputs(drafts(9, 3), monkeypatch), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(narrow[0], outputs(drafts(None, 9), monkeypatch)[0])


@pytest.mark.parametrize("window", [0, -1, True, 2.5, "auto"])
def test_what_is_no_window(window):
    with pytest.raises(ValueError, match=f"assistant_window must be None or an int of at least 1, got {window!r}"):
        target_of("llama").generate(prompt(5), max_new_tokens=4, assistant_model=drafts(window, None))


def test_saved_with_the_head(tmp_path):
    drafts(7, None).save_pretrained(tmp_path)
    assert Eagle3DraftModel.from_pretrained(tmp_path).generation_config.assistant_window == 7
