"""Every way to stop, at every place inside an accepted block: ids, scores, streamer, cache and generator as vanilla's.

The head foretells everything here, so that a round accepts its whole depth and blocks would run past the stop.
"""

from functools import cache

import pytest
import torch
from transformers import (
    DynamicCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from eagle3_hf.decoding.target.runner import CACHE_KEY
from support.callbacks import AfterCalls, raising, surroundings
from support.drafts import assert_same, assert_same_cache, cache_of, draft_of, observe, set_tree, target_of
from support.families import VOCAB_SIZE, prompt


PROMPT = prompt(9, 3)
LENGTH = PROMPT.shape[1]
# The first token (from the prefill), the whole first block and a good part of the second.
PLACES = range(9)
CALLS = [("llama", "cpu", {}), ("gemma3", "chain", {"do_sample": True, "top_k": 0, "temperature": 0.9})]
BOTH = pytest.mark.parametrize(("family", "tree", "mode"), CALLS, ids=["greedy", "sampled"])


def texts(family: str, mode: dict) -> list[int]:
    """The continuation that nothing stops."""
    return _texts(family, tuple(mode.items()))


@cache
def _texts(family: str, mode: tuple) -> list[int]:
    return observe(target_of(family), PROMPT, max_new_tokens=20, **dict(mode)).ids[LENGTH:]


def assert_stops_as_plain(family: str, tree: str, mode: dict, make=dict, foretold=None, **kwargs):
    """A call with and without the draft, and the two must look the same; returns the draft's result."""
    target, draft = target_of(family), set_tree(draft_of(family, half=False), tree)
    foretold = texts(family, mode) if foretold is None else foretold
    kwargs = {"max_new_tokens": 16, **mode, **kwargs}
    vanilla = observe(target, PROMPT, make=make, **kwargs)
    ours = observe(target, PROMPT, make=make, assistant_model=draft.foretell(foretold, favourite=1.0), **kwargs)
    assert_same(ours, vanilla)
    return ours


@BOTH
def test_the_blocks_are_long_enough_to_be_cut(family, tree, mode):
    ours = assert_stops_as_plain(family, tree, mode)
    assert ours.out.speculation.tau > 3


@BOTH
@pytest.mark.parametrize("place", PLACES)
def test_end_of_sequence(family, tree, mode, place):
    end = texts(family, mode)[place]
    ours = assert_stops_as_plain(family, tree, mode, eos_token_id=end)
    assert ours.ids[-1] == end
    assert end not in ours.ids[LENGTH:-1]
    assert cache_of(ours.out).get_seq_length() == len(ours.ids) - 1, "the last token is not in the cache"


@pytest.mark.each_choice
@BOTH
@pytest.mark.parametrize("place", PLACES)
def test_list_of_ends(family, tree, mode, place):
    text = texts(family, mode)
    unused = next(token for token in range(1, VOCAB_SIZE) if token not in text)
    assert_stops_as_plain(family, tree, mode, eos_token_id=[unused, text[place], text[-1]], pad_token_id=unused)


@pytest.mark.pairwise
@BOTH
@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 2, 5])
def test_end_of_sequence_beside_the_limit(family, tree, mode, place, extra):
    end = texts(family, mode)[place]
    assert_stops_as_plain(family, tree, mode, eos_token_id=end, max_new_tokens=place + extra + 1)


@pytest.mark.each_choice
@BOTH
@pytest.mark.parametrize("number", range(1, 12))
def test_max_new_tokens(family, tree, mode, number):
    ours = assert_stops_as_plain(family, tree, mode, max_new_tokens=number)
    assert len(ours.ids) == LENGTH + number


@BOTH
@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_max_length(family, tree, mode, number):
    ours = assert_stops_as_plain(family, tree, mode, max_new_tokens=None, max_length=LENGTH + number)
    assert len(ours.ids) == LENGTH + number


@BOTH
@pytest.mark.parametrize("number", [1, 3, 6])
def test_min_new_tokens(family, tree, mode, number):
    """An end that may not come yet is suppressed, at every node by that node's own length."""
    end = texts(family, mode)[1]
    kwargs = {"eos_token_id": end, "min_new_tokens": number, **mode}
    foretold = observe(target_of(family), PROMPT, max_new_tokens=16, **kwargs).ids[LENGTH:]
    ours = assert_stops_as_plain(family, tree, mode, foretold=foretold, **kwargs)
    assert len(ours.ids) >= LENGTH + number


class AtLength(StoppingCriteria):
    """Stops at a length; keeps what it was called with."""

    def __init__(self, length: int):
        self.length = length
        self.seen: list[tuple[list[int], int]] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids[0].tolist(), len(scores)))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@BOTH
@pytest.mark.parametrize("place", PLACES)
def test_criterion_of_the_user(family, tree, mode, place):
    made: list[AtLength] = []

    def make():
        made.append(AtLength(LENGTH + place + 1))
        return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

    ours = assert_stops_as_plain(family, tree, mode, make=make)
    assert len(ours.ids) == LENGTH + place + 1
    vanilla_calls, our_calls = (criterion.seen for criterion in made)
    assert our_calls == vanilla_calls, "asked once for each token, with that token's own prefix"


@pytest.mark.each_choice
@BOTH
@pytest.mark.parametrize("place", PLACES)
def test_criterion_with_a_state(family, tree, mode, place):
    ours = assert_stops_as_plain(
        family, tree, mode, make=lambda: {"stopping_criteria": StoppingCriteriaList([AfterCalls(place + 1)])}
    )
    assert len(ours.ids) == LENGTH + place + 1


@BOTH
def test_no_time_left(family, tree, mode):
    assert len(assert_stops_as_plain(family, tree, mode, max_time=1e-9).ids) == LENGTH + 1


@pytest.mark.each_choice
@BOTH
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("across", [False, True], ids=["one token", "across two tokens"])
def test_stop_strings(family, tree, mode, place, across, tokenizer):
    words = tokenizer.convert_ids_to_tokens(texts(family, mode))
    stop = words[place]
    if across and place:
        stop = words[place - 1][1] + words[place][0]
    ours = assert_stops_as_plain(family, tree, mode, stop_strings=[stop, "zzzz"], tokenizer=tokenizer)
    said = "".join(tokenizer.convert_ids_to_tokens(ours.ids[LENGTH:]))
    assert stop in said
    assert len(ours.ids) <= LENGTH + place + 1


# ----- something raises ----------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@BOTH
@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize(
    ("at", "error"), [(1, ValueError), (2, KeyboardInterrupt), (4, ValueError), (7, KeyboardInterrupt)]
)
def test_exceptions_leave_no_trace(family, tree, mode, error, kind, at):
    target, draft = target_of(family), set_tree(draft_of(family, half=False), tree)
    text = texts(family, mode)
    before = surroundings(target, draft)
    caches, states, streamed = [], [], []
    for assistant in (None, draft.foretell(text, favourite=1.0)):
        caches.append(DynamicCache(config=target.config))
        callbacks = raising(kind, at, error)
        torch.manual_seed(0)
        with pytest.raises(error, match="raised by"):
            target.generate(
                PROMPT,
                assistant_model=assistant,
                max_new_tokens=16,
                **{CACHE_KEY: caches[-1]},
                **mode,
                **callbacks,
            )
        streamed.append(callbacks["streamer"].calls)
        states.append(torch.get_rng_state())
    assert surroundings(target, draft) == before
    assert torch.equal(*states), "random numbers are used up token by token"
    assert streamed[1] == streamed[0]
    assert_same_cache(caches[1], caches[0])
    assert_stops_as_plain(family, tree, mode)


@BOTH
def test_an_interrupted_forward_leaves_no_trace(family, tree, mode):
    target, draft = target_of(family), set_tree(draft_of(family, half=False), tree)
    text = texts(family, mode)  # for which transformers may leave hooks of its own
    before = surroundings(target, draft)
    calls = 0

    def interrupt(module, args):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    handle = target.get_decoder().layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.generate(PROMPT, assistant_model=draft.foretell(text), max_new_tokens=16, **mode)
    handle.remove()
    assert surroundings(target, draft) == before
    assert_stops_as_plain(family, tree, mode)
