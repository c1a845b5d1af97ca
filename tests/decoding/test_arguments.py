"""Arguments of `generate` about what is kept where, and what is shown of it: caches and attentions, of batches too."""

import inspect
from collections.abc import Callable
from functools import cache

import pytest
import torch
from transformers import CompileConfig, DynamicCache, GenerationMixin, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from eagle3_hf.decoding.target.runner import CACHE_KEY
from support.drafts import (
    FOUR,
    MODES,
    NEW_TOKENS,
    ForetellingDraft,
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
from support.families import WINDOW, prompt, tiny
from support.plain_runs import share


ROWS = pytest.mark.parametrize("rows", [1, 3])
# Earlier versions of transformers put a dynamic cache in the place of a static one beside an assistant, and warn.
KEEPS_STATIC = "ASSISTED_GENERATION" not in inspect.getsource(GenerationMixin._prepare_cache_for_generation)
STATIC = pytest.mark.skipif(not KEEPS_STATIC, reason="this version makes the cache dynamic")


def assert_shown_as_plain(target, inputs, tree="cpu", accepted: bool = True, **kwargs):
    """A call with and without a head, everything compared; returns the head's output."""
    ours, _ = assert_same_as_plain(target, set_tree(draft_for(target), tree), inputs, output_attentions=True, **kwargs)
    assert ours.out.speculation.mean_accepted > 0.5 or not accepted
    return ours.out


@cache
def draft_for(target) -> ForetellingDraft:
    """The head of one of the session's targets."""
    return new_draft(target, half=False)


def prompts(rows: int, length: int = 11) -> dict[str, torch.Tensor]:
    """Left-padded, each row three tokens shorter than the one before."""
    return padded([length - 3 * row for row in range(rows)], 3)


@cache
def eager(family: str) -> PreTrainedModel:
    """One for the whole session: tests leave it as they found it."""
    target = tiny(family, num_hidden_layers=4)
    target.set_attn_implementation("eager")
    return share(target)


# ----- attentions ----------------------------------------------------------------------------------------------------


@pytest.mark.each_choice
@FOUR
@MODES
@ROWS
def test_attentions(family, mode, rows):
    out = assert_shown_as_plain(eager(family), prompts(rows), **mode)
    assert len(out.attentions) == NEW_TOKENS
    assert [weights.shape for weights in out.attentions[0]] == [(rows, 4, 11, 11)] * 4
    full = 11 + NEW_TOKENS - 1
    windowed = {"llama": [full] * 4, "mistral_sw": [WINDOW] * 4, "gemma3": [WINDOW, WINDOW, full, WINDOW]}
    expected = windowed.get(family, [WINDOW, full] * 2)
    assert [weights.shape for weights in out.attentions[-1]] == [(rows, 4, 1, keys) for keys in expected]


@pytest.mark.parametrize("tree", ["paper", "chain"])
def test_attentions_of_other_trees(tree):
    assert_shown_as_plain(eager("gemma3"), prompts(2), tree=tree)


@ROWS
def test_attentions_of_rows_that_end_early(rows):
    target, inputs = eager("mistral_sw"), prompts(rows)
    text = target.generate(**inputs, max_new_tokens=NEW_TOKENS)[0, 11:].tolist()
    assert_shown_as_plain(target, inputs, eos_token_id=[text[9]])


@ROWS
def test_attentions_of_chunks(rows):
    """Vanilla shows those of the last chunk."""
    out = assert_shown_as_plain(eager("llama"), prompts(rows), prefill_chunk_size=4)
    assert out.attentions[0][0].shape == (rows, 4, 3, 11)


def test_an_attention_that_shows_no_weights():
    """sdpa gives none, and vanilla an empty tuple a step."""
    out = assert_shown_as_plain(target_of("llama"), prompts(1))
    assert out.attentions == ((),) * NEW_TOKENS


# ----- static caches -------------------------------------------------------------------------------------------------


@pytest.mark.each_choice
@STATIC
@FOUR
@MODES
@ROWS
def test_static_caches_of_generate(family, mode, rows):
    out = assert_shown_as_plain(eager(family), prompts(rows), cache_implementation="static", **mode)
    assert {type(layer) for layer in cache_of(out).layers} <= {StaticLayer, StaticSlidingWindowLayer}


@pytest.mark.pairwise
@STATIC
@FOUR
@pytest.mark.parametrize("length", [3, WINDOW, WINDOW + 5])
@pytest.mark.parametrize("new", [1, 2, 5, WINDOW])
def test_static_windows_at_every_fill(family, length, new):
    target = target_of(family)
    kwargs = {"max_new_tokens": new, "cache_implementation": "static"}
    vanilla = observe(target, prompt(length), **kwargs)
    draft = set_tree(draft_of(family, half=False), "cpu").foretell(vanilla.told, favourite=1.0)
    assert_same(observe(target, prompt(length), assistant_model=draft, **kwargs), vanilla)


@STATIC
@ROWS
def test_static_caches_and_rows_that_end_early(rows):
    for family in ("llama", "gemma3"):
        target, inputs = target_of(family), prompts(rows)
        text = target.generate(**inputs, max_new_tokens=NEW_TOKENS)[:, 11:]
        assert_shown_as_plain(
            target, inputs, cache_implementation="static", eos_token_id=[int(text[0, 9]), int(text[-1, 3])],
            accepted=False,
        )  # fmt: skip


@pytest.mark.each_choice
@STATIC
@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_static_caches_filled_in_chunks(family, chunk):
    assert_shown_as_plain(target_of(family), prompts(1, 15), cache_implementation="static", prefill_chunk_size=chunk)


def static_cache(target: PreTrainedModel, slots: int) -> Callable[[], dict]:
    return lambda: {CACHE_KEY: StaticCache(config=target.config, max_cache_len=slots)}


@pytest.mark.each_choice
@FOUR
@ROWS
@pytest.mark.parametrize("slots", [11 + NEW_TOKENS - 1, 11 + NEW_TOKENS + 3, 200])
def test_static_caches_of_the_user(family, rows, slots):
    """Exactly as long as the text, a little longer, and with room for every tree."""
    target = target_of(family)
    assert_shown_as_plain(target, prompts(rows), make=static_cache(target, slots))


@pytest.mark.each_choice
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("slots", [64, 200])
def test_static_buffers_keep_their_addresses(family, slots):
    """And a second call goes on in the same cache, with and without a head."""
    target, draft = pair(family)
    texts = {}
    for drafted in (False, True):
        cache = StaticCache(config=target.config, max_cache_len=slots)
        ids, addresses = prompt(9), None
        for turn in range(3):
            assistant = draft.foretell(texts[False][turn]) if drafted and turn != 1 else None
            out = target.generate(ids, **{CACHE_KEY: cache}, max_new_tokens=9, assistant_model=assistant)
            now = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
            assert addresses in (None, now)
            addresses = now
            texts.setdefault(drafted, []).append(out[0, ids.shape[1] :].tolist())
            ids = torch.cat([out, prompt(3, turn)], dim=1)
            assert {type(layer) for layer in cache.layers} <= {StaticLayer, StaticSlidingWindowLayer}
    assert texts[True] == texts[False]


@ROWS
def test_a_static_cache_after_an_exception(rows):
    """The user's own cache holds what it would hold without a head."""
    target, draft = target_of("gemma3"), set_tree(draft_of("gemma3", half=False), "cpu")

    def broken(ids, scores):
        if ids.shape[1] == 16:
            raise KeyboardInterrupt
        return scores

    caches = []
    told = target.generate(prompt(9, rows=rows), max_new_tokens=NEW_TOKENS)[:, 9:]
    for assistant in (None, draft.foretell(told, favourite=1.0)):
        caches.append(StaticCache(config=target.config, max_cache_len=40))
        with pytest.raises(KeyboardInterrupt):
            target.generate(
                prompt(9, rows=rows), **{CACHE_KEY: caches[-1]}, max_new_tokens=NEW_TOKENS,
                assistant_model=assistant, logits_processor=[broken],
            )  # fmt: skip
    assert_same_cache(*caches)


@pytest.mark.parametrize("kind", ["chunks", "steps"])
def test_a_compile_config_is_left_aside_aloud(kind, caplog, monkeypatch):
    """Vanilla compiles for static caches (on a CPU only when made to); beside a head nothing is compiled."""
    config, compilations = CompileConfig(backend=lambda graph, inputs: compilations.append(graph) or graph.forward), []
    config._compile_all_devices = True
    target = tiny("llama", num_hidden_layers=2)
    kwargs = {"prefill_chunk_size": 4} if kind == "chunks" else {}
    draft = set_tree(new_draft(target, half=False), "cpu")
    vanilla = target.generate(prompt(9), max_new_tokens=9)
    ours = target.generate(
        prompt(9), max_new_tokens=9, cache_implementation="static", compile_config=config,
        assistant_model=draft.foretell(vanilla[0, 9:]), **kwargs,
    )  # fmt: skip
    assert torch.equal(ours, vanilla)
    assert draft.stats.mean_accepted > 0.5
    assert not compilations


# ----- caches of the user, and going on ------------------------------------------------------------------------------


def turns(target: PreTrainedModel, cache, heads: tuple[bool, ...], told: list | None = None) -> list[torch.Tensor]:
    """A padded batch goes on turn after turn in one cache, with a head or without; returns what each turn said."""
    inputs, said = prompts(3), []
    draft = set_tree(draft_for(target), "cpu")
    for turn, with_head in enumerate(heads):
        assistant = draft.foretell(told[turn]) if with_head and told else None
        ids = target.generate(**inputs, **{CACHE_KEY: cache}, max_new_tokens=12, assistant_model=assistant)
        assert assistant is None or draft.stats.mean_accepted > 0.5
        said.append(ids[:, -12:])
        ids = torch.cat([ids, prompt(3, turn, rows=3)], dim=1)
        more = torch.ones(3, ids.shape[1] - inputs["attention_mask"].shape[1], dtype=torch.int64)
        inputs = {"inputs": ids, "attention_mask": torch.cat([inputs["attention_mask"], more], dim=1)}
    return said


@pytest.mark.each_choice
@FOUR
@pytest.mark.parametrize("kind", ["dynamic", "with config", "static"])
@pytest.mark.parametrize("heads", [(True, False, True), (False, True, True)], ids=str)
def test_turns_of_a_batch_on_one_cache(family, kind, heads):
    target = target_of(family)
    new = {
        "dynamic": DynamicCache,
        "with config": lambda: DynamicCache(config=target.config),
        "static": lambda: StaticCache(config=target.config, max_cache_len=64),
    }[kind]
    caches = new(), new()
    texts = turns(target, caches[0], (False,) * 3)
    assert torch.equal(torch.cat(turns(target, caches[1], heads, texts)), torch.cat(texts))
    assert_same_cache(caches[1], caches[0])
    assert vars(caches[1]).keys() == vars(caches[0]).keys(), "nothing is hidden on the cache"


@pytest.mark.each_choice
@ROWS
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("whole", [True, False], ids=["all ids again", "new ids alone"])
def test_a_cache_that_a_forward_has_filled(family, rows, whole):
    """The user's own prefill of a part of the prompt."""
    target, inputs = target_of(family), prompts(rows)
    ids, mask = inputs["inputs"], inputs["attention_mask"]

    def make():
        cache = DynamicCache(config=target.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, :7]
        with torch.no_grad():
            target(ids[:, :7], attention_mask=mask[:, :7], position_ids=positions, **{CACHE_KEY: cache})
        return {CACHE_KEY: cache}

    assert_shown_as_plain(target, inputs if whole else {**inputs, "inputs": ids[:, 7:]}, make=make)


@pytest.mark.each_choice
@FOUR
@ROWS
@pytest.mark.parametrize("beside", [True, False], ids=["with ids", "alone"])
def test_embeddings_for_a_prompt(family, rows, beside):
    target, inputs = target_of(family), prompts(rows)
    embeds = target.get_input_embeddings()(inputs["inputs"]).detach()
    ids = {"input_ids": inputs["inputs"]} if beside else {}
    given = {**ids, "attention_mask": inputs["attention_mask"], "inputs_embeds": embeds}
    assert_shown_as_plain(target, given)
    if KEEPS_STATIC:
        assert_shown_as_plain(target, given, cache_implementation="static")


@pytest.mark.each_choice
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_chunks_of_a_batch(family, chunk):
    assert_shown_as_plain(target_of(family), prompts(3), prefill_chunk_size=chunk)
