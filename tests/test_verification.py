"""The walk: whatever the tree holds, the tokens are the target's own, and a foreseen token costs no forward pass."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3_hf.decoding.verification import greedy_choices, walk


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


@given(trees())
def test_tokens_are_the_targets_own(tree):
    tokens, parents = tree
    visited = list(walk(tokens, parents, lambda node: target(prefix_of(tokens, parents, node))))

    text = [tokens[0]]
    for node, token in visited:
        assert prefix_of(tokens, parents, node) == text
        assert token == target(text)
        text.append(token)
    # It went as far as the tree foresaw: no node continues the whole text, bonus token included.
    assert text not in [prefix_of(tokens, parents, node) for node in range(len(tokens))]


@given(trees(), st.integers(0, 5))
def test_choices_are_made_one_by_one_and_only_on_demand(tree, wanted):
    tokens, parents = tree
    asked = []

    def choose(node):
        asked.append(node)
        return target(prefix_of(tokens, parents, node))

    taken = [node for _, (node, _) in zip(range(wanted), walk(tokens, parents, choose), strict=False)]
    # `zip` asks the walk only after its own range has more to give.
    assert asked == taken
    assert len(asked) <= wanted


def test_the_root_alone_gives_one_token():
    assert list(walk([5], [-1], lambda node: 9)) == [(0, 9)]


def test_first_of_equal_siblings():
    assert list(walk([0, 3, 3], [-1, 0, 0], {0: 3, 1: 8, 2: 9}.__getitem__)) == [(0, 3), (1, 8)]


def test_padding_is_cut_by_the_callers_lists():
    tokens, parents = [5, 6, 0, 0], [-1, 0, 0, 0]
    assert list(walk(tokens[:2], parents[:2], lambda node: 0)) == [(0, 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_choices(dtype):
    logits = torch.tensor([[[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]]], dtype=dtype)
    assert greedy_choices(logits).tolist() == [[1, 0]]


@pytest.mark.parametrize("name", ["trace.json", "trace_small.json", "trace_chain.json"])
def test_accepted_lengths_of_the_reference(shared, name):
    trace = json.loads((shared / "reference" / name).read_text())
    text = trace["output"]
    position = len(trace["prompt"])
    for step in trace["rounds"][:-1]:
        tokens, parents = step["tree_tokens"], step["parents"]
        assert tokens[0] == text[position]
        visited = list(walk(tokens, parents, lambda node: text[position + step["tree_depths"][node] + 1]))  # noqa: B023
        assert len(visited) - 1 == step["accept"]
        assert [tokens[node] for node, _ in visited] == step["accepted"]
        position += len(visited)
