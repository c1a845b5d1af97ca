"""Threads that sample at the same time, with a draft and without: no random number is used twice, and nobody notices.

With a temperature this high all tokens are equally likely, so that each token is the place of the least of the random
numbers it came from: from the texts alone it can be told whether two steps had the same numbers.
"""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers.generation.streamers import BaseStreamer

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.decoding.coupling import Noise
from support.chi_square import p_value
from support.drafts import (
    SAMPLED,
    Recorder,
    assert_close,
    assert_same_as_plain,
    assert_same_cache,
    cache_of,
    padded,
    pair,
    set_tree,
)
from support.families import prompt, tiny
from support.threads import another_thread


EVEN = {"do_sample": True, "top_k": 0, "temperature": 1e6}
THREADS, STEPS, WORDS, ROWS, PROMPT = 8, 14, 4096, 4, 5
BATCHES = pytest.mark.parametrize("number", [1, 3], ids=["one target", "three targets"])


@pytest.fixture(scope="module")
def targets():
    return [tiny("llama", seed, num_hidden_layers=4, vocab_size=WORDS) for seed in range(3)]


@pytest.fixture(scope="module")
def draft(targets) -> Eagle3DraftModel:
    """Without every other word, so that rows accept different numbers of tokens."""
    with torch.random.fork_rng(devices=[]):
        head = Eagle3DraftModel.from_target(targets[0], draft_vocab=list(range(0, WORDS, 2)))
    return set_tree(head.eval(), (6, 3, 2))


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of all calls, each made in a thread of its own; they take turns as often as can be."""
    interval, start = sys.getswitchinterval(), threading.Barrier(len(calls))

    def wait_and(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(wait_and, calls))
    finally:
        sys.setswitchinterval(interval)


def most_alike(steps: torch.Tensor) -> int:
    """In how many rows any two of the steps (N, rows) agree; two are already too many for chance."""
    return int((steps[:, None] == steps).sum(-1).fill_diagonal_(0).max())


class UsedNoise(BaseStreamer):
    """Writes down what noise each token of a batch of one came from."""

    def __init__(self, last: threading.local):
        self.used: list[tuple] = []
        self._last, self._is_prompt = last, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            noise = self._last.noise
            assert int(noise.argmin()) == int(value), "the token is not from this noise"
            self.used.append(tuple(noise[0, :8].tolist()))
        self._is_prompt = False

    def end(self) -> None:
        pass


@BATCHES
def test_no_noise_is_used_twice(targets, draft, number, monkeypatch):
    last, race = threading.local(), Noise.race

    def recording(probs, noise):
        last.noise = noise
        return race(probs, noise)

    monkeypatch.setattr(Noise, "race", staticmethod(recording))
    streamers = [UsedNoise(last) for _ in range(THREADS)]

    def request(index: int) -> None:
        target, ids = targets[index % number], prompt(PROMPT, index)
        target.generate(ids, assistant_model=draft, max_new_tokens=STEPS, streamer=streamers[index], **EVEN)

    at_once([lambda index=index: request(index) for index in range(THREADS)])
    used = [noise for streamer in streamers for noise in streamer.used]
    assert len(used) == STEPS * THREADS
    assert len(set(used)) == len(used)


@pytest.mark.each_choice
@BATCHES
@pytest.mark.parametrize("plain", [0, 2], ids=["all with a draft", "two without"])
def test_no_numbers_are_used_twice_by_batches(targets, draft, number, plain):
    def request(index: int) -> torch.Tensor:
        assistant = {"assistant_model": draft} if index >= plain else {}
        out = targets[index % number].generate(prompt(PROMPT, index, ROWS), max_new_tokens=STEPS, **EVEN, **assistant)
        return out[:, PROMPT:].T

    texts = at_once([lambda index=index: request(index) for index in range(THREADS)])
    assert draft.stats.accepted, "no row was ahead of another, so little was tested"
    assert most_alike(torch.cat(texts)) < 2


@pytest.mark.each_choice
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("ends", [{}, {"eos_token_id": list(range(1, WORDS, 16))}], ids=["one length", "several"])
def test_another_thread_draws_while_rows_are_ahead(targets, draft, every, ends):
    """What rows have chosen with numbers that somebody else drew meanwhile is chosen again, without a trace."""
    target, forwards, theirs = targets[0], [], []

    def draw() -> None:
        theirs.append(torch.empty(ROWS, WORDS).exponential_().argmin(-1))

    def draw_elsewhere(*_) -> None:
        forwards.append(None)
        if len(forwards) % every == 0:
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()

    streamer, ids = Recorder(), prompt(PROMPT, rows=ROWS)
    everything = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    handle = target.register_forward_hook(draw_elsewhere)
    try:
        out = target.generate(
            ids, assistant_model=draft, max_new_tokens=40, streamer=streamer, **EVEN, **everything, **ends
        )
    finally:
        handle.remove()
    new = out.sequences[:, PROMPT:].T
    # Of a row that is finished the token drawn is not seen.
    shown = new[: int((new != 0).all(1).sum())] if ends else new
    assert most_alike(torch.cat([shown, *(tokens[None] for tokens in theirs)])) < 2
    assert out.speculation.accepted, "no row was ahead of another, so little was tested"
    assert [values for _, values in streamer.calls[1:-1]] == new.tolist(), "told twice, or of what was taken back"
    whole = target(out.sequences[:, :-1])
    logits = whole.logits[:, PROMPT - 1 :].unbind(1)
    assert_close(out.logits, logits, 1e-5)
    assert_close(out.scores, [step / EVEN["temperature"] for step in logits], 1e-5)
    assert_same_cache(cache_of(out), cache_of(whole))


# ----- the distribution ----------------------------------------------------------------------------------------------


@torch.no_grad()
def places(target, text: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Where each new token stands in its distribution, at random within its share: even in [0, 1) if all is well."""
    logits, tokens = target(text[:, :-1]).logits[:, PROMPT - 1 :], text[:, PROMPT:, None]
    probs, order = (logits.double() / temperature).softmax(-1).sort(-1)
    rank = (order == tokens).double().argmax(-1, keepdim=True)
    own = probs.gather(-1, rank)
    within = torch.rand(own.shape, generator=torch.Generator().manual_seed(0), dtype=own.dtype)
    return (probs.cumsum(-1).gather(-1, rank) - own + own * within).flatten()


def evenness(values: torch.Tensor, bins: int) -> float:
    """P-value of chi-square."""
    counts = torch.bincount((values * bins).long().clamp(max=bins - 1), minlength=bins).double()
    return p_value(counts, torch.full((bins,), 1 / bins, dtype=torch.float64))


@pytest.mark.parametrize(("rows", "length"), [(1, 40), (40, 8)])
def test_each_request_is_distributed_as_it_should_be(rows, length):
    target = tiny("llama", num_hidden_layers=4, vocab_size=8, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        draft = set_tree(Eagle3DraftModel.from_target(target).eval(), (6, 3, 2))

    def request(index: int) -> torch.Tensor:
        return target.generate(
            prompt(PROMPT, index, rows, vocab_size=8), assistant_model=draft, max_new_tokens=length, do_sample=True,
            top_k=0, pad_token_id=0,
        )  # fmt: skip

    texts = at_once([lambda index=index: request(index) for index in range(THREADS)])
    found = [places(target, text) for text in texts]
    # Threads take turns otherwise each time, so that no seed fixes the texts: one right run in 100,000 fails.
    assert min(evenness(values, 8) for values in found) > 1e-6
    assert evenness(torch.cat(found), 32) > 1e-6
    # One step and the next, each in one of four quarters.
    pairs = (torch.cat([values.view(-1, 2) for values in found]) * 4).long().clamp(max=3)
    assert evenness((pairs * torch.tensor([4, 1])).sum(-1) / 16, 16) > 1e-6
    # And the test can tell.
    assert evenness(torch.cat([places(target, text, 0.3) for text in texts]), 8) < 1e-12


# ----- one thread that samples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [[9], [5, 14, 9]], ids=["one row", "three rows"])
def test_beside_an_idle_thread_all_is_as_alone(lengths):
    target, draft = pair("llama")
    with another_thread():
        assert_same_as_plain(target, draft, padded(lengths), **SAMPLED)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("call", [2, 5, 9])
def test_beside_an_idle_thread_an_exception_leaves_the_generator_as_alone(rows, call):
    target, draft = pair("llama")
    states = []
    with another_thread():
        for assistant in ({}, {"assistant_model": draft.foretell([])}):
            torch.manual_seed(0)
            with pytest.raises(ValueError, match="raised by the streamer"):
                target.generate(
                    prompt(7, rows=rows), streamer=Recorder(raise_at=call), max_new_tokens=20, **SAMPLED, **assistant
                )
            states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_alone_again_after_threads_that_sampled(targets, draft):
    def request(index: int) -> torch.Tensor:
        return targets[0].generate(prompt(PROMPT, index), assistant_model=draft, max_new_tokens=8, **EVEN)

    at_once([lambda index=index: request(index) for index in range(3)])
    target, foretelling = pair("llama")
    assert_same_as_plain(target, foretelling, prompt(6), **SAMPLED)
