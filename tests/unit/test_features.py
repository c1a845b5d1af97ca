"""Which layers of a target a head reads, and that what is read is the raw residual stream there."""

import logging
import threading

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSeq2SeqLM, DynamicCache

from eagle3_hf.decoding.target.runner import CACHE_KEY
from eagle3_hf.model.borrowed import call_on_module_device
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.target_check import check_target, default_layer_ids
from eagle3_hf.model.target_modules import decoder_blocks, num_target_layers
from support.families import FAMILIES, HIDDEN_SIZE, prompt, tiny
from support.heads import new_head


@pytest.mark.parametrize("layers", range(1, 90))
def test_default_ids_are_usable_at_every_depth(layers):
    ids = default_layer_ids(layers)
    assert ids == sorted(set(ids))
    assert 0 <= ids[0] <= ids[-1] <= layers
    assert len(ids) == min(3, layers + 1)


@pytest.mark.parametrize(("layers", "ids"), [(8, [2, 4, 5]), (30, [2, 15, 27]), (32, [2, 16, 29]), (80, [2, 40, 77])])
def test_default_ids_are_the_references(layers, ids):
    assert default_layer_ids(layers) == ids


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_hidden_states_and_the_last_one_is_before_the_norm(family):
    target = tiny(family, num_hidden_layers=4)
    with FeatureReader(target, [0, 1, 2, 3, 4]) as reader:
        states = target(prompt(9, rows=2), output_hidden_states=True).hidden_states
        features = reader.take()
    assert features.shape == (2, 9, 5 * HIDDEN_SIZE)
    chunks = features.split(HIDDEN_SIZE, dim=-1)
    for index in range(4):
        assert torch.equal(chunks[index], states[index]), index
    assert not torch.allclose(chunks[4], states[4], atol=1e-2)
    torch.testing.assert_close(target.get_decoder().norm(chunks[4]), states[4])


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_index_minus_one_is_the_input_of_the_output_layer(family):
    target, ids = tiny(family, num_hidden_layers=4), prompt(9, rows=2)
    inputs = []
    handle = target.lm_head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with FeatureReader(target, [-1]) as reader:
        states = target(ids, output_hidden_states=True).hidden_states
        features = reader.take()
        assert torch.equal(features, inputs[0])
        assert torch.equal(features, states[-1])
        target(ids, logits_to_keep=1, return_dict=False)  # as in a prefill: all rows are needed, not only the last
        torch.testing.assert_close(reader.take(), features)
    handle.remove()


@torch.no_grad()
@pytest.mark.parametrize("layer_ids", [[1, 4], [-1]], ids=str)
def test_prefill_in_chunks_is_joined(layer_ids):
    target, ids = tiny("llama", num_hidden_layers=4), prompt(11)
    with FeatureReader(target, layer_ids) as reader:
        target(ids)
        whole = reader.take()
        cache = DynamicCache(config=target.config)
        for chunk in ids.split(4, dim=1):
            target(chunk, **{CACHE_KEY: cache})
        torch.testing.assert_close(reader.take(), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_take_converts_and_forgets():
    target = tiny("llama", num_hidden_layers=2)
    with FeatureReader(target, [0, 2]) as reader:
        target(prompt(3))
        assert reader.take(dtype=torch.bfloat16).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match=r"did not run the blocks behind hidden_states indices \[0, 2\]"):
            reader.take()
        target(prompt(3))
        reader.clear()
        with pytest.raises(RuntimeError, match="did not run"):
            reader.take()


def hooks(target: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in target.modules())


def test_hooks_are_gone_after_the_block_whatever_happens():
    target = tiny("llama", num_hidden_layers=2)
    before = hooks(target)

    def interrupted():
        with FeatureReader(target, [0, 1, 2]):
            assert hooks(target) == before + 4, "of three blocks and the backbone"
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert hooks(target) == before


@torch.no_grad()
def test_another_threads_forward_is_not_read():
    target, ids = tiny("llama", num_hidden_layers=2), prompt(5)
    with FeatureReader(target, [0, 1, 2]) as reader:
        target(ids)
        expected = reader.take()
        other = threading.Thread(target=lambda: target(prompt(9)))
        other.start()
        other.join()
        target(ids)
        assert torch.equal(reader.take(), expected)


def test_a_list_of_the_right_length_is_looked_for():
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = tiny("llama", num_hidden_layers=3).config
            self.blocks = nn.ModuleList([nn.Linear(2, 2)] * 2)

    with pytest.raises(ValueError, match="Strange has no list of 3 decoder blocks"):
        decoder_blocks(Strange())
    target = tiny("llama", num_hidden_layers=3)
    assert decoder_blocks(target) is target.model.layers
    assert num_target_layers(target) == 3


def test_reader_refuses_a_layer_beyond_the_last():
    with pytest.raises(ValueError, match=r"index 5, but LlamaForCausalLM has 4 layers \(largest index 4\)"):
        FeatureReader(tiny("llama", num_hidden_layers=4), [1, 5])


# ----- fitting a target ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=4)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hidden_size": 32, "head_dim": 8}, "features of width 32, but LlamaForCausalLM has hidden_size 64"),
        ({"vocab_size": 512}, "a vocabulary of 512 tokens, but LlamaForCausalLM has 320"),
        ({"target_num_hidden_layers": 6}, "a target of 6 layers, but LlamaForCausalLM has 4"),
        ({"target_layer_ids": [1, 2, 7]}, r"index 7, but LlamaForCausalLM has 4 layers \(largest index 4\)"),
    ],
)
def test_head_for_another_target(target, overrides, words):
    draft = new_head(**overrides)
    for check in (draft.check_target, draft.bind):
        with pytest.raises(ValueError, match=f"{words}.*trained for another target"):
            check(target)
    assert draft._target is None


def test_resized_target_fits_by_either_number():
    target = tiny("llama", num_hidden_layers=4)
    target.resize_token_embeddings(352)
    new_head(vocab_size=352).check_target(target)
    target.config.vocab_size = 340  # a padded embedding of which the config tells less
    new_head(vocab_size=352).check_target(target)
    new_head(vocab_size=340).check_target(target)
    with pytest.raises(ValueError, match="345"):
        new_head(vocab_size=345).check_target(target)


def test_encoder_decoder_target_is_refused():
    config = AutoConfig.for_model(
        "t5", d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, vocab_size=320, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        new_head().check_target(AutoModelForSeq2SeqLM.from_config(config))


def warnings_of(caplog, call) -> list[str]:
    logging.Logger.warning_once.cache_clear()
    caplog.clear()
    call()
    return [record.getMessage() for record in caplog.records]


def test_ids_that_the_file_does_not_name_are_guessed_aloud_and_kept(caplog):
    draft, target = new_head(target_layer_ids=None), tiny("llama", num_hidden_layers=8)
    (message,) = warnings_of(caplog, lambda: draft.bind(target))
    assert "hidden_states indices [2, 4, 5]" in message
    assert "target_layer_ids=[...]" in message
    assert draft.config.target_layer_ids == [2, 4, 5]
    assert warnings_of(caplog, lambda: draft.bind(target)) == []
    # The guess holds for this depth; another one would silently read other layers than the head was trained on.
    with pytest.raises(ValueError, match="a target of 8 layers, but LlamaForCausalLM has 9"):
        draft.bind(tiny("llama", num_hidden_layers=9))


def test_ids_taken_for_outputs_are_given_back_where_the_target_is_too_shallow_for_them(caplog):
    target = tiny("llama", num_hidden_layers=4)
    draft = new_head(target_layer_ids=[2, 3, 5], guessed_layer_ids=True, target_num_hidden_layers=4)
    (message,) = warnings_of(caplog, lambda: draft.bind(target))
    assert "[2, 3, 5], but LlamaForCausalLM has only 4 layers" in message
    assert "[1, 2, 4]" in message
    assert (draft.config.target_layer_ids, draft.config.guessed_layer_ids) == ([1, 2, 4], False)
    assert warnings_of(caplog, lambda: draft.bind(target)) == []
    with pytest.raises(ValueError, match="a target of 4 layers, but LlamaForCausalLM has 5"):
        draft.bind(tiny("llama", num_hidden_layers=5))


def test_a_guess_that_fits_stays_a_guess(target, caplog):
    draft = new_head(target_layer_ids=[2, 3, 4], guessed_layer_ids=True)
    assert warnings_of(caplog, lambda: draft.bind(target)) == []
    assert (draft.config.target_layer_ids, draft.config.guessed_layer_ids) == ([2, 3, 4], True)


@pytest.mark.parametrize(("ids", "guessed"), [([2, 3, 6], True), ([2, 3, 5], False)])
def test_ids_beyond_the_last_block_are_named(target, ids, guessed):
    draft = new_head(target_layer_ids=ids, guessed_layer_ids=guessed)
    with pytest.raises(ValueError, match=rf"index {ids[-1]}, but LlamaForCausalLM has 4 layers \(largest index 4\)"):
        draft.bind(target)
    assert draft.config.target_layer_ids == ids


def test_too_shallow_to_guess(target):
    with pytest.raises(ValueError, match=r"only 4 layers, too few .*target_layer_ids=\[\.\.\.\]"):
        new_head(target_layer_ids=None).check_target(target)


def test_check_target_is_what_the_model_uses(target):
    draft = new_head()
    check_target(draft.config, target)
    assert draft.bind(target) is draft


# ----- calling the target's modules ---------------------------------------------------------------------------------


def test_calls_go_in_the_modules_own_dtype_and_come_back():
    head = nn.Linear(4, 3).to(torch.bfloat16)
    inputs = torch.randn(2, 4)
    outputs = call_on_module_device(head)(inputs)
    assert torch.equal(outputs, head(inputs.bfloat16()))
    embed = nn.Embedding(5, 4).to(torch.bfloat16)
    ids = torch.tensor([[1, 4]])
    assert torch.equal(call_on_module_device(embed)(ids), embed(ids))


def test_modules_without_weights_here_are_called_as_they_are():
    class Packed(nn.Module):
        """Stands for an offloaded module: its parameter is elsewhere, and its call sees to it."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 4, device="meta"))

        def forward(self, inputs):
            return inputs * 2

    inputs = torch.randn(2, 4)
    assert torch.equal(call_on_module_device(Packed())(inputs), inputs * 2)
