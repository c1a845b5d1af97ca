"""Each miss has one cause, and a round without a miss has none."""

from typing import NamedTuple

import numpy as np
import pytest

from eagle3_hf.decoding.tree import HostTree
from eagle3_hf.evaluation.misses import Cause, cause_of_miss, count_causes
from eagle3_hf.evaluation.pools import sorted_pool


class Pool(NamedTuple):
    tokens: list[int]
    parents: list[int]


#       root 9 -> 1 -> 3
#              -> 2 -> 4       and in the pool only: 1 -> 5, 3 -> 6, and 7 below the root
TREE = HostTree([9, 1, 2, 3, 4], [-1, 0, 0, 1, 2])
POOL = Pool([1, 2, 7, 3, 5, 4, 6], [-1, -1, -1, 0, 0, 1, 3])
VOCABULARY = set(range(1, 9))


@pytest.mark.parametrize(
    ("path", "token", "cause"),
    [
        ([0], 7, Cause.PRUNED),
        ([0], 8, Cause.NOT_A_CANDIDATE),
        ([0], 11, Cause.OUTSIDE_VOCABULARY),
        ([0, 1], 5, Cause.PRUNED),
        ([0, 1], 4, Cause.WRONG_ANCESTOR),
        ([0, 1], 2, Cause.NOT_A_CANDIDATE),  # drafted, but at another level
        ([0, 2], 5, Cause.NOT_A_CANDIDATE),  # a candidate behind a wrong ancestor that the target never saw
        ([0, 1, 3], 6, Cause.PRUNED),
        ([0, 1, 3], 11, Cause.OUTSIDE_VOCABULARY),
        ([0, 2, 4], 5, Cause.NOT_A_CANDIDATE),  # a node that was not expanded
    ],
)
def test_the_cause_of_a_miss(path, token, cause):
    assert cause_of_miss(POOL, TREE, path, token, VOCABULARY) is cause


def test_every_vocabulary_unless_one_is_given():
    assert cause_of_miss(POOL, TREE, [0], 11) is Cause.NOT_A_CANDIDATE


def test_a_candidate_of_another_source_may_be_outside_the_vocabulary():
    assert cause_of_miss(Pool([1, 11], [-1, -1]), HostTree([9, 1], [-1, 0]), [0], 11, VOCABULARY) is Cause.PRUNED


def test_no_miss_behind_the_deepest_level():
    assert cause_of_miss(Pool([1], [-1]), HostTree([9, 1], [-1, 0]), [0, 1], 5) is None
    assert cause_of_miss(POOL, TREE, [0, 1, 3], 11, max_depth=2) is None
    assert cause_of_miss(Pool([], []), HostTree([9], [-1]), [0], 5) is None


def test_nodes_that_the_pool_lacks_have_no_candidates():
    assert cause_of_miss(Pool([1], [-1]), HostTree([9, 1, 2], [-1, 0, 0]), [0, 2], 5, max_depth=3) is (
        Cause.NOT_A_CANDIDATE
    )


def test_pools_of_a_record():
    tokens, parents = np.array([1, 2, 3]), np.array([-1, -1, 0])
    pool = sorted_pool(tokens, parents, np.array([-0.1, -3.0, -0.2], dtype=np.float32))
    tree = pool.tree(9, 2)
    assert tree.tokens == [9, 1, 3]
    assert cause_of_miss(pool, tree, [0], 2) is Cause.PRUNED


@pytest.mark.parametrize("path", [[], [1], [0, 3], [0, 9]])
def test_what_is_no_path(path):
    with pytest.raises(ValueError, match="not a path from the root"):
        cause_of_miss(POOL, TREE, path, 7)


def test_an_accepted_token_is_no_miss():
    with pytest.raises(ValueError, match="token 2 is a child of node 0"):
        cause_of_miss(POOL, TREE, [0], 2)


def test_counts_add_up():
    causes = [Cause.PRUNED, None, Cause.PRUNED, Cause.WRONG_ANCESTOR]
    assert count_causes(causes) == {
        Cause.OUTSIDE_VOCABULARY: 0,
        Cause.NOT_A_CANDIDATE: 0,
        Cause.PRUNED: 2,
        Cause.WRONG_ANCESTOR: 1,
    }
    assert all(cause.words for cause in Cause)
