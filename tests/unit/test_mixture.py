"""Best-first choice among head and lookup, against an enumeration of all paths."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf.decoding.draft.lookup import LONGEST_MATCH, Lookup
from eagle3_hf.decoding.draft.mixture import BOTH, EMPTY, HEAD, LOOKUP, Pool, best_nodes, likeliest_first


def random_pool(rng: random.Random, width: int, levels: int, vocab: int, noise=None):
    """A pool as the head grows it, with the head's distribution at each expanded path: path -> {token: q}."""
    tokens, parents, scores, log_probs, known = [], [], [], [], {}
    frontier = [(-1, ())]
    for level in range(levels):
        first = len(tokens)
        for parent, path in frontier:
            weights = [rng.random() ** 3 + 1e-3 for _ in range(vocab)]
            q = [weight / sum(weights) for weight in weights]
            race = [value / noise(level, token) for token, value in enumerate(q)] if noise else q
            known[path] = (q, sum(race))
            best = sorted(range(vocab), key=lambda token: -race[token])[:width]
            above, own_above = (0.0, 0.0) if parent < 0 else (scores[parent], log_probs[parent])
            for token in best:
                tokens.append(token)
                parents.append(parent)
                scores.append(above + math.log(race[token] / sum(race)))
                log_probs.append(own_above + math.log(q[token]))
        new = sorted(range(first, len(tokens)), key=lambda entry: -scores[entry])[:width]
        paths = {entry: _path(tokens, parents, entry) for entry in new}
        frontier = [(entry, paths[entry]) for entry in new]
    return Pool(tokens, parents, scores, log_probs, width), known


def _path(tokens, parents, entry):
    path = []
    while entry >= 0:
        path.append(tokens[entry])
        entry = parents[entry]
    return tuple(reversed(path))


def all_values(pool, known, guesses, text, depth, noise=None):
    """The value of every path, by the definition, without a heap."""
    drafted = {_path(pool.tokens, pool.parents, entry) for entry in range(len(pool.tokens))}
    values, waiting = {}, [((), 1.0)]
    while waiting:
        path, value = waiting.pop()
        if len(path) == depth:
            continue
        level, own = len(path), guesses((text + list(path))[-LONGEST_MATCH:])
        children = {}
        if path in known:
            q, z = known[path]
            rest = 1 - sum(0.6 * right for _, right in own)
            total = rest * z + sum(0.6 * right / (noise(level, token) if noise else 1) for token, right in own)
            for token in range(len(q)):
                if (*path, token) in drafted:
                    children[token] = rest * q[token] / (noise(level, token) if noise else 1) / total
            for token, right in own:
                more = 0.6 * right / (noise(level, token) if noise else 1) / total
                children[token] = children.get(token, 0.0) + more
        else:
            for token, right in own:
                children[token] = math.exp(-noise(level, token) * (1 - right) / right) if noise else right
        for token, share in children.items():
            if value * share > 0:
                values[(*path, token)] = value * share
                waiting.append(((*path, token), value * share))
    return values


def paths_of(found):
    paths = [()]
    for token, parent in zip(found.tokens, found.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@given(st.integers(0, 10**6), st.booleans(), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=120, deadline=None)
def test_the_best_nodes_of_all_paths_are_kept(seed, sampled, width, levels):
    rng = random.Random(seed)
    vocab = 6
    races = [[rng.expovariate(1) + 1e-3 for _ in range(vocab)] for _ in range(12)]
    noise = (lambda level, token: races[level][token]) if sampled else None
    text = rng.choices(range(vocab), k=40)
    lookup = Lookup([text])

    def guesses(tail):
        return lookup.guesses(0, tail)

    pool, known = random_pool(rng, width, levels, vocab, noise)
    # Without noise Z is 1, the sum of the head's whole distribution.
    expected = all_values(pool, known, guesses, text, 6, noise)
    found = best_nodes(pool, guesses, text[-LONGEST_MATCH:], 20, 6, noise=noise)
    paths = paths_of(found)
    assert len(set(paths)) == len(paths) == min(20, len(expected))
    for path, value in zip(paths, found.values, strict=True):
        assert value == pytest.approx(expected[path], rel=1e-6)
    best = sorted(expected.values(), reverse=True)[:20]
    assert found.values == pytest.approx(best, rel=1e-6)
    assert found.depths == [len(path) for path in paths]
    assert all(parent <= place for place, parent in enumerate(found.parents))


def test_nodes_say_who_proposed_them():
    # The head proposes 1 and 2 behind 0; the text says that 2 follows, then 3.
    lookup = Lookup([[0, 2, 3, 0]])
    pool = Pool([1, 2], [-1, -1], [math.log(0.6), math.log(0.3)], [math.log(0.6), math.log(0.3)], 2)
    found = best_nodes(pool, lambda tail: lookup.guesses(0, tail), [0], 8, 3)
    sources = dict(zip(paths_of(found), found.sources, strict=True))
    assert sources[(1,)] == HEAD
    assert sources[(2,)] == BOTH
    assert sources[(2, 3)] == LOOKUP
    values = dict(zip(paths_of(found), found.values, strict=True))
    weight = 0.6 * 0.18
    assert values[(2,)] == pytest.approx((1 - weight) * 0.3 + weight)
    assert values[(1,)] == pytest.approx((1 - weight) * 0.6)


def test_a_chain_has_one_child_a_node_and_limits_hold():
    lookup = Lookup([[0, 2, 3, 4, 5, 6, 0, 7, 0]])
    found = best_nodes(EMPTY, lambda tail: lookup.guesses(0, tail), [0], 9, 3, is_chain=True)
    assert found.parents == list(range(len(found.parents)))
    assert max(found.depths) <= 3
    assert best_nodes(EMPTY, None, [0], 9, 3).tokens == []
    bounded = best_nodes(EMPTY, lambda tail: lookup.guesses(0, tail), [0], 9, 9, least=0.1)
    assert bounded.values
    assert min(bounded.values) > 0.1


def test_what_a_cutoff_excludes_is_not_kept():
    pool = Pool([1, 2], [-1, -1], [0.0, -math.inf], [0.0, -math.inf], 2)
    assert best_nodes(pool, None, [0], 5, 3).tokens == [1]
    nothing = Pool([1, 2], [-1, -1], [-math.inf] * 2, [-math.inf] * 2, 2)
    lookup = Lookup([[0, 2, 0]])
    noise = lambda level, token: 1.0  # noqa: E731
    assert best_nodes(nothing, lambda tail: lookup.guesses(0, tail), [0], 5, 1, noise=noise).tokens == [2]
    assert best_nodes(nothing, None, [0], 5, 3).tokens == []


@given(st.integers(0, 10_000), st.integers(1, 30))
def test_the_likeliest_path_comes_first(seed, count):
    rng = random.Random(seed)
    pool, _ = random_pool(rng, 3, 3, 12)
    found = best_nodes(pool, None, [1, 2], 30, 3)
    ordered, kept = likeliest_first(found, count), len(found.tokens[:count])

    def nodes(candidates):
        paths = [()]
        for token, parent in zip(candidates.tokens[:count], candidates.parents, strict=False):
            paths.append((*paths[parent], token))
        return paths[1:], list(zip(candidates.values[:count], candidates.depths, candidates.sources, strict=False))

    (before, old), (after, new) = nodes(found), nodes(ordered)
    assert len(after) == kept
    assert sorted(zip(after, new, strict=True)) == sorted(zip(before, old, strict=True))
    values = dict(zip(before, found.values, strict=False))
    gains = {path: sum(values[path[: end + 1]] for end in range(len(path))) for path in before}
    best = max(gains, key=gains.__getitem__)
    assert gains[after[len(best) - 1]] == pytest.approx(gains[best])
