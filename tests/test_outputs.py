"""What `generate` returns and whom it calls: values, shapes, caches and callbacks as vanilla's, for all inputs."""

import re
from threading import Thread

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)

from drafts import (
    assert_same,
    assert_same_cache,
    cache_of,
    draft_of,
    new_draft,
    observe,
    set_tree,
    target_of,
)
from eagle3_hf.decoding.loop import CACHE_KEY
from families import COMMON, FAMILIES, VOCAB_SIZE, WINDOW, prompt, tiny


NEW_TOKENS = 24
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.9}
MODES = pytest.mark.parametrize("mode", [{}, SAMPLED], ids=["greedy", "sampled"])
# Full layers, windows, both, and eager attention with sinks.
FOUR = pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3", "gpt_oss"])


def compare(target, draft, inputs, make=dict, seed: int = 0, **kwargs):
    """A call with and without the draft, and the two must look the same; returns the draft's result and vanilla's."""
    kwargs = {"max_new_tokens": NEW_TOKENS, **kwargs}
    vanilla = observe(target, inputs, seed, make, **kwargs)
    told = vanilla.ids[-len(vanilla.streamed[1:-1]) :]
    ours = observe(target, inputs, seed, make, assistant_model=draft.foretell(told, seed), **kwargs)
    assert_same(ours, vanilla)
    assert ours.out.speculation.accepted, "nothing was accepted, so little was tested"
    return ours, vanilla


def pair(family: str, tree: str = "cpu"):
    return target_of(family), set_tree(draft_of(family, half=False), tree)


# ----- what is returned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@MODES
def test_everything_returned_equals_vanilla(family, mode):
    ours, _ = compare(*pair(family), prompt(17, 2), **mode)
    out = ours.out
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == NEW_TOKENS
    assert out.attentions is None
    layers = target_of(family).config.num_hidden_layers
    assert [state.shape for state in out.hidden_states[0]] == [(1, 17, 64)] * (layers + 1)
    assert {state.shape for token in out.hidden_states[1:] for state in token} == {(1, 1, 64)}


@pytest.mark.parametrize("asked", ["output_scores", "output_logits", "output_hidden_states", None])
def test_only_what_was_asked_for(asked):
    switches = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), False)
    ours, vanilla = compare(*pair("llama"), prompt(5), **{**switches, **({asked: True} if asked else {})})
    present = {name for name in ("scores", "logits", "hidden_states") if getattr(ours.out, name) is not None}
    assert present == ({asked.removeprefix("output_")} if asked else set())
    assert list(ours.out.keys()) == list(vanilla.out.keys())


def test_plain_ids_without_return_dict():
    target, draft = pair("llama")
    vanilla = target.generate(prompt(5), max_new_tokens=8)
    ours = target.generate(prompt(5), max_new_tokens=8, assistant_model=draft.foretell(vanilla[0, 5:]))
    assert type(ours) is torch.Tensor
    assert torch.equal(ours, vanilla)
    # Asking for scores alone returns ids, in vanilla too.
    ours = target.generate(prompt(5), max_new_tokens=8, output_scores=True, assistant_model=draft)
    assert torch.equal(ours, vanilla)


@MODES
@pytest.mark.parametrize("tree", ["paper", "cpu", "chain"])
def test_counters_add_up(mode, tree):
    target, draft = pair("qwen3", tree)
    ours, _ = compare(target, draft, prompt(6), **mode)
    stats = ours.out.speculation
    assert stats is draft.stats
    assert stats.emitted == NEW_TOKENS - 1, "the first token is the prefill's"
    assert stats.emitted == stats.rounds + sum(stats.accepted), "a bonus token each round"
    assert stats.tau == stats.emitted / stats.rounds
    assert sum(stats.histogram) == stats.rounds
    assert sum(k * n for k, n in enumerate(stats.histogram)) == sum(stats.accepted)
    assert all(hit <= tried for hit, tried in zip(stats.accepted, stats.reached, strict=True))
    assert all(tried <= hit for tried, hit in zip(stats.reached[1:], stats.accepted[:-1], strict=True)), (
        "a depth can be tried only where the one above was accepted"
    )
    assert stats.reached[0] <= stats.rounds
    assert len(stats.reached) <= draft.generation_config.assistant_tree_depth
    seconds = stats.draft_seconds, stats.verify_seconds, stats.other_seconds
    assert min(seconds) > 0
    assert re.search(rf"{stats.emitted} tokens in {stats.rounds} rounds", str(stats))


def test_an_accepted_end_of_text_counts_as_accepted():
    """The block ends at an end-of-text token that the draft foresaw: right at every depth it reached."""
    target, draft = pair("llama", "chain")
    texts = {seed: target.generate(prompt(6, seed), max_new_tokens=NEW_TOKENS)[0, 6:] for seed in range(4)}
    seed, text = next((seed, text) for seed, text in texts.items() if text[8] not in text[:8])
    draft.foretell(text, favourite=1.0)
    target.generate(prompt(6, seed), max_new_tokens=NEW_TOKENS, assistant_model=draft, eos_token_id=int(text[8]))
    # The prefill emits one token, the first round six, and the second ends at its second drafted token.
    assert (draft.stats.rounds, draft.stats.emitted) == (2, 8)
    assert draft.stats.accepted == draft.stats.reached == [2, 2, 1, 1, 1]


def test_counters_are_of_the_last_call_only():
    target, draft = pair("llama")
    first = compare(target, draft, prompt(5))[0].out.speculation
    second = compare(target, draft, prompt(6), max_new_tokens=5)[0].out.speculation
    assert (first.emitted, second.emitted) == (NEW_TOKENS - 1, 4)
    target.generate(prompt(5), max_new_tokens=1, assistant_model=draft)
    assert (draft.stats.rounds, draft.stats.emitted, draft.stats.tau) == (0, 0, 0.0)


# ----- the returned cache --------------------------------------------------------------------------------------------


@FOUR
@MODES
@pytest.mark.parametrize("first_drafted", [True, False])
@pytest.mark.parametrize("then_drafted", [True, False])
def test_a_returned_cache_can_be_continued(family, mode, first_drafted, then_drafted):
    """A second turn on the first one's cache; positions are absolute, also across a window's edge."""
    target, draft = pair(family)
    first = target.generate(prompt(WINDOW - 3), max_new_tokens=9)[0, WINDOW - 3 :]
    turns = {}
    for name, drafted in {"vanilla": (False, False), "ours": (first_drafted, then_drafted)}.items():
        assistant = draft.foretell(first) if drafted[0] else None
        begun = observe(target, prompt(WINDOW - 3), max_new_tokens=9, assistant_model=assistant)
        ids = torch.cat([begun.out.sequences, prompt(4, 9)], dim=1)
        inputs = {"input_ids": ids, CACHE_KEY: cache_of(begun.out)}
        if name == "vanilla":
            turns[name] = observe(target, inputs, max_new_tokens=NEW_TOKENS, **mode)
            continue
        assistant = draft.foretell(turns["vanilla"].ids[ids.shape[1] :]) if drafted[1] else None
        turns[name] = observe(target, inputs, max_new_tokens=NEW_TOKENS, assistant_model=assistant, **mode)
        assert cache_of(turns[name].out) is cache_of(begun.out), "the user's cache is used in place"
    assert_same(turns["ours"], turns["vanilla"])


def test_the_draft_sits_at_absolute_positions_on_a_continued_cache():
    target, draft = pair("llama")
    begun = observe(target, prompt(20), max_new_tokens=4)
    ids = torch.cat([begun.out.sequences, prompt(3, 9)], dim=1)
    seen = []
    handle = draft.rotary_emb.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    target.generate(ids, **{CACHE_KEY: cache_of(begun.out)}, assistant_model=draft.foretell([]), max_new_tokens=5)
    handle.remove()
    # 24 ids of which 23 are in the cache, and three more: four features, at the positions of their tokens.
    assert seen[0].tolist() == [[23, 24, 25, 26]]
    # Then the levels of the tree, each one further.
    assert [positions.unique().tolist() for positions in seen[1:3]] == [[27], [28]]


def test_only_new_ids_beside_a_cache():
    """The other way to continue: the new ids alone, and a mask over everything."""
    target, draft = pair("llama")
    results = []
    for drafted in (False, True):
        begun = observe(target, prompt(8), max_new_tokens=5)
        new = torch.cat([begun.out.sequences[:, -1:], prompt(3, 5)], dim=1)
        inputs = {"input_ids": new, "attention_mask": torch.ones(1, 16, dtype=torch.int64)}
        inputs[CACHE_KEY] = cache_of(begun.out)
        assistant = draft.foretell(results[0].ids[4:]) if drafted else None
        results.append(observe(target, inputs, max_new_tokens=10, assistant_model=assistant))
    assert_same(results[1], results[0])


def test_a_cache_of_the_user_is_filled_in_place():
    target, draft = pair("gemma3")
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    vanilla = target.generate(prompt(20), **{CACHE_KEY: caches[0]}, max_new_tokens=8)
    draft.foretell(vanilla[0, 20:])
    ours = target.generate(prompt(20), **{CACHE_KEY: caches[1]}, max_new_tokens=8, assistant_model=draft)
    assert torch.equal(ours, vanilla)
    assert_same_cache(caches[1], caches[0])


def test_a_cache_without_a_config_has_full_layers():
    """`DynamicCache()` grows plain layers even for windowed models; the masks must hold the window alone."""
    target, draft = pair("mistral_sw")
    compare(target, draft, prompt(20), make=lambda: {CACHE_KEY: DynamicCache()})


# ----- kinds of input ------------------------------------------------------------------------------------------------


@FOUR
@MODES
@pytest.mark.parametrize("padding", [1, 7, WINDOW + 3])
def test_left_padding(family, mode, padding):
    target, draft = pair(family)
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.int64), prompt(9)], dim=1)
    mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
    ours, _ = compare(target, draft, {"input_ids": ids, "attention_mask": mask}, **mode)
    if not mode:
        unpadded = target.generate(prompt(9), max_new_tokens=NEW_TOKENS)
        assert ours.ids[padding:] == unpadded[0].tolist()


@FOUR
@MODES
def test_holes_in_the_mask(family, mode):
    ids, mask = prompt(16), torch.ones(1, 16, dtype=torch.int64)
    mask[0, [0, 4, 5, 11]] = 0
    compare(*pair(family), {"input_ids": ids, "attention_mask": mask}, **mode)


def test_the_draft_reads_attended_tokens_only():
    """Padding and holes leave the draft's rows, their positions and their next tokens as if they were not there."""
    target, draft = pair("llama")
    ids, mask = prompt(8), torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1]])
    fed: list = []
    embed = target.get_input_embeddings().register_forward_pre_hook(lambda module, args: fed.append(args[0]))
    rotary = draft.rotary_emb.register_forward_pre_hook(lambda module, args: fed.append(args[1]))
    out = target.generate(ids, attention_mask=mask, max_new_tokens=3, assistant_model=draft.foretell([]))
    embed.remove()
    rotary.remove()
    # The target's prompt; then the draft's rows: the token after each attended one, at positions without gaps.
    assert torch.equal(fed[0], ids)
    rows = {fed[1].shape, fed[2].shape}
    assert rows == {(1, 5)}
    positions, tokens = sorted((fed[1], fed[2]), key=lambda t: t.tolist() != [[0, 1, 2, 3, 4]])
    assert positions.tolist() == [[0, 1, 2, 3, 4]]
    assert tokens.tolist() == [[*ids[0, [3, 5, 6, 7]].tolist(), int(out[0, 8])]]


def test_a_prompt_that_is_all_padding():
    ids, mask = prompt(5), torch.zeros(1, 5, dtype=torch.int64)
    target, draft = pair("llama")
    vanilla = target.generate(ids, attention_mask=mask, max_new_tokens=6)
    draft.foretell(vanilla[0, 5:])
    assert torch.equal(target.generate(ids, attention_mask=mask, max_new_tokens=6, assistant_model=draft), vanilla)


@FOUR
@MODES
@pytest.mark.parametrize("length", [1, 15])
def test_inputs_embeds(family, mode, length):
    target, draft = pair(family)
    embeds = target.get_input_embeddings()(prompt(length)).detach()
    vanilla = observe(target, {"inputs_embeds": embeds}, max_new_tokens=NEW_TOKENS, **mode)
    draft.foretell(vanilla.ids)
    ours = observe(target, {"inputs_embeds": embeds}, max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert_same(ours, vanilla)


def test_inputs_embeds_beside_their_ids():
    target, draft = pair("llama")
    embeds = target.get_input_embeddings()(prompt(15)).detach()
    compare(target, draft, {"inputs_embeds": embeds, "input_ids": prompt(15)})


@FOUR
def test_position_ids_of_the_user(family):
    compare(*pair(family), {"input_ids": prompt(9), "position_ids": torch.arange(9)[None] * 2 + 5})


@FOUR
@MODES
@pytest.mark.parametrize("chunk", [1, 5, 16, 40])
def test_chunked_prefill(family, mode, chunk):
    target, draft = pair(family)
    ours, _ = compare(target, draft, prompt(21), prefill_chunk_size=chunk, **mode)
    draft.foretell(ours.ids[21:])
    whole = observe(target, prompt(21), max_new_tokens=NEW_TOKENS, assistant_model=draft, **mode)
    assert whole.ids == ours.ids
    assert draft.stats.histogram == ours.out.speculation.histogram, "the draft starts from the same features"


def test_a_prompt_of_one_token_and_an_int32_prompt():
    compare(*pair("llama"), torch.tensor([[7]]))
    compare(*pair("llama"), prompt(6).to(torch.int32))


def longrope_target():
    """A Phi-3 whose frequencies change at 40 tokens, where it also runs the whole text again without its cache."""
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 40,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    }  # fmt: skip
    return tiny("phi3", num_hidden_layers=4, original_max_position_embeddings=40, rope_parameters=rope)


@MODES
@pytest.mark.parametrize("length", [15, 37, 39, 40, 41, 42, 60])
def test_frequencies_that_change_with_the_length(mode, length):
    """A tree looks ahead of the text; where that would change the target's rotary frequencies there must be none."""
    target = longrope_target()
    draft = set_tree(new_draft(target, half=False), (8, 4, 3))
    compare(target, draft, prompt(length), max_new_tokens=40, **mode)


@MODES
def test_frequencies_that_change_with_every_token(mode):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    target = tiny("llama", num_hidden_layers=4, max_position_embeddings=40, rope_parameters=rope)
    draft = set_tree(new_draft(target, half=False), (8, 4, 3))
    compare(target, draft, prompt(15), max_new_tokens=20, **mode)
    vanilla = target.generate(prompt(25), max_new_tokens=40)
    assert torch.equal(target.generate(prompt(25), max_new_tokens=40, assistant_model=draft.foretell([])), vanilla)


def test_layers_that_skip_the_prompt():
    """Gemma 4 runs its key-sharing layers over the last prompt token only, unless asked; the head reads them all."""
    target = causal_lm(
        "gemma4_text", sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2, hidden_size_per_layer_input=16, vocab_size_per_layer_input=VOCAB_SIZE,
        global_head_dim=16,
    )  # fmt: skip
    draft = set_tree(new_draft(target, half=False), "cpu")
    vanilla = target.generate(prompt(20), max_new_tokens=NEW_TOKENS)
    draft.foretell(vanilla[0, 20:])
    assert torch.equal(target.generate(prompt(20), max_new_tokens=NEW_TOKENS, assistant_model=draft), vanilla)
    assert draft.stats.mean_accepted > 0.5


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("llama4_text", {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64}),
        ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}),
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@MODES
def test_other_families(model_type, fields, mode):
    target = causal_lm(model_type, **fields)
    compare(target, set_tree(new_draft(target, half=False), "cpu"), prompt(20), **mode)


def causal_lm(model_type: str, **fields):
    config = AutoConfig.for_model(model_type, **{**COMMON, "num_hidden_layers": 4, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@MODES
@pytest.mark.parametrize("padding", [0, 3])
def test_images_and_three_dimensional_positions(mode, padding):
    text = {**COMMON, "num_hidden_layers": 4}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
        "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    image, start = 300, 302
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=image, video_token_id=301, vision_start_token_id=start
    )
    torch.manual_seed(0)
    target = Qwen2_5_VLForConditionalGeneration(config).eval()
    target.generation_config = GenerationConfig(pad_token_id=0)
    ids = prompt(20) % 299
    ids[0, 3:8] = torch.tensor([start, *[image] * 4])
    ids = torch.cat([torch.zeros(1, padding, dtype=torch.int64), ids], dim=1)
    inputs = {
        "input_ids": ids,
        "attention_mask": (torch.arange(20 + padding) >= padding).long()[None],
        "mm_token_type_ids": (ids == image).long(),
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
    }
    compare(target, set_tree(new_draft(target, half=False), "cpu"), inputs, **mode)


def test_generation_config_objects():
    target, draft = pair("llama")
    switches = dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits"), True)
    config = GenerationConfig(
        max_new_tokens=9, do_sample=True, top_k=12, repetition_penalty=1.2, pad_token_id=0, **switches
    )
    before = config.to_dict()
    outs = []
    for assistant in (None, draft.foretell([])):
        torch.manual_seed(0)
        outs.append(target.generate(prompt(7), generation_config=config, assistant_model=assistant))
    assert torch.equal(outs[1].sequences, outs[0].sequences)
    assert outs[1].keys() == outs[0].keys()
    torch.testing.assert_close(outs[1].scores, outs[0].scores)
    assert config.to_dict() == before


def test_sampling_that_the_model_itself_asks_for():
    target = tiny("llama", num_hidden_layers=4)
    target.generation_config.update(do_sample=True, temperature=0.8, top_k=12)
    compare(target, new_draft(target, half=False), prompt(7))


# ----- processors and other callbacks --------------------------------------------------------------------------------


class Remembering(LogitsProcessor):
    """A processor with a state that changes the scores by how often it was called, as a grammar would."""

    def __init__(self):
        self.calls: list[tuple[list[int], tuple]] = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids[0].tolist(), tuple(scores.shape)))
        return scores + 3.0 * torch.sin(torch.arange(scores.shape[1]) * len(self.calls))


@FOUR
@MODES
@pytest.mark.parametrize("tree", ["cpu", "chain"])
def test_processors_see_the_calls_of_vanilla(family, mode, tree):
    made: list[Remembering] = []

    def make():
        made.append(Remembering())
        return {"logits_processor": LogitsProcessorList([made[-1]])}

    compare(*pair(family, tree), prompt(7), make=make, **mode)
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
    "processor", [InPlace, OtherDtype, ChangingDtype, ShorterVocabulary, MovesTheGenerator, GeneratesInside]
)
def test_unusual_processors(mode, processor):
    compare(*pair("llama"), prompt(7), make=lambda: {"logits_processor": LogitsProcessorList([processor()])}, **mode)


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
    compare(*pair("llama"), prompt(9), **kwargs, **mode)


def test_a_token_of_negative_bias_never_appears():
    target, draft = pair("llama")
    plain = target.generate(prompt(9), max_new_tokens=NEW_TOKENS)[0, 9:].tolist()
    ours, _ = compare(target, draft, prompt(9), sequence_bias=[[[token], -100.0] for token in set(plain[:5])])
    assert not set(plain[:5]) & set(ours.ids[9:])


def test_negative_prompt_of_guidance():
    compare(*pair("llama"), prompt(9), guidance_scale=1.5, negative_prompt_ids=prompt(4, 8))


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

    compare(*pair("llama"), prompt(7), make=make, **mode)
    assert asked[1] == asked[0]


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
