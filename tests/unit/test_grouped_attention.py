"""Grouped heads under a mask: what transformers' `sdpa` computes, without repeated keys; and whom it leaves alone."""

import inspect
import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import eagle3_hf
from eagle3_hf.decoding.draft.candidate import Eagle3Candidate
from eagle3_hf.decoding.draft.inputs import DraftInputs
from eagle3_hf.decoding.target import runner
from eagle3_hf.decoding.target.tree_attention import tree_attention
from eagle3_hf.decoding.tree import DraftTree
from eagle3_hf.model import grouped_attention
from eagle3_hf.model.grouped_attention import AdditiveMasks
from eagle3_hf.model.tree_settings import TreeSettings
from support.drafts import LAYERS, assert_same_as_plain, new_draft, pair, set_tree, target_of
from support.families import prompt, tiny


CACHE_KEY = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
BATCH, QUERIES, KEYS, WIDTH = 2, 5, 19, 8
ATTENTIONS = AttentionInterface._global_mapping
GENERATOR = torch.Generator().manual_seed(0)


class Layer(torch.nn.Module):
    """An attention layer, as far as its attention function sees it."""

    def __init__(self, groups: int = 2):
        super().__init__()
        self.num_key_value_groups = groups


def random(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR).to(dtype)


def states(groups: int = 2, queries: int = QUERIES, dtype=torch.float32, width: int = WIDTH) -> list[torch.Tensor]:
    """Query (with the strides that layers give it), key and value."""
    query = random(BATCH, queries, 2 * groups, WIDTH, dtype=dtype).transpose(1, 2)
    return [query, random(BATCH, 2, KEYS, WIDTH, dtype=dtype), random(BATCH, 2, KEYS, width, dtype=dtype)]


def seen(batch: int = BATCH, queries: int = QUERIES) -> torch.Tensor:
    """A boolean mask in which each query attends to something."""
    mask = torch.rand(batch, 1, queries, KEYS, generator=GENERATOR) > 0.4
    mask[..., 0] = True
    return mask


MASKS = {
    "of each sequence": seen,
    "of all sequences": lambda: seen(1),
    "expanded": lambda: seen(1).expand(BATCH, -1, -1, -1),
    "numbers": lambda: random(BATCH, 1, QUERIES, KEYS),
    "a query that sees nothing": lambda: seen() & (torch.arange(QUERIES) != 2)[:, None],
}


@pytest.fixture
def stock(monkeypatch) -> list[tuple]:
    """The calls that reach transformers' own function."""
    calls: list[tuple] = []

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(grouped_attention, "sdpa_attention_forward", spy)
    return calls


# ----- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_same_as_transformers_own(groups, mask, stock):
    layer, mask = Layer(groups), mask()
    for dtype, width, scaling in [(torch.float32, WIDTH, None), (torch.float64, 6, 0.3), (torch.bfloat16, WIDTH, 0.3)]:
        mask = mask if mask.dtype == torch.bool else mask.to(dtype)
        arguments = layer, *states(groups, dtype=dtype, width=width), mask
        expected = sdpa_attention_forward(*arguments, scaling=scaling)[0]
        with grouped_attention.grouped_attention():
            found, weights = ATTENTIONS["sdpa"](*arguments, scaling=scaling, dropout=0.0, is_causal=True)
        assert weights is None
        assert found.is_contiguous()
        assert found.shape == (BATCH, QUERIES, 2 * groups, width)
        torch.testing.assert_close(found, expected, equal_nan=True)
    assert not stock


def test_gradients_pass():
    query, key, value = (state.requires_grad_() for state in states())
    mask = seen()
    gradients = []
    for attention in (sdpa_attention_forward, ATTENTIONS["sdpa"]):
        with grouped_attention.grouped_attention():
            output = attention(Layer(), query, key, value, mask)[0]
        gradients.append(torch.autograd.grad(output.square().sum(), (query, key, value)))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_mask_is_made_once_and_again_when_it_changes():
    masks, mask = AdditiveMasks(), seen()
    made = masks.get(mask, 2, torch.float32)
    assert made.shape == (BATCH, 1, 2 * QUERIES, KEYS)
    assert made.stride(-2) % 8 == 0, "kernels would copy it"
    assert torch.equal(made == 0, mask.repeat(1, 1, 2, 1))
    assert (made[~mask.repeat(1, 1, 2, 1)] == -torch.inf).all()
    assert masks.get(mask, 2, torch.float32) is made
    assert masks.get(mask.clone(), 2, torch.float32) is not made
    assert masks.get(mask, 1, torch.float32).shape[2] == QUERIES
    assert masks.get(mask, 2, torch.bfloat16).dtype == torch.bfloat16
    assert masks.get(mask, 2, torch.float32) is made, "layers with and without a window take turns"
    mask[0, 0, 0, 1] = ~mask[0, 0, 0, 1]
    assert torch.equal(masks.get(mask, 2, torch.float32) == 0, mask.repeat(1, 1, 2, 1))
    for _ in range(9):
        masks.get(seen(), 2, torch.float32)
    assert len(masks._made) == 4, "masks that layers make for themselves must not pile up"


@torch.inference_mode()
def test_masks_of_inference_mode():
    masks, mask = AdditiveMasks(), seen()
    assert masks.get(mask, 2, torch.float32) is masks.get(mask, 2, torch.float32)


# ----- what is left to transformers ----------------------------------------------------------------------------------


def head_wise() -> torch.Tensor:
    return random(BATCH, 4, QUERIES, KEYS)


MORE = {
    "no mask": {"attention_mask": None},
    "another mask for each head": {"attention_mask": head_wise()},
    "a mask without heads": {"attention_mask": seen()[0, 0]},
    "a mask for all queries": {"attention_mask": seen(queries=1)},
    "a mask of other numbers": {"attention_mask": random(BATCH, 1, QUERIES, KEYS, dtype=torch.float64)},
    "dropout": {"dropout": 0.1},
    "weights": {"output_attentions": True},
    "soft cap": {"softcap": 30.0},
    "sinks": {"s_aux": random(4)},
    "position bias": {"position_bias": head_wise()},
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE.keys())
def test_a_layer_that_needs_more_has_transformers_own(more, monkeypatch):
    result = object()
    calls = []
    monkeypatch.setattr(
        grouped_attention, "sdpa_attention_forward", lambda *args, **kwargs: calls.append((args, kwargs)) or result
    )
    layer, (query, key, value) = Layer(), states()
    options = {"attention_mask": seen(), "scaling": 0.5, **more}
    mask = options.pop("attention_mask")
    with grouped_attention.grouped_attention():
        assert ATTENTIONS["sdpa"](layer, query, key, value, mask, **options) is result
    [(args, kwargs)] = calls
    assert all(given is one for given, one in zip(args, (layer, query, key, value, mask), strict=True))
    assert kwargs == options


def test_options_that_say_nothing_are_no_reason(stock):
    options = dict.fromkeys(("softcap", "s_aux", "position_bias", "sliding_window"), None)
    with grouped_attention.grouped_attention():
        ATTENTIONS["sdpa"](Layer(), *states(), seen(), dropout=0.0, output_attentions=False, **options)
    assert not stock


def test_one_token_and_long_prompts_have_transformers_own(stock):
    with grouped_attention.grouped_attention():
        ATTENTIONS["sdpa"](Layer(), *states(queries=1), seen(queries=1))
        assert len(stock) == 1
        # Two key heads of 8 numbers: for more than 32 queries the mask is larger than what is saved.
        for queries, reach_stock in [(256, 1), (257, 2)]:
            ATTENTIONS["sdpa"](Layer(), *states(queries=queries), seen(queries=queries))
            assert len(stock) == reach_stock
        ATTENTIONS["sdpa"](Layer(1), *states(1, queries=257), seen(queries=257))
        assert len(stock) == 2, "without groups nothing is repeated"


def test_keys_that_were_repeated_before_are_seen_by_their_number(stock):
    query, key, value = states()
    with grouped_attention.grouped_attention(), pytest.raises(RuntimeError):
        ATTENTIONS["sdpa"](Layer(), query, key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1), seen())
    assert len(stock) == 1


# ----- for whom ------------------------------------------------------------------------------------------------------


def test_only_inside_the_block_and_only_in_its_thread(stock):
    arguments = Layer(), *states(), seen()

    def reaches_stock() -> bool:
        stock.clear()
        ATTENTIONS["sdpa"](*arguments)
        return bool(stock)

    found = []
    assert reaches_stock()
    with grouped_attention.grouped_attention():
        assert not reaches_stock()
        with pytest.raises(KeyError), grouped_attention.grouped_attention():
            raise KeyError
        assert not reaches_stock()
        thread = threading.Thread(target=lambda: found.append(reaches_stock()))
        thread.start()
        thread.join()
    assert found == [True]
    assert reaches_stock()
    with pytest.raises(KeyError), grouped_attention.grouped_attention():
        raise KeyError
    assert reaches_stock()


@pytest.fixture
def registration():
    before = ATTENTIONS["sdpa"]
    yield
    ATTENTIONS["sdpa"] = before


@pytest.mark.usefixtures("registration")
def test_install_and_uninstall():
    assert ATTENTIONS["sdpa"].__wrapped__ is sdpa_attention_forward
    with eagle3_hf.enabled(False):
        assert ATTENTIONS["sdpa"] is sdpa_attention_forward
        grouped_attention.uninstall()
        assert ATTENTIONS["sdpa"] is sdpa_attention_forward
    ours = ATTENTIONS["sdpa"]
    grouped_attention.install()
    assert ATTENTIONS["sdpa"] is ours
    assert inspect.signature(ours) == inspect.signature(sdpa_attention_forward)


@pytest.mark.usefixtures("registration")
def test_what_somebody_else_has_registered_stays(stock):
    below, calls = ATTENTIONS["sdpa"], []

    def theirs(*args, **kwargs):
        calls.append(args)
        return below(*args, **kwargs)

    ATTENTIONS["sdpa"] = theirs
    grouped_attention.install()
    assert ATTENTIONS["sdpa"] is theirs
    with grouped_attention.grouped_attention():
        ATTENTIONS["sdpa"](Layer(), *states(), seen())
    assert len(calls) == 1
    assert not stock, "below theirs ours still does its work"
    grouped_attention.uninstall()
    assert ATTENTIONS["sdpa"] is theirs
    ATTENTIONS["sdpa"](Layer(), *states(), seen())
    assert len(stock) == 1


def test_a_users_full_graph_compile_still_works_inside_the_block():
    """Outside of it `test_tree_attention` compiles the same model."""
    model, ids = tiny("mistral_sw", num_hidden_layers=2), prompt(20)
    torch.compiler.reset()
    with torch.no_grad(), grouped_attention.grouped_attention():
        found = torch.compile(model, backend="eager", fullgraph=True)(ids).logits
        expected = model(ids).logits
    torch.compiler.reset()
    torch.testing.assert_close(found, expected)


# ----- the target and the draft --------------------------------------------------------------------------------------


class Copies(TorchDispatchMode):
    """Counts the keys and values that a forward repeats, and the masks that it turns into numbers.

    Args:
        queries: Of the forward. Keys are more, unless there is no past.
    """

    def __init__(self, config, queries: int):
        super().__init__()
        self.of_keys = self.of_masks = 0
        self._heads = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
        self._queries = queries

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::clone" and result.dim() == 5:
            self.of_keys += tuple(result.shape[1:3]) == self._heads and result.shape[3] > self._queries
        if name in ("aten::masked_fill", "aten::masked_fill_", "aten::where"):
            self.of_masks += result.dim() >= 4 and result.dtype.is_floating_point
        return result


PAST, TREE = 40, [-1, 0, 0, 1, 1, 2, 3]


def small_tree() -> DraftTree:
    size = len(TREE)
    return DraftTree(prompt(size, 5), torch.tensor([TREE]), torch.tensor([size]), *[torch.zeros(1, size)] * 2)


@torch.no_grad()
def verify(model, tree: DraftTree, past: int = PAST) -> tuple[torch.Tensor, Copies]:
    """Logits of a tree's nodes after a prompt, and what the forward has copied."""
    cache = DynamicCache(config=model.config)
    model(prompt(past), **{CACHE_KEY: cache})
    with tree_attention(tree.ancestors, tree.depths, past), Copies(model.config, len(TREE)) as copies:
        logits = model(tree.tokens, position_ids=past + tree.depths, **{CACHE_KEY: cache}).logits
    return logits, copies


@pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3"])
def test_a_targets_keys_are_not_repeated(family):
    model, tree = target_of(family), small_tree()
    assert model.config.num_attention_heads == 2 * model.config.num_key_value_heads
    expected, before = verify(model, tree)
    with grouped_attention.grouped_attention():
        found, after = verify(model, tree)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert before.of_keys == 2 * LAYERS, "otherwise this test sees nothing"
    assert before.of_masks == LAYERS
    assert after.of_keys == 0
    assert after.of_masks == (2 if family == "gemma3" else 1), "one for each kind of layers"


def drafted(draft, features: torch.Tensor, ids: torch.Tensor) -> tuple[DraftTree, Copies]:
    candidate = Eagle3Candidate(target_of("llama"), draft, TreeSettings(12, 4, 4))
    candidate.draft_tree(DraftInputs(features[:, :-1], ids[:, :-1]))
    with Copies(draft.config, 4) as copies:
        tree = candidate.draft_tree(DraftInputs(features[:, -1:], ids[:, -1:]))
    return tree, copies


@pytest.mark.usefixtures("registration")
def test_a_drafts_keys_are_not_repeated():
    draft = new_draft(target_of("llama"), num_hidden_layers=2)
    config = draft.config
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    width = len(config.target_layer_ids) * target_of("llama").config.hidden_size
    features, ids = random(1, PAST, width), prompt(PAST)
    tree, after = drafted(draft, features, ids)
    ATTENTIONS["sdpa"] = sdpa_attention_forward
    expected, before = drafted(draft, features, ids)
    assert torch.equal(tree.tokens, expected.tokens)
    assert torch.equal(tree.parents, expected.parents)
    torch.testing.assert_close(tree.scores, expected.scores)
    levels = 3  # with a mask
    assert before.of_keys == 2 * 2 * levels, "keys and values, in two layers"
    assert before.of_masks == 2 * levels
    assert after.of_keys == 0
    assert after.of_masks == levels


def test_generate_uses_it_and_leaves_the_config_alone(monkeypatch, stock):
    target, draft = pair("llama")
    inside = []
    monkeypatch.setattr(
        runner, "grouped_attention", lambda: inside.append(target.config._attn_implementation) or block()
    )
    block = grouped_attention.grouped_attention
    assert_same_as_plain(target, draft, prompt(9))
    rounds = len(inside)
    assert rounds
    assert set(inside) == {"sdpa"}
    assert target.config._attn_implementation == "sdpa"
    with_mask = [args for args, _ in stock if len(args) > 4 and args[4] is not None and args[1].shape[2] > 1]
    assert not with_mask, "in a round nothing repeats keys"


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_eager_attention_of_targets_stays(family, stock):
    """Soft caps and sinks need it, and it is not ours to replace."""
    target, draft = pair(family)
    target_layers = {layer.config._attn_implementation for layer in target.modules() if hasattr(layer, "config")}
    if target_layers != {"eager"}:
        pytest.skip("older versions leave the soft cap out of sdpa")
    assert_same_as_plain(target, draft, prompt(9))
    assert not [args for args, _ in stock if args[0] in target.modules()]


def test_another_thread_decodes_as_ever_during_a_forward(stock):
    target, draft = pair("llama")
    other = tiny("llama", seed=3, num_hidden_layers=2)
    expected = other(prompt(8)).logits
    found = []

    def meanwhile(*_):
        if len(found) < 3:
            stock.clear()
            mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
            thread = threading.Thread(target=lambda: found.append(other(prompt(8), attention_mask=mask).logits))
            thread.start()
            thread.join()
            assert len(stock) == 2, "one call for each layer of the other model"

    handle = target.model.layers[1].mlp.register_forward_hook(meanwhile)
    try:
        set_tree(draft, "cpu").foretell([1, 2, 3])
        target.generate(prompt(9), assistant_model=draft, max_new_tokens=6)
    finally:
        handle.remove()
    assert len(found) == 3
    for logits in found:
        torch.testing.assert_close(logits, expected)
