"""Processors, criteria and streamers are called as vanilla calls them: same prefixes, same order, same number."""

from threading import Thread

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)

from eagle3_hf.decoding import transfers
from eagle3_hf.decoding.output.emitter import TokenEmitter
from support.drafts import (
    FOUR,
    MODES,
    NEW_TOKENS,
    SAMPLED,
    Recorder,
    assert_same_as_plain,
    new_draft,
    pair,
    set_tree,
    target_of,
)
from support.families import VOCAB_SIZE, prompt


class Remembering(LogitsProcessor):
    """A processor with a state that changes the scores by how often it was called, as a grammar would."""

    def __init__(self):
        self.calls: list[tuple[list[int], tuple]] = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids[0].tolist(), tuple(scores.shape)))
        return scores + 3.0 * torch.sin(torch.arange(scores.shape[1]) * len(self.calls))


@pytest.mark.pairwise
@FOUR
@MODES
@pytest.mark.parametrize("tree", ["cpu", "chain"])
def test_processors_see_the_calls_of_vanilla(family, mode, tree):
    made: list[Remembering] = []

    def make():
        made.append(Remembering())
        return {"logits_processor": LogitsProcessorList([made[-1]])}

    assert_same_as_plain(*pair(family, tree), prompt(7), make=make, **mode)
    vanilla_calls, our_calls = (processor.calls for processor in made)
    assert our_calls == vanilla_calls, "one call for each token, with that token's own prefix"


class InPlace(LogitsProcessor):
    """Writes into the scores it is given, as many processors do."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] = -torch.inf
        scores *= 0.5
        return scores


class OtherDtype(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.double()


class MovesTheGenerator(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores + 0.1 * torch.randn(scores.shape)


class ShorterVocabulary(LogitsProcessor):
    """Cuts the scores off: the draft's later tokens have no noise at all."""

    def __call__(self, input_ids, scores):
        return scores[:, :100]


class HalfPrecision(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.bfloat16()


class ChangingDtype(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.double() if input_ids.shape[1] % 2 else scores


class GeneratesInside(LogitsProcessor):
    """Runs the same target in the middle, plainly and with another draft."""

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] % 3 == 0:
            target, draft = target_of("llama"), set_tree(new_draft(target_of("llama")), "cpu").foretell([])
            first = target.generate(prompt(4), max_new_tokens=6)
            assert torch.equal(target.generate(prompt(4), max_new_tokens=6, assistant_model=draft), first)
        return scores


@MODES
@pytest.mark.parametrize(
    "processor",
    [InPlace, OtherDtype, HalfPrecision, ChangingDtype, ShorterVocabulary, MovesTheGenerator, GeneratesInside],
)
def test_unusual_processors(mode, processor):
    assert_same_as_plain(
        *pair("llama"), prompt(7), make=lambda: {"logits_processor": LogitsProcessorList([processor()])}, **mode
    )


@pytest.mark.each_choice
@MODES
@pytest.mark.parametrize(
    "kwargs",
    [
        {"repetition_penalty": 1.4},
        {"encoder_repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [17, 3], [250]]},
        {"suppress_tokens": list(range(100, 200))},
        {"begin_suppress_tokens": list(range(100, 320))},
        {"forced_bos_token_id": 9},
        {"forced_eos_token_id": 9},
        {"eos_token_id": 9, "exponential_decay_length_penalty": (4, 1.5)},
        {"eos_token_id": 9, "min_new_tokens": 12},
        {"eos_token_id": 9, "min_length": 12},
        {"sequence_bias": [[[8], -5.0], [[9, 11], 4.0], [[30], 6.0]]},
        {"guidance_scale": 1.7},
        {"renormalize_logits": True},
        {"remove_invalid_values": True},
        {"watermarking_config": WatermarkingConfig(bias=2.0, seeding_scheme="selfhash")},
    ],
    ids=lambda kwargs: next(reversed(kwargs)),
)
def test_every_processor_of_generate(mode, kwargs):
    assert_same_as_plain(*pair("llama"), prompt(9), **kwargs, **mode)


def test_a_token_of_negative_bias_never_appears():
    target, draft = pair("llama")
    plain = target.generate(prompt(9), max_new_tokens=NEW_TOKENS)[0, 9:].tolist()
    ours, _ = assert_same_as_plain(
        target, draft, prompt(9), sequence_bias=[[[token], -100.0] for token in set(plain[:5])]
    )
    assert not set(plain[:5]) & set(ours.ids[9:])


def test_negative_prompt_of_guidance():
    assert_same_as_plain(*pair("llama"), prompt(9), guidance_scale=1.5, negative_prompt_ids=prompt(4, 8))


@MODES
def test_allowed_tokens_are_asked_with_real_prefixes_only(mode):
    asked: list[list[tuple[int, list[int]]]] = []

    def make():
        asked.append([])
        calls = asked[-1]

        def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
            calls.append((batch_id, ids.tolist()))
            return [token for token in range(VOCAB_SIZE) if (token + int(ids[-1])) % 3]

        return {"prefix_allowed_tokens_fn": allowed}

    assert_same_as_plain(*pair("llama"), prompt(7), make=make, **mode)
    assert asked[1] == asked[0]


WARPED = {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.9}


@pytest.fixture
def at_once(monkeypatch) -> list[bool]:
    """Decoding as on an accelerator. The list tells for each round whether it has chosen for all nodes at once."""
    asked: list[bool] = []
    original = TokenEmitter._chooses_at_once

    def chooses(self, device):
        asked.append(original(self, device))
        return asked[-1]

    monkeypatch.setattr(transfers, "makes_host_wait", lambda device: True)
    monkeypatch.setattr(TokenEmitter, "_chooses_at_once", chooses)
    return asked


def both(target, draft, inputs, **options) -> list[tuple[list, torch.Tensor]]:
    """Ids and the generator's state of plain decoding and of ours, from one seed; `make` gives new arguments."""
    make, found = options.pop("make", dict), []
    for assistant in (None, draft):
        if assistant is not None:
            draft.foretell([row[inputs.shape[1] :] for row in found[0][0]])
        torch.manual_seed(3)
        ids = target.generate(inputs, assistant_model=assistant, max_new_tokens=NEW_TOKENS, **make(), **options)
        found.append((ids.tolist(), torch.get_rng_state()))
    return found


@FOUR
def test_choices_of_all_nodes_at_once(family, at_once):
    target, draft = pair(family)
    for options in ({}, SAMPLED, WARPED):
        (ids, state), (ours, our_state) = both(target, draft, prompt(7), **options)
        assert ours == ids
        assert torch.equal(our_state, state)
        assert draft.stats.mean_accepted > 0.3
    assert all(at_once)
    at_once.clear()
    assert_same_as_plain(target, draft, prompt(7))
    assert_same_as_plain(target, draft, prompt(7), **SAMPLED)
    assert not any(at_once), "scores are wanted of each token"


@pytest.mark.parametrize("batch", [1, 3])
def test_choices_made_before_a_streamer_has_drawn(batch, at_once):
    """Numbers that a callback draws change those of all steps behind it, which were chosen with the earlier ones."""

    class Drawing(Recorder):
        def put(self, value):
            if len(self.calls) % 3 == 2:
                torch.rand(1)
            super().put(value)

    target, draft = pair("llama")
    inputs = torch.cat([prompt(7, seed) for seed in range(batch)])
    vanilla, ours = both(target, draft, inputs, make=lambda: {"streamer": Drawing()}, **WARPED)
    assert ours[0] == vanilla[0]
    assert torch.equal(ours[1], vanilla[1])
    assert any(at_once)


def test_choices_of_logits_that_cannot_be_sampled_from(at_once):
    """The error of plain decoding, at the same step."""
    target, draft = pair("llama")
    torch.manual_seed(3)
    options = {"max_new_tokens": NEW_TOKENS, **SAMPLED}
    plain = target.generate(prompt(7), return_dict_in_generate=True, output_logits=True, **options)
    broken = plain.logits[9].argmax(-1)
    assert all(logits.argmax(-1) != broken for logits in plain.logits[:5])

    def spoil(module, args, output):
        return output.masked_fill(output.argmax(-1, keepdim=True) == broken, torch.nan)

    handle, streamed = target.get_output_embeddings().register_forward_hook(spoil), []
    try:
        for assistant in (None, draft.foretell(plain.sequences[0, 7:])):
            torch.manual_seed(3)
            streamer = Recorder()
            with pytest.raises(RuntimeError, match="probability tensor"):
                target.generate(prompt(7), assistant_model=assistant, streamer=streamer, **options)
            streamed.append((streamer.calls, torch.get_rng_state().tolist()))
    finally:
        handle.remove()
    assert streamed[1] == streamed[0]
    assert any(at_once)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_text_streamers(family):
    tokenizer = _tokenizer()
    target, draft = pair(family)
    vanilla = target.generate(prompt(7), max_new_tokens=NEW_TOKENS)
    expected = tokenizer.decode(vanilla[0, 7:]).split()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    draft.foretell(vanilla[0, 7:])
    thread = Thread(
        target=target.generate,
        kwargs={"inputs": prompt(7), "max_new_tokens": NEW_TOKENS, "assistant_model": draft, "streamer": streamer},
    )
    thread.start()
    assert "".join(streamer).split() == expected
    thread.join()


def test_printing_streamer(capsys):
    target, draft = pair("llama")
    printed = []
    for assistant in (None, draft.foretell([])):
        streamer = TextStreamer(_tokenizer())
        target.generate(prompt(7), max_new_tokens=NEW_TOKENS, assistant_model=assistant, streamer=streamer)
        printed.append(capsys.readouterr().out)
    assert printed[1] == printed[0] != ""


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = {f"w{token}": token for token in range(VOCAB_SIZE)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))


def test_a_streamer_with_end_round_hears_of_every_round():
    target, draft = pair("llama")

    class Rounds:
        def __init__(self):
            self.accepted, self.tokens = [], 0

        def put(self, value):
            self.tokens += value.numel()

        def end(self):
            pass

        def end_round(self, accepted):
            self.accepted.append((accepted, self.tokens))

    text = target.generate(prompt(7), max_new_tokens=NEW_TOKENS)[0, 7:]
    rounds = Rounds()
    target.generate(prompt(7), max_new_tokens=NEW_TOKENS, assistant_model=draft.foretell(text), streamer=rounds)
    assert len(rounds.accepted) == draft.stats.rounds
    before = 8  # the prompt, and the token from the prefill
    for accepted, tokens in rounds.accepted:
        assert tokens - before == accepted + 1
        before = tokens
