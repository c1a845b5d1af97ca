"""Random calls of `generate`: any family, batch, head, tree and arguments, drawn from a seed and from nothing else.

`draw(seed)` gives a `Call`; `run` makes it, with or without a draft, from fresh processors, criteria and caches, and
gives all that a caller can see of it. A call that vanilla refuses, or ends with an exception, is a good call too.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from eagle3_hf.decoding.target.runner import CACHE_KEY
from eagle3_hf.model.target_modules import decoder_blocks
from support.drafts import TREES, ForetellingDraft, Recorder, cache_of, new_draft, target_of
from support.families import FAMILIES, VOCAB_SIZE, prompt


HEADS: dict[str, dict[str, Any]] = {
    "all words": {},
    "half of the words": {"half": True},
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 6},
    "latent": {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
    "one feature": {"use_aux_hidden_state": False},
    "two layers": {"num_hidden_layers": 2, "norm_output": True},
}


@cache
def head_of(family: str, name: str, copy: int = 0) -> ForetellingDraft:
    """A head, one for the whole session; `copy` for another one of the same weights."""
    fields = dict(HEADS[name])
    return new_draft(target_of(family), fields.pop("half", False), **fields)


# ----- code of the caller's in the target's forward ------------------------------------------------------------------


def everywhere(out: torch.Tensor) -> torch.Tensor:
    return out + 0.3 * torch.cos(torch.arange(out.shape[-1]))


def at_the_newest(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[:, :-1], everywhere(out[:, -1:])], dim=1)


def at_single_tokens(out: torch.Tensor) -> torch.Tensor:
    return everywhere(out) if out.shape[1] == 1 else out


def by_row(out: torch.Tensor) -> torch.Tensor:
    return out + 0.3 * torch.arange(len(out))[:, None, None] * torch.cos(torch.arange(out.shape[-1]))


HOOKS = {hook.__name__: hook for hook in (everywhere, at_the_newest, at_single_tokens, by_row)}
HARMFUL_HOOKS = ("at_the_newest", "at_single_tokens")


@contextmanager
def hooked(target: PreTrainedModel, name: str | None) -> Iterator[None]:
    """With a steering hook on one block, behind the hooks by which transformers captures outputs."""
    if name is None:
        yield
        return
    steer = HOOKS[name]

    def hook(module, args, out):
        return steer(out) if isinstance(out, torch.Tensor) else (steer(out[0]), *out[1:])

    with torch.no_grad():
        target(torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    handle = decoder_blocks(target)[1].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@cache
def stepping(kind: type) -> type:
    """A subclass that counts its steps in the model kwargs; the logits of every fifth step are turned round."""

    class Stepping(kind):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
            model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
            return {**model_kwargs, "step": model_kwargs.get("step", 0) + 1}

        def forward(self, *args, step=0, **kwargs):
            out = super().forward(*args, **kwargs)
            if step % 5 == 4:
                out.logits = -out.logits
            return out

    return Stepping


@contextmanager
def counting_steps(target: PreTrainedModel, counts: bool) -> Iterator[None]:
    kind = type(target)
    if counts:
        target.__class__ = stepping(kind)
    try:
        yield
    finally:
        target.__class__ = kind


# ----- callbacks, new for each call ----------------------------------------------------------------------------------


class Logged:
    """Writes down its calls."""

    def __init__(self, log: list):
        self.log, self.calls = log, 0

    def note(self, *what) -> None:
        self.calls += 1
        self.log.append((type(self).__name__, *what))


class Counting(Logged, LogitsProcessor):
    """What it does depends on how often it was called, and on the row."""

    def __call__(self, input_ids, scores):
        self.note(input_ids.tolist())
        rows = torch.arange(len(scores))[:, None]
        return scores + 2.0 * torch.sin(torch.arange(scores.shape[1]) * self.calls + rows)


class InPlace(Logged, LogitsProcessor):
    """Forbids each row's newest token, in the tensor it was given."""

    def __call__(self, input_ids, scores):
        self.note(input_ids.shape)
        scores.scatter_(1, input_ids[:, -1:], -30.0)
        return scores


class RowsEnd(Logged, StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, log, lengths):
        super().__init__(log)
        self.lengths = lengths

    def __call__(self, input_ids, scores, **kwargs):
        self.note(input_ids.tolist(), scores is None)
        return torch.tensor(
            [input_ids.shape[1] >= self.lengths[row % len(self.lengths)] for row in range(len(input_ids))]
        )


class AfterCalls(Logged, StoppingCriteria):
    """Ends everything at its n-th call, and draws random numbers before that if told to."""

    def __init__(self, log, calls: int, draws: int):
        super().__init__(log)
        self.last, self.draws = calls, draws

    def __call__(self, input_ids, scores, **kwargs):
        self.note(input_ids[:, -1].tolist())
        if self.draws and self.calls % self.draws == 0:
            torch.rand(2)
        return torch.full((len(input_ids),), self.calls >= self.last)


# ----- calls ---------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call, without its draft.

    Attributes:
        kwargs: Arguments that keep no state.
        callbacks: From a log to arguments that do, made anew for each run.
        user_cache, second_turn, as_config: A cache of the caller's; its continuation; arguments in a config object.
        window, is_auto: Settings of the head: how far its attention reaches, and whether the tree is sized by cost.
        static_slots: A static cache of the caller's with so many slots more than the text takes; `None` for no such.
        hook, counts_steps: Code of the caller's in the target.
        is_beside: Another call of the same family is made in another thread meanwhile.
    """

    seed: int
    family: str
    head: str
    tree: tuple[int, int, int]
    favourite: float
    inputs: dict[str, torch.Tensor]
    kwargs: dict[str, Any]
    callbacks: list[Callable[[list], dict]] = field(default_factory=list)
    user_cache: bool = False
    second_turn: int = 0
    as_config: bool = False
    streams: bool = False
    window: int | None = None
    is_auto: bool = False
    static_slots: int | None = None
    hook: str | None = None
    counts_steps: bool = False
    is_beside: bool = False

    def __str__(self) -> str:
        shape = tuple(next(iter(self.inputs.values())).shape[:2])
        names = (
            "user_cache", "second_turn", "as_config", "streams", "is_auto", "hook", "counts_steps", "is_beside",
        )  # fmt: skip
        extras = [f"{name}={getattr(self, name)}" for name in names if getattr(self, name)]
        extras += [f"{len(self.callbacks)} callbacks", f"static_slots={self.static_slots}"]
        kwargs = {name: value for name, value in self.kwargs.items() if name != "tokenizer"}
        head = f"{self.head} (window {self.window})"
        return f"call {self.seed}: {self.family}, {head}, tree {self.tree}, {shape}, {kwargs}, {extras}"


def draw(seed: int, tokenizer: Any = None) -> Call:
    """The call of a seed."""
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 2, 3, 3, 4])
    tree = rng.choice([*TREES.values(), *TREES.values(), (rng.randint(1, 24), rng.randint(1, 6), rng.randint(1, 5))])
    call = Call(
        seed,
        rng.choice(FAMILIES),
        rng.choice(["all words", "all words", *HEADS]),
        tree,
        rng.choice([0.0, 0.5, 0.7, 0.7, 0.9, 1.0]),
        _inputs(rng, rows),
        {"max_new_tokens": rng.choice([1, 2, 3, *(rng.randint(4, 30) for _ in range(9)), rng.randint(50, 90)])},
    )
    _draw_ends(rng, call)
    _draw_sampling(rng, call)
    _draw_processors(rng, call)
    _draw_callbacks(rng, call, tokenizer)
    _draw_outputs(rng, call)
    _draw_refused(rng, call)
    call.window, call.is_auto = rng.choice([None] * 6 + [1, 5, 16]), rng.random() < 0.4
    _draw_surroundings(rng, call)
    if "inputs_embeds" in call.inputs:
        target = target_of(call.family)
        call.inputs["inputs_embeds"] = target.get_input_embeddings()(call.inputs["inputs_embeds"]).detach()
    return call


def _inputs(rng: random.Random, rows: int) -> dict[str, torch.Tensor]:
    equal = rng.random() < 0.25
    lengths = [rng.choice([1, 2, rng.randint(3, 30)]) for _ in range(rows)]
    lengths = [lengths[0]] * rows if equal else lengths
    ids = prompt(max(lengths), rng.randrange(10**6), rows)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : ids.shape[1] - length] = 0
        mask[row, : ids.shape[1] - length] = 0
    if rng.random() < 0.1:
        mask[rng.randrange(rows), rng.randrange(ids.shape[1])] = 0  # a hole
    if rows > 1 and rng.random() < 0.05:
        mask[rng.randrange(rows)] = 0  # padding alone
    name = "inputs_embeds" if rng.random() < 0.08 else "inputs"
    return {name: ids} if equal and bool(mask.all()) else {name: ids, "attention_mask": mask}


def _draw_ends(rng: random.Random, call: Call) -> None:
    kwargs = call.kwargs
    if rng.random() < 0.6:
        number = rng.choice([1, 5, 15, 40])
        kwargs["eos_token_id"] = rng.sample(range(1, VOCAB_SIZE), number)
        if rng.random() < 0.3:
            kwargs["pad_token_id"] = kwargs["eos_token_id"][0]
        if rng.random() < 0.3:
            kwargs[rng.choice(["min_new_tokens", "min_length"])] = rng.randint(1, 12)
        if rng.random() < 0.1:
            kwargs["exponential_decay_length_penalty"] = (rng.randint(1, 5), 1.1)
    elif rng.random() < 0.2:
        kwargs["pad_token_id"] = rng.randrange(VOCAB_SIZE)
    if rng.random() < 0.1 and "inputs" in call.inputs:
        kwargs["max_length"] = call.inputs["inputs"].shape[1] + kwargs.pop("max_new_tokens")


def _draw_sampling(rng: random.Random, call: Call) -> None:
    kwargs = call.kwargs
    if rng.random() < 0.5:
        return
    kwargs["do_sample"] = True
    options = {
        "temperature": lambda: rng.choice([0.3, 0.7, 1.0, 1.4]),
        "top_k": lambda: rng.choice([0, 5, 40]),
        "top_p": lambda: rng.choice([0.5, 0.9, 0.99]),
        "min_p": lambda: rng.choice([0.02, 0.1]),
        "typical_p": lambda: rng.choice([0.7, 0.95]),
        "epsilon_cutoff": lambda: 3e-4,
        "eta_cutoff": lambda: 3e-4,
    }
    for name in rng.sample(list(options), rng.choice([0, 1, 1, 2, 3])):
        kwargs[name] = options[name]()
    if rng.random() < 0.15:
        kwargs["num_return_sequences"] = rng.choice([2, 3])


def _draw_processors(rng: random.Random, call: Call) -> None:
    def some(number: int) -> list[int]:
        return rng.sample(range(VOCAB_SIZE), number)

    options: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice([0.9, 1.2, 1.5]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2, 3]),
        "encoder_repetition_penalty": lambda: 1.3,
        "encoder_no_repeat_ngram_size": lambda: 2,
        "bad_words_ids": lambda: [[token] for token in some(20)] + [some(2)],
        "suppress_tokens": lambda: some(60),
        "begin_suppress_tokens": lambda: some(100),
        "forced_bos_token_id": lambda: rng.randrange(VOCAB_SIZE),
        "forced_eos_token_id": lambda: rng.randrange(VOCAB_SIZE),
        "sequence_bias": lambda: [[[token], rng.uniform(-4, 4)] for token in some(8)],
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "guidance_scale": lambda: rng.choice([0.7, 1.5]),
        "watermarking_config": lambda: rng.choice(
            [
                WatermarkingConfig(bias=2.0),
                WatermarkingConfig(bias=2.0, seeding_scheme="selfhash"),
                SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3),
            ]
        ),
    }
    for name in rng.sample(list(options), rng.choice([0, 0, 0, 1, 1, 2, 4])):
        call.kwargs[name] = options[name]()


def _draw_callbacks(rng: random.Random, call: Call, tokenizer: Any) -> None:
    start = next(iter(call.inputs.values())).shape[1] if "inputs" in call.inputs else 0
    ends = [start + rng.randint(1, 25) for _ in range(4)]
    calls, draws, modulus = rng.randint(1, 25), rng.choice([0, 0, 1, 3]), rng.randint(2, 4)

    def allowed_tokens(log: list) -> dict:
        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            log.append(("allowed", batch_id, ids.tolist()))
            last = int(ids[-1]) if len(ids) else 0
            return [token for token in range(VOCAB_SIZE) if (token + last + batch_id) % modulus]

        return {"prefix_allowed_tokens_fn": allowed}

    processors = [
        lambda log: {"logits_processor": LogitsProcessorList([Counting(log)])},
        lambda log: {"logits_processor": LogitsProcessorList([InPlace(log)])},
        allowed_tokens,
    ]
    criteria = [
        lambda log: {"stopping_criteria": StoppingCriteriaList([RowsEnd(log, ends)])},
        lambda log: {"stopping_criteria": StoppingCriteriaList([AfterCalls(log, calls, draws)])},
        lambda log: {"stopping_criteria": StoppingCriteriaList([AfterCalls(log, calls, draws), RowsEnd(log, ends)])},
    ]
    if rng.random() < 0.2 and start:
        call.callbacks.append(rng.choice(processors))
    if rng.random() < 0.3:
        call.callbacks.append(rng.choice(criteria))
    if rng.random() < 0.1 and tokenizer is not None and start:
        call.kwargs["stop_strings"] = tokenizer.convert_ids_to_tokens(rng.sample(range(VOCAB_SIZE), 12))
        call.kwargs["tokenizer"] = tokenizer
    if rng.random() < 0.1:
        call.kwargs["max_time"] = rng.choice([1e-9, 1e9])


def _draw_outputs(rng: random.Random, call: Call) -> None:
    if rng.random() < 0.7:
        call.kwargs["return_dict_in_generate"] = True
        for name in ("output_scores", "output_logits", "output_hidden_states"):
            if rng.random() < 0.4:
                call.kwargs[name] = True
        if target_of(call.family).config._attn_implementation == "eager" and rng.random() < 0.3:
            call.kwargs["output_attentions"] = True
    if rng.random() < 0.1:
        call.kwargs["num_assistant_tokens"] = rng.randint(1, 19)
    call.streams = rng.random() < 0.5
    call.as_config = rng.random() < 0.1
    if "inputs" in call.inputs and rng.random() < 0.1:
        call.kwargs["prefill_chunk_size"] = rng.choice([1, 4])
    if rng.random() < 0.15:
        call.user_cache = True
    elif rng.random() < 0.2:
        call.kwargs["cache_implementation"] = rng.choice(["dynamic", "static", "static"])
    elif "inputs" in call.inputs and call.kwargs.get("num_return_sequences", 1) == 1 and rng.random() < 0.1:
        call.kwargs["return_dict_in_generate"] = True
        call.second_turn = rng.randint(1, 4)


def _draw_surroundings(rng: random.Random, call: Call) -> None:
    """What is not an argument: a static cache that is used over turns, code in the target, other threads."""
    turns = "inputs" in call.inputs and call.kwargs.get("num_return_sequences", 1) == 1
    if turns and not call.user_cache and "cache_implementation" not in call.kwargs and rng.random() < 0.3:
        call.static_slots = rng.choice([0, 0, 1, 7, 60, 140])
        call.second_turn = call.second_turn or rng.choice([0, 1, 3])
        call.kwargs.pop("guidance_scale", None)  # runs a batch of its own through a cache of its own
    if rng.random() < 0.1:
        call.hook = rng.choice(list(HOOKS))
    elif rng.random() < 0.04:
        call.counts_steps = True
    call.is_beside = not call.kwargs.get("do_sample") and rng.random() < 0.1


REFUSED = {
    "num_beams": 2,
    "use_cache": False,
    "prompt_lookup_num_tokens": 3,
    "assistant_confidence_threshold": 0.2,
    "num_assistant_tokens_schedule": "heuristic",
}


def _draw_refused(rng: random.Random, call: Call) -> None:
    if rng.random() < 0.03:
        name = rng.choice(list(REFUSED))
        call.kwargs[name] = REFUSED[name]


FIRST_TURN = 5  # tokens


# ----- making one ----------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What a caller sees of a call: its result or its exception, and every call of its callbacks."""

    out: Any
    error: Exception | None
    streamed: list
    log: list
    generator: torch.Tensor
    cache: Any

    @property
    def sequences(self) -> torch.Tensor:
        return self.out if isinstance(self.out, torch.Tensor) else self.out.sequences


def run(call: Call, draft: ForetellingDraft | None = None, **more) -> Outcome:
    """Make the call, from fresh callbacks and from its seed; `more` overrides its arguments."""
    target = target_of(call.family)
    with hooked(target, call.hook), counting_steps(target, call.counts_steps):
        return run_as_it_is(call, draft, **more)


def run_as_it_is(call: Call, draft: ForetellingDraft | None = None, **more) -> Outcome:
    """The same, without the caller's code in the target."""
    target, log, streamer = target_of(call.family), [], Recorder()
    given = _given_cache(call, target)
    kwargs: dict[str, Any] = {"assistant_model": draft}
    if given is not None:
        kwargs[CACHE_KEY] = given
    if call.streams:
        kwargs["streamer"] = streamer
    for make in call.callbacks:
        kwargs |= make(log)
    inputs, out, error = call.inputs, None, None
    try:
        if call.second_turn:
            inputs, kwargs[CACHE_KEY] = _after_a_first_turn(call, target, draft, given)
        kwargs |= _arguments(call, more)
        torch.manual_seed(call.seed)
        out = target.generate(**inputs, **kwargs)
    except Exception as raised:  # noqa: BLE001 - whatever vanilla raises is what we must raise
        error = raised
    return Outcome(out, error, streamer.calls, log, torch.get_rng_state(), given)


def _given_cache(call: Call, target: PreTrainedModel) -> Any:
    if call.user_cache:
        return DynamicCache(config=target.config)
    if call.static_slots is None:
        return None
    ids = call.inputs["inputs"]
    longest = call.kwargs.get("max_length", ids.shape[1] + call.kwargs.get("max_new_tokens", 0))
    before = FIRST_TURN + call.second_turn if call.second_turn else 0
    # The newest token needs no slot.
    return StaticCache(config=target.config, max_cache_len=longest + before + call.static_slots - 1)


def _arguments(call: Call, more: dict[str, Any]) -> dict[str, Any]:
    if not call.as_config:
        return {**call.kwargs, **more}
    config = GenerationConfig(pad_token_id=0)
    return {**config.update(**call.kwargs, **more), "generation_config": config}


def _after_a_first_turn(call: Call, target, draft, given: Any) -> tuple[dict, Any]:
    """A conversation goes on: what was said, a few tokens more, and the cache of the first turn."""
    # With and without a draft: a cache says nothing about who filled it.
    helper = {"assistant_model": draft} if draft is not None and call.seed % 2 else {}
    kwargs = {} if given is None else {CACHE_KEY: given}
    first = target.generate(**call.inputs, max_new_tokens=FIRST_TURN, return_dict_in_generate=True, **helper, **kwargs)
    ids = torch.cat([first.sequences, prompt(call.second_turn, call.seed, len(first.sequences))], dim=1)
    mask = call.inputs.get("attention_mask", torch.ones_like(call.inputs["inputs"]))
    grown = mask.new_ones(len(mask), ids.shape[1] - mask.shape[1])
    return {"inputs": ids, "attention_mask": torch.cat([mask, grown], dim=1)}, cache_of(first)
