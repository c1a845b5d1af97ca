"""Loading published heads, and what is said about folders that are none, are damaged, or would run code."""

import json
import logging
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, LlamaConfig

from eagle3_hf import DraftTree, Eagle3Candidate, Eagle3DraftConfig, Eagle3DraftModel
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.model.attention import CachedAttention, DraftCache
from eagle3_hf.model.tree_settings import TreeSettings
from eagle3_hf.published_formats import HeadFormatError
from eagle3_hf.ttt.attention import TTTAttention
from support.families import HIDDEN_SIZE, VOCAB_SIZE, prompt, tiny
from support.heads import DRAFT_VOCAB, new_head, published, write_folder


NARROW = {"hidden_size": 32, "head_dim": 8, "target_hidden_size": HIDDEN_SIZE, "own_embeddings": True}
WHOLE = {"draft_vocab_size": VOCAB_SIZE}
PUBLISHED = {
    "plain": {},
    "wide target": NARROW,
    "own embedding": {"own_embeddings": True},
    "whole vocabulary": WHOLE,
    "borrowed head": {**WHOLE, "own_lm_head": False},
    "one key head": {"num_key_value_heads": 1},
}
FILES = ["pytorch_model.bin", "model.safetensors"]
load = Eagle3DraftModel.from_pretrained


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=8)


def published_folder(folder: Path, file: str = "model.safetensors", **overrides) -> Path:
    return write_folder(folder, *published(new_head(target_layer_ids=None, **overrides)), file)


def refusal(folder, **kwargs) -> str:
    """The words of the HeadFormatError, without the folder's name."""
    with pytest.raises(HeadFormatError) as caught:
        load(folder, **kwargs)
    assert isinstance(caught.value, ValueError)
    assert str(folder) in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}: ").replace(str(folder), "FOLDER")


# ----- the reference's layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("overrides", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_published_layout_is_the_same_head(tmp_path, file, overrides):
    draft = new_head(target_layer_ids=None, **overrides)
    loaded = load(write_folder(tmp_path, *published(draft), file))
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in draft.state_dict().items())
    assert state.keys() == draft.state_dict().keys()
    assert loaded.has_draft_vocab
    for name in ("hidden_size", "target_hidden_size", "head_dim", "num_key_value_heads", "draft_vocab_size"):
        assert getattr(loaded.config, name) == getattr(draft.config, name)
    assert loaded.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (loaded.config.own_embeddings, loaded.config.own_lm_head) == (
        draft.config.own_embeddings,
        draft.config.own_lm_head,
    )
    assert loaded.dtype == torch.float32  # the file's; its config says float16
    assert not loaded.training


def test_published_layout_saved_again_is_our_own(tmp_path):
    draft = load(published_folder(tmp_path / "published"), target_layer_ids=[2, 4, 5])
    draft.save_pretrained(tmp_path / "own")
    names = load_file(tmp_path / "own" / "model.safetensors").keys()
    assert any(name.startswith("layers.0.") for name in names)
    assert not any(name.startswith("midlayer.") for name in names)
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("eagle3_draft", ["Eagle3DraftModel"])
    for again in (load(tmp_path / "own"), AutoModel.from_pretrained(tmp_path / "own")):
        assert torch.equal(again.layers[0].mlp.up_proj.weight, draft.layers[0].mlp.up_proj.weight)
        assert again.config.target_layer_ids == [2, 4, 5]


def test_subclasses_load_it_too(tmp_path):
    class Derived(Eagle3DraftModel):
        pass

    assert isinstance(Derived.from_pretrained(published_folder(tmp_path)), Derived)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_stay_half(tmp_path, dtype):
    config, tensors = published(new_head())
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    draft = load(write_folder(tmp_path, config, tensors))
    assert draft.dtype == dtype
    assert (draft.d2t.dtype, draft.t2d.dtype) == (torch.int64, torch.bool)
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32
    assert load(tmp_path, dtype="auto").dtype == dtype


def test_layer_ids_are_guessed_aloud_or_given(tmp_path, target, caplog):
    logging.Logger.warning_once.cache_clear()
    folder = published_folder(tmp_path)
    given = load(folder, target_layer_ids=[1, 3, 8]).bind(target)
    assert given.config.target_layer_ids == [1, 3, 8]
    assert not caplog.records
    guessed = load(folder)
    assert guessed.config.target_layer_ids is None
    guessed.bind(target)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"The config of {folder} names no target layers; the reference's rule for 8 layers is used: hidden_states "
        "indices [2, 4, 5]. If few drafts are accepted, load the head with target_layer_ids=[...]."
    )


def test_a_loaded_head_drafts_for_its_target(tmp_path, target):
    draft = load(published_folder(tmp_path, "pytorch_model.bin"), target_layer_ids=[2, 4, 5])
    plain = target.generate(prompt(6), max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(prompt(6), assistant_model=draft, max_new_tokens=12, do_sample=False), plain)


def test_config_fields_can_be_overridden(tmp_path):
    folder = published_folder(tmp_path / "a")
    rope = {"rope_type": "default", "rope_theta": 5e5}
    draft = load(folder, rope_parameters=rope, rms_norm_eps=1e-6, norm_before_residual=True)
    assert draft.config.rope_parameters == rope
    assert draft.config.rms_norm_eps == 1e-6
    assert draft.layers[0].norm_before_residual
    # A width that the published config forgot, too.
    config, tensors = published(new_head(**NARROW))
    del config["target_hidden_size"]
    folder = write_folder(tmp_path / "b", config, tensors)
    assert "or target_hidden_size or its layer ids" in refusal(folder)
    assert load(folder, target_hidden_size=HIDDEN_SIZE).config.target_hidden_size == HIDDEN_SIZE


@pytest.mark.parametrize(
    ("published_rope", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e6},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "rope_theta": 1.0, "rope_scaling": None},
            {"rope_type": "default", "rope_theta": 7e4},
        ),
    ],
)
def test_rope_of_published_configs(tmp_path, published_rope, expected):
    config, tensors = published(new_head())
    assert load(write_folder(tmp_path, {**config, **published_rope}, tensors)).config.rope_parameters == expected


def test_number_of_layers_is_counted_not_believed(tmp_path):
    config, tensors = published(new_head())
    assert load(write_folder(tmp_path, {**config, "num_hidden_layers": 36}, tensors)).config.num_hidden_layers == 1


@pytest.mark.parametrize("file", FILES)
def test_without_the_redundant_mask_it_is_rebuilt(tmp_path, file):
    draft = new_head()
    config, tensors = published(draft)
    del tensors["t2d"]
    loaded = load(write_folder(tmp_path, config, tensors, file))
    assert torch.equal(loaded.t2d, draft.t2d)
    assert torch.equal(loaded.d2t, draft.d2t)


def test_narrow_integers_and_old_buffers_are_no_obstacle(tmp_path):
    draft = new_head()
    config, tensors = published(draft)
    tensors["d2t"] = tensors["d2t"].int()
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    loaded = load(write_folder(tmp_path, config, tensors))
    assert loaded.d2t.dtype == torch.int64
    assert torch.equal(loaded.d2t, draft.d2t)
    assert torch.equal(loaded.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)


# ----- the reference's own numbers -----------------------------------------------------------------------------------


class OnlyConfig:
    """Stands for a target of which only the embedding and the config are known."""

    def __init__(self, target, embedding: torch.Tensor, width: int):
        self.config = target.config.__class__(**{**target.config.to_dict(), "hidden_size": width})
        self.embed = torch.nn.Embedding.from_pretrained(embedding)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return None


EAGLE_HEADS = {"base_bin_fp16": 64, "wide_target": 96}


@pytest.fixture(params=EAGLE_HEADS)
def eagle_head(request, shared):
    """A head written by the reference, a stand-in target, and inputs and outputs of the reference's own forward."""
    folder = shared / "heads" / "eagle-tiny" / request.param
    io = load_file(folder / "io.safetensors")
    like = tiny("llama", vocab_size=512)
    target = OnlyConfig(like, io["embed_tokens.weight"], EAGLE_HEADS[request.param])
    return load(folder, dtype=torch.float32, target_layer_ids=[2, 4, 5]), target, io


@torch.no_grad()
def test_reference_prefill_and_chain(eagle_head):
    draft, target, io = eagle_head
    borrowed, cache = draft.borrow(target), DraftCache(1)
    next_tokens = io["input_ids"]
    hidden = draft.run_layers(
        draft.fuse(io["features"]), borrowed.embed(next_tokens), io["position_ids_step0"], CachedAttention(cache)
    )
    torch.testing.assert_close(hidden, io["prefill_hidden_prenorm"], rtol=0, atol=2e-5)
    torch.testing.assert_close(draft.compute_logits(hidden), io["prefill_logits"], rtol=0, atol=2e-5)
    feature = hidden[:, -1:]
    for step in range(3):
        token = draft.draft_to_target(draft.compute_logits(feature).argmax(-1))
        assert token.tolist() == io["chain_tokens"][:, step : step + 1].tolist()
        position = io["chain_position_ids"][:, step : step + 1]
        feature = draft.run_layers(feature, borrowed.embed(token), position, CachedAttention(cache))
        torch.testing.assert_close(feature[:, 0], io["chain_hidden_prenorm"][:, step], rtol=0, atol=2e-5)
        logits = draft.compute_logits(feature)[:, 0]
        torch.testing.assert_close(logits, io["chain_logits"][:, step], rtol=0, atol=2e-5)


def test_reference_tree(eagle_head):
    draft, target, io = eagle_head
    nodes = io["tree_draft_tokens"].shape[1] - 1
    candidate = Eagle3Candidate(target, draft, TreeSettings(nodes, 4, 4))
    tree: DraftTree = candidate.draft_tree(DraftInputs(io["features"], io["input_ids"]))
    # The same nodes, in another order.
    order = torch.tensor(sorted(range(nodes + 1), key=lambda node: _path_of(tree.tokens[0], tree.ancestors[0], node)))
    tokens, mask = io["tree_draft_tokens"], io["tree_mask"][0, 0].bool()
    theirs = torch.tensor(sorted(range(nodes + 1), key=lambda node: _path_of(tokens[0], mask, node)))
    assert torch.equal(tree.tokens[:, order], tokens[:, theirs])
    assert torch.equal(tree.ancestors[0][order][:, order], mask[theirs][:, theirs])
    assert torch.equal(tree.depths[0][order], io["tree_position_ids"][theirs])


def _path_of(tokens: torch.Tensor, mask: torch.Tensor, node: int) -> list[int]:
    """The tokens from the root to a node: ancestors, in the order of their depths."""
    ancestors = mask[node].nonzero().flatten().tolist()
    return [int(tokens[each]) for each in sorted(ancestors, key=lambda each: int(mask[each].sum()))]


UNROLLED_HEADS = {
    **{f"specforge-tiny/{name}": {} for name in ("base", "full_vocab", "llama3", "with_embed_wide_target")},
    # Written by a SpecForge whose `norm_output: true` fed the un-normed output back; the warning names the override.
    "specforge-tiny/eagle31": {"norm_output": False},
    **{f"speculators-tiny/{name}": {} for name in ("base", "eagle31", "nbr_nbfc", "qwen3arch", "two_layers")},
}


@torch.no_grad()
@pytest.mark.parametrize(("name", "override"), UNROLLED_HEADS.items(), ids=UNROLLED_HEADS)
def test_other_libraries_heads_give_their_own_outputs(shared, name, override):
    """Three steps of training-time test, as the library that wrote the head ran them."""
    folder = shared / "heads" / name
    io, draft = load_file(folder / "io.safetensors"), load(folder, **override)
    embed = (
        draft.embed_tokens if draft.config.own_embeddings else nn.Embedding.from_pretrained(io["embed_tokens.weight"])
    )
    rows = torch.arange(io["features"].shape[1])[None]
    attend, hidden = TTTAttention(rows), draft.fuse(io["features"])
    for step, ids in enumerate(io["ids_used_per_step"]):
        attend.step = step
        output = draft.run_layers(hidden, embed(ids), io["position_ids_step0"] + step, attend)
        torch.testing.assert_close(output, io["hidden_prenorm_per_step"][step], rtol=2e-6, atol=2e-5)
        torch.testing.assert_close(draft.compute_logits(output), io["logits_per_step"][step], rtol=0, atol=2e-5)
        hidden = draft.feedback(output)


# ----- other heads and other models ----------------------------------------------------------------------------------


SUPPORTED = "EAGLE-3 heads have `fc.weight` and a layer that reads [embedding, feature] (`midlayer.*`, `layers.0.*`)."


@pytest.mark.parametrize("key", ["fc_norm", "norm_before_fc", "norm_before_residual", "eagle_config", "dflash_config"])
def test_switched_off_they_mean_nothing(tmp_path, key):
    config, tensors = published(new_head())
    plain = load(write_folder(tmp_path / "plain", config, tensors))
    off = {**config, key: None if key.endswith("_config") else False}
    assert load(write_folder(tmp_path / "off", off, tensors)).config.to_diff_dict() == plain.config.to_diff_dict()


def renamed(tensors: dict, old: str, new: str) -> dict:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("new", ["layers.0.", "midlayer.0.", "model.layers.0.", "model.midlayer."])
def test_the_layers_name_does_not_matter(tmp_path, new):
    draft = new_head()
    config, tensors = published(draft)
    loaded = load(write_folder(tmp_path, config, renamed(tensors, "midlayer.", new)))
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in draft.state_dict().items())


def test_two_names_for_one_tensor(tmp_path):
    config, tensors = published(new_head())
    tensors["layers.0.hidden_norm.weight"] = torch.ones(64)
    assert refusal(write_folder(tmp_path, config, tensors)) == (
        "its tensors layers.0.hidden_norm.weight and midlayer.hidden_norm.weight are two of the same kind "
        "(layers.0.hidden_norm.weight)"
    )


def test_first_generation_head(tmp_path):
    """EAGLE-1 and 2: one feature beside the embedding, `fc` with a bias, an ordinary layer, the target's head."""
    config, _ = published(new_head())
    del config["draft_vocab_size"]
    tensors = {
        "fc.weight": torch.zeros(64, 128),
        "fc.bias": torch.zeros(64),
        "embed_tokens.weight": torch.zeros(320, 64),
        "layers.0.self_attn.q_proj.weight": torch.zeros(64, 64),
        "layers.0.mlp.up_proj.weight": torch.zeros(96, 64),
    }
    assert "an EAGLE-1/EAGLE-2 head or an unknown format" in refusal(write_folder(tmp_path / "a", config, tensors))
    config, tensors = published(new_head())
    tensors["fc.weight"] = tensors["fc.weight"][:, :128].clone()
    assert refusal(write_folder(tmp_path / "b", config, tensors)) == (
        "fc.weight reads 128 features, but 3 layers of a target of width 64 give 192: this is not an EAGLE-3 head "
        "(an EAGLE-1/2 head reads one layer), or target_hidden_size or its layer ids "
        "(eagle_aux_hidden_state_layer_ids) are missing from its config; load it with target_hidden_size= or "
        "target_layer_ids=[...]"
    )


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "sharded"])
def test_an_ordinary_model(tmp_path, target, shards):
    target.save_pretrained(tmp_path, max_shard_size="100KB" if shards else "1GB")
    assert refusal(tmp_path) == (
        f"this is an ordinary model with {len(target.state_dict())} tensors, not an EAGLE-3 draft head: no "
        f"`fc.weight` (the config says ['LlamaForCausalLM']). {SUPPORTED}"
    )


def test_an_ordinary_models_shards_are_not_even_opened(tmp_path, target):
    target.save_pretrained(tmp_path, max_shard_size="100KB")
    for shard in tmp_path.glob("model-*.safetensors"):
        shard.unlink()
    assert refusal(tmp_path).startswith("this is an ordinary model with ")


def test_something_else_altogether(tmp_path):
    folder = write_folder(tmp_path, {"model_type": "vae"}, {"decoder.weight": torch.zeros(2, 2)})
    assert refusal(folder).startswith("no EAGLE-3 tensors (`fc.weight`, `midlayer.*`) among its 1 tensors (the config")


def test_a_head_opened_under_the_wrong_class_is_refused_by_generate(tmp_path, target):
    """AutoModel makes a random Llama of it, with no more than a table of what did not fit."""
    wrong = AutoModel.from_pretrained(published_folder(tmp_path))
    assert not isinstance(wrong, Eagle3DraftModel)
    with pytest.raises(ValueError, match=r"LlamaModel .* opened under the wrong class.*Eagle3DraftModel.from_pretr"):
        target.generate(prompt(4), assistant_model=wrong, max_new_tokens=4)


def test_another_models_config(tmp_path):
    with pytest.raises(ValueError, match="config must be an Eagle3DraftConfig, got a LlamaConfig"):
        load(published_folder(tmp_path), config=LlamaConfig())


# ----- tensors that do not add up ------------------------------------------------------------------------------------


def names_of(**overrides) -> list[str]:
    return sorted(published(new_head(**overrides))[1])


@pytest.mark.parametrize("own", [False, True], ids=["published", "own"])
@pytest.mark.parametrize("name", [name for name in names_of(**NARROW) if name not in ("d2t", "t2d")])
def test_every_missing_tensor_is_named(tmp_path, name, own):
    draft = new_head(**NARROW)
    config, tensors = published(draft)
    if own:
        draft.save_pretrained(tmp_path)
        config, tensors = None, {k: t.clone() for k, t in draft.state_dict().items()}
        name = name.replace("midlayer.", "layers.0.")
    del tensors[name]
    message = refusal(write_folder(tmp_path, config, tensors))
    assert message.startswith("missing tensors [")
    renamed_name = name.replace("midlayer.", "layers.0.")
    assert (f"['{name}']" if own or name == renamed_name else f"['{name} ({renamed_name})']") in message


STRAYS = {
    "fc.bias": "fc.bias has shape (16,) in the file, but the config makes it (64,)",
    "input_norm.weight": "it has a tensor input_norm.weight, but its config does not say `norm_before_fc: true`; if "
    "it was trained with that norm, load it with norm_before_fc=True",
    "fc_norm.0.weight": "it has a tensor fc_norm.0.weight, but its config does not say `fc_norm: true`; if it was "
    "trained with that norm, load it with fc_norm=True",
    "midlayer.self_attn.q_norm.weight": "missing tensors ['midlayer.self_attn.k_norm.weight (layers.0.self_attn.k_n",
    "midlayer.self_attn.v_proj.bias": "missing tensors ['midlayer.self_attn.k_proj.bias (layers.0.self_attn.k_proj.",
    "midlayer.mlp.up_proj.bias": "tensors that no part of an EAGLE-3 head uses: ['midlayer.mlp.up_proj.bias']",
    "verifier_norm": "tensors that no part of an EAGLE-3 head uses: ['verifier_norm']",
    "layers.2.input_layernorm.weight": "its draft layers are numbered [0, 2]: layer 1 is missing",
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(("extra", "words"), STRAYS.items(), ids=STRAYS)
def test_every_extra_tensor_is_named(tmp_path, extra, words, file):
    config, tensors = published(new_head())
    tensors[extra] = torch.zeros(16)
    assert refusal(write_folder(tmp_path, config, tensors, file)).startswith(words)


@pytest.mark.parametrize("extra", ["verifier_norm.weight", "verifier_lm_head.weight", "model.rotary_emb.inv_freq"])
def test_what_only_a_trainer_needs_is_left_out(tmp_path, extra, messages):
    config, tensors = published(new_head())
    tensors[extra] = torch.zeros(16)
    draft = load(write_folder(tmp_path, config, tensors))
    assert messages() == []
    assert not any("verifier" in name for name in draft.state_dict())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(tmp_path, value):
    config, tensors = published(new_head())
    tensors["midlayer.mlp.up_proj.weight"][3, 4] = value
    name = "midlayer.mlp.up_proj.weight (layers.0.mlp.up_proj.weight)"
    words = f"NaN or infinity in ['{name}']: its training broke, or the file is corrupt"
    assert refusal(write_folder(tmp_path, config, tensors)) == words


def test_several_faults_are_told_at_once(tmp_path):
    draft = new_head()
    draft.save_pretrained(tmp_path)
    tensors = {name: t.clone() for name, t in draft.state_dict().items()}
    del tensors["norm.weight"]
    tensors["foo"], tensors["fc.weight"] = torch.zeros(1), torch.zeros(64, 128)
    assert refusal(write_folder(tmp_path, None, tensors)) == (
        "missing tensors ['norm.weight']: these would stay random; tensors that no part of an EAGLE-3 head uses: "
        "['foo']; fc.weight has shape (64, 128) in the file, but the config makes it (64, 192)"
    )


def test_mismatched_shapes_are_an_error_even_if_allowed(tmp_path):
    config, tensors = published(new_head())
    tensors["midlayer.mlp.up_proj.weight"] = torch.zeros(95, 64)
    name = "midlayer.mlp.up_proj.weight (layers.0.mlp.up_proj.weight)"
    words = f"{name} has shape (95, 64) in the file, but the config makes it (96, 64)"
    assert refusal(write_folder(tmp_path, config, tensors)) == words
    assert refusal(tmp_path, ignore_mismatched_sizes=True) == words


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 32, "its config says hidden_size 32, but its tensors are made for 64"),
        ("intermediate_size", 128, "its config says intermediate_size 128, but its tensors are made for 96"),
        ("num_key_value_heads", 4, "its config says num_key_value_heads 4, but its tensors are made for 2"),
        ("num_attention_heads", 8, "its config says num_key_value_heads 2, but its tensors are made for 4"),
        ("head_dim", 32, "its config says head_dim 32, but its tensors are made for 16"),
        ("draft_vocab_size", 100, "its config says draft_vocab_size 100, but its tensors are made for 128"),
        ("vocab_size", 512, "its config says vocab_size 512, but t2d has shape (320,)"),
        ("vocab_size", 10**15, "its config says vocab_size 1000000000000000, but t2d has shape (320,)"),
        ("vocab_size", None, "its config must have `vocab_size`, an integer of at least 1; it says None"),
        ("vocab_size", "320", "its config must have `vocab_size`, an integer of at least 1; it says '320'"),
        (
            "num_attention_heads",
            4.0,
            "its config must have `num_attention_heads`, an integer of at least 1; it says 4.0",
        ),
        (
            "num_attention_heads",
            None,
            "its config must have `num_attention_heads`, an integer of at least 1; it says N",
        ),
        ("num_attention_heads", 3, "q_proj.weight) has 64 rows, which is not a multiple of num_attention_heads 3"),
        ("num_attention_heads", 128, "q_proj.weight) has 64 rows, which is not a multiple of num_attention_heads 128"),
        (
            "target_hidden_size",
            "wide",
            "its config must have `target_hidden_size`, an integer of at least 1; it says 'w",
        ),
        ("target_hidden_size", 128, "but 3 layers of a target of width 128 give 384"),
        ("rms_norm_eps", "small", "rms_norm_eps must be a finite number above 0, got 'small'"),
        (
            "hidden_act",
            "nonsense",
            "hidden_act must be the name of an activation function of transformers, got 'nonsense'",
        ),
        (
            "hidden_act",
            {"a": 1},
            "hidden_act must be the name of an activation function of transformers, got {'a': 1}",
        ),
        (
            "max_position_embeddings",
            "long",
            "max_position_embeddings must be an integer from 1 to 2147483647, got 'long'",
        ),
        ("rope_scaling", "linear", "its config's rope_scaling must be a dict, got 'linear'"),
        ("rope_scaling", {"type": "su-scaled"}, "rope_type 'su-scaled' is unknown; known: default, dynamic, linear"),
        (
            "rope_scaling",
            {"type": "linear"},
            "Missing required keys in `rope_parameters` for 'rope_type'='linear': {'f",
        ),
    ],
)
def test_configs_that_contradict_the_tensors_or_make_no_sense(tmp_path, field, value, words):
    config, tensors = published(new_head())
    assert words in refusal(write_folder(tmp_path, {**config, field: value}, tensors))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", "64", "hidden_size must be an integer from 1 to 2147483647, got '64'"),
        ("norm_output", "no", "norm_output must be True or False, got 'no'"),
        ("target_layer_ids", "1,2,4", "must be ascending, distinct hidden_states indices"),
        ("draft_vocab_size", 500, "draft_vocab_size (500) is larger than the target's vocab_size (320)"),
        (
            "intermediate_size",
            50,
            "layers.0.mlp.down_proj.weight has shape (64, 96) in the file, but the config makes",
        ),
        ("num_hidden_layers", 2, "its config says num_hidden_layers 2, but it has tensors of 1 layers"),
        ("qk_norm", True, "missing tensors ['layers.0.self_attn.k_norm.weight', 'layers.0.self_attn.q_norm.weight']"),
    ],
)
def test_own_configs_of_the_wrong_kind(tmp_path, field, value, words):
    new_head().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert words in refusal(write_folder(tmp_path, {**config, field: value}, None))


def test_quantised_weights(tmp_path):
    config, tensors = published(new_head())
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.float8_e4m3fn)
    words = "quantised heads are not supported, use the original one"
    assert words in refusal(write_folder(tmp_path, config, tensors))
    tensors["fc.weight"] = torch.zeros(64, 192, dtype=torch.int8)
    assert refusal(write_folder(tmp_path, config, tensors)) == f"fc.weight has dtype int8: {words}"


# ----- the draft vocabulary ------------------------------------------------------------------------------------------


def with_map(folder: Path, change) -> Path:
    config, tensors = published(new_head())
    change(tensors)
    return write_folder(folder, config, tensors)


def without_lm_head(tensors):
    del tensors["lm_head.weight"]


def without_map(tensors):
    del tensors["d2t"]


def zeros(tensors):
    tensors["d2t"].zero_()


def too_far(tensors):
    tensors["d2t"][5] = 400


def absolute(tensors):
    tensors["d2t"] += torch.arange(DRAFT_VOCAB)


def twice(tensors):
    tensors["d2t"][7] = tensors["d2t"][6] - 1


def stale_mask(tensors):
    member = int(tensors["t2d"].nonzero()[0])
    other = int((~tensors["t2d"]).nonzero()[0])
    tensors["t2d"][member], tensors["t2d"][other] = False, True


def short_mask(tensors):
    tensors["t2d"][int(tensors["t2d"].nonzero()[0])] = False


def floats(tensors):
    tensors["d2t"] = tensors["d2t"].half()


def too_short(tensors):
    tensors["d2t"] = tensors["d2t"][:-1].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            without_map,
            "draft vocabulary without a map: the head has 128 of 320 tokens and no `d2t` tensor that says wh",
        ),
        (
            without_lm_head,
            "missing tensors ['lm_head.weight']: a head with a draft vocabulary of 128 tokens cannot borrow",
        ),
        (zeros, "d2t is all zero although the draft vocabulary (128) is smaller than the target's (320)"),
        (too_far, "d2t[5] = 400 maps draft id 5 to target id 405, outside 0..319 (1 such entries)"),
        (twice, "d2t is not one-to-one: draft ids 6 and 7 both map to target id"),
        (stale_mask, "which t2d does not mark (1 such ids); one of the two is stale"),
        (short_mask, "t2d marks 127 tokens, but d2t maps 128; one of the two is stale"),
        (floats, "d2t must hold integer offsets, got float16, which rounds them"),
        (too_short, "d2t has shape (127,) in the file, but the config makes it (128,)"),
    ],
)
def test_maps_that_mean_nothing(tmp_path, change, words):
    assert words in refusal(with_map(tmp_path, change))


@pytest.mark.parametrize("mask", [True, False], ids=["with t2d", "without"])
def test_absolute_ids_are_recognised_aloud(tmp_path, caplog, mask):
    draft = new_head()

    def change(tensors):
        absolute(tensors)
        if not mask:
            del tensors["t2d"]

    loaded = load(with_map(tmp_path, change))
    assert torch.equal(loaded.d2t, draft.d2t)
    assert torch.equal(loaded.t2d, draft.t2d)
    assert "its d2t holds target ids instead of offsets; they were converted" in caplog.text


def test_whole_vocabulary_with_an_identity_map(tmp_path):
    config, tensors = published(new_head(**WHOLE))
    tensors["d2t"], tensors["t2d"] = torch.zeros(320, dtype=torch.int64), torch.ones(320, dtype=torch.bool)
    assert load(write_folder(tmp_path, config, tensors)).draft_vocab_ids().tolist() == list(range(320))


# ----- damaged and dangerous files -----------------------------------------------------------------------------------


DAMAGE = {
    "empty": lambda content: b"",
    "cut in the header": lambda content: content[:40],
    "cut in the data": lambda content: content[: len(content) * 2 // 3],
    "a web page": lambda content: b"<html>not found</html>",
    "noise": lambda content: bytes(range(256)) * 100,
    "a broken header": lambda content: bytes(8) + content[8:],
}


@pytest.mark.parametrize("own", [False, True], ids=["published", "own"])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_weights(tmp_path, damage, file, own):
    draft = new_head()
    config, tensors = published(draft)
    if own:
        draft.save_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
    path = write_folder(tmp_path, None if own else config, tensors, file) / file
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(tmp_path)
    assert f"FOLDER/{file} cannot be read as a weights file (" in message
    assert "It is truncated, corrupt, or holds code instead of plain tensors (never executed)." in message
    with pytest.raises(HeadFormatError):
        AutoModel.from_pretrained(tmp_path) if own else load(tmp_path, config=Eagle3DraftConfig())


class Bomb:
    """Unpickled, it would create a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("writer", ["torch", "pickle"])
@pytest.mark.parametrize("where", ["a value", "the whole file", "beside the weights"])
def test_a_pickle_with_code_is_refused_and_never_executed(tmp_path, writer, where):
    config, tensors = published(new_head())
    folder = write_folder(tmp_path / "head", config, None)
    bomb = Bomb(tmp_path / "executed")
    content = {"a value": {**tensors, "norm.weight": bomb}, "beside the weights": {**tensors, "x": bomb}}.get(
        where, bomb
    )
    if writer == "torch":
        torch.save(content, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    for kwargs in ({}, {"weights_only": False}, {"trust_remote_code": True}, {"config": Eagle3DraftConfig()}):
        assert "holds code instead of plain tensors (never executed)" in refusal(folder, **kwargs)
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(bomb))
    assert (tmp_path / "executed").exists()  # it would have


def test_code_beside_the_weights_is_not_run(tmp_path):
    config, tensors = published(new_head())
    config["auto_map"] = {"AutoConfig": "trap.Config", "AutoModel": "trap.Model"}
    folder = write_folder(tmp_path / "head", config, tensors)
    (folder / "trap.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\n")
    load(folder, trust_remote_code=True)
    assert not (tmp_path / "executed").exists()


def test_a_training_checkpoint_is_not_taken_for_weights(tmp_path):
    config, tensors = published(new_head())
    folder = write_folder(tmp_path, config, {"module": tensors, "global_steps": 3}, "pytorch_model.bin")
    assert refusal(folder) == (
        "FOLDER/pytorch_model.bin holds ['module', 'global_steps'] that are not tensors: a training checkpoint, not "
        "the weights of a head"
    )


def test_the_file_format_of_old_torch_versions_loads(tmp_path):
    draft = new_head()
    config, tensors = published(draft)
    torch.save(
        tensors, write_folder(tmp_path, config, None) / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    assert torch.equal(load(tmp_path).fc.weight, draft.fc.weight)


@pytest.mark.parametrize(
    ("present", "words"),
    [
        (
            {"config.json"},
            "FOLDER has neither model.safetensors nor pytorch_model.bin: not a draft head, or an interru",
        ),
        ({"model.safetensors"}, "FOLDER has no config.json: not a draft head, or an interrupted download"),
        (set(), "FOLDER has no config.json: not a draft head, or an interrupted download"),
    ],
)
def test_interrupted_download(tmp_path, present, words):
    folder = published_folder(tmp_path)
    (folder / "model.safetensors.incomplete").write_bytes(b"half")
    for file in list(folder.iterdir()):
        if file.name not in present and not file.name.endswith("incomplete"):
            file.unlink()
    assert words in refusal(folder)


def test_sharded_head_and_its_missing_shard(tmp_path):
    draft = new_head()
    draft.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert torch.equal(load(tmp_path).fc.weight, draft.fc.weight)
    shards[1].unlink()
    assert refusal(tmp_path) == f"FOLDER lacks {shards[1].name}, which its index names: an interrupted download"
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json has no `weight_map`: corrupt, download it again" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "FOLDER/config.json is not JSON ("),
        ('{"hidden_size": 64, ', "corrupt or truncated, download it again"),
        ("[1, 2]", "FOLDER/config.json must hold a JSON object, it holds a list"),
        ("{}", "its config must have `vocab_size`, an integer of at least 1; it says None"),
        ("\xff\xfe", "FOLDER/config.json is not JSON ("),
    ],
)
def test_damaged_config(tmp_path, content, words):
    folder = published_folder(tmp_path)
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    assert words in refusal(folder)


def test_a_folder_of_checkpoints_is_told_apart(tmp_path):
    for step in (90, 1000):
        published_folder(tmp_path / f"checkpoint-{step}")
    assert refusal(tmp_path).endswith(
        "it holds checkpoints of a training run; pass one of them, such as FOLDER/checkpoint-1000"
    )


def test_a_folder_of_adapters_is_told_apart(tmp_path):
    """`eagle3-hf train --lora_r` leaves such a one; its checkpoints hold adapters too."""
    published_folder(tmp_path / "checkpoint-90")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert refusal(tmp_path).endswith(
        "it holds adapters of a head; pass the head with them merged in (merge_and_unload of peft)"
    )
    published_folder(tmp_path / "merged")
    assert refusal(tmp_path).endswith("it holds adapters of a head; pass the head with them merged in, FOLDER/merged")


def test_paths_that_are_no_folder(tmp_path):
    folder = published_folder(tmp_path)
    file = folder / "model.safetensors"
    assert refusal(file) == "FOLDER is a file: pass the folder that holds the head's config.json and weights"
    # Not a matter of the format: transformers' own words for what it cannot reach.
    for path in (tmp_path / "nothing", "somebody/no-such-head"):
        with pytest.raises(OSError, match="is neither a local folder nor a Hub id|is no local folder|connect"):
            load(path)


# ----- what from_pretrained passes on --------------------------------------------------------------------------------


def test_attention_implementation_and_device_map(tmp_path):
    folder = published_folder(tmp_path)
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert load(folder).config._attn_implementation == "sdpa"
    assert load(folder, device_map="cpu").device.type == "cpu"
    with pytest.raises(ValueError, match="(?i)flash"):
        load(folder, attn_implementation="flash_attention_2")


def test_loading_info_on_request(tmp_path):
    draft, info = load(published_folder(tmp_path), output_loading_info=True)
    assert isinstance(draft, Eagle3DraftModel)
    assert not info["missing_keys"]
    assert draft.generation_config.assistant_tree_depth is None


def test_config_given(tmp_path):
    draft = new_head()
    draft.save_pretrained(tmp_path)
    config = Eagle3DraftConfig.from_pretrained(tmp_path)
    config.target_layer_ids = [0, 1, 2]
    assert load(tmp_path, config=config).config.target_layer_ids == [0, 1, 2]
    elsewhere = shutil.copytree(tmp_path, tmp_path / "elsewhere")
    (tmp_path / "config.json").unlink()
    assert load(tmp_path, config=str(elsewhere)).config.target_layer_ids == [1, 2, 4]


def test_subfolder_and_variant(tmp_path):
    draft = new_head()
    draft.save_pretrained(tmp_path / "deep", variant="fp16")
    assert (tmp_path / "deep" / "model.fp16.safetensors").is_file()
    assert torch.equal(load(tmp_path, subfolder="deep", variant="fp16").fc.weight, draft.fc.weight)


def test_preference_between_two_files(tmp_path):
    draft, other = new_head(), new_head(seed=1)
    folder = write_folder(tmp_path, *published(draft), "model.safetensors")
    write_folder(folder, None, published(other)[1], "pytorch_model.bin")
    assert torch.equal(load(folder).fc.weight, draft.fc.weight)
    assert torch.equal(load(folder, use_safetensors=True).fc.weight, draft.fc.weight)
    assert torch.equal(load(folder, use_safetensors=False).fc.weight, other.fc.weight)
    (folder / "model.safetensors").unlink()
    assert "FOLDER has neither model.safetensors: not a" in refusal(folder, use_safetensors=True)


def test_unknown_keywords_are_refused(tmp_path):
    with pytest.raises(TypeError, match="no_such_argument"):
        load(published_folder(tmp_path), no_such_argument=1)


# ----- silence -------------------------------------------------------------------------------------------------------


@pytest.fixture
def messages():
    """What the libraries log and warn while a test runs."""

    class Keep(logging.Handler):
        lines: list[str] = []

        def emit(self, record):
            self.lines.append(record.getMessage())

    keep = Keep(level=logging.WARNING)
    keep.lines = []
    loggers = [logging.getLogger(), logging.getLogger("transformers"), logging.getLogger("eagle3_hf")]
    for logger in loggers:
        logger.addHandler(keep)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: keep.lines + [str(warning.message) for warning in caught]
    for logger in loggers:
        logger.removeHandler(keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_heads_load_draft_and_save_without_a_word(tmp_path, target, messages, dtype):
    draft = Eagle3DraftModel.from_target(target, draft_vocab=list(range(0, 320, 2)))
    draft.to(dtype).save_pretrained(tmp_path)
    target.generate(prompt(5), max_new_tokens=6, do_sample=False)
    for loaded in (load(tmp_path), AutoModel.from_pretrained(tmp_path)):
        for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7}):
            target.generate(prompt(5), assistant_model=loaded, max_new_tokens=6, **settings)
        loaded.save_pretrained(tmp_path / "again")
    assert messages() == []


@pytest.mark.parametrize("file", FILES)
def test_published_heads_load_without_a_word_when_their_layers_are_given(tmp_path, target, messages, file):
    draft = load(published_folder(tmp_path, file), target_layer_ids=[2, 4, 5])
    target.generate(prompt(5), assistant_model=draft, max_new_tokens=6, do_sample=False)
    assert messages() == []


def test_first_lines_of_the_readme_print_nothing_but_progress(fresh):
    assert fresh.found["first_lines"] == 3 + 8
    assert fresh.stdout["first_lines"] == ""
    lines = [line for line in fresh.stderr["first_lines"].replace("\r", "\n").splitlines() if line.strip()]
    assert [line for line in lines if not line.startswith("Loading weights:")] == []
