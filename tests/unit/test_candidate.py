"""`Eagle3Candidate` as candidate generator of transformers' own loop: a chain a round, from the same draft state."""

import pytest
import torch
from transformers import GenerationMixin

import eagle3_hf
from eagle3_hf import Eagle3Candidate, Eagle3DraftModel
from eagle3_hf.decoding import loop, patching
from eagle3_hf.model.tree_settings import TreeSettings, tree_settings
from support.drafts import draft_of, new_draft, observe, set_tree, target_of
from support.families import prompt


NEW_TOKENS = 24


class Watching(Eagle3Candidate):
    """Writes down each round: the committed rows, the draft's row, and the drafted tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rounds = []

    def draft_tree(self, *args, **kwargs):
        tree = super().draft_tree(*args, **kwargs)
        self.rounds.append((self._cache.length, self._last[0, 0], tree.host()[0].tokens))
        return tree


@pytest.fixture
def stock(monkeypatch):
    """`stock(target, draft, ids)`: the ids, and the candidate generator that made the drafts."""

    def run(target, draft, ids, **kwargs):
        made = []

        def make(self, *args, **kwargs):
            made.append(Watching(target, draft))
            return made[-1]

        # Any ordinary assistant selects transformers' loop; the generator it would get is exchanged for ours.
        with eagle3_hf.enabled(False), monkeypatch.context() as patch:
            patch.setattr(GenerationMixin, "_get_candidate_generator", make)
            out = target.generate(ids, assistant_model=target, max_new_tokens=NEW_TOKENS, **kwargs)
        return out, made[0]

    before = {name: getattr(patching._owner(name), name) for name in patching._WRAPPERS}
    yield run
    eagle3_hf.enable()
    assert {name: getattr(patching._owner(name), name).__wrapped__ for name in before} == {
        name: method.__wrapped__ for name, method in before.items()
    }


@pytest.mark.each_choice
@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [1, 9, 20])
def test_greedy_text_of_vanilla_in_the_stock_loop(stock, family, length):
    target, draft, ids = target_of(family), set_tree(draft_of(family, half=False), "cpu"), prompt(length, 3)
    vanilla = target.generate(ids, max_new_tokens=NEW_TOKENS)
    draft.foretell(vanilla[0, length:])
    out, candidate = stock(target, draft, ids)
    assert torch.equal(out, vanilla)
    assert len(candidate.rounds) < NEW_TOKENS - 4, "drafts were accepted"
    assert {len(tokens) for _, _, tokens in candidate.rounds} == {5}, "a chain of the tree's depth, behind the root"


def test_processors_in_the_stock_loop(stock):
    target, draft, ids = target_of("llama"), set_tree(draft_of("llama", half=False), "chain"), prompt(9)
    kwargs = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    vanilla = target.generate(ids, max_new_tokens=NEW_TOKENS, **kwargs)
    out, _ = stock(target, draft.foretell(vanilla[0, 9:]), ids, **kwargs)
    assert torch.equal(out, vanilla)


def test_an_end_inside_a_block_in_the_stock_loop(stock):
    target, draft, ids = target_of("llama"), set_tree(draft_of("llama", half=False), "chain"), prompt(9)
    text = target.generate(ids, max_new_tokens=NEW_TOKENS)[0, 9:]
    for place in (0, 3, 8):
        end = int(text[place])
        vanilla = target.generate(ids, max_new_tokens=NEW_TOKENS, eos_token_id=end)
        out, _ = stock(target, draft.foretell(text, favourite=1.0), ids, eos_token_id=end)
        assert torch.equal(out, vanilla)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_both_loops_draft_the_same(stock, family, monkeypatch):
    """Chains of the same tokens from the same rows: there is one cache and one growth."""
    target, draft, ids = target_of(family), set_tree(draft_of(family, half=False), "chain"), prompt(9, 1)
    text = target.generate(ids, max_new_tokens=NEW_TOKENS)[0, 9:]
    _, candidate = stock(target, draft.foretell(text), ids)
    ours: list[Watching] = []

    def make(*args, **kwargs):
        ours.append(Watching(*args, **kwargs))
        return ours[-1]

    monkeypatch.setattr(loop, "Eagle3Candidate", make)
    observe(target, ids, max_new_tokens=NEW_TOKENS, assistant_model=draft.foretell(text), assistant_lookup=False)
    compared = 0
    # Our loop drafts less where the text is about to end.
    for (length, row, tokens), (my_length, my_row, my_tokens) in zip(candidate.rounds, ours[0].rounds, strict=False):
        assert my_length == length
        torch.testing.assert_close(my_row, row, rtol=0, atol=1e-4)
        assert my_tokens == tokens[: len(my_tokens)]
        compared += len(my_tokens) == len(tokens)
    assert compared >= 4


def test_the_first_call_only_asks_for_features():
    candidate = Eagle3Candidate(target_of("llama"), draft_of("llama").foretell([]))
    ids, logits = candidate.get_candidates(prompt(5), is_first_iteration=True, model_outputs=None, n_last_matches=0)
    assert torch.equal(ids, prompt(5))
    assert logits is None
    assert candidate.update_candidate_strategy(prompt(5), torch.zeros(1, 1, 320), 0) is None


def test_a_head_that_reads_the_last_block_needs_our_own_loop(stock):
    """The stock loop shows the last hidden state after the final norm only, which is not what the head reads."""
    target = target_of("llama")
    draft = new_draft(target, target_layer_ids=[1, 2, 4])
    with pytest.raises(ValueError, match=r"hidden_states\[4\].*final norm.*assistant_model="):
        stock(target, draft.foretell([]), prompt(5))
    vanilla = target.generate(prompt(5), max_new_tokens=8)
    ours = target.generate(prompt(5), max_new_tokens=8, assistant_model=set_tree(draft, "cpu").foretell([]))
    assert torch.equal(ours, vanilla)


def test_settings_come_from_the_draft_unless_given():
    target, draft = target_of("llama"), set_tree(draft_of("llama"), (15, 4, 4))
    assert tree_settings(draft, target) == TreeSettings(15, 4, 4, lookup_levels=16)
    assert tree_settings(draft, target, 7) == TreeSettings(7, 4, 4, lookup_levels=16)
    assert Eagle3Candidate(target, draft).settings == tree_settings(draft, target)


def test_a_candidate_needs_a_vocabulary_and_a_fitting_target():
    target = target_of("llama")
    with pytest.raises(ValueError, match="draft vocabulary"):
        Eagle3Candidate(target, Eagle3DraftModel.from_target(target, draft_vocab_size=100))
    other = Eagle3DraftModel.from_target(target, target_layer_ids=[1, 2, 3])
    other.config.target_hidden_size = 96
    with pytest.raises(ValueError, match="width 96.*hidden_size 64"):
        Eagle3Candidate(target, other)
