"""Trees against a plain Python model of them."""

import json
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from eagle3_hf.decoding.tree import DraftTree, select
from support.trees import assert_valid


PAD = 999
# Zero (a certain token), ties, steps too small for float32 to notice, dead and broken branches.
INCREMENTS = st.sampled_from([0.0, 0.0, -0.25, -0.5, -1.0, -1e-9, -30.0, -math.inf, math.nan])


@st.composite
def random_parents(draw, max_size=40):
    size = draw(st.integers(1, max_size))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]


@st.composite
def pools(draw, increments=INCREMENTS):
    """Parents (into the pool, -1 for the root) and cumulative float32 scores of up to 30 candidates."""
    size = draw(st.integers(1, 30))
    parents = [draw(st.integers(-1, index - 1)) for index in range(size)]
    scores = torch.empty(size)
    for index, parent in enumerate(parents):
        scores[index] = (scores[parent] if parent >= 0 else 0.0) + draw(increments)
    return parents, scores


def tree_of(parents, num_nodes=None):
    size = len(parents)
    zeros = torch.zeros(1, size)
    count = torch.tensor([size if num_nodes is None else num_nodes])
    return DraftTree(torch.arange(100, 100 + size)[None], torch.tensor([parents]), count, zeros, zeros)


def select_row(parents, scores, num_nodes):
    """`select` on one row; candidate i carries token 100 + i and the log-probability 2 x its score."""
    size = len(parents)
    return select(
        torch.arange(100, 100 + size)[None],
        torch.tensor([parents]),
        scores[None],
        2 * scores[None],
        torch.tensor([7]),
        num_nodes,
        PAD,
    )


def kept_by_hand(scores, num_nodes):
    values = [-math.inf if math.isnan(score) else score for score in scores.tolist()]
    ranked = sorted(range(len(values)), key=lambda index: (-values[index], index))
    return sorted(index for index in ranked[:num_nodes] if values[index] > -math.inf)


def ancestors_by_hand(parents, node):
    found = {node}
    while parents[node] >= 0:
        node = parents[node]
        found.add(node)
    return found


@given(random_parents())
@example([-1, *range(63)])
@example([-1] + [0] * 63)
def test_ancestors_and_depths(parents):
    tree = tree_of(parents)
    assert_valid(tree)
    for node in range(len(parents)):
        expected = ancestors_by_hand(parents, node)
        assert set(tree.ancestors[0, node].nonzero().flatten().tolist()) == expected
        assert tree.depths[0, node] == len(expected) - 1
        assert tree.path(0, node) == sorted(expected)
    assert tree.max_depth == int(tree.depths.max())


@given(pools(), st.integers(1, 35))
def test_select_keeps_the_best_and_their_parents(pool, num_nodes):
    parents, scores = pool
    tree = select_row(parents, scores, num_nodes)
    assert_valid(tree)
    kept = kept_by_hand(scores, num_nodes)
    assert all(parents[index] in kept for index in kept if parents[index] >= 0)

    padding = num_nodes - len(kept)
    node_of = {-1: 0, **{index: node for node, index in enumerate(kept, start=1)}}
    assert tree.num_nodes.tolist() == [len(kept) + 1]
    assert tree.tokens.tolist() == [[7] + [100 + index for index in kept] + [PAD] * padding]
    assert tree.parents.tolist() == [[-1] + [node_of[parents[index]] for index in kept] + [0] * padding]
    dead = [-math.inf] * padding
    assert tree.scores.tolist() == [[0.0, *scores[kept].tolist(), *dead]]
    assert tree.log_probs.tolist() == [[0.0, *(2 * scores[kept]).tolist(), *dead]]
    assert tree.host() == [(tree.tokens[0, : len(kept) + 1].tolist(), tree.parents[0, : len(kept) + 1].tolist())]


@given(pools(increments=st.just(0.0)), st.integers(1, 35))
def test_certain_tokens_keep_pool_order(pool, num_nodes):
    parents, scores = pool
    tree = select_row(parents, scores, num_nodes)
    assert_valid(tree)
    assert tree.host()[0].tokens == [7, *range(100, 100 + min(num_nodes, len(parents)))]


@given(st.lists(pools(), min_size=2, max_size=4), st.integers(1, 20))
def test_rows_do_not_touch_each_other(rows, num_nodes):
    size = min(len(parents) for parents, _ in rows)
    rows = [(parents[:size], scores[:size]) for parents, scores in rows]
    scores = torch.stack([scores for _, scores in rows])
    together = select(
        torch.arange(100, 100 + size).expand(len(rows), size),
        torch.tensor([parents for parents, _ in rows]),
        scores,
        2 * scores,
        torch.full((len(rows), 1), 7),
        num_nodes,
        PAD,
    )
    assert_valid(together)
    for row, (parents, row_scores) in enumerate(rows):
        alone = select_row(parents, row_scores, num_nodes)
        for name in ("tokens", "parents", "num_nodes", "scores", "log_probs", "ancestors", "depths"):
            assert torch.equal(getattr(together, name)[row], getattr(alone, name)[0]), name
        assert together.host()[row] == alone.host()[0]


def test_half_precision_scores_are_ranked_in_float32():
    scores = torch.tensor([-1.0, -1.0078125, -0.5], dtype=torch.bfloat16)
    tree = select_row([-1, -1, -1], scores, 2)
    assert tree.scores.dtype == torch.float32
    assert tree.tokens.tolist() == [[7, 100, 102]]


def test_a_broken_branch_is_pruned_and_the_rest_stays():
    scores = torch.tensor([-0.1, math.nan, math.nan, -0.2, -math.inf])
    tree = select_row([-1, -1, 1, 0, 0], scores, 5)
    assert tree.host()[0] == ([7, 100, 103], [-1, 0, 1])


def test_nothing_left_is_the_root_alone():
    tree = select_row([-1, -1], torch.tensor([math.nan, -math.inf]), 3)
    assert_valid(tree)
    assert tree.host()[0] == ([7], [-1])
    assert tree.max_depth == 0
    empty = torch.empty((1, 0), dtype=torch.int64)
    assert select(empty, empty, empty.float(), empty.float(), torch.tensor([7]), 3, PAD).tokens.tolist() == [[7]]


def test_padding_sees_root_and_itself_and_is_seen_by_nobody():
    tree = select_row([-1, 0], torch.tensor([-0.5, -1.0]), 4)
    assert tree.num_nodes.tolist() == [3]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 1]]
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    assert tree.ancestors[0].int().tolist() == expected
    assert tree.max_depth == 2
    with pytest.raises(IndexError, match="node 3 is not one of the 3 nodes of tree 0"):
        tree.path(0, 3)


def test_chain_and_root_only():
    chain = DraftTree.chain(torch.tensor([[3, 4, 5], [6, 7, 8]]))
    assert_valid(chain)
    assert chain.parents.tolist() == [[-1, 0, 1]] * 2
    assert chain.depths.tolist() == [[0, 1, 2]] * 2
    assert chain.host() == [([3, 4, 5], [-1, 0, 1]), ([6, 7, 8], [-1, 0, 1])]
    assert chain.max_depth == 2
    assert chain.path(1, 2) == [0, 1, 2]

    root = DraftTree.root_only(torch.tensor([[3], [6]]))
    assert_valid(root)
    assert root.ancestors.tolist() == [[[True]]] * 2
    assert root.max_depth == 0
    with pytest.raises(ValueError, match=r"\(B, 1\), got \(1, 2\)"):
        DraftTree.root_only(torch.tensor([[3, 4]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parents": torch.tensor([[0, 0, 1]])}, "root's parent must be -1"),
        ({"parents": torch.tensor([[-1, 0, 2]])}, r"parent of node 2 of tree 0"),
        ({"parents": torch.tensor([[-1, -1, 1]])}, r"parent of node 1 of tree 0"),
        ({"num_nodes": torch.tensor([2])}, "parent of node 2 of tree 0"),
        ({"num_nodes": torch.tensor([4])}, "claims 4 nodes"),
        ({"num_nodes": torch.tensor([0])}, "claims 0 nodes"),
        ({"num_nodes": torch.tensor([3, 3])}, "num_nodes must have shape"),
        ({"tokens": torch.tensor([[1, 2, 3]], dtype=torch.int32)}, "tokens must be int64"),
        ({"scores": torch.zeros(1, 3, dtype=torch.float64)}, "scores must be float32"),
        ({"log_probs": torch.zeros(1, 2)}, "log_probs must have the shape"),
        (
            {"tokens": torch.tensor([[1, 4, 4]]), "parents": torch.tensor([[-1, 0, 0]])},
            "carry the same token",
        ),
    ],
)
def test_broken_trees_are_found(change, message):
    zeros = torch.zeros(1, 3)
    fields = {
        "tokens": torch.tensor([[1, 2, 3]]),
        "parents": torch.tensor([[-1, 0, 1]]),
        "num_nodes": torch.tensor([3]),
        "scores": zeros,
        "log_probs": zeros,
    }
    assert_valid(DraftTree(**fields))
    with pytest.raises(AssertionError, match=message):
        assert_valid(DraftTree(**{**fields, **change}))


@pytest.mark.parametrize("name", ["trace.json", "trace_small.json", "trace_chain.json"])
def test_depths_and_paths_of_the_reference(shared, name):
    trace = json.loads((shared / "reference" / name).read_text())
    rounds = trace["rounds"]
    assert rounds
    for step in rounds[:20]:
        tree = tree_of(step["parents"])
        assert_valid(tree)
        assert tree.depths[0].tolist() == step["tree_depths"]
        for padded in step["retrieve"]:
            path = [node for node in padded if node >= 0]
            assert tree.path(0, path[-1]) == path


def test_a_tree_in_words():
    tree = DraftTree.from_nodes(
        [7, 9],
        [[3, 5, 4, 6], [8]],
        [[0, 0, 1, 1], [0]],
        [[0.25, 0.5, 0.125, 0.0625], [1.0]],
        torch.device("cpu"),
    )
    assert str(tree) == (
        "7 (root; drafted nodes: 4, levels: 2)\n"
        "├─ 5  0.500\n"
        "└─ 3  0.250\n"
        "   ├─ 4  0.125\n"
        "   └─ 6  0.062\n"
        "\n"
        "9 (root; drafted nodes: 1, levels: 1)\n"
        "└─ 8  1.000"
    )
    assert repr(tree) == "DraftTree(B=2, N=5, device='cpu')"
    assert str(DraftTree.root_only(torch.tensor([[3]]))) == "3 (root; drafted nodes: 0, levels: 0)"
    meta = torch.zeros(1, 3, device="meta")
    assert str(DraftTree(meta, meta, meta[:, 0], meta, meta)) == "DraftTree(B=1, N=3, device='meta')"


# ----- the order of nodes --------------------------------------------------------------------------------------------


def paths_by_hand(tree: DraftTree, index: int = 0) -> list[tuple[int, ...]]:
    tokens, parents = tree.host()[index]
    paths = [(tokens[0],)]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@given(st.lists(pools(), min_size=1, max_size=3), st.integers(2, 20))
def test_the_likeliest_path_comes_first_and_nothing_else_changes(rows, num_nodes):
    size = min(len(parents) for parents, _ in rows)
    scores = torch.stack([scores[:size] for _, scores in rows])
    tree = select(
        torch.arange(100, 100 + size).expand(len(rows), size),
        torch.tensor([parents[:size] for parents, _ in rows]),
        scores,
        2 * scores,
        torch.full((len(rows), 1), 7),
        num_nodes,
        PAD,
    )
    first = tree.likeliest_first()
    assert_valid(first)
    assert torch.equal(first.num_nodes, tree.num_nodes)
    for row in range(len(rows)):
        before, after = paths_by_hand(tree, row), paths_by_hand(first, row)
        assert sorted(after) == sorted(before)
        for name in ("scores", "log_probs", "depths"):
            values = [
                dict(zip(p, getattr(t, name)[row].tolist(), strict=False)) for t, p in ((tree, before), (first, after))
            ]
            assert values[1] == values[0], name
        # Expected accepted tokens of the path to each node, the root counted.
        probabilities = dict(zip(before, tree.scores[row].exp().tolist(), strict=False))
        gains = {path: sum(probabilities[path[: end + 1]] for end in range(len(path))) for path in before}
        length = next((n for n, parent in enumerate(first.host()[row].parents[1:]) if parent != n), len(after) - 1)
        likeliest = max(gains.values())
        assert max(gains[path] for path in after[: length + 1]) == pytest.approx(likeliest, rel=1e-5)
        ancestors = [[other == path[: len(other)] for other in after] for path in after]
        assert first.ancestors[row, : len(after), : len(after)].tolist() == ancestors


def test_trees_of_the_host_and_of_the_device_are_the_same():
    """What follows from the parents is computed on the host, if the nodes are known there, and moved with them."""
    tree = DraftTree.from_nodes(
        [7, 8], [[1, 2, 3, 4], [5]], [[0, 1, 0, 2], [0]], [[0.5, 0.25, 0.125, 0.1], [0.5]], torch.device("cpu")
    )
    assert_valid(tree)
    known = DraftTree(tree.tokens, tree.parents, tree.num_nodes, tree.scores, tree.log_probs)
    assert torch.equal(tree.ancestors, known.ancestors)
    assert torch.equal(tree.depths, known.depths)
    assert tree.host() == known.host()
    assert tree.scores.exp().tolist() == [pytest.approx([1, 0.5, 0.25, 0.125, 0.1]), pytest.approx([1, 0.5, 0, 0, 0])]


def test_ancestors_need_no_more_steps_than_there_are_levels():
    parents = [-1, 0, 1, 2, 3, 0, 5, 2, 7]
    tree = tree_of(parents)
    for levels in (4, 5, 8, 30):
        bounded = DraftTree(tree.tokens, tree.parents, tree.num_nodes, tree.scores, tree.log_probs, levels)
        assert torch.equal(bounded.ancestors, tree.ancestors)


def test_nodes_are_read_together_with_something_else():
    tree = tree_of([-1, 0, 0, 1])
    more = torch.tensor([[5, 6]])
    assert tree.read_with(more) == [[5, 6]]
    assert tree.host() == [([100, 101, 102, 103], [-1, 0, 0, 1])]
    assert tree.read_with(more) == [[5, 6]]


@pytest.mark.parametrize("known", [False, True])
def test_chains_in_the_place_of_trees(known):
    zeros = torch.zeros(3, 4)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 1], [-1, 0, 0, 0]])
    tree = DraftTree(tokens, parents, torch.tensor([4, 4, 1]), zeros, zeros, 2)
    if known:
        tree.host()
    for chains, size in (({0: [1], 2: [9, 0, 0]}, 4), ({2: [9, 0, 0, 0, 0, 0]}, 6)):
        replaced = tree.with_chains(chains)
        assert_valid(replaced)
        assert replaced.tokens.shape == (3, size)
        expected = list(tree.host())
        for index, chain in chains.items():
            expected[index] = (chain, list(range(-1, len(chain) - 1)))
        assert replaced.host() == expected
        assert [replaced.deepest(index) for index in range(3)] == [tree.depth for tree in replaced.host()]
    assert tree.with_chains({}) is tree
