"""A path kept in a cache against a cache that only ever saw that path."""

import inspect

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaForCausalLM, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer

from eagle3_hf.decoding.target import kv_cache as tree_cache
from eagle3_hf.decoding.target import tree_attention
from eagle3_hf.decoding.target.kv_cache import finish, keep_paths, prepare, supported
from eagle3_hf.decoding.tree import DraftTree
from support.families import WINDOW, prompt, tiny


CACHE_KEY = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
HEADS, HEAD_DIM = 2, 3


@pytest.fixture
def tree_masks():
    ours = dict(tree_attention._installed)
    tree_attention.install()
    yield
    if not ours:
        tree_attention.uninstall()


def states(start, count):
    """Keys (or values) whose numbers name their token: slot s holds s everywhere."""
    return torch.arange(start, start + count, dtype=torch.float32).view(1, 1, -1, 1).expand(1, HEADS, -1, HEAD_DIM)


def slots(tensor):
    """The tokens a layer holds, after a check that all its heads agree."""
    assert (tensor == tensor[:, :1, :, :1]).all()
    return tensor[0, 0, :, 0].int().tolist()


def fill(cache, start, count):
    for layer in range(2):
        cache.update(states(start, count), states(start, count) + 1000, layer)


def keep_path(cache, past_length, nodes, num_nodes):
    """`keep_paths` for sequences that all keep the same nodes."""
    end = past_length + len(nodes)
    keep_paths(cache, [past_length], [nodes], num_nodes, [end], end)


def layers_of(kind):
    return [kind(), kind()]


def window_layer():
    return DynamicSlidingWindowLayer(sliding_window=6)


def dynamic_cache(kind):
    cache = DynamicCache()
    cache.layers = layers_of(kind)
    cache.layer_class_to_replicate = None
    return cache


PATHS = [[0], [0, 1, 2], [0, 2], [0, 1, 4], [0, 3, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize("nodes", PATHS)
@pytest.mark.parametrize("past", [1, 3, 9])
@pytest.mark.parametrize("kind", [DynamicLayer, window_layer])
def test_what_stays(kind, past, nodes):
    cache, plain = dynamic_cache(kind), dynamic_cache(kind)
    fill(cache, 0, past)
    fill(plain, 0, past)
    prepare(cache)
    kept_past = slots(cache.layers[0].keys)
    fill(cache, 100, 8)
    keep_path(cache, past, nodes, 8)
    finish(cache)
    for node in nodes:
        fill(plain, 100 + node, 1)

    window = 1000 if kind is DynamicLayer else 5
    expected = (kept_past + [100 + node for node in nodes])[-window:]
    for layer, reference in zip(cache.layers, plain.layers, strict=True):
        assert type(layer) is type(reference)
        assert slots(layer.keys) == slots(reference.keys) == expected
        assert slots(layer.values) == [token + 1000 for token in expected]
        assert layer.get_seq_length() == reference.get_seq_length() == past + len(nodes)
        assert layer.get_mask_sizes(3) == reference.get_mask_sizes(3)
        assert not getattr(layer, "record_past", False)


@pytest.mark.parametrize("nodes", PATHS)
def test_static_layers_keep_their_buffers(nodes):
    cache = DynamicCache()
    cache.layers = [StaticLayer(max_cache_len=20) for _ in range(2)]
    cache.layer_class_to_replicate = None
    fill(cache, 0, 4)
    addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    prepare(cache)
    fill(cache, 100, 8)
    keep_path(cache, 4, nodes, 8)
    finish(cache)
    for layer, address in zip(cache.layers, addresses, strict=True):
        expected = [0, 1, 2, 3, *(100 + node for node in nodes)]
        assert slots(layer.keys[:, :, : len(expected)]) == expected
        assert int(layer.get_seq_length()) == len(expected)
        assert (layer.keys.data_ptr(), layer.values.data_ptr()) == address
    # The next entries go right behind.
    fill(cache, 200, 1)
    assert slots(cache.layers[1].keys[:, :, len(expected) : len(expected) + 1]) == [200]


def test_rows_keep_their_own_states():
    cache = DynamicCache()
    both = torch.randn(2, HEADS, 9, HEAD_DIM)
    cache.update(both.clone(), both.clone(), 0)
    keep_path(cache, 4, [0, 2, 3], 5)
    expected = both[:, :, [0, 1, 2, 3, 4, 6, 7]]
    assert torch.equal(cache.layers[0].keys, expected)
    assert torch.equal(cache.layers[0].values, expected)


def test_layers_that_share_are_left_alone():
    dummy = getattr(tree_cache.cache_utils, "DummyLayer", None)
    if dummy is None:
        pytest.skip("this version of transformers has no layers that share entries")
    cache = dynamic_cache(DynamicLayer)
    fill(cache, 0, 3)
    cache.layers.append(dummy())
    prepare(cache)
    fill(cache, 100, 4)
    keep_path(cache, 3, [0, 2], 4)
    finish(cache)
    assert supported(cache) is None
    assert slots(cache.layers[1].keys) == [0, 1, 2, 100, 102]


def test_a_layer_that_never_ran_is_left_alone():
    cache = dynamic_cache(DynamicLayer)
    cache.update(states(0, 5), states(0, 5), 0)
    prepare(cache)
    keep_path(cache, 2, [0, 2], 3)
    finish(cache)
    assert slots(cache.layers[0].keys) == [0, 1, 2, 4]
    assert not cache.layers[1].is_initialized


@pytest.mark.parametrize("kind", [DynamicLayer, window_layer])
def test_wrong_lengths_name_both_numbers(kind):
    cache = dynamic_cache(kind)
    fill(cache, 0, 9)
    prepare(cache)
    fill(cache, 100, 4)
    with pytest.raises(ValueError, match=r"holds 13 entries.* 9 committed ones and 5 tree nodes make 14"):
        keep_path(cache, 9, [0], 5)


def test_finish_after_a_round_that_was_cut_short():
    """Interrupted between forward and `keep_path`: the cache is long, but evicts again."""
    cache = dynamic_cache(window_layer)
    fill(cache, 0, 9)
    prepare(cache)
    fill(cache, 100, 8)
    finish(cache)
    fill(cache, 200, 1)
    for layer in cache.layers:
        assert type(layer) is DynamicSlidingWindowLayer
        assert slots(layer.keys) == [104, 105, 106, 107, 200]


class ForeignLayer(DynamicLayer):
    """Stores who knows what besides."""


def with_layer(layer):
    cache = DynamicCache()
    cache.layers = [DynamicLayer(), layer]
    return cache


def library_layer(name, **arguments):
    kind = getattr(tree_cache.cache_utils, name, None)
    if kind is None:
        pytest.skip(f"this version of transformers has no {name}")
    return kind(**arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("LinearAttentionLayer", {}, "cannot follow several branches"),
        ("DynamicIndexedLayer", {}, "does not know"),
    ],
)
def test_unsupported_layers_are_named(name, arguments, reason):
    cache = with_layer(library_layer(name, **arguments))
    assert f"layer 1 is a {name}" in supported(cache)
    assert reason in supported(cache)


def test_unsupported_caches_are_named():
    assert "layer 1 is a ForeignLayer" in supported(with_layer(ForeignLayer()))
    with pytest.raises(ValueError, match="ForeignLayer"):
        keep_path(with_layer(ForeignLayer()), 0, [0], 1)
    assert "EncoderDecoderCache" in supported(EncoderDecoderCache(DynamicCache(), DynamicCache()))
    assert "NoneType" in supported(None)
    assert "tuple" in supported(())


def test_quantized_layers_are_named():
    # Without its constructor, which asks for the quantization library.
    layer = object.__new__(tree_cache.cache_utils.QuantoQuantizedLayer)
    assert "cannot be rolled back" in supported(with_layer(layer))


def test_ordinary_caches_are_supported():
    assert supported(DynamicCache()) is None
    for family in ("llama", "gemma3"):
        config = tiny(family, num_hidden_layers=3).config
        assert supported(DynamicCache(config=config)) is None
    assert supported(StaticCache(config=tiny("llama", num_hidden_layers=2).config, max_cache_len=10)) is None


def verify(model, cache, past, tree):
    with tree_attention.tree_attention(tree.ancestors, tree.depths, past):
        return model(tree.tokens, position_ids=past + tree.depths, **{CACHE_KEY: cache}).logits[0]


def assert_same_states(cache, plain):
    for layer, reference in zip(cache.layers, plain.layers, strict=True):
        assert layer.keys.shape == reference.keys.shape
        torch.testing.assert_close(layer.keys, reference.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer.values, reference.values, rtol=1e-4, atol=1e-4)
        assert layer.get_seq_length() == reference.get_seq_length()


PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5, 6, 7]
LEAVES = [8, 4, 0, 9]


@torch.no_grad()
@pytest.mark.parametrize("past", [WINDOW - 7, 30])
@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma2", "gemma3", "gpt_oss"])
def test_rounds_of_trees_equal_plain_decoding(family, past, tree_masks):
    """Rounds that keep one path each; the windows fill up on the way, or were full before."""
    model, ids = tiny(family, num_hidden_layers=3), prompt(past)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE_KEY: cache})
    prepare(cache)
    zeros = torch.zeros(1, len(PARENTS))
    for round_index, leaf in enumerate(LEAVES):
        tokens = prompt(len(PARENTS), seed=round_index)
        tree = DraftTree(tokens, torch.tensor([PARENTS]), torch.tensor([len(PARENTS)]), zeros, zeros)
        logits = verify(model, cache, ids.shape[1], tree)
        path = tree.path(0, leaf)
        keep_path(cache, ids.shape[1], path, len(PARENTS))
        ids = torch.cat((ids, tokens[:, path]), dim=1)
        expected = model(ids).logits[0, -len(path) :]
        assert (logits[path] - expected).abs().max() <= 2e-5 * expected.abs().max()
    finish(cache)

    plain = DynamicCache(config=model.config)
    model(ids, **{CACHE_KEY: plain})
    assert_same_states(cache, plain)
    # And both go on alike, one token at a time.
    for token in prompt(4, seed=99)[0].split(1):
        found, expected = (model(token[None], **{CACHE_KEY: held}).logits for held in (cache, plain))
        assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
    assert_same_states(cache, plain)


@torch.no_grad()
def test_rounds_in_a_static_cache(tree_masks):
    model, ids = tiny("llama", num_hidden_layers=2), prompt(5)
    cache = StaticCache(config=model.config, max_cache_len=60)
    model(ids, **{CACHE_KEY: cache})
    zeros = torch.zeros(1, len(PARENTS))
    for round_index, leaf in enumerate(LEAVES):
        tokens = prompt(len(PARENTS), seed=round_index)
        tree = DraftTree(tokens, torch.tensor([PARENTS]), torch.tensor([len(PARENTS)]), zeros, zeros)
        logits = verify(model, cache, ids.shape[1], tree)
        path = tree.path(0, leaf)
        keep_path(cache, ids.shape[1], path, len(PARENTS))
        ids = torch.cat((ids, tokens[:, path]), dim=1)
        expected = model(ids).logits[0, -len(path) :]
        assert (logits[path] - expected).abs().max() <= 2e-5 * expected.abs().max()
