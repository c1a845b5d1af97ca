"""The walk: whatever the tree holds, the tokens are the target's own, and a foreseen token costs no forward pass."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_hf.decoding.tree import HostTree
from eagle3_hf.decoding.verification import Walk


VOCABULARY = 4


def target(prefix):
    """A deterministic stand-in for a language model: the next token of a prefix."""
    return (7 * sum((place + 1) * token for place, token in enumerate(prefix)) + len(prefix)) % 11 % VOCABULARY


@st.composite
def trees(draw):
    """Tokens and parents of a random tree over few tokens, so that branches often agree with the target."""
    tokens, parents = [draw(st.integers(0, VOCABULARY - 1))], [-1]
    for _ in range(draw(st.integers(0, 25))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, VOCABULARY - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):  # siblings differ
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def prefix_of(tokens, parents, node):
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def walked(tree, choose, goes_on=lambda row: True) -> tuple[Walk, list[int]]:
    """A finished walk through one row's tree, and the tokens chosen on the way."""
    walk, chosen = Walk([HostTree(*tree)]), []

    def choose_one(cursor):
        chosen.append(choose(cursor[0]))
        return {0: chosen[-1]}

    walk.run([0], choose_one, goes_on)
    return walk, chosen


@given(trees())
def test_tokens_are_the_targets_own(tree):
    tokens, parents = tree
    walk, chosen = walked(tree, lambda node: target(prefix_of(tokens, parents, node)))

    text = [tokens[0]]
    for node, token in zip(walk.paths[0], chosen, strict=True):
        assert prefix_of(tokens, parents, node) == text
        assert token == target(text)
        text.append(token)
    # It went as far as the tree foresaw: no node continues the whole text, bonus token included.
    assert text not in [prefix_of(tokens, parents, node) for node in range(len(tokens))]
    assert walk.accepted == [len(chosen) - 1]


@given(trees(), st.integers(1, 5))
def test_choices_are_made_one_by_one_and_only_on_demand(tree, wanted):
    tokens, parents = tree
    asked = []

    def choose(node):
        asked.append(node)
        return target(prefix_of(tokens, parents, node))

    walk, _ = walked(tree, choose, lambda row: len(asked) < wanted)
    assert asked == walk.paths[0]
    assert len(asked) <= wanted
    assert walk.accepted[0] in (len(asked) - 1, len(asked)), "the last token may be a draft that was right, too"


def test_the_root_alone_gives_one_token():
    walk, chosen = walked(([5], [-1]), lambda node: 9)
    assert (walk.paths, chosen, walk.accepted) == ([[0]], [9], [0])


def test_first_of_equal_siblings():
    walk, _ = walked(([0, 3, 3], [-1, 0, 0]), {0: 3, 1: 8, 2: 9}.__getitem__)
    assert walk.paths == [[0, 1]]


# ----- batches -------------------------------------------------------------------------------------------------------


def walk_all(forest, rows, together=(), leave_out=(), goes_on=lambda row: True) -> tuple[Walk, list[dict[int, int]]]:
    """A walk of several rows by the stand-in target; `leave_out` are pairs of row and node that choose nothing yet."""
    walk, levels = Walk([HostTree(*tree) for tree in forest], together), []

    def choose(cursor):
        levels.append(dict(cursor))
        return {
            row: target(prefix_of(*forest[row], node)) for row, node in cursor.items() if (row, node) not in leave_out
        }

    walk.run(rows, choose, goes_on)
    return walk, levels


@given(st.lists(trees(), min_size=2, max_size=4))
def test_rows_do_not_disturb_each_other(forest):
    walk, levels = walk_all(forest, range(len(forest)))
    alone = [walked(tree, lambda node, tree=tree: target(prefix_of(*tree, node)))[0] for tree in forest]
    assert walk.paths == [one.paths[0] for one in alone]
    assert walk.accepted == [one.accepted[0] for one in alone]
    assert len(levels) == max(map(len, walk.paths)), "all rows are asked at once, a level at a time"


@given(st.lists(trees(), min_size=2, max_size=4), st.integers(0, 3))
def test_rows_that_stay_together_end_with_the_first(forest, loner):
    together = [row for row in range(len(forest)) if row != loner]
    walk, _ = walk_all(forest, range(len(forest)), together)
    free, _ = walk_all(forest, range(len(forest)))
    shortest = min(len(free.paths[row]) for row in together)
    for row in range(len(forest)):
        expected = free.paths[row] if row == loner else free.paths[row][:shortest]
        assert walk.paths[row] == expected
        assert walk.accepted[row] == min(free.accepted[row], len(expected))


def test_a_row_that_has_enough_ends_those_that_stay_with_it():
    chain = ([0, 1, 2, 3], [-1, 0, 1, 2])
    walk = Walk([HostTree(*chain)] * 2, together=[0, 1])
    walk.run([0, 1], lambda cursor: {row: chain[0][node] + 1 for row, node in cursor.items()}, lambda row: row == 0)
    assert walk.paths == [[0], [0]]


@given(trees(), trees())
def test_a_row_that_cannot_choose_yet_ends_before_its_node(one, other):
    free, _ = walk_all([one, other], [0, 1])
    last = free.paths[0][-1]
    walk, _ = walk_all([one, other], [0, 1], leave_out={(0, last)})
    assert walk.paths == [free.paths[0][:-1], free.paths[1]]


def test_a_chain_of_known_tokens_is_taken_whole():
    walk = Walk([HostTree([5, 0, 0], [-1, 0, 1]), HostTree([5], [-1])])
    walk.take_all(0)
    walk.run([1], lambda cursor: {1: 8}, lambda row: True)
    assert walk.paths == [[0, 1, 2], [0]]


@pytest.mark.parametrize("name", ["trace.json", "trace_small.json", "trace_chain.json"])
def test_accepted_lengths_of_the_reference(shared, name):
    trace = json.loads((shared / "reference" / name).read_text())
    text = trace["output"]
    position = len(trace["prompt"])
    for step in trace["rounds"][:-1]:
        tokens, parents = step["tree_tokens"], step["parents"]
        assert tokens[0] == text[position]
        depths = step["tree_depths"]
        walk, _ = walked((tokens, parents), lambda node, at=position, depths=depths: text[at + depths[node] + 1])
        assert walk.accepted == [step["accept"]]
        assert [tokens[node] for node in walk.paths[0]] == step["accepted"]
        position += len(walk.paths[0])
