"""Batches: rows of different lengths, at different steps, finished at different times; nothing tells from vanilla's.

Every call is compared with plain `generate` in all that a caller can see: ids, generator, scores, logits, hidden
states, the whole returned cache (finished rows too), and the calls of streamers, processors and criteria. Every family
meets both modes and all trees in `test_left_padded_prompts`; where these do not bear on what else is tested, each of
them occurs in some case only. `--all-settings` runs all cases.
"""

import itertools

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from eagle3_hf.decoding import loop, transfers
from eagle3_hf.decoding.target.runner import CACHE_KEY
from support.callbacks import AfterCalls, raising, surroundings
from support.drafts import (
    FOUR,
    MODES,
    NEW_TOKENS,
    SAMPLED,
    Recorder,
    assert_close,
    assert_same,
    assert_same_as_plain,
    assert_same_cache,
    cache_of,
    draft_of,
    new_draft,
    observe,
    padded,
    pair,
    set_tree,
    target_of,
)
from support.families import FAMILIES, VOCAB_SIZE, deepseek, prompt
from support.heads import VARIANTS


TWO = pytest.mark.parametrize("family", ["llama", "gemma3"])
GROWN = pytest.mark.parametrize(
    ("family", "tree"), [("llama", "paper"), ("mistral_sw", "chain"), ("gemma3", "cpu"), ("gpt_oss", "paper")]
)
LENGTHS = [5, 14, 9]


def ends_of(family: str, inputs: dict, steps, seed: int = 0, **mode) -> list[int]:
    """End-of-sequence ids that finish row `i` at step `steps[i]` at the latest, by the text that nothing stops."""
    text = observe(target_of(family), inputs, seed, max_new_tokens=NEW_TOKENS, **mode).told
    return sorted({int(text[row, step]) for row, step in enumerate(steps) if step is not None})


def assert_ragged(draft, rows: int) -> None:
    """Rows were at different steps at the same time."""
    assert any(len(set(places[:rows])) > 1 for places in draft.places_seen), "all rows went in step"


def assert_in_step(draft) -> None:
    """Rows that moved stood at the same step (a finished row's draft is told nothing more, and so stays)."""
    for before, places in itertools.pairwise(draft.places_seen):
        moved = {place for place, old in zip(places, before, strict=True) if place != old}
        assert len(moved) <= 1, "rows were at different steps"


# ----- shapes of a batch ---------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@pytest.mark.parametrize("family", FAMILIES)
@MODES
@pytest.mark.parametrize("tree", ["paper", "cpu", "chain"])
def test_left_padded_prompts(family, mode, tree):
    target, draft = pair(family, tree)
    ours, _ = assert_same_as_plain(target, draft, padded(LENGTHS), **mode)
    assert_ragged(draft, 3)
    stats = ours.out.speculation
    assert 0 < sum(stats.accepted) < sum(stats.reached), "some drafts are right and some are wrong"
    assert stats.emitted == 3 * (NEW_TOKENS - 1)


@pytest.mark.each_choice
@FOUR
@MODES
@pytest.mark.parametrize("lengths", [[1, 1], [17, 3], [4, 20, 11, 4, 1, 9, 30]], ids=str)
def test_sizes_of_batches(family, mode, lengths):
    target, draft = pair(family)
    assert_same_as_plain(target, draft, padded(lengths, seed=1), seed=1, max_new_tokens=24, **mode)
    assert_ragged(draft, len(lengths))


@pytest.mark.each_choice
@TWO
@MODES
@pytest.mark.parametrize("half", [False, True], ids=["all words", "half of the words"])
def test_no_mask_at_all(family, mode, half):
    target, draft = target_of(family), set_tree(draft_of(family, half), "cpu")
    assert_same_as_plain(target, draft, prompt(8, 2, rows=3), **mode)


@pytest.mark.each_choice
@TWO
@MODES
def test_holes_in_the_mask(family, mode):
    inputs = padded([9, 16, 12], seed=4)
    inputs["attention_mask"][0, 9:11] = 0
    inputs["attention_mask"][1, [3, 14]] = 0
    assert_same_as_plain(*pair(family), inputs, **mode)


@pytest.mark.each_choice
@FOUR
@MODES
def test_a_row_of_padding_alone(family, mode):
    inputs = padded([9, 4, 12], seed=4)
    inputs["attention_mask"][1] = 0
    assert_same_as_plain(*pair(family), inputs, **mode)


@pytest.mark.each_choice
@TWO
@MODES
@pytest.mark.parametrize(
    "name", [name for name in VARIANTS if "latent with" in name or "one of" in name or "output" in name]
)
def test_other_heads(name, family, mode):
    draft = set_tree(new_draft(target_of(family), half=False, **VARIANTS[name]), "cpu")
    assert_same_as_plain(target_of(family), draft, padded([25, 6]), **mode)


@MODES
def test_a_latent_target(mode):
    target = deepseek()
    target.generation_config.pad_token_id = 0
    assert_same_as_plain(target, set_tree(new_draft(target, half=False), "cpu"), padded([9, 4]), **mode)


@pytest.mark.each_choice
@TWO
@MODES
def test_prompts_given_as_embeddings(family, mode):
    target, draft = pair(family)
    inputs = padded([9, 4])
    embeds = target.get_input_embeddings()(inputs.pop("inputs")).detach()
    assert_same_as_plain(target, draft, {"inputs_embeds": embeds, **inputs}, **mode)


@pytest.mark.each_choice
@FOUR
@MODES
def test_a_returned_cache_goes_on(family, mode):
    """The second turn continues ours, and vanilla's continues vanilla's."""
    target, draft = pair(family)
    inputs = padded([9, 4])
    first, vanilla = assert_same_as_plain(target, draft, inputs, max_new_tokens=7, **mode)
    more = prompt(3, 8, rows=2)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 10, dtype=torch.int64)], dim=1)

    def make():
        cache = caches.pop()
        return {CACHE_KEY: cache}

    caches = [cache_of(first.out), cache_of(vanilla.out)]
    ids = torch.cat([first.out.sequences, more], dim=1)
    assert_same_as_plain(target, draft, {"inputs": ids, "attention_mask": mask}, make=make, **mode)


# ----- rows that end -------------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@TWO
@MODES
@pytest.mark.parametrize("steps", [[2, 9, 15], [12, None, 3], [0, 8, None], [0, 0, 0], [5, 5, 5]], ids=str)
def test_rows_finish_at_their_own_time(family, mode, steps):
    inputs, (target, draft) = padded(LENGTHS), pair(family)
    eos = ends_of(family, inputs, steps, **mode)
    assert_same_as_plain(target, draft, inputs, eos_token_id=eos, accepts=max(step or 0 for step in steps) > 0, **mode)


@pytest.mark.each_choice
@MODES
@pytest.mark.parametrize("tree", ["paper", "chain"])
@pytest.mark.parametrize("outputs", [{}, {"output_scores": True}, {"output_hidden_states": True}], ids=str)
def test_what_is_not_asked_for_is_not_returned(mode, tree, outputs):
    inputs, (target, draft) = padded(LENGTHS), pair("gemma3", tree)
    nothing = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), False)
    eos = ends_of("gemma3", inputs, [4, None, 11], **mode)
    assert_same_as_plain(target, draft, inputs, eos_token_id=eos, **{**nothing, **outputs}, **mode)


@pytest.mark.each_choice
@TWO
@MODES
@pytest.mark.parametrize("steps", [[2, 9, 15], [12, None, 3], [0, 8, None], [6, 6, 6]], ids=str)
def test_ids_alone(family, mode, steps):
    """Nobody sees the cache of this call, so that finished rows are not run on."""
    inputs, (target, draft) = padded(LENGTHS), pair(family)
    kwargs = {"max_new_tokens": NEW_TOKENS, "eos_token_id": ends_of(family, inputs, steps, **mode), **mode}
    torch.manual_seed(0)
    vanilla, state = target.generate(**inputs, **kwargs), torch.get_rng_state()
    torch.manual_seed(0)
    draft.foretell(vanilla[:, 14:])
    assert torch.equal(target.generate(**inputs, assistant_model=draft, **kwargs), vanilla)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.each_choice
@TWO
@MODES
def test_pad_is_end_of_sequence(family, mode):
    inputs = padded(LENGTHS)
    eos = ends_of(family, inputs, [3, 10, 16], **mode)
    assert_same_as_plain(*pair(family), inputs, eos_token_id=eos, pad_token_id=eos[0], **mode)


@pytest.mark.pairwise
@TWO
@MODES
@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("eos", [False, True])
def test_few_new_tokens(family, mode, number, eos):
    inputs = padded(LENGTHS)
    ends = {"eos_token_id": ends_of(family, inputs, [1, None, 0], **mode)} if eos else {}
    target, draft = pair(family)
    assert_same_as_plain(target, draft, inputs, max_new_tokens=number, accepts=False, **ends, **mode)


@pytest.mark.each_choice
@TWO
@MODES
def test_no_end_before_its_time(family, mode):
    inputs = padded(LENGTHS)
    eos = ends_of(family, inputs, [1, 4, 2], **mode)
    assert_same_as_plain(*pair(family), inputs, eos_token_id=eos, min_new_tokens=7, **mode)


class RowsFinish(StoppingCriteria):
    """Finishes each row at its own length, and writes down its calls."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)
        self.seen: list = []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), len(scores or ())))
        return input_ids.shape[1] >= self.lengths


STEPS = [[3, 3, 3], [1, 6, 12], [12, 2, 7], [30, 5, 30]]


@pytest.mark.pairwise
@GROWN
@MODES
@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize(
    ("eos", "scores"), [(None, True), ([12, None, 8], True), ([12, None, 8], False)], ids=["free", "eos", "no scores"]
)
def test_criterion_of_the_user_per_row(family, mode, steps, eos, tree, scores):
    inputs, made = padded(LENGTHS), []

    def make():
        made.append(RowsFinish([14 + step for step in steps]))
        return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, **mode)}
    assert_same_as_plain(*pair(family, tree), inputs, make=make, output_scores=scores, **ends, **mode)
    assert made[1].seen == made[0].seen


class LikesScores(StoppingCriteria):
    """Looks at the scores of all rows, finished ones too."""

    def __init__(self):
        self.sums = []

    def __call__(self, input_ids, scores, **kwargs):
        self.sums.append(torch.stack([step.nan_to_num(neginf=0.0).sum(-1) for step in scores]))
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.each_choice
@TWO
@MODES
@pytest.mark.parametrize("eos", [None, [6, None, 2]], ids=["no eos", "eos"])
def test_a_criterion_sees_the_scores_of_all_rows(family, mode, eos):
    inputs, made = padded(LENGTHS), []

    def make():
        made.append(LikesScores())
        return {"stopping_criteria": StoppingCriteriaList([made[-1]])}

    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, **mode)}
    assert_same_as_plain(*pair(family), inputs, make=make, **ends, **mode)
    assert_close(made[1].sums, made[0].sums, 1e-4)


@MODES
@pytest.mark.parametrize("calls", [1, 4, 9])
def test_criterion_with_a_state(mode, calls):
    def make():
        return {"stopping_criteria": StoppingCriteriaList([AfterCalls(calls)])}

    assert_same_as_plain(*pair("gemma3"), padded(LENGTHS), make=make, accepts=calls > 1, **mode)


@pytest.mark.each_choice
@TWO
@MODES
def test_stop_strings(family, mode, tokenizer):
    inputs = padded(LENGTHS)
    text = observe(target_of(family), inputs, max_new_tokens=NEW_TOKENS, **mode).told
    words = [tokenizer.convert_ids_to_tokens(int(text[row, step])) for row, step in enumerate([3, 9, 14])]
    assert_same_as_plain(*pair(family), inputs, stop_strings=words, tokenizer=tokenizer, **mode)
    eos = ends_of(family, inputs, [None, 5, None], **mode)
    assert_same_as_plain(*pair(family), inputs, stop_strings=words, tokenizer=tokenizer, eos_token_id=eos, **mode)


@MODES
def test_time(mode):
    inputs, (target, draft) = padded(LENGTHS), pair("llama")
    vanilla = observe(target, inputs, max_new_tokens=9, **mode)
    for limit, steps in ((1e-9, 1), (1e9, 9)):
        ours = observe(
            target, inputs, max_new_tokens=9, max_time=limit, assistant_model=draft.foretell(vanilla.told), **mode
        )
        assert ours.told.tolist() == vanilla.told[:, :steps].tolist()


# ----- rows that are many of one -------------------------------------------------------------------------------------


@TWO
def test_several_sequences_of_a_prompt(family):
    target, draft = pair(family)
    ours, _ = assert_same_as_plain(target, draft, padded([9, 4]), num_return_sequences=3, **SAMPLED)
    assert ours.out.sequences.shape[0] == 6
    eos = ends_of(family, padded([9]), [7], num_return_sequences=3, **SAMPLED)
    assert_same_as_plain(target, draft, prompt(9), num_return_sequences=3, eos_token_id=eos, **SAMPLED)


def test_several_greedy_sequences_are_refused_as_in_vanilla():
    target, draft = pair("llama")
    for kwargs in ({}, {"assistant_model": draft.foretell([])}):
        with pytest.raises(ValueError, match="num_return_sequences"):
            target.generate(prompt(4), num_return_sequences=3, do_sample=False, max_new_tokens=4, **kwargs)


# ----- processors ----------------------------------------------------------------------------------------------------

IN_PLACE = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
FREE = [
    {"temperature": 0.7, "top_k": 30},
    {"top_p": 0.8},
    {"min_p": 0.05, "typical_p": 0.9},
    {"epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4},
    IN_PLACE,
    {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [17, 3], [250]], "suppress_tokens": list(range(100, 150))},
    {"begin_suppress_tokens": list(range(100, 320)), "forced_bos_token_id": 9},
    {"forced_eos_token_id": 9, "renormalize_logits": True},
    {"sequence_bias": [[[8], -5.0], [[9, 11], 4.0], [[30], 2.0]], "remove_invalid_values": True},
]


@pytest.mark.each_choice
@MODES
@TWO
@pytest.mark.parametrize("kwargs", FREE, ids=lambda kwargs: " ".join(kwargs))
def test_processors_that_remember_nothing(family, kwargs, mode):
    inputs, (target, draft) = padded(LENGTHS), pair(family)
    assert_same_as_plain(target, draft, inputs, **{**mode, **kwargs})
    assert_ragged(draft, 3)
    eos = ends_of(family, inputs, [3, 10, None], **{**mode, **kwargs})
    ends = {"eos_token_id": eos, "exponential_decay_length_penalty": (4, 1.1)}
    assert_same_as_plain(target, draft, inputs, accepts=False, **ends, **{**mode, **kwargs})


@pytest.mark.pairwise
@MODES
@TWO
@pytest.mark.parametrize("eos", [None, [3, None, 10]], ids=str)
@pytest.mark.parametrize(
    "kwargs",
    [
        {"guidance_scale": 1.7},
        {"watermarking_config": WatermarkingConfig(bias=2.0, seeding_scheme="selfhash")},
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
    ],
    ids=["guidance", "watermark", "synthid"],
)
def test_processors_that_remember(family, mode, kwargs, eos):
    inputs, (target, draft) = padded(LENGTHS), pair(family)
    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, **mode, **kwargs)}
    assert_same_as_plain(target, draft, inputs, **ends, **mode, **kwargs)
    assert_in_step(draft)


class Remembering(LogitsProcessor):
    """Changes the scores by how often it was called, for each row otherwise."""

    def __init__(self):
        self.calls: list = []
        self.sums: list = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        self.sums.append(scores.sum(-1))
        rows = torch.arange(scores.shape[0])[:, None]
        return scores + 3.0 * torch.sin(torch.arange(scores.shape[1]) * len(self.calls) + rows)


@pytest.mark.pairwise
@MODES
@GROWN
@pytest.mark.parametrize("eos", [None, [3, None, 10], [0, 4, 4]], ids=str)
@pytest.mark.parametrize("dict_too", [True, False], ids=["everything", "ids"])
def test_processors_get_vanillas_calls(family, mode, eos, tree, dict_too):
    """As many, with the same ids (pads of finished rows too) and the same scores in every row."""
    inputs, (target, draft), made = padded(LENGTHS), pair(family, tree), []

    def make():
        made.append(Remembering())
        return {"logits_processor": LogitsProcessorList([made[-1]])}

    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, make=make, **mode)}
    made.clear()
    if dict_too:
        assert_same_as_plain(target, draft, inputs, make=make, **ends, **mode)
    else:
        kwargs = {"max_new_tokens": NEW_TOKENS, **ends, **mode}
        torch.manual_seed(0)
        vanilla = target.generate(**inputs, **make(), **kwargs)
        torch.manual_seed(0)
        draft.foretell(vanilla[:, 14:])
        assert torch.equal(target.generate(**inputs, **make(), assistant_model=draft, **kwargs), vanilla)
    assert made[1].calls == made[0].calls
    assert_close(made[1].sums, made[0].sums, 1e-4)
    assert_in_step(draft)


@MODES
@pytest.mark.parametrize("eos", [None, [3, None, 10]], ids=str)
def test_allowed_tokens_know_their_row(mode, eos):
    asked: list = []

    def make():
        asked.append([])
        calls = asked[-1]

        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            calls.append((batch_id, ids.tolist()))
            return [token for token in range(VOCAB_SIZE) if (token + int(ids[-1])) % (3 + batch_id)]

        return {"prefix_allowed_tokens_fn": allowed}

    inputs, (target, draft) = padded(LENGTHS), pair("llama")
    ends = {} if eos is None else {"eos_token_id": ends_of("llama", inputs, eos, make=make, **mode)}
    asked.clear()
    assert_same_as_plain(target, draft, inputs, make=make, **ends, **mode)
    assert asked[1] == asked[0]


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("family", "token"), [("llama", 91), ("llama", 149), ("gemma3", 235), ("gemma3", 52), ("gemma3", 67)]
)
@pytest.mark.parametrize("ends", [[40, 40, 40], [3, 9, 6]], ids=str)
@pytest.mark.parametrize("warper", [{}, {"eta_cutoff": 3e-4}], ids=["drawn", "warped"])
def test_logits_that_nothing_can_be_drawn_from(family, token, ends, warper):
    """A row ahead may find NaN where plain decoding may never get: it waits, and the error comes in its own time."""
    inputs, (target, draft) = padded(LENGTHS), pair(family)

    def spoil(module, args, logits):
        return logits.masked_fill((logits.argmax(-1) == token)[..., None], torch.nan)

    kwargs = {"max_new_tokens": NEW_TOKENS, **SAMPLED, **warper}
    text = observe(target, inputs, **kwargs).told
    handle, results = target.lm_head.register_forward_hook(spoil), []
    try:
        for assistant in (None, draft.foretell(text, favourite=0.9)):
            criteria, streamer = RowsFinish([14 + end for end in ends]), Recorder()
            torch.manual_seed(0)
            try:
                found = target.generate(
                    **inputs,
                    assistant_model=assistant,
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([criteria]),
                    **kwargs,
                ).tolist()
            except (RuntimeError, ValueError) as error:
                found = str(error)[:30]
            results.append((found, streamer.calls, criteria.seen, torch.get_rng_state().tolist()))
    finally:
        handle.remove()
    assert results[1] == results[0]


@pytest.mark.each_choice
@TWO
@MODES
@pytest.mark.parametrize("furthest", [1, 5, loop.FURTHEST_AHEAD])
def test_a_row_waits_when_it_is_too_far_ahead(family, mode, furthest, monkeypatch):
    monkeypatch.setattr(loop, "FURTHEST_AHEAD", furthest)
    inputs, (target, draft) = padded(LENGTHS), pair(family)
    kwargs = {"max_new_tokens": furthest + 27, **mode}
    vanilla = observe(target, inputs, **kwargs)
    told = vanilla.told.clone()
    told[1:] = (told[1:] + 1) % VOCAB_SIZE
    ours = observe(target, inputs, assistant_model=draft.foretell(told, favourite=1.0), **kwargs)
    assert_same(ours, vanilla)
    leads = [max(places) - min(places) for places in draft.places_seen]
    assert furthest <= max(leads) <= furthest + 4, "as far as allowed, and the depth of a tree"


# ----- callbacks that do something -----------------------------------------------------------------------------------


class Draws(StoppingCriteria):
    """Draws random numbers at some of its calls."""

    def __init__(self, every: int):
        self.calls, self.every = 0, every

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls % self.every == 0:
            torch.rand(3)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class DrawingStreamer(Recorder):
    def put(self, value):
        super().put(value)
        if len(self.calls) == 5:
            torch.rand(1)


@pytest.mark.pairwise
@GROWN
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("eos", [None, [3, None, 10], [0, 4, 4]], ids=str)
def test_criteria_that_draw_random_numbers(family, every, eos, tree):
    inputs, (target, draft) = padded(LENGTHS), pair(family, tree)

    def make():
        return {"stopping_criteria": StoppingCriteriaList([Draws(every)])}

    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, make=make, **SAMPLED)}
    assert_same_as_plain(target, draft, inputs, make=make, **ends, **SAMPLED)
    # The first time comes as a surprise; from there on no row goes ahead of the others.
    if every == 1 and eos is None:
        assert_in_step(draft)


@pytest.mark.each_choice
@TWO
@pytest.mark.parametrize("eos", [None, [12, 3, 10]], ids=str)
def test_streamers_that_draw_random_numbers(family, eos):
    inputs, (target, draft) = padded(LENGTHS), pair(family)
    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, **SAMPLED)}
    results = []
    told = []
    for _ in range(2):
        streamer = DrawingStreamer()
        assistant = {"assistant_model": draft.foretell(told)} if results else {}
        torch.manual_seed(0)
        out = target.generate(**inputs, max_new_tokens=NEW_TOKENS, streamer=streamer, **ends, **SAMPLED, **assistant)
        results.append((out.tolist(), streamer.calls, torch.get_rng_state().tolist()))
        told = out[:, 14:]
    assert results[0] == results[1]


@pytest.mark.pairwise
@TWO
@MODES
@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize(("at", "error"), [(1, ValueError), (4, KeyboardInterrupt), (9, ValueError)])
def test_exceptions_leave_no_trace(family, mode, error, kind, at):
    target, draft = pair(family)
    inputs = padded(LENGTHS)
    text = observe(target, inputs, max_new_tokens=16, **mode).told
    before = surroundings(target, draft)
    caches, states, streamed = [], [], []
    for assistant in (None, draft.foretell(text)):
        caches.append(DynamicCache(config=target.config))
        callbacks = raising(kind, at, error)
        torch.manual_seed(0)
        with pytest.raises(error, match="raised by"):
            target.generate(
                **inputs, assistant_model=assistant, max_new_tokens=16, **{CACHE_KEY: caches[-1]}, **mode, **callbacks
            )
        streamed.append(callbacks["streamer"].calls)
        states.append(torch.get_rng_state())
    assert surroundings(target, draft) == before
    assert torch.equal(*states), "random numbers are used up step by step"
    assert streamed[1] == streamed[0]
    assert_same_cache(caches[1], caches[0])
    assert_same_as_plain(target, draft, inputs, **mode)


@pytest.mark.each_choice
@TWO
@MODES
@pytest.mark.parametrize("at", range(5, 12))
def test_exceptions_behind_the_end_of_a_row(family, mode, at):
    """The pad tokens that plain decoding has run by then are in the cache, also of a row that ends in that round."""
    inputs, (target, draft) = padded(LENGTHS), pair(family, "chain")
    ends = {"eos_token_id": ends_of(family, inputs, [3, None, 6], **mode)}
    text = observe(target, inputs, max_new_tokens=16, **ends, **mode).told
    found = [
        raised(target, inputs, assistant, ValueError, raise_at=at, max_new_tokens=16, **ends, **mode)
        for assistant in (None, draft.foretell(text, favourite=1.0))
    ]
    assert_same_failure(*found)


@pytest.mark.pairwise
@TWO
@pytest.mark.parametrize("tree", ["paper", "chain"])
@pytest.mark.parametrize("eos", [[3, None, 10], [8, 8, 2], [1, 2, 3], [4, 5, 6]], ids=str)
def test_finished_rows_from_which_nothing_can_be_drawn(family, tree, eos):
    """Vanilla draws for them too: here nothing may follow a pad token."""
    inputs, (target, draft) = padded(LENGTHS), pair(family, tree)
    kwargs = {"bad_words_ids": [[0, token] for token in range(VOCAB_SIZE)], **SAMPLED}
    kwargs["eos_token_id"] = ends_of(family, inputs, eos, **SAMPLED)
    text = observe(target, inputs, max_new_tokens=NEW_TOKENS, **SAMPLED).told
    found = [
        raised(target, inputs, assistant, RuntimeError, max_new_tokens=NEW_TOKENS, **kwargs)
        for assistant in (None, draft.foretell(text, favourite=1.0))
    ]
    assert "probability tensor" in found[0][0]
    assert_same_failure(*found)


def raised(target, inputs, assistant, error, raise_at=None, **kwargs) -> tuple:
    """What a call that raises leaves behind: its message, the streamer's calls, the generator, its user's cache."""
    cache, streamer = DynamicCache(config=target.config), Recorder(raise_at)
    torch.manual_seed(0)
    with pytest.raises(error) as info:
        target.generate(**inputs, assistant_model=assistant, streamer=streamer, **{CACHE_KEY: cache}, **kwargs)
    return str(info.value), streamer.calls, torch.get_rng_state().tolist(), cache


def assert_same_failure(theirs: tuple, mine: tuple) -> None:
    assert mine[:3] == theirs[:3]
    assert_same_cache(mine[3], theirs[3])


@pytest.mark.each_choice
@TWO
@MODES
def test_an_interrupted_forward_leaves_no_trace(family, mode):
    target, draft = pair(family)
    inputs = padded(LENGTHS)
    text = observe(target, inputs, max_new_tokens=16, **mode).told
    before, calls = surroundings(target, draft), []

    def interrupt(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = target.get_decoder().layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, assistant_model=draft.foretell(text), max_new_tokens=16, **mode)
    handle.remove()
    assert surroundings(target, draft) == before
    assert_same_as_plain(target, draft, inputs, **mode)


@pytest.mark.each_choice
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eos", [None, [3, None, 10]], ids=str)
@pytest.mark.parametrize("hidden", [False, True], ids=["ids", "hidden states"])
def test_choices_of_all_nodes_at_once(family, eos, hidden, monkeypatch):
    """What an accelerator does, made to run here; hidden states are asked of pad tokens."""
    (target, draft), inputs = pair(family), padded(LENGTHS)
    monkeypatch.setattr(transfers, "makes_host_wait", lambda device: True)
    asked = {"output_scores": False, "output_logits": False, "output_hidden_states": hidden}
    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos)}
    assert_same_as_plain(target, draft, inputs, **asked, **ends)
    ends = {} if eos is None else {"eos_token_id": ends_of(family, inputs, eos, **SAMPLED)}
    assert_same_as_plain(target, draft, inputs, **asked, **ends, **SAMPLED)
