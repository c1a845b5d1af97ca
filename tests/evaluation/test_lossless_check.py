"""The check finds planted bugs, each where it is told apart from others, and raises no false alarm."""

import copy
from functools import cached_property

import pytest
import torch

import eagle3_hf
from eagle3_hf import LookupDraft
from eagle3_hf.decoding.coupling import Noise
from eagle3_hf.decoding.draft.growth import TreeGrower
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.decoding.loop import SpeculativeDecoding
from eagle3_hf.decoding.output.emitter import TokenEmitter
from eagle3_hf.decoding.target.runner import TargetRun
from eagle3_hf.decoding.tree import DraftTree
from eagle3_hf.evaluation.lossless import LosslessError, assert_lossless, check_lossless
from eagle3_hf.evaluation.lossless.cases import CASES
from eagle3_hf.evaluation.lossless.judging import BUG, EQUAL, NEAR_TIE, Rounding, judge
from eagle3_hf.evaluation.lossless.observing import Observed
from eagle3_hf.evaluation.lossless.told import told_tree
from eagle3_hf.model.attention import DraftCache
from support.drafts import new_draft, target_of
from support.families import prompt


PROMPTS = [prompt(5, 1), prompt(9, 2)]
FAMILIES = ("llama", "gemma3", "mistral_sw", "qwen3", "gpt_oss")


@pytest.fixture(scope="module")
def target():
    return target_of("llama")


@pytest.fixture(scope="module")
def draft(target):
    return new_draft(target, half=True)


def cases(*names):
    return [case for case in CASES if case.name in names]


def wrap(monkeypatch, owner, name, wrapper):
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda self, *args, **kwargs: wrapper(original, self, *args, **kwargs))


# ----- planted bugs --------------------------------------------------------------------------------------------------


def wrong_position(monkeypatch):
    wrap(
        monkeypatch,
        TargetRun,
        "_tree_kwargs",
        lambda run, self, depths, *more: run(self, depths + (depths > 1).long(), *more),
    )


def visible_sibling(monkeypatch):
    """In trees that are known on the host, and in those that are not."""
    original, of_host = DraftTree.__dict__["ancestors"].func, DraftTree._of_host

    def with_siblings(tree, seen):
        same = tree.parents[:, :, None] == tree.parents[:, None]
        return seen | (same & torch.ones_like(same[0]).tril())

    def moved(host, scores, device):
        tree = of_host(host, scores, device)
        tree.__dict__["ancestors"] = with_siblings(tree, tree.ancestors)
        return tree

    ancestors = cached_property(lambda self: with_siblings(self, original(self)))
    ancestors.__set_name__(DraftTree, "ancestors")
    monkeypatch.setattr(DraftTree, "ancestors", ancestors)
    monkeypatch.setattr(DraftTree, "_of_host", staticmethod(moved))


def forgotten_processor(monkeypatch):
    def processed(original, self, raw, steps):
        kept = self._processors
        self._processors = type(kept)(each for each in kept if "Repetition" not in type(each).__name__)
        try:
            return original(self, raw, steps)
        finally:
            self._processors = kept

    wrap(monkeypatch, TokenEmitter, "_processed", processed)


def forgotten_call_of_a_processor(monkeypatch):
    """The text is the same, since the first token's processor call is made twice, and changes nothing."""

    def processed(original, self, raw, steps):
        if 0 in steps.values() and any("Counting" in type(each).__name__ for each in self._processors):
            original(self, raw.clone(), steps)
            for each in self._processors:
                each._calls -= 1
        return original(self, raw, steps)

    wrap(monkeypatch, TokenEmitter, "_processed", processed)


def shifted_generator(monkeypatch):
    def run(original, self):
        result = original(self)
        if self.tokens.noise is not None:
            torch.rand(1)
        return result

    wrap(monkeypatch, SpeculativeDecoding, "run", run)


def noise_of_another_step(monkeypatch):
    def drawn(original, self, noise, steps):
        return noise.peek(1) if len(steps) == 1 and 3 in steps.values() else original(self, noise, steps)

    assert hasattr(Noise, "peek")
    wrap(monkeypatch, TokenEmitter, "_drawn", drawn)


def stale_draft_cache_entry(monkeypatch):
    """What was grown into the cache is left in the place of a committed entry."""

    def append(original, self, layer_idx, *states):
        before, buffers = self._filled[layer_idx], self._buffers[layer_idx]
        stale = None if buffers is None or states[0].shape[2] < 2 else [each[:, :, before].clone() for each in buffers]
        views = original(self, layer_idx, *states)
        if stale is not None and before and before == self.length:
            for view, old in zip(views, stale, strict=True):
                if view.shape[2] > before and old.any():
                    view[:, :, before] = old
        return views

    wrap(monkeypatch, DraftCache, "append", append)


def features_of_another_node(monkeypatch):
    original = DraftInputs.on_paths.__func__

    def on_paths(cls, features, paths, tokens, positions):
        return original(cls, features, [[max(0, node - 1) for node in path] for path in paths], tokens, positions)

    monkeypatch.setattr(DraftInputs, "on_paths", classmethod(on_paths))


def wrong_position_in_the_draft(monkeypatch):
    def grow_pool(original, self, hidden, cache, position, settings, goes_on=None, expansion=None, ahead=None):
        return original(self, hidden, cache, position + 1, settings, goes_on, expansion)

    wrap(monkeypatch, TreeGrower, "grow_pool", grow_pool)


PLANTED = [
    (wrong_position, "greedy", "logits of new token"),
    (visible_sibling, "greedy", "logits of new token"),
    (forgotten_processor, "greedy, penalties", "processed scores of new token"),
    (forgotten_call_of_a_processor, "greedy, a processor with a state", "callbacks were called|of the callbacks was"),
    (shifted_generator, "sampled", "generator was left in another state"),
    (noise_of_another_step, "sampled", "became"),
    (stale_draft_cache_entry, None, "cache entry of position"),
    (features_of_another_node, None, "cache entry of position"),
    (wrong_position_in_the_draft, None, "at depth 2 of its tree the draft gives"),
]


@pytest.mark.parametrize(("plant", "case", "what"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_bug_is_found(plant, case, what, target, draft, monkeypatch):
    plant(monkeypatch)
    chosen = cases(*(case,) if case else ())
    with pytest.raises(LosslessError, match=f"(?s)BUG: .*({what}).*NOT lossless") as raised:
        assert_lossless(target, draft, PROMPTS[:1] if case else PROMPTS, max_new_tokens=12, cases=chosen)
    report = raised.value.report
    assert report.bugs
    assert {result.case for result in report.bugs} <= {
        case,
        "the head's state",
        "the head's state, a batch of prompts",
    }


def stop_at_bug(result):
    if result.kind == BUG:
        raise InterruptedError(str(result))


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant, _, _ in PLANTED], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_planted_bug_is_found_in_every_family(plant, family, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(InterruptedError, match="BUG"):
        check_lossless(target_of(family), new_draft(target_of(family)), PROMPTS, max_new_tokens=12, show=stop_at_bug)


# ----- no false alarm ------------------------------------------------------------------------------------------------

FEW = ("greedy, a batch of prompts", "greedy, static cache", "sampled, a processor with a state, a batch")


def test_a_sound_draft_is_lossless(target, draft):
    seen = []
    generator = torch.get_rng_state()
    report = assert_lossless(target, draft, PROMPTS, max_new_tokens=10, cases=cases(*FEW), show=seen.append)
    assert report.cases == seen
    assert torch.equal(torch.get_rng_state(), generator)
    assert {result.kind for result in report.cases} == {EQUAL}, str(report)
    assert {result.case for result in report.cases} == {
        *FEW,
        "the head's state",
        "the head's state, a batch of prompts",
    }
    assert report.accepted > 20
    assert "lossless: every text is that of ordinary decoding" in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_false_alarm(family):
    report = check_lossless(target_of(family), new_draft(target_of(family)), max_new_tokens=24)
    assert not report.bugs, str(report)
    assert report.accepted > 500
    assert len(report.near_ties) <= 1, str(report)
    assert {result.detail for result in report.cases if result.kind not in (EQUAL, NEAR_TIE)} == set()


@pytest.mark.parametrize("plant", [None, wrong_position, features_of_another_node])
def test_in_half_precision(plant, target, monkeypatch):
    """Rounding is larger there, and bugs are larger still."""
    target = copy.deepcopy(target).bfloat16()
    draft = new_draft(target_of("llama"), half=True).bfloat16()
    if plant is not None:
        plant(monkeypatch)
    chosen = cases("greedy") if plant else cases("greedy", "sampled, temperature 0.6, top-k, top-p")
    report = check_lossless(target, draft, PROMPTS[:1], max_new_tokens=12, cases=chosen)
    assert bool(report.bugs) == (plant is not None), str(report)


def test_without_a_head(target):
    report = assert_lossless(target, LookupDraft(), PROMPTS[:1], max_new_tokens=8, cases=cases("greedy", "sampled"))
    assert {result.way for result in report.cases} == {"draft", "told the text"}


def test_errors_and_refusals_are_told_apart(target, draft, monkeypatch):
    chosen = cases("greedy")
    report = check_lossless(target, draft, PROMPTS[:1], max_new_tokens=4, cases=chosen, num_beams=2)
    assert {result.kind for result in report.cases if result.way != "state"} == {"refused"}
    assert not report.is_lossless
    with pytest.raises(LosslessError, match="nothing can be said"):
        assert_lossless(target, draft, PROMPTS[:1], max_new_tokens=4, cases=chosen, num_beams=2)
    monkeypatch.setattr(SpeculativeDecoding, "_round", lambda self: 1 / 0)
    report = check_lossless(target, draft, PROMPTS[:1], max_new_tokens=4, cases=chosen)
    assert all("ZeroDivisionError" in result.detail for result in report.bugs)
    assert len(report.bugs) == len(report.cases)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompts": [[]]}, "expected prompts of at least one token id"),
        ({"prompts": []}, "expected prompts of at least one token id"),
        ({"prompts": [[1.5]]}, "prompts must be token ids"),
        ({"max_new_tokens": 1}, "max_new_tokens is 1, expected at least 2"),
    ],
)
def test_bad_arguments(given, message, target, draft):
    with pytest.raises(ValueError, match=message):
        eagle3_hf.assert_lossless(target, draft, **given)


# ----- the parts -----------------------------------------------------------------------------------------------------


def observed(ids, logits, generator=0, scores=None):
    steps = tuple(torch.tensor([step]) for step in logits)
    scores = steps if scores is None else tuple(torch.tensor([step]) for step in scores)
    return Observed(torch.tensor([ids]), torch.tensor([generator]), [], None, scores, steps)


PLAIN = observed([1, 2], [[0.0, 9.0, 1.0], [0.0, 8.0, 8.0 + 1e-5]])
ROUNDING = Rounding(0.0, torch.float32)


def test_a_near_tie_has_its_token_and_margin():
    verdict = judge(PLAIN, observed([1, 1], [[0.0, 9.0, 1.0], [0.0, 8.0, 8.0]]), ROUNDING, None)
    assert (verdict.kind, verdict.index, verdict.plain, verdict.assisted) == (NEAR_TIE, 1, 2, 1)
    assert 0 < verdict.margin <= verdict.bound


def test_what_is_a_bug():
    assert judge(PLAIN, observed([1, 0], [[0.0, 9.0, 1.0]]), ROUNDING, None).kind == BUG  # 8 apart
    assert judge(PLAIN, observed([1, 2], [[0.0, 9.1, 1.0]]), ROUNDING, None).kind == BUG
    assert judge(PLAIN, observed([1, 2], [[float("nan")] * 3]), ROUNDING, None).kind == BUG
    assert judge(PLAIN, observed([1], []), ROUNDING, None).kind == BUG
    assert judge(PLAIN, observed([1, 2], [], generator=1), ROUNDING, None).kind == BUG
    assert judge(PLAIN, observed([1, 2], []), ROUNDING, None).kind == EQUAL


def test_the_edge_of_a_cutoff_is_a_near_tie():
    none, raw = -float("inf"), [3.0, 2.0, 2.0 - 1e-6]
    plain = observed([1], [raw], scores=[[3.0, 2.0, none]])
    verdict = judge(plain, observed([2], [raw], scores=[[3.0, none, 2.0 - 1e-6]]), ROUNDING, [torch.ones(1, 3)])
    assert verdict.kind == NEAR_TIE
    verdict = judge(plain, observed([0], [raw], scores=[[none, 2.0, none]]), ROUNDING, [torch.ones(1, 3)])
    assert verdict.kind == BUG  # not the edge


def test_told_trees():
    import random

    chance, sizes, told = random.Random(0), set(), 0
    for _ in range(300):
        tree = told_tree(9, [1, 2, 3, 4], [1, 2, 3, 4, 5], 6, 3, False, chance)
        sizes.add(len(tree.tokens))
        assert tree.tokens[0] == 9
        assert tree.depth <= 3
        assert all(parent < node for node, parent in enumerate(tree.parents))
        pairs = list(zip(tree.parents, tree.tokens, strict=True))
        assert len(set(pairs)) == len(pairs), "no node has two children of the same token"
        told += (0, 1) in pairs
        chain = told_tree(9, [1, 2, 3, 4], [1, 2, 3, 4, 5], 6, 3, True, chance)
        assert chain.parents == list(range(-1, len(chain.tokens) - 1))
        assert told_tree(9, [], [1, 2], 0, 0, False, chance).tokens == [9]
    assert sizes == set(range(1, 8))
    assert 150 < told < 300


# ----- the command ---------------------------------------------------------------------------------------------------


def test_the_command(target, draft, tmp_path, capsys, monkeypatch):
    from eagle3_hf.cli import main
    from eagle3_hf.evaluation.lossless import checking

    target.save_pretrained(tmp_path / "target")
    eagle3_hf.Eagle3DraftModel.save_pretrained(draft, tmp_path / "head")
    monkeypatch.setattr(checking.check_lossless, "__kwdefaults__", {**checking.check_lossless.__kwdefaults__})
    monkeypatch.setitem(checking.check_lossless.__kwdefaults__, "cases", cases("greedy", "sampled"))
    options = ["--prompts", "random", "--max-new-tokens", "6", "--device", "cpu"]
    command = ["check", str(tmp_path / "target"), str(tmp_path / "head"), *options]
    assert main([*command, "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "equal: greedy (told the text, prompt 0)" in said
    assert "lossless: every text is that of ordinary decoding" in said
    shifted_generator(monkeypatch)
    assert main(command) == 1
    said = capsys.readouterr().out
    assert "BUG: sampled (draft, prompt 0): the text is the same, but the random generator was left in another" in said
    assert "NOT lossless" in said
