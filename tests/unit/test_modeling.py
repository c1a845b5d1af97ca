"""The draft model: one causal pass, cached drafting and the training unroll agree; and what it keeps and saves."""

import copy
import gc
import io
import json
import math
import pickle
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, modeling_utils
from transformers.utils import hub

from eagle3_hf import Eagle3Candidate, Eagle3DraftModel
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.model.attention import CachedAttention, DraftCache
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.ttt.attention import TTTAttention
from eagle3_hf.ttt.loss import Supervision
from eagle3_hf.ttt.settings import TTTSettings
from support.drafts import draft_of, set_tree, target_of
from support.families import HIDDEN_SIZE, VOCAB_SIZE, prompt, tiny
from support.heads import DRAFT_VOCAB, new_head


LAYERS = 4
NARROW = {"hidden_size": 32, "head_dim": 8, "target_hidden_size": HIDDEN_SIZE, "own_embeddings": True}
WHOLE = {"draft_vocab_size": VOCAB_SIZE}
BORROWS_ALL = {**WHOLE, "own_lm_head": False}
BIASES = {"attention_bias": True, "mlp_bias": True, "fc_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": None, "head_dim": None}
DEEPSEEK_YARN = YARN | {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3}
VARIANTS = {
    "grouped queries": {},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "odd head size": {"head_dim": 10},
    "normed queries": {"qk_norm": True},
    "two layers": {"num_hidden_layers": 2},
    "normed residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norms before fc": {"fc_norm": True},
    "normed feedback": {"norm_output": True},
    "biases": BIASES,
    "own narrow embedding": NARROW,
    "whole vocabulary": WHOLE,
    "borrowed head": BORROWS_ALL,
    "two features": {"target_layer_ids": [0, 4]},
    "yarn": {"rope_parameters": YARN, "max_position_embeddings": 256},
    "biased output": {"attention_output_bias": True},
    "all biased but the output": {"attention_bias": True, "attention_output_bias": False},
    "half of the head rotated": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "odd part rotated": {"head_dim": 10, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}},
    "no final norm": {"final_norm": False},
    "final output alone": {"use_aux_hidden_state": False, "target_layer_ids": None},
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 4},
    "window of one": {"layer_types": ["sliding_attention"], "sliding_window": 1},
    "window beyond the text": {"layer_types": ["sliding_attention"], "sliding_window": 64},
    "window in every other layer": {"num_hidden_layers": 3, "sliding_window": 3, "norm_output": True}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "latent": LATENT,
    "latent, halves rotated": {**LATENT, "rope_interleave": False, "attention_bias": True},
    "latent, low-rank queries": {**LATENT, "q_lora_rank": 20, "rope_parameters": DEEPSEEK_YARN},
    "latent with windows": {**LATENT, "q_lora_rank": 20, "attention_bias": True, "num_hidden_layers": 2}
    | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
    "all at once": {**BIASES, "qk_norm": True, "num_hidden_layers": 3, "norm_before_residual": True, "fc_norm": True}
    | {"norm_output": True, **NARROW},
}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

variants = pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
implementations = pytest.mark.parametrize("implementation", ["sdpa", "eager"])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=LAYERS)


def head_for(target, implementation: str = "sdpa", **overrides) -> Eagle3DraftModel:
    draft = new_head(**overrides)
    draft.set_attn_implementation(implementation)
    return draft.bind(target)


def test_learning_needs_what_the_target_says(target):
    draft, ids = head_for(target), torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="pass teacher_logits and teacher_in_vocab too"):
        draft(ids, features_of(target, draft, ids), labels=ids)


@torch.no_grad()
def features_of(target, draft, ids: torch.Tensor) -> torch.Tensor:
    with FeatureReader(target, draft.config.target_layer_ids) as reader:
        target(ids)
        return reader.take()


# ----- one pass, cached, unrolled -----------------------------------------------------------------------------------


@torch.no_grad()
@implementations
@variants
def test_cached_rows_equal_one_causal_pass(target, overrides, implementation):
    draft, ids = head_for(target, implementation, **overrides), prompt(14, rows=2)
    features = features_of(target, draft, ids)
    whole = draft(ids, features)
    assert whole.logits.shape == (2, 14, draft.config.draft_vocab_size)
    candidate, start = Eagle3Candidate(target, draft), 0
    for size in (5, 1, 1, 4, 2):  # the last row has no next token
        rows = slice(start, start + size)
        candidate.extend(DraftInputs(features[:, rows], ids[:, start + 1 : start + size + 1]))
        start += size
        torch.testing.assert_close(candidate._last[:, 0], whole.hidden_states[:, start - 1], **CLOSE)
    logits = draft.compute_logits(candidate._last[:, 0])
    torch.testing.assert_close(logits, whole.logits[:, start - 1], **CLOSE)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: torch.Tensor, frequencies: torch.Tensor, scale: float) -> torch.Tensor:
    """Rotary positions of (T, heads, hd), halves paired."""
    angles = torch.arange(x.shape[0])[:, None, None] * frequencies
    x, rest = x[..., : 2 * len(frequencies)], x[..., 2 * len(frequencies) :]
    cos, sin, (left, right) = angles.cos() * scale, angles.sin() * scale, x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)


def grouped_heads(config, inputs, linear, normed, rotary):
    """Query, key and value (T, heads, width) of ordinary attention, and the scale of the scores."""
    query, key, value = (linear(inputs, f"{part}_proj").unflatten(-1, (-1, config.head_dim)) for part in "qkv")
    if config.qk_norm:
        query, key = normed(query, "q_norm"), normed(key, "k_norm")
    query, key = turned(query, *rotary), turned(key, *rotary)
    group = config.num_attention_heads // config.num_key_value_heads
    return query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), config.head_dim**-0.5


def latent_heads(config, inputs, linear, normed, rotary):
    """The same of latent attention (DeepSeek-V2, equations 9 to 19)."""
    if config.q_lora_rank is None:
        query = linear(inputs, "q_proj")
    else:
        query = linear(normed(linear(inputs, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    query = query.unflatten(-1, (config.num_attention_heads, -1))
    latent, shared = linear(inputs, "kv_a_proj_with_mqa").tensor_split([config.kv_lora_rank], dim=-1)
    expanded = linear(normed(latent, "kv_a_layernorm"), "kv_b_proj").unflatten(-1, (config.num_attention_heads, -1))
    key, value = expanded.tensor_split([config.qk_nope_head_dim], dim=-1)
    query, rotated = query.tensor_split([config.qk_nope_head_dim], dim=-1)
    shared = shared[:, None].expand_as(rotated)
    if config.rope_interleave:  # neighbours are a pair
        rotated, shared = (torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) for x in (rotated, shared))
    query = torch.cat([query, turned(rotated, *rotary)], dim=-1)
    key = torch.cat([key, turned(shared, *rotary)], dim=-1)
    rope, scale = config.rope_parameters, query.shape[-1] ** -0.5
    if "mscale_all_dim" in rope:
        scale *= (1 + 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"])) ** 2
    return query, key, value, scale


def spelled_out(draft, borrowed, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """The logits of one causal pass over one text (T,), from the tensors and the words of the config alone."""
    config, w = draft.config, draft.state_dict()
    rotary = draft.rotary_emb.inv_freq, draft.rotary_emb.attention_scaling

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    if config.norm_before_fc:
        features = rms_norm(features, w["input_norm.weight"])
    if config.fc_norm:
        chunks = features.chunk(config.num_captured_layers, dim=-1)
        features = torch.cat([rms_norm(chunk, w[f"fc_norm.{i}.weight"]) for i, chunk in enumerate(chunks)], dim=-1)
    hidden, embeds = linear(features, "fc") if "fc.weight" in w else features, borrowed.embed(ids)
    for i in range(config.num_hidden_layers):
        name = f"layers.{i}"
        inputs, residual = rms_norm(hidden, w[f"{name}.input_layernorm.weight"]), hidden
        if i == 0:
            normed = rms_norm(hidden, w[f"{name}.hidden_norm.weight"])
            inputs = torch.cat([rms_norm(embeds, w[f"{name}.input_layernorm.weight"]), normed], dim=-1)
            residual = normed if config.norm_before_residual else hidden
        query, key, value, scale = (latent_heads if config.kv_lora_rank else grouped_heads)(
            config,
            inputs,
            lambda x, part, name=name: linear(x, f"{name}.self_attn.{part}"),
            lambda x, part, name=name: rms_norm(x, w[f"{name}.self_attn.{part}.weight"]),
            rotary,
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        slides = config.layer_types is not None and config.layer_types[i] == "sliding_attention"
        before = torch.arange(len(ids))[:, None] - torch.arange(len(ids))  # how far each key lies behind each query
        unseen = (before < 0) | (before >= (config.sliding_window if slides else len(ids)))
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        hidden = residual + linear(torch.einsum("hqk,khd->qhd", weights, value).flatten(1), f"{name}.self_attn.o_proj")
        mlp = rms_norm(hidden, w[f"{name}.post_attention_layernorm.weight"])
        mlp = nn.functional.silu(linear(mlp, f"{name}.mlp.gate_proj")) * linear(mlp, f"{name}.mlp.up_proj")
        hidden = hidden + linear(mlp, f"{name}.mlp.down_proj")
    normed = rms_norm(hidden, w["norm.weight"]) if "norm.weight" in w else hidden
    return linear(normed, "lm_head") if config.own_lm_head else borrowed.lm_head(normed)


@torch.no_grad()
@variants
def test_one_pass_is_the_arithmetic_that_the_config_names(target, overrides):
    draft, ids = head_for(target, **overrides), prompt(10)
    features = features_of(target, draft, ids)
    logits = draft(ids, features).logits[0, :-1]  # the last row has no next token
    expected = spelled_out(draft, draft.borrow(), ids[0, 1:], features[0, :-1])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["base", "nbr_nbfc", "eagle31", "qwen3arch", "two_layers"])
def test_switches_mean_what_another_library_means(shared, name):
    """Three steps of training-time test, as the speculators library computed them with its own heads."""
    folder = shared / "heads" / "speculators-tiny" / name
    io, config = load_file(folder / "io.safetensors"), json.loads((folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    sizes = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    sizes += ["num_hidden_layers", "vocab_size", "rms_norm_eps", "rope_parameters"]
    switches = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields = {key: layer[key] for key in sizes} | {key: config[key] for key in switches}
    fields |= {"draft_vocab_size": config["draft_vocab_size"], "qk_norm": layer["model_type"] == "qwen3"}
    ids = config["eagle_aux_hidden_state_layer_ids"]
    draft = new_head(**fields, target_layer_ids=ids, own_embeddings=True)
    draft.load_state_dict(load_file(folder / "model.safetensors"))
    rows = torch.arange(io["features"].shape[1])[None]
    attend, hidden = TTTAttention(rows), draft.fuse(io["features"])
    for step, tokens in enumerate(io["ids_used_per_step"]):
        attend.step = step
        embeds = draft.embed_tokens(tokens)
        output = draft.run_layers(hidden, embeds, io["position_ids_step0"] + step, attend)
        torch.testing.assert_close(draft.compute_logits(output), io["logits_per_step"][step], rtol=1e-4, atol=3e-5)
        torch.testing.assert_close(output, io["hidden_prenorm_per_step"][step], rtol=1e-4, atol=3e-5)
        hidden = draft.feedback(output)


@torch.no_grad()
def test_the_pass_is_causal_and_reads_the_token_ahead(target):
    draft, ids = head_for(target), prompt(10)
    features = features_of(target, draft, ids)
    logits = draft(ids, features).logits
    other = ids.clone()
    other[0, 6] = ids[0, 6] % 300 + 1
    changed = (draft(other, features).logits != logits).any(-1)[0]
    assert changed.tolist() == [False] * 5 + [True] * 5  # row 5 reads the embedding of token 6
    features[0, 6] += 1
    changed = (draft(ids, features).logits != logits).any(-1)[0]
    assert changed.tolist() == [False] * 6 + [True] * 4


def record_logits(draft, monkeypatch) -> list[torch.Tensor]:
    """From now on, the (n, D) logits of each call of the head."""
    recorded, original = [], draft.compute_logits

    def compute_logits(hidden, borrowed=None):
        recorded.append(original(hidden, borrowed))
        return recorded[-1]

    monkeypatch.setattr(draft, "compute_logits", compute_logits)
    return recorded


def all_supervised(ids: torch.Tensor, size: int) -> Supervision:
    """Every pair is supervised, by a random teacher."""
    mask = torch.ones_like(ids, dtype=torch.bool)
    generator = torch.Generator().manual_seed(5)
    teacher = torch.randn(ids.numel(), size, generator=generator)
    return Supervision.build(mask, teacher, torch.ones(ids.numel(), dtype=torch.bool))


@torch.no_grad()
def drafted_logits(draft, features, ids, row: int, steps: int) -> torch.Tensor:
    """(steps, D) of the draft that leaves the prefix at `row`: a cached prefix, then its own output, row by row."""
    cache, embed = DraftCache(draft.config.num_hidden_layers), draft.borrow().embed
    positions = torch.arange(row + 1)[None]
    hidden = draft.fuse(features[:, : row + 1])
    hidden = draft.run_layers(hidden, embed(ids[:, 1 : row + 2]), positions, CachedAttention(cache))[:, -1:]
    logits = [draft.compute_logits(hidden)]
    for step in range(1, steps):
        at, token = torch.tensor([[row + step]]), ids[:, row + step + 1 : row + step + 2]
        hidden = draft.run_layers(draft.feedback(hidden), embed(token), at, CachedAttention(cache))
        logits.append(draft.compute_logits(hidden))
    return torch.cat(logits, dim=1)[0]


@torch.no_grad()
@implementations
@variants
def test_unroll_equals_drafting_step_by_step(target, overrides, implementation, monkeypatch):
    """Row t of step s is the draft that left the prefix at row t and is s tokens deep (paper section 3.2)."""
    draft, ids, steps = head_for(target, implementation, **overrides), prompt(11), 5
    features = features_of(target, draft, ids)
    recorded = record_logits(draft, monkeypatch)
    draft.training_time_test(ids, features, all_supervised(ids, draft.config.draft_vocab_size), TTTSettings(steps))
    monkeypatch.undo()
    for row in (0, 1, 4, 6, 9):
        depth = min(steps, 10 - row)  # as many tokens as the text has
        expected = drafted_logits(draft, features, ids, row, depth)
        for step in range(depth):
            torch.testing.assert_close(recorded[step][row], expected[step], **CLOSE)


@torch.no_grad()
def test_unroll_of_several_texts_is_that_of_each(target):
    draft, ids = head_for(target), prompt(9, rows=3)
    features, supervision = features_of(target, draft, ids), all_supervised(ids, DRAFT_VOCAB)
    settings = TTTSettings(num_steps=4)
    together = draft.training_time_test(ids, features, supervision, settings)
    alone = []
    for row in range(3):
        entries = slice(9 * row, 9 * row + 9)
        own = Supervision.build(
            torch.ones(1, 9, dtype=torch.bool), supervision.teacher[entries], supervision.in_vocab[entries]
        )
        alone.append(draft.training_time_test(ids[row : row + 1], features[row : row + 1], own, settings))
    for step in range(4):
        torch.testing.assert_close(together[step].loss_sum, sum(steps[step].loss_sum for steps in alone))


# ----- the steps after the first on some rows only ------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("overrides", [{}, {"norm_output": True, "num_hidden_layers": 2}], ids=["plain", "deep"])
def test_sampled_rows_have_exactly_their_own_logits(target, overrides, monkeypatch):
    draft, ids = head_for(target, **overrides), prompt(12, rows=2)
    features, supervision = features_of(target, draft, ids), all_supervised(ids, DRAFT_VOCAB)
    recorded = record_logits(draft, monkeypatch)
    draft.training_time_test(ids, features, supervision, TTTSettings(num_steps=4))
    everything = list(recorded)
    recorded.clear()
    rows = torch.tensor([[1, 4, 5, 9, 11], [0, 2, 3, 4, 10]])
    monkeypatch.setattr(Supervision, "sample_positions", lambda *args: rows)
    sampled = draft.training_time_test(ids, features, supervision, TTTSettings(num_steps=4, position_share=0.4))
    assert torch.equal(recorded[0], everything[0])
    for step in range(1, 4):
        all_rows = torch.arange(12).expand(2, -1)
        batch, place, _ = supervision.pairs(all_rows, step)
        chosen = (rows[batch] == all_rows[batch, place][:, None]).any(1)
        torch.testing.assert_close(recorded[step], everything[step][chosen], **CLOSE)
        assert len(sampled[step].entries) == int(chosen.sum())


def supervision_at(spans: list[list[tuple[int, int]]], length: int) -> Supervision:
    """Supervised `u` in these spans, both ends included, one list a batch row."""
    mask = torch.zeros(len(spans), length, dtype=torch.bool)
    for row, parts in enumerate(spans):
        for first, last in parts:
            mask[row, first : last + 1] = True
    count = int(mask.sum())
    return Supervision.build(mask, torch.zeros(count, 2), torch.ones(count, dtype=torch.bool))


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_weighted_sample_expects_every_pair_once(share):
    """Unequal answers in one batch, some shorter than the sample: each pair of each step counts once on average."""
    supervision, steps, draws = supervision_at([[(3, 28)], [(5, 6), (20, 24)], [(0, 0)], []], 30), 4, 1500
    totals = [torch.zeros(len(supervision.teacher)) for _ in range(steps)]
    for _ in range(draws):
        rows = supervision.sample_positions(share, steps)
        weights = supervision.sample_weights(rows.shape[1], steps)
        for step in range(1, steps):
            batch, _, entries = supervision.pairs(rows, step)
            totals[step].index_add_(0, entries, weights[batch])
    everything = torch.arange(30).expand(4, -1)
    for step in range(1, steps):
        expected = torch.zeros_like(totals[step])
        expected[supervision.pairs(everything, step)[2]] = 1.0
        size = max(1, round(share * 30))
        spread = max(1.0, 28 / size) ** 0.5  # of one pair's weight, where its row is one of 28
        assert (totals[step] / draws - expected).abs().max() < 6 * spread / draws**0.5


@torch.no_grad()
def test_sampled_loss_has_the_expectation_of_the_whole(target):
    draft, ids = head_for(target), prompt(16, rows=2)
    features = features_of(target, draft, ids)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 2:14], mask[1, 9:12] = True, True
    count = int(mask.sum())
    teacher = 3 * torch.randn(count, DRAFT_VOCAB)
    supervision = Supervision.build(mask, teacher, torch.ones(count, dtype=torch.bool))
    settings = TTTSettings(num_steps=3)
    some = TTTSettings(num_steps=3, position_share=0.25)
    exact = [float(step.loss_sum) for step in draft.training_time_test(ids, features, supervision, settings)]
    draws = torch.tensor(
        [
            [float(step.loss_sum) for step in draft.training_time_test(ids, features, supervision, some)]
            for _ in range(200)
        ]
    )
    assert draws[:, 0].tolist() == pytest.approx([exact[0]] * 200, rel=1e-5)
    error = draws.std(0) / 200**0.5
    for step in (1, 2):
        assert abs(float(draws[:, step].mean()) - exact[step]) < 4.5 * float(error[step])
        assert float(draws[:, step].std()) > 0


@torch.no_grad()
def test_the_whole_share_samples_nothing(target, monkeypatch):
    draft, ids = head_for(target), prompt(8)
    monkeypatch.setattr(Supervision, "sample_positions", None)  # would raise when called
    features = features_of(target, draft, ids)
    settings = TTTSettings(num_steps=3)
    assert len(draft.training_time_test(ids, features, all_supervised(ids, DRAFT_VOCAB), settings)) == 3


# ----- the cache between rounds -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_cache_after_the_rounds_equals_one_made_from_scratch(family, sampled, monkeypatch):
    """Neither tree rows nor features of the draft's own making stay behind, whatever was accepted."""
    target, draft, ids = target_of(family), set_tree(draft_of(family), "cpu"), prompt(9)
    settings = {"max_new_tokens": 40, "do_sample": sampled, "top_k": 0} if sampled else {"max_new_tokens": 40}
    torch.manual_seed(3)
    text = target.generate(ids, **settings)
    draft.foretell(text[0, 9:])
    candidates, fed = [], []
    extend = Eagle3Candidate.extend

    def recording(candidate, inputs):
        candidates.append(candidate)
        fed.append(inputs.tokens)
        extend(candidate, inputs)

    monkeypatch.setattr(Eagle3Candidate, "extend", recording)
    torch.manual_seed(3)
    assert torch.equal(target.generate(ids, assistant_model=draft, **settings), text)
    assert 0 < sum(draft.stats.accepted) < draft.stats.rounds * 4
    cache, rows = candidates[0]._cache, sum(tokens.shape[1] for tokens in fed)
    assert all(candidate is candidates[0] for candidate in candidates)
    assert torch.equal(torch.cat(fed, dim=1), text[:, 1 : rows + 1])
    assert cache.length == rows
    scratch = Eagle3Candidate(target, draft)
    scratch.extend(DraftInputs(features_of(target, draft, text)[:, :rows], text[:, 1 : rows + 1]))
    for mine, fresh in zip(cache._buffers, scratch._cache._buffers, strict=True):
        for kept, expected in zip(mine, fresh, strict=True):
            torch.testing.assert_close(kept[:, :, :rows], expected[:, :, :rows], rtol=1e-4, atol=1e-4)


def test_rollback_forgets_what_was_not_committed():
    cache, rows = DraftCache(1), torch.randn(1, 2, 40, 8)
    cache.append(0, rows[:, :, :3], rows[:, :, :3])
    cache.commit()
    cache.append(0, rows[:, :, 3:9], rows[:, :, 3:9])
    cache.rollback()
    assert cache.length == 3
    keys, values = cache.append(0, rows[:, :, 20:], rows[:, :, 20:])
    assert torch.equal(keys, torch.cat([rows[:, :, :3], rows[:, :, 20:]], dim=2))
    assert torch.equal(values, keys)


# ----- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to(torch.float64)])
def test_moves_leave_the_vocabulary_and_the_frequencies(move):
    draft = new_head()
    d2t, t2d, frequencies = draft.d2t.clone(), draft.t2d.clone(), draft.rotary_emb.inv_freq.clone()
    move(draft)
    assert draft.d2t.dtype == torch.int64
    assert draft.t2d.dtype == torch.bool
    assert draft.rotary_emb.inv_freq.dtype == draft.rotary_emb.original_inv_freq.dtype == torch.float32
    assert torch.equal(draft.d2t, d2t)
    assert torch.equal(draft.t2d, t2d)
    assert torch.equal(draft.rotary_emb.inv_freq, frequencies)


@pytest.mark.parametrize("overrides", [{}, BORROWS_ALL], ids=["own head", "borrowed head"])
@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_draft_and_target_may_differ(draft_dtype, target_dtype, overrides):
    target = tiny("llama", num_hidden_layers=LAYERS).to(target_dtype)
    draft, ids = head_for(target, **overrides).to(draft_dtype).train(), prompt(6)
    text = target.generate(ids, assistant_model=draft, max_new_tokens=6, do_sample=False)
    assert text.shape == (1, 12)
    features = features_of(target, draft, ids)
    supervision = all_supervised(ids, draft.config.draft_vocab_size)
    for step in draft.training_time_test(ids, features, supervision, TTTSettings(num_steps=2)):
        assert step.loss_sum.dtype == torch.float32
        assert step.loss_sum.isfinite()
    assert draft.dtype == draft_dtype
    assert draft.training
    assert all(parameter.requires_grad for parameter in draft.parameters())


# ----- saving and loading -------------------------------------------------------------------------------------------


def same(draft: Eagle3DraftModel, other: Eagle3DraftModel) -> bool:
    mine, theirs = draft.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )


@variants
def test_round_trip_is_bit_equal(tmp_path, overrides):
    draft = new_head(**overrides)
    draft.generation_config.num_assistant_tokens = 15
    draft.generation_config.assistant_tree_depth = 4
    draft.generation_config.assistant_tree_top_k = 3
    draft.save_pretrained(tmp_path)
    for load in (Eagle3DraftModel.from_pretrained, AutoModel.from_pretrained):
        loaded = load(tmp_path)
        assert type(loaded) is Eagle3DraftModel
        assert same(draft, loaded)
        assert loaded.has_draft_vocab
        assert not loaded.training
        settings = loaded.generation_config
        assert settings.num_assistant_tokens == 15
        assert settings.assistant_tree_depth == 4
        assert settings.assistant_tree_top_k == 3
        ignored = {"_name_or_path": None, "dtype": None, "architectures": None}
        assert {**loaded.config.to_dict(), **ignored} == {**draft.config.to_dict(), **ignored}


@pytest.mark.parametrize("load", [Eagle3DraftModel.from_pretrained, AutoModel.from_pretrained], ids=["own", "auto"])
def test_dtype_is_the_files_unless_given(tmp_path, load):
    draft = new_head().to(torch.bfloat16)
    draft.save_pretrained(tmp_path)
    assert same(draft, load(tmp_path))
    assert same(draft, load(tmp_path, dtype="auto"))
    for given in (torch.float32, "float32"):
        wide = load(tmp_path, dtype=given)
        assert wide.dtype == torch.float32
        assert same(draft, wide.to(torch.bfloat16))
        assert torch.equal(wide.rotary_emb.inv_freq, new_head().rotary_emb.inv_freq)


def test_tree_settings_of_a_head_are_those_that_were_set(tmp_path):
    """A head is made on one machine and used on another: what was not set stays unset when it is saved."""

    def settings(draft):
        config = draft.generation_config
        return config.num_assistant_tokens, config.assistant_tree_depth, config.assistant_tree_top_k

    draft = new_head()
    assert settings(draft) == (None, None, None)
    draft.save_pretrained(tmp_path)
    assert settings(Eagle3DraftModel.from_pretrained(tmp_path)) == (None, None, None)
    (tmp_path / "generation_config.json").write_text('{"num_assistant_tokens": 12}')
    draft = Eagle3DraftModel.from_pretrained(tmp_path)
    assert settings(draft) == (12, None, None)
    draft.save_pretrained(tmp_path)
    assert settings(Eagle3DraftModel.from_pretrained(tmp_path)) == (12, None, None)
    (tmp_path / "generation_config.json").unlink()
    assert settings(Eagle3DraftModel.from_pretrained(tmp_path)) == (None, None, None)


class Hub:
    """Keeps what would be uploaded; the rest of a push is transformers' own."""

    def __init__(self, monkeypatch):
        self.files: dict[str, bytes] = {}

        def create_repo(*args, **kwargs):
            return SimpleNamespace(repo_id="somebody/a-head")

        def create_commit(*args, operations, **kwargs):
            self.files = {part.path_in_repo: Path(part.path_or_fileobj).read_bytes() for part in operations}

        monkeypatch.setattr(HfApi, "create_repo", create_repo)
        monkeypatch.setattr(HfApi, "create_commit", create_commit)
        for module in (hub, modeling_utils):  # transformers up to 5.22 holds on to the functions
            for function in (create_repo, create_commit):
                monkeypatch.setattr(module, function.__name__, function, raising=False)
        monkeypatch.setattr(hub.ModelCard, "load", staticmethod(self.no_card))

    @staticmethod
    def no_card(repo_id, **kwargs):
        raise EntryNotFoundError.__new__(EntryNotFoundError)  # its arguments differ between versions of the library


def test_a_push_uploads_what_a_save_writes(monkeypatch, tmp_path):
    uploaded, draft = Hub(monkeypatch), new_head()
    draft.push_to_hub("somebody/a-head")
    for name, content in uploaded.files.items():
        (tmp_path / name).write_bytes(content)
    assert uploaded.files.keys() == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    loaded = Eagle3DraftModel.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, draft.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    card = uploaded.files["README.md"].decode()
    assert "1, 2, 4 as `hidden_states` indices" in card
    assert "[More Information Needed]" not in card
    uploaded.files.clear()
    draft.save_pretrained(str(tmp_path / "a-head"), push_to_hub=True, repo_id="somebody/a-head")
    assert "1, 2, 4 as `hidden_states` indices" in uploaded.files["README.md"].decode()


def test_state_dict_of_a_set_vocabulary_sets_it():
    draft, fresh = new_head(), Eagle3DraftModel(new_head().config)
    assert not fresh.has_draft_vocab
    fresh.load_state_dict(draft.state_dict())
    assert fresh.has_draft_vocab
    assert same(draft, fresh)
    unset = Eagle3DraftModel(draft.config)
    unset.load_state_dict(Eagle3DraftModel(draft.config).state_dict())
    assert not unset.has_draft_vocab


def test_head_opened_under_the_wrong_class(tmp_path):
    new_head().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Eagle3DraftConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


# ----- nothing of the target ----------------------------------------------------------------------------------------


def own_bytes(draft) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in draft.state_dict().values())


def test_nothing_of_the_target_is_in_the_head(target, tmp_path):
    unbound, draft = new_head(**BORROWS_ALL), head_for(target, **BORROWS_ALL)
    target.generate(prompt(5), assistant_model=draft, max_new_tokens=4)
    assert draft.state_dict().keys() == unbound.state_dict().keys()
    assert [name for name, _ in draft.named_parameters()] == [name for name, _ in unbound.named_parameters()]
    assert [name for name, _ in draft.named_modules()] == [name for name, _ in unbound.named_modules()]
    room = own_bytes(draft) + 40_000  # Python's own words; the target's embedding alone is 80,000
    assert len(pickle.dumps(draft)) < room
    buffer = io.BytesIO()
    torch.save(draft, buffer)
    assert buffer.tell() < room
    draft.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < room


def test_pickles_and_copies_work(target):
    draft, ids = head_for(target), prompt(6)
    features = features_of(target, draft, ids)
    thawed = pickle.loads(pickle.dumps(draft))
    assert same(draft, thawed)
    with pytest.raises(ValueError, match="no target is bound"):
        thawed(ids, features)
    copied = copy.deepcopy(draft)
    assert same(draft, copied)
    assert copied._target() is target
    assert copied.fc.weight.data_ptr() != draft.fc.weight.data_ptr()
    for other in (thawed.bind(target), copied):
        assert torch.equal(other(ids, features).logits, draft(ids, features).logits)


@pytest.mark.parametrize("make", [head_for, lambda target: Eagle3DraftModel.from_target(target)], ids=["bind", "new"])
def test_bind_keeps_no_target_alive(make):
    target = tiny("llama", num_hidden_layers=LAYERS)
    draft, alive = make(target), weakref.ref(target)
    target.generate(prompt(5), assistant_model=draft, max_new_tokens=4)
    features = features_of(target, draft, prompt(5))
    del target
    gc.collect()
    assert alive() is None
    with pytest.raises(ValueError, match=r"no target is bound \(or it was deleted\).*draft.bind\(target\)"):
        draft(prompt(5), features)


def test_generate_binds_nothing(target):
    draft = new_head()
    target.generate(prompt(5), assistant_model=draft, max_new_tokens=4)
    assert draft._target is None


def test_bind_copies_the_special_ids():
    target = tiny("llama", num_hidden_layers=LAYERS)
    target.config.eos_token_id = [7, 9]
    target.config.bos_token_id = 3
    draft = head_for(target)
    assert (draft.config.eos_token_id, draft.config.pad_token_id, draft.config.bos_token_id) == ([7, 9], 0, 3)


def test_target_and_head_are_left_as_they_were(target):
    draft, ids = head_for(target), prompt(6)
    before = {name: tensor.clone() for name, tensor in {**target.state_dict(), **draft.state_dict()}.items()}
    target.generate(ids, assistant_model=draft, max_new_tokens=8)
    after = {**target.state_dict(), **draft.state_dict()}
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.modules())


@pytest.mark.parametrize("overrides", [{}, BORROWS_ALL], ids=["own head", "borrowed head"])
def test_one_head_serves_two_targets_in_turn_and_at_once(overrides):
    targets = [tiny("llama", seed=seed, num_hidden_layers=LAYERS) for seed in (0, 1)]
    draft, ids = set_tree(new_head(**overrides), "cpu"), prompt(7)
    plain = [target.generate(ids, max_new_tokens=16, do_sample=False) for target in targets]
    assert not torch.equal(*plain)

    def assisted(number: int) -> torch.Tensor:
        return targets[number].generate(ids, assistant_model=draft, max_new_tokens=16, do_sample=False)

    for number in (0, 1, 0):
        assert torch.equal(assisted(number), plain[number])
    results: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: assisted(n)})) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[number], plain[number]) for number in (0, 1))


# ----- the draft vocabulary -----------------------------------------------------------------------------------------


def test_life_cycle_of_a_vocabulary_known_by_size_only(target, tmp_path):
    draft, ids = Eagle3DraftModel.from_target(target, draft_vocab_size=40), prompt(5)
    features = features_of(target, draft, ids)
    assert not draft.has_draft_vocab
    words = r"needs a draft vocabulary: only its size \(40 of 320\) is known.*draft.set_draft_vocab\(ids\)"
    for what, call in (
        ("forward", lambda: draft(ids, features)),
        ("generate", lambda: target.generate(ids, assistant_model=draft, max_new_tokens=3)),
        ("save_pretrained", lambda: draft.save_pretrained(tmp_path)),
        ("draft_vocab_ids", draft.draft_vocab_ids),
    ):
        with pytest.raises(ValueError, match=f"^{what} {words}"):
            call()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="draft_vocab_size is 40, but 39 ids were given"):
        draft.set_draft_vocab(list(range(39)))
    chosen = torch.arange(0, 320, 8)
    draft.set_draft_vocab(chosen.flip(0))  # any order
    assert draft.draft_vocab_ids().tolist() == chosen.tolist()
    assert draft.t2d.nonzero()[:, 0].tolist() == chosen.tolist()
    assert draft.draft_to_target(torch.tensor([0, 39])).tolist() == [0, 312]
    torch.testing.assert_close(draft.lm_head.weight, target.lm_head.weight[chosen])
    assert draft(ids, features).logits.shape == (1, 5, 40)
    draft.save_pretrained(tmp_path)


def test_a_set_map_is_never_rebuilt(target, tmp_path):
    draft = Eagle3DraftModel.from_target(target, draft_vocab=list(range(0, 320, 4)))
    before = draft.state_dict()
    draft.save_pretrained(tmp_path)
    for head in (draft, Eagle3DraftModel.from_pretrained(tmp_path), copy.deepcopy(draft)):
        with pytest.raises(ValueError, match="already set"):
            head.set_draft_vocab(list(range(80)))
        assert torch.equal(head.d2t, before["d2t"])
    whole = Eagle3DraftModel.from_target(target)
    with pytest.raises(ValueError, match="already set"):
        whole.set_draft_vocab(list(range(320)))


@pytest.mark.parametrize("ids", [[3, 3, 5], [1, 2, 320], [-1, 2, 3]], ids=repr)
def test_bad_ids_leave_the_map_unset(target, ids):
    draft = Eagle3DraftModel.from_target(target, draft_vocab_size=3)
    with pytest.raises(ValueError, match=r"ids\[\d\] = "):
        draft.set_draft_vocab(ids)
    assert not draft.has_draft_vocab
    assert not draft.d2t.any()


def test_from_target_takes_ids_counts_a_size_or_nothing(target):
    make = Eagle3DraftModel.from_target
    assert make(target, [5, 1, 9]).draft_vocab_ids().tolist() == [1, 5, 9]
    assert make(target, torch.tensor([5, 1, 9]), 3).draft_vocab_ids().tolist() == [1, 5, 9]
    counts = torch.zeros(320, dtype=torch.int64)
    counts[[4, 8, 300]] = torch.tensor([5, 7, 9])
    assert make(target, counts, 3).draft_vocab_ids().tolist() == [0, 8, 300]  # 0 is the pad token, always kept
    assert make(target, None, 12).config.draft_vocab_size == 12
    whole = make(target)
    assert whole.config.draft_vocab_size == 320
    assert whole.draft_vocab_ids().tolist() == list(range(320))
    assert make(target, torch.arange(320)).has_draft_vocab
    with pytest.raises(ValueError, match="counts for 320 ids were given without draft_vocab_size"):
        make(target, counts)
    with pytest.raises(ValueError, match="draft_vocab_size is 4, but 3 ids were given"):
        make(target, [5, 1, 9], 4)
    with pytest.raises(ValueError, match=r"draft_vocab\[2\] = 320 is outside"):
        make(target, [5, 1, 320])
    with pytest.raises(ValueError, match="draft_vocab_size is 321"):
        make(target, counts, 321)


# ----- manners ------------------------------------------------------------------------------------------------------


def test_a_head_does_not_generate_alone():
    with pytest.raises(TypeError, match=r"target.generate\(..., assistant_model=draft\)"):
        new_head().generate(prompt(3))


def test_forward_with_labels_gives_the_weighted_loss_and_sums(target):
    draft, ids = head_for(target), prompt(10)
    labels = ids.clone()
    labels[0, :4] = -100
    count = 6  # u = 2..7
    teacher = torch.randn(count, DRAFT_VOCAB)
    known = torch.tensor([True, True, False, True, True, True])
    features = features_of(target, draft, ids)
    settings = TTTSettings(num_steps=3, step_decay=0.5)
    given = {"labels": labels, "teacher_logits": teacher, "teacher_in_vocab": known, "settings": settings}
    output = draft(ids, features, **given)
    supervision = Supervision.build(nn.functional.pad(labels[:, 2:] != -100, (0, 2)), teacher, known)
    steps = draft.training_time_test(ids, features, supervision, settings)
    expected = sum(0.5**s * float(step.loss_sum.detach()) for s, step in enumerate(steps))
    assert float(output.loss.detach()) == pytest.approx(expected / count, rel=1e-5)
    assert output.step_counts.tolist() == [6, 6, 6]
    assert output.step_hits.tolist() == [int(step.hits.sum()) for step in steps]
    assert output.logits is None
    scaled = draft(ids, features, **given, num_items_in_batch=torch.tensor(60))
    assert float(scaled.loss.detach()) == pytest.approx(expected / 60, rel=1e-5)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in draft.parameters())
