"""How large a tree pays: costs, acceptance and decisions on made-up seconds; and that no decision changes a text."""

import gc
import random
from functools import partial
from statistics import median

import pytest

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.decoding import dispatch, loop
from eagle3_hf.decoding.draft import candidate, sizing
from eagle3_hf.decoding.draft.sizing import Acceptance, Costs, TreeSizer, ranks_on_path, sizes_within
from eagle3_hf.model.tree_settings import TreeSettings
from support.drafts import MODES, SAMPLED, Recorder, assert_same_as_plain, new_draft, padded, set_tree, target_of
from support.families import prompt
from support.families.others import tiny_or_skip


LIMITS = TreeSettings(59, 8, 10, at_most=True)


# ----- the parts -----------------------------------------------------------------------------------------------------


def test_costs_are_medians_and_lie_on_lines_between():
    costs = Costs()
    for seconds in (1.0, 9.0, 1.1):  # one was disturbed
        costs.add(0, seconds)
    assert costs.verify(0) == 1.1
    assert costs.verify(30) == 1.1, "one point is all that is known"
    costs.add(10, 2.1)
    assert costs.verify(5) == pytest.approx(1.6)
    assert costs.verify(20) == pytest.approx(3.1)
    costs.add(20, 1.9)
    assert costs.verify(40) >= 1.9, "more nodes are never promised to cost less"


def test_costs_of_drafting_grow_with_levels_and_width():
    costs = Costs()
    assert costs.draft(3, 4) == 0.0
    costs.add_draft(2, 4, 1.0)
    assert costs.draft(2, 4) == 1.0
    assert costs.draft(4, 4) == pytest.approx(2.0)
    assert costs.draft(2, 10) > 1.0


def test_other_contexts_begin_with_what_is_known_nearby():
    older = Costs()
    older.add(0, 1.0)
    newer = Costs(older)
    newer.add(0, 3.0)
    assert (older.count(0), newer.count(0)) == (1, 2)


def test_what_smaller_trees_would_have_accepted_is_counted():
    """Against the plain count: a tree of the best n nodes and d levels accepts the path as far as it holds it."""
    rng, nodes = random.Random(0), [1, 2, 4, 8]
    acceptance, walks = Acceptance(nodes, 3), []
    for _ in range(250):
        ranks = sorted(rng.sample(range(1, 9), rng.randint(0, 3)))
        walks.append(ranks)
        acceptance.add(8, 3, ranks)
    found = acceptance.expected()
    for size in nodes:
        for depth in range(4):
            right = sum(sum(rank <= size for rank in ranks[:depth]) for ranks in walks) / len(walks)
            assert found[size][depth] == pytest.approx(right, abs=0.03), (size, depth)


def test_what_is_not_known_is_believed_on_the_bright_side():
    acceptance = Acceptance([1, 4, 16], 4)
    for _ in range(100):
        acceptance.add(4, 2, [1, 3])
    found = acceptance.expected()
    assert found[4][2] == pytest.approx(2.0, abs=0.1)
    assert found[4][4] > found[4][2], "deeper"
    assert found[16][2] >= found[4][2], "more nodes"


def test_old_walks_are_forgotten():
    acceptance = Acceptance([1], 1)
    for ranks in ([], [1]):
        for _ in range(4 * sizing._RECENT):
            acceptance.add(1, 1, ranks)
    assert acceptance.expected()[1][1] > 0.9


def test_ranks_on_a_path():
    scores = [0.0, -1.0, -0.5, -0.7, -0.7]
    assert ranks_on_path(scores, [0, 2, 4]) == [1, 3]
    assert ranks_on_path(scores, [0, 3]) == [2]
    assert ranks_on_path(scores, [0]) == []


@pytest.mark.parametrize("limits", [LIMITS, TreeSettings(11, 3, 4), TreeSettings(1, 1, 1), TreeSettings(6, 2, 2)])
def test_sizes_stay_within_the_limits(limits):
    sizes = sizes_within(limits)
    assert sizes
    assert all(size.capped(size.depth) == size for size in sizes), "no tree holds more nodes than its pool"
    for size in sizes:
        assert size.num_nodes <= limits.num_nodes
        assert size.depth <= limits.depth
        assert size.top_k <= limits.top_k


@pytest.mark.parametrize(("limits", "is_chain"), [(LIMITS, True), (TreeSettings(59, 8, 1), False)])
def test_chains_are_as_many_nodes_as_levels(limits, is_chain):
    assert sizes_within(limits, is_chain) == [TreeSettings(depth, depth, 1) for depth in range(1, 9)]


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_single_node_leaves_no_choice(is_chain):
    limits = TreeSettings(1, 1, 1)
    chosen = decode(TreeSizer(limits, 20, is_chain), 100, plain=1.0, node=0.1, level=0.05, share=0.9)
    assert set(chosen[sizing._ENOUGH :]) == {limits}


# ----- decisions -----------------------------------------------------------------------------------------------------


def decode(sizer: TreeSizer, rounds: int, plain: float, node: float, level: float, share: float, rows: int = 1):
    """Rounds of a machine with these costs and a head that is right with probability `share` at each level, by its
    best node in two of three cases; returns the sizes."""
    rng, chosen = random.Random(0), []
    for _ in range(rounds):
        size = sizer.choose(100)
        chosen.append(size)
        if size is None:
            sizer.observe(None, 0, None, plain)
            continue
        walks = []
        for _ in range(rows):
            ranks: list[int] = []
            while len(ranks) < size.depth and rng.random() < share:
                ranks.append((ranks[-1] if ranks else 0) + (1 if rng.random() < 0.66 else rng.randint(2, 6)))
            walks.append([rank for rank in ranks if rank <= size.num_nodes])
        drafting = level * size.depth
        sizer.observe(size, size.num_nodes, drafting, plain + node * size.num_nodes, walks)
    return chosen


def last(chosen: list) -> TreeSettings:
    return max(set(chosen[-100:]), key=chosen[-100:].count)


def test_a_plain_step_is_measured_first_and_then_a_middling_tree():
    chosen = decode(TreeSizer(LIMITS), 10, plain=1.0, node=0.01, level=0.05, share=0.7)
    assert chosen[: sizing._ENOUGH] == [None] * sizing._ENOUGH
    assert chosen[sizing._ENOUGH] == TreeSettings(11, 3, 4)


def test_nodes_for_nothing_make_large_trees():
    size = last(decode(TreeSizer(LIMITS), 800, plain=1.0, node=0.0, level=0.01, share=0.85))
    assert size.num_nodes >= 15
    assert size.depth >= 5


def test_dear_nodes_make_small_trees():
    size = last(decode(TreeSizer(LIMITS), 800, plain=1.0, node=0.12, level=0.02, share=0.7))
    assert size.num_nodes <= 3


def test_dear_levels_make_shallow_trees():
    size = last(decode(TreeSizer(LIMITS), 800, plain=1.0, node=0.0, level=0.3, share=0.7))
    assert size.depth <= 3, "where levels cost nothing it is five or more"


def test_larger_trees_are_tried_now_and_then():
    chosen = decode(TreeSizer(LIMITS), 300, plain=1.0, node=0.005, level=0.05, share=0.7)
    size = last(chosen)
    larger = [other for other in chosen[-100:] if other is not None and other.num_nodes > size.num_nodes]
    assert 5 <= len(larger) <= 20


def test_drafting_is_switched_off_where_it_does_not_pay_and_tried_again_ever_more_rarely():
    sizer = TreeSizer(LIMITS, batch_size=10)
    chosen = decode(sizer, 1500, plain=1.0, node=1.2, level=0.1, share=0.5, rows=10)
    drafted = [place for place, size in enumerate(chosen) if size is not None]
    assert len(drafted) < 0.02 * len(chosen)
    gaps = [b - a for a, b in zip(drafted, drafted[1:], strict=False) if b - a > 1]
    assert gaps[0] > sizing._FIRST_PAUSE
    assert all(later > 1.8 * earlier for earlier, later in zip(gaps, gaps[1:], strict=False))


def test_drafting_that_is_slightly_slower_stops_when_enough_walks_have_shown_it():
    sizer = TreeSizer(LIMITS)
    chosen = decode(sizer, 150, plain=1.0, node=0.4, level=0.1, share=0.7)
    drafted = [place for place, size in enumerate(chosen) if size is not None]
    assert drafted == list(range(sizing._ENOUGH, sizing._ENOUGH + sizing._WALKS_TO_CHANGE)), "then plain steps only"
    assert sizing._HOPELESS < sizer._gain < 1.0, "the few walks of the first decision were no reason to stop"


def test_it_is_said_once_that_drafting_is_off(monkeypatch):
    said = []
    monkeypatch.setattr(sizing.logger, "info", said.append)
    decode(TreeSizer(LIMITS, batch_size=10), 1500, plain=1.0, node=1.2, level=0.1, share=0.5, rows=10)
    assert len(said) == 1
    assert "drafting does not pay here" in said[0]


def test_drafting_comes_back_where_it_pays_again():
    sizer = TreeSizer(LIMITS)
    assert decode(sizer, 100, plain=1.0, node=1.0, level=0.5, share=0.5)[-1] is None
    back = decode(sizer, 1000, plain=5.0, node=0.01, level=0.02, share=0.8)
    assert last(back) is not None


def test_sizes_do_not_jump_about():
    chosen = decode(TreeSizer(LIMITS), 1000, plain=1.0, node=0.02, level=0.06, share=0.6)[-500:]
    usual = [size for place, size in enumerate(chosen) if size is not None]
    changes = sum(a != b for a, b in zip(usual, usual[1:], strict=False))
    assert changes <= 2 * len(usual) / sizing._LARGER + 10, "those that are tried, and few more"


# ----- in a call -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_known():
    """No memory of other tests."""
    sizing._found.clear()


def auto(target) -> tuple:
    draft = set_tree(new_draft(target, half=False), "paper")
    draft.generation_config.num_assistant_tokens = "auto"
    return target, draft


@MODES
@pytest.mark.parametrize(("family", "lengths"), [("llama", [7]), ("gemma3", [5, 14, 9]), ("bloom", [6, 6])], ids=str)
def test_whatever_sizes_the_text_is_the_same(family, lengths, mode, monkeypatch):
    target, draft = auto(tiny_or_skip(family) if family == "bloom" else target_of(family))
    rng, chosen = random.Random(1), []

    def anything(self, context):
        chosen.append(rng.choice([None, *self.sizes]) if chosen[-1:] != [None] else self.sizes[-1])
        return chosen[-1]

    monkeypatch.setattr(TreeSizer, "choose", anything)
    for seed in range(2):
        chosen.append(None)
        assert_same_as_plain(target, draft, padded(lengths), seed=seed, max_new_tokens=40, **mode)
    assert len(set(chosen)) > 5


@MODES
@pytest.mark.parametrize("lengths", [[7], [5, 14, 9]], ids=str)
def test_a_call_that_decides_for_itself(lengths, mode, monkeypatch):
    """On a clock of its own: a pass of the target takes 1, one of the draft 0.1."""
    target, draft = auto(target_of("llama"))
    seconds = [0.0]
    handles = [
        target.register_forward_pre_hook(lambda module, args: seconds.append(seconds[-1] + 1.0)),
        draft.layers[0].register_forward_pre_hook(lambda module, args: seconds.append(seconds[-1] + 0.1)),
    ]
    monkeypatch.setattr(dispatch, "SpeculativeDecoding", partial(loop.SpeculativeDecoding, clock=lambda: seconds[-1]))
    try:
        for seed in range(2):
            assert_same_as_plain(target, draft, padded(lengths), seed=seed, max_new_tokens=60, accepts=False, **mode)
    finally:
        for handle in handles:
            handle.remove()
    (sizer,) = sizing._found[draft][target].values()
    assert sizer._here.verify(0) == sizer._here.verify(5) == pytest.approx(1.0)
    for (depth, _), kept in sizer._here._draft.items():
        assert median(kept) == pytest.approx(0.1 * depth)


def test_auto_in_a_call_and_an_int_over_auto():
    target, draft = auto(target_of("llama"))
    sizes = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        target.generate(prompt(5), max_new_tokens=30, assistant_model=draft.foretell([]), num_assistant_tokens=7)
        assert sizes[1] == 8
        set_tree(draft, "cpu")
        sizes.clear()
        target.generate(prompt(5), max_new_tokens=30, assistant_model=draft.foretell([]), num_assistant_tokens="auto")
        assert sizes[1 : 1 + sizing._ENOUGH] == [1] * sizing._ENOUGH, "a plain step is measured first"
    finally:
        handle.remove()


def test_what_was_found_dies_with_the_head():
    target = target_of("llama")
    sizing._found.clear()
    draft = new_draft(target)
    draft.generation_config.num_assistant_tokens = "auto"
    target.generate(prompt(5), max_new_tokens=12, assistant_model=draft.foretell([]), **SAMPLED)
    assert len(sizing._found) == 1
    del draft
    gc.collect()
    assert not sizing._found


def test_auto_is_saved_with_the_head(tmp_path):
    target, draft = auto(target_of("llama"))
    draft.save_pretrained(tmp_path)
    assert Eagle3DraftModel.from_pretrained(tmp_path).generation_config.num_assistant_tokens == "auto"


# ----- while nothing is drafted --------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("lengths", [[7], [5, 14, 9]], ids=str)
@pytest.mark.parametrize("pause", [30, 26], ids=["features wait", "none waits"])
def test_features_do_not_pile_up_in_a_pause(lengths, pause, mode, monkeypatch):
    """The draft is fed now and then, so that few tokens wait; drafting then goes on as if nothing had happened."""
    monkeypatch.setattr(candidate, "_MOST_PENDING", 8)
    waiting: list[int] = []
    rounds = iter(range(10**6))

    def pause_after_two_rounds(self, context):
        return None if 2 <= next(rounds) % 40 < 2 + pause else TreeSettings(11, 3, 4)

    def count(self, *args, **kwargs):
        waiting.append(sum(part.tokens.shape[1] for part in self._candidate._pending))
        return original(self, *args, **kwargs)

    original = loop.SpeculativeDecoding._propose
    monkeypatch.setattr(loop.SpeculativeDecoding, "_propose", count)
    monkeypatch.setattr(TreeSizer, "choose", pause_after_two_rounds)
    target, draft = auto(target_of("llama"))
    ours, _ = assert_same_as_plain(target, draft, padded(lengths), max_new_tokens=60, **mode)
    assert len(waiting) > 30
    assert max(waiting[2:]) <= 8 + 4, "a round's tokens more than the bound at most"
    assert ours.out.speculation.mean_accepted > 0.3, "the draft has been fed all of the text"


# ----- what a call leaves on the head --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mamba"])
def test_stats_are_those_of_an_interrupted_call(family):
    target = target_of("llama") if family == "llama" else tiny_or_skip(family)
    draft = set_tree(new_draft(target), "cpu")
    target.generate(prompt(7), max_new_tokens=12, assistant_model=draft.foretell([]))
    before = draft.stats
    streamer = Recorder(raise_at=5)  # the prompt, and four tokens
    with pytest.raises(ValueError, match="raised by the streamer"):
        target.generate(prompt(7), max_new_tokens=12, assistant_model=draft.foretell([]), streamer=streamer)
    assert draft.stats is not before
    assert draft.stats.rounds < max(1, before.rounds)
    assert draft.stats.emitted == (3 if family == "llama" else 0)
