"""A tree in one forward against each of its paths alone, on real models; and what the wrappers leave alone."""

import inspect
import threading

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask, sliding_window_overlay

from eagle3_hf.decoding.target import tree_attention
from eagle3_hf.decoding.tree import DraftTree
from support.families import FAMILIES, WINDOW, prompt, tiny


CACHE_KEY = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
NODES = 10


@pytest.fixture(autouse=True)
def installed():
    """Our wrappers on top during a test, and afterwards what was there before it."""
    mapping = AttentionMaskInterface._global_mapping
    before, ours = dict(mapping), dict(tree_attention._installed)
    tree_attention.install()
    yield
    mapping.clear()
    mapping.update(before)
    tree_attention._installed.clear()
    tree_attention._installed.update(ours)


def random_tree(size=NODES, seed=0, rows=1):
    generator = torch.Generator().manual_seed(seed)
    parents = [[-1] + [int(torch.randint(max(0, i - 4), i, (), generator=generator)) for i in range(1, size)]]
    parents *= rows
    tokens = torch.stack([torch.randperm(300, generator=generator)[:size] + 1 for _ in range(rows)])
    zeros = torch.zeros(rows, size)
    return DraftTree(tokens, torch.tensor(parents), torch.full((rows,), size), zeros, zeros)


def deep_tree(size=NODES):
    """A chain longer than the window would hold beside a second branch at the root."""
    parents = torch.tensor([[-1, *range(size - 2), 0]])
    zeros = torch.zeros(1, size)
    return DraftTree(prompt(size, seed=9), parents, torch.tensor([size]), zeros, zeros)


@torch.no_grad()
def tree_logits(model, ids, tree, cache=None, with_mask=True):
    """Logits `(N, V)` of all nodes in one forward over the prefix `ids`."""
    past = ids.shape[1]
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids, **{CACHE_KEY: cache})
    arguments = {"position_ids": past + tree.depths, CACHE_KEY: cache}
    if not with_mask:
        return model(tree.tokens, **arguments).logits[0]
    with tree_attention.tree_attention(tree.ancestors, tree.depths, past) as active:
        assert not active.used
        logits = model(tree.tokens, **arguments).logits[0]
    assert active.used
    return logits


@torch.no_grad()
def path_logits(model, ids, tree):
    """The same, each path alone behind the prefix and without any cache."""
    parents = tree.host()[0].parents
    logits = [None] * len(parents)
    for leaf in set(range(len(parents))) - set(parents):
        path = tree.path(0, leaf)
        row = model(torch.cat((ids, tree.tokens[:, path]), dim=1)).logits[0, ids.shape[1] :]
        for node, found in zip(path, row, strict=True):
            logits[node] = found
    return torch.stack(logits)


def assert_close(found, expected):
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("past", [5, WINDOW - 1, WINDOW, WINDOW + 1, 30])
@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma2", "gemma3", "gpt_oss"])
def test_every_node_sees_its_path(family, past):
    model, ids = tiny(family, num_hidden_layers=3), prompt(past)
    for tree in (random_tree(seed=past), deep_tree(WINDOW + 4)):
        expected = path_logits(model, ids, tree)
        assert_close(tree_logits(model, ids, tree), expected)
        # Negative control: what follows would pass on any logits if this did.
        assert not torch.allclose(tree_logits(model, ids, tree, with_mask=False), expected, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family, seed):
    model, ids, tree = tiny(family), prompt(4 + 7 * seed, seed), random_tree(24, seed)
    assert_close(tree_logits(model, ids, tree), path_logits(model, ids, tree))


@pytest.mark.parametrize("family", ["mistral_sw", "gpt_oss"])
def test_static_cache_hides_the_slots_behind_the_tree(family):
    # A static window overwrites what lies beyond it, so this one is longer than the cache.
    model, ids, tree = tiny(family, num_hidden_layers=3, sliding_window=64), prompt(7), random_tree()
    cache = StaticCache(config=model.config, max_cache_len=40)
    assert_close(tree_logits(model, ids, tree, cache), path_logits(model, ids, tree))


def test_a_padded_tree_changes_no_real_node():
    model, ids, tree = tiny("gemma3", num_hidden_layers=3), prompt(20), random_tree(6)
    pad = torch.nn.functional.pad
    padded = DraftTree(pad(tree.tokens, (0, 3)), pad(tree.parents, (0, 3)), tree.num_nodes, *[torch.zeros(1, 9)] * 2)
    logits = tree_logits(model, ids, padded)
    assert logits.isfinite().all()
    assert_close(logits[:6], tree_logits(model, ids, tree))


def mask_of(interface, tree, past, offset=0, slack=0, **arguments):
    size = tree.tokens.shape[1]
    with tree_attention.tree_attention(tree.ancestors, tree.depths, past):
        return AttentionMaskInterface._global_mapping[interface](
            batch_size=tree.tokens.shape[0],
            q_length=size,
            kv_length=int(torch.as_tensor(past).max()) - offset + size + slack,
            q_offset=int(torch.as_tensor(past).max()),
            kv_offset=offset,
            **arguments,
        )


WINDOWED = {"mask_function": lambda b, h, q, kv: (kv <= q) & (kv > q - 8)}


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("arguments", [{}, WINDOWED])
def test_mask_against_a_mask_by_hand(arguments, offset):
    tree, past = random_tree(), 11
    mask = mask_of("sdpa", tree, past, offset=offset, slack=3, **arguments)
    assert mask.shape == (1, 1, NODES, past - offset + NODES + 3)
    reach = 8 if arguments else 1000
    for node in range(NODES):
        path = tree.path(0, node)
        position = past + len(path) - 1
        seen = [slot for slot in range(offset, past) if slot > position - reach]
        seen += [past + ancestor for depth, ancestor in enumerate(path) if past + depth > position - reach]
        assert (mask[0, 0, node].nonzero().flatten() + offset).tolist() == seen


@pytest.mark.parametrize("arguments", [{}, WINDOWED])
def test_vmapped_and_broadcast_masks_are_equal(arguments):
    tree = random_tree(rows=2)
    padding = torch.ones(2, 9 + NODES, dtype=torch.bool)
    padding[1, :3] = False
    for extra in ({}, {"attention_mask": padding}):
        broadcast = mask_of("sdpa", tree, 9, **arguments, **extra)
        assert torch.equal(broadcast, mask_of("sdpa", tree, 9, use_vmap=True, **arguments, **extra))
    assert not broadcast[1, ..., :3].any()


def test_rows_that_end_at_different_slots():
    tree, ends = random_tree(rows=2), torch.tensor([11, 7])
    together = mask_of("sdpa", tree, ends, **WINDOWED)
    vmapped = mask_of("sdpa", tree, ends, use_vmap=True, **WINDOWED)
    assert torch.equal(together, vmapped)
    for row, end in enumerate(ends.tolist()):
        alone = mask_of("sdpa", random_tree(rows=2), end, **WINDOWED)[row, 0]
        assert torch.equal(together[row, 0, :, :end], alone[:, :end])
        assert not together[row, 0, :, end:11].any()
        assert torch.equal(together[row, 0, :, 11:], alone[:, end:])


def test_eager_mask_is_the_same_in_numbers():
    tree = random_tree()
    seen = mask_of("sdpa", tree, 9)
    numbers = mask_of("eager", tree, 9, dtype=torch.float32)
    assert torch.equal(numbers == 0, seen)
    assert (numbers[~seen] == torch.finfo(torch.float32).min).all()


def test_flex_mask_is_the_same_blockwise():
    """Flex asks for one pair of indices at a time, under vmap; compiling it is left out here."""
    tree, past = random_tree(), 9
    seen = mask_of("sdpa", tree, past, **WINDOWED)
    with tree_attention.tree_attention(tree.ancestors, tree.depths, past) as active:
        rewritten = active.rewrite(WINDOWED["mask_function"], 0, past + NODES, "cpu")
    create = torch.nn.attention.flex_attention.create_mask
    offset = lambda b, h, q, kv: rewritten(b, h, q + past, kv)  # noqa: E731
    assert torch.equal(create(offset, 1, 1, NODES, past + NODES, device="cpu"), seen)


def test_a_mask_that_could_be_skipped_is_made():
    """One query, or as many queries as keys: transformers would leave the mask out."""
    assert mask_of("sdpa", DraftTree.root_only(torch.tensor([[3]])), 9).all()
    assert mask_of("sdpa", random_tree(), 0) is not None


def test_nothing_changes_without_a_tree():
    model, ids = tiny("mistral_sw", num_hidden_layers=2), prompt(20)
    with torch.no_grad():
        found = model(ids).logits
        tree_attention.uninstall()
        assert torch.equal(model(ids).logits, found)


def test_uninstall_restores_and_install_is_idempotent():
    mapping = AttentionMaskInterface._global_mapping
    tree_attention.uninstall()
    originals = dict(mapping)
    assert mapping["sdpa"] is sdpa_mask
    assert mapping["eager"] is eager_mask
    tree_attention.install()
    wrapped = dict(mapping)
    assert {name for name in mapping if wrapped[name] is not originals[name]} == {"sdpa", "eager", "flex_attention"}
    tree_attention.install()
    assert dict(mapping) == wrapped
    tree_attention.uninstall()
    tree_attention.uninstall()
    assert dict(mapping) == originals


def test_a_wrapper_on_top_of_ours_survives():
    mapping = AttentionMaskInterface._global_mapping
    below = mapping["sdpa"]
    calls = []

    def theirs(*args, **kwargs):
        calls.append(kwargs["q_length"])
        return below(*args, **kwargs)

    mapping["sdpa"] = theirs
    tree_attention.uninstall()
    assert mapping["sdpa"] is theirs
    expected = sdpa_mask(batch_size=1, q_length=4, kv_length=6, q_offset=2)
    assert torch.equal(mapping["sdpa"](batch_size=1, q_length=4, kv_length=6, q_offset=2), expected)

    # Enabled again, ours stands twice in the chain; the tree must be applied once.
    tree_attention.install()
    tree = random_tree()
    found = mask_of("sdpa", tree, 9)
    assert torch.equal(mask_of("eager", tree, 9, dtype=torch.float32) == 0, found)
    assert calls == [4, NODES]


def test_the_tree_ends_with_its_block_and_nests():
    outer, inner = random_tree(), DraftTree.chain(prompt(3))
    with tree_attention.tree_attention(outer.ancestors, outer.depths, 9) as first:
        with tree_attention.tree_attention(inner.ancestors, inner.depths, 5):
            assert tree_attention._active.tree is not first
        assert tree_attention._active.tree is first
    with pytest.raises(KeyError), tree_attention.tree_attention(outer.ancestors, outer.depths, 9):
        raise KeyError
    assert tree_attention._active.tree is None


def test_other_threads_see_no_tree():
    tree, found = random_tree(), []
    with tree_attention.tree_attention(tree.ancestors, tree.depths, 9) as active:
        interface = AttentionMaskInterface._global_mapping["sdpa"]
        work = lambda: found.append(interface(batch_size=1, q_length=4, kv_length=6, q_offset=2))  # noqa: E731
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not active.used
    assert torch.equal(found[0], sdpa_mask(batch_size=1, q_length=4, kv_length=6, q_offset=2))


def test_used_stays_false_where_no_mask_is_asked_for():
    model, tree = tiny("llama", num_hidden_layers=2), random_tree()
    own_mask = torch.ones(1, 1, NODES, NODES, dtype=torch.bool).tril()
    with tree_attention.tree_attention(tree.ancestors, tree.depths, 0) as active, torch.no_grad():
        model(tree.tokens, attention_mask=own_mask)
    assert not active.used


@pytest.mark.parametrize("active", [False, True])
def test_a_users_full_graph_compile_still_works(active):
    model, ids = tiny("mistral_sw", num_hidden_layers=2), prompt(20)
    with torch.no_grad():
        expected = model(ids).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        if active:
            tree = random_tree()
            with tree_attention.tree_attention(tree.ancestors, tree.depths, 9) as state:
                found = compiled(ids).logits
            assert not state.used
        else:
            found = compiled(ids).logits
    torch.compiler.reset()
    assert_close(found, expected)


def test_an_overlay_of_transformers_goes_through():
    """The window as transformers itself writes it, not by hand."""
    tree = random_tree()
    overlay = sliding_window_overlay(8)
    causal = lambda b, h, q, kv: overlay(b, h, q, kv) & (kv <= q)  # noqa: E731
    assert torch.equal(mask_of("sdpa", tree, 11, mask_function=causal), mask_of("sdpa", tree, 11, **WINDOWED))
