"""What a call leaves in a cache: what plain decoding leaves, whatever kind of cache, and whatever went wrong.

Each case is made twice, with a head and without. Layer classes, flags, lengths, entries and states of the cache must
then be equal, as must the error, what was streamed, and the generator.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)

from eagle3_hf.decoding.target import capability_probe
from eagle3_hf.decoding.target.capability import VerifyMode
from eagle3_hf.decoding.target.capability_probe import capability_of
from eagle3_hf.decoding.target.runner import CACHE_KEY
from support.drafts import SAMPLED, Recorder, assert_same_cache, cache_of, new_draft, padded, set_tree
from support.families import prompt
from support.families.others import IS_OLD, tiny_or_skip


LENGTH, NEW = 9, 14  # of the prompts, and of the text behind them
LONGROPE = {
    "model_type": "phi3", "max_position_embeddings": 64, "original_max_position_embeddings": LENGTH + 7,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8, "original_max_position_embeddings": LENGTH + 7,
    },
}  # fmt: skip


@cache
def target_of(family: str) -> PreTrainedModel:
    if family == "longrope":
        return tiny_or_skip("phi3", **LONGROPE)
    if family == "longrope_sw":
        return tiny_or_skip("phi3", sliding_window=12, **LONGROPE)
    target = tiny_or_skip(family)
    if IS_OLD and capability_of(target).mode is VerifyMode.PLAIN:
        pytest.skip(f"{family} has a cache of its own in transformers {transformers.__version__}")
    return target


@cache
def head_of(family: str):
    return set_tree(new_draft(target_of(family), half=False), "cpu")


@dataclass
class Left:
    """What a caller sees of a call, whether it returned or raised."""

    error: BaseException | None
    ids: list | None
    streamed: list
    generator: torch.Tensor
    cache: Any


def leave(family: str, inputs: dict, assistant, brought: Any, at: int | None, kind: str, error, **kwargs) -> Left:
    callbacks = {"streamer": Recorder()} if at is None else raising(kind, at, error)
    given = {} if brought is None else {CACHE_KEY: brought}
    torch.manual_seed(0)
    raised = out = None
    try:
        out = target_of(family).generate(
            **inputs, **given, **callbacks, **{"max_new_tokens": NEW, **kwargs}, assistant_model=assistant,
            return_dict_in_generate=True,
        )  # fmt: skip
    except (Exception, KeyboardInterrupt) as caught:  # noqa: BLE001 - whatever plain decoding raises
        raised = caught
    left = brought if brought is not None else out and cache_of(out)
    return Left(raised, out and out.sequences.tolist(), callbacks["streamer"].calls, torch.get_rng_state(), left)


class Raising:
    """A logits processor, or a criterion, that raises at its n-th call."""

    def __init__(self, at: int, error: type[BaseException], is_criterion: bool):
        self.left, self.error, self.is_criterion = at, error, is_criterion

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise self.error("raised by a callback")
        return torch.zeros(len(input_ids), dtype=torch.bool) if self.is_criterion else scores


def raising(kind: str, at: int, error: type[BaseException]) -> dict:
    if kind == "streamer":
        return {"streamer": Recorder(raise_at=at + 1, error=error)}  # the prompt is its first call
    callback = Raising(at, error, kind == "criterion")
    if kind == "criterion":
        return {"streamer": Recorder(), "stopping_criteria": StoppingCriteriaList([callback])}
    return {"streamer": Recorder(), "logits_processor": LogitsProcessorList([callback])}


def assert_left_alike(mine: Left, theirs: Left, tolerance: float = 1e-5) -> None:
    assert type(mine.error) is type(theirs.error), mine.error
    assert mine.ids == theirs.ids
    assert mine.streamed == theirs.streamed
    assert torch.equal(mine.generator, theirs.generator)
    if theirs.cache is not None:
        assert_same_cache(mine.cache, theirs.cache, tolerance)
        assert vars(mine.cache).keys() == vars(theirs.cache).keys()


TREES = ["llama", "mistral_sw", "gemma3"]
OTHERS = ["gpt_oss", "bloom", "gpt_neo"]
RECURRENT = ["qwen3_next", "lfm2", "mamba2", "falcon_h1", "granitemoehybrid"]
LONG = ["longrope", "longrope_sw"]
CACHES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "made": lambda target: None,
    "dynamic": lambda target: DynamicCache(),
    "with config": lambda target: DynamicCache(config=target.config),
    "static": lambda target: static(target, 64),
    "static, exact": lambda target: static(target, LENGTH + NEW - 1),
    "static, one less": lambda target: static(target, LENGTH + NEW - 2),
    "static, few": lambda target: static(target, LENGTH + 4),
    "static, prompt": lambda target: static(target, LENGTH),
    "static, less": lambda target: static(target, LENGTH - 2),
}
# Caches of states are made by their config alone.
PAIRS = [
    *((family, kind) for family in TREES for kind in CACHES),
    *((family, kind) for family in OTHERS for kind in ("dynamic", "with config", "static, few")),
    *((family, kind) for family in RECURRENT for kind in ("made", "with config")),
    *((family, kind) for family in LONG for kind in ("made", "with config", "static", "static, few")),
]
CALLBACKS = [("processor", ValueError), ("criterion", ValueError), ("streamer", KeyboardInterrupt)]


def static(target: PreTrainedModel, slots: int) -> StaticCache:
    return StaticCache(config=target.config, max_cache_len=slots)


def assert_same_caches_left(
    family: str, kind: str, rows: int, steps: list, mode: dict, ends: bool = False, callbacks=CALLBACKS
) -> None:
    """Calls that end by themselves (`None`), or in which a callback raises at a step: each callback at each step."""
    target, inputs = target_of(family), padded([LENGTH, LENGTH - 3, LENGTH - 5][:rows])
    torch.manual_seed(0)
    text = target.generate(**inputs, **mode, max_new_tokens=NEW)[:, LENGTH:]
    kwargs = {**mode, "eos_token_id": [int(text[0, 4]), int(text[-1, 7])]} if ends else mode
    for at in steps:
        for callback, error in callbacks if at else [("", None)]:
            theirs = leave(family, inputs, None, CACHES[kind](target), at, callback, error, **kwargs)
            head = head_of(family).foretell(text, favourite=1.0)
            mine = leave(family, inputs, head, CACHES[kind](target), at, callback, error, **kwargs)
            assert_left_alike(mine, theirs, 1e-4 if family in RECURRENT else 1e-5)


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_what_a_call_leaves(family, kind):
    """One prompt or a batch, in turns: a family has several kinds of caches."""
    place = PAIRS.index((family, kind))
    callbacks = [CALLBACKS[place % 3]]
    if place % 2:
        assert_same_caches_left(family, kind, rows=1, steps=[None, 9], mode={}, callbacks=callbacks)
    else:
        assert_same_caches_left(family, kind, rows=3, steps=[None, 5], mode=SAMPLED, ends=True, callbacks=callbacks)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_what_a_call_leaves_at_every_step(family, kind, rows, mode):
    for ends in [False, True][: 1 + (rows > 1)]:
        assert_same_caches_left(family, kind, rows, [None, *range(1, NEW + 1)], mode, ends)


# ----- static caches at their limits ---------------------------------------------------------------------------------


@pytest.mark.each_choice
@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3"])
@pytest.mark.parametrize("slots", range(LENGTH - 2, LENGTH + NEW + 2, 2))
def test_static_caches_of_every_length(family, slots):
    """And what comes after: the same cache in a call without a head, which may find it broken."""
    target, text = target_of(family), target_of(family).generate(prompt(LENGTH), max_new_tokens=NEW)
    inputs = {"inputs": prompt(LENGTH)}
    found = []
    for assistant in (None, head_of(family).foretell(text[0, LENGTH:], favourite=1.0)):
        brought = static(target, slots)
        first = leave(family, inputs, assistant, brought, None, "", None)
        again = leave(family, {"inputs": torch.cat([text, prompt(2)], dim=1)}, None, brought, None, "", None)
        found.append((first, again))
    assert_left_alike(found[1][0], found[0][0])
    assert_left_alike(found[1][1], found[0][1])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_static_cache_that_is_too_small_says_how_long_it_must_be(rows):
    target, inputs = target_of("gemma3"), padded([LENGTH, LENGTH - 3, LENGTH - 5][:rows])
    streamer = Recorder()
    with pytest.raises(
        IndexError, match=rf"longer than the 13 slots.* max_cache_len of at least {LENGTH + NEW - 1}, or a smaller"
    ):
        target.generate(
            **inputs, **{CACHE_KEY: static(target, 13)}, assistant_model=head_of("gemma3").foretell([]),
            max_new_tokens=NEW, streamer=streamer,
        )  # fmt: skip
    assert len(streamer.calls) == 1 + 13 - LENGTH + 1, "the prompt, a token for each slot, and one without"


def test_a_small_static_cache_and_a_text_that_ends_in_time():
    """No room for `max_new_tokens`, nor needed: and no buffer is made for them either."""
    target = target_of("llama")
    text = target.generate(prompt(LENGTH), max_new_tokens=9)[0].tolist()
    stop, used = text.index(text[LENGTH + 4], LENGTH) - LENGTH + 1, []
    head = head_of("llama").foretell([text[LENGTH:]], favourite=1.0)

    def watch(module, args, kwargs):
        used.append(kwargs[CACHE_KEY].layers[0].max_cache_len)

    handle = target.model.register_forward_pre_hook(watch, with_kwargs=True)
    ids = target.generate(
        prompt(LENGTH), **{CACHE_KEY: static(target, LENGTH + 8)}, assistant_model=head, max_new_tokens=100_000,
        eos_token_id=text[LENGTH + 4],
    )  # fmt: skip
    handle.remove()
    assert ids[0].tolist() == text[: LENGTH + stop]
    assert max(used) <= LENGTH + 8 + 16


# ----- turns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*TREES, "bloom", "qwen3_next", "mamba2", "longrope"])
def test_a_conversation_that_was_interrupted(family):
    """A turn breaks off, the next one goes on in the same cache, with a head again; the third one ends well."""
    target, found = target_of(family), []
    make = CACHES["static" if family == "gemma3" else "with config"]
    text = target.generate(prompt(LENGTH), max_new_tokens=NEW)
    for head in (None, head_of(family)):
        brought, turns = make(target), []
        for at, length in [(4, LENGTH), (3, LENGTH + 5), (None, LENGTH + 9)]:
            ids = {"inputs": text[:, :length]}
            assistant = head and head.foretell(text[0, length:], favourite=1.0)
            turns.append(leave(family, ids, assistant, brought, at, "criterion", ValueError, max_new_tokens=5))
        found.append(turns)
    for mine, theirs in zip(*reversed(found), strict=True):
        assert_left_alike(mine, theirs, 1e-4 if family in RECURRENT or family == "mamba2" else 1e-5)


# ----- raised elsewhere ----------------------------------------------------------------------------------------------


class EndsRounds(Recorder):
    """Raises at the end of the second round."""

    rounds = 0

    def end_round(self, accepted: int) -> None:
        self.rounds += 1
        if self.rounds == 2:
            raise KeyboardInterrupt


def interrupted(family: str, kind: str, rows: int, where: str) -> tuple[Any, int]:
    """The cache of a call that was interrupted between two steps, and how many of these it had streamed."""
    target, inputs = target_of(family), padded([LENGTH, LENGTH - 3, LENGTH - 5][:rows])
    text = target.generate(**inputs, max_new_tokens=NEW)[:, LENGTH:]
    head, brought = head_of(family).foretell(text, favourite=0.7), CACHES[kind](target)
    streamer = EndsRounds() if where == "end_round" else Recorder()
    module = {"draft": head.layers[0], "forward": target.get_decoder().layers[2], "end_round": nn.Identity()}[where]
    calls = []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == (3 if where == "forward" else 7):
            raise KeyboardInterrupt

    capability_of(target)  # else the call begins with the target's trial, which would be interrupted
    handle = module.register_forward_pre_hook(interrupt)
    try:
        # Without a trial of that hook, which would be interrupted.
        with pytest.raises(KeyboardInterrupt), patch.object(capability_probe, "custom_code", lambda target: []):
            target.generate(
                **inputs, **{CACHE_KEY: brought}, assistant_model=head, max_new_tokens=NEW, streamer=streamer
            )
    finally:
        handle.remove()
    return brought, len(streamer.calls) - 1


@pytest.mark.pairwise
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("where", ["draft", "forward", "end_round"])
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "dynamic"), ("llama", "static"), ("gemma3", "with config"), ("gemma3", "static, exact"),
        ("qwen3_next", "with config"),
    ],
)  # fmt: skip
def test_an_interrupt_between_steps(family, kind, rows, where):
    """The cache stands where the last whole step left it, as after a shorter text."""
    found, steps = interrupted(family, kind, rows, where)
    assert 1 < steps < NEW
    theirs = CACHES[kind](target_of(family))
    inputs = padded([LENGTH, LENGTH - 3, LENGTH - 5][:rows])
    target_of(family).generate(**inputs, **{CACHE_KEY: theirs}, max_new_tokens=steps)
    assert_same_cache(found, theirs, 1e-4 if family in RECURRENT else 1e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_that_longrope_has_left_behind_is_the_users_own_again(rows):
    """Phi-3 goes on in a cache of its own; what was brought ends where plain decoding leaves it."""
    for kind in ("static", "with config"):
        target, caches = target_of("longrope_sw"), []
        inputs = padded([LENGTH, LENGTH - 4][:rows])
        text = target.generate(**inputs, max_new_tokens=NEW)[:, LENGTH:]
        for assistant in (None, head_of("longrope_sw").foretell(text, favourite=1.0)):
            caches.append(CACHES[kind](target))
            target.generate(**inputs, **{CACHE_KEY: caches[-1]}, max_new_tokens=NEW, assistant_model=assistant)
        assert int(caches[0].get_seq_length()) < LENGTH + NEW - 1
        assert_same_cache(caches[1], caches[0])
