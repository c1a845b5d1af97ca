"""What cannot be meant with a draft head is refused by name before the target runs."""

import re

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    T5Config,
    T5ForConditionalGeneration,
)

from eagle3_hf import Eagle3DraftConfig, Eagle3DraftModel
from eagle3_hf.decoding import validation
from eagle3_hf.decoding.target.capability_probe import capability_of
from eagle3_hf.decoding.target.runner import CACHE_KEY
from eagle3_hf.model import vocab
from support.drafts import draft_of, new_draft, set_tree, target_of
from support.families import HIDDEN_SIZE, VOCAB_SIZE, prompt, tiny
from support.tokenizers import words


@pytest.fixture
def refused():
    """`refused(words, target, **kwargs)`: the call raises these words, and the target's forward never runs."""

    def check(words: str, target=None, draft=None, inputs=None, error=ValueError, **kwargs):
        target = target_of("llama") if target is None else target
        draft = draft_of("llama") if draft is None else draft
        calls = []
        hooks = [model.register_forward_pre_hook(lambda *args: calls.append(args)) for model in (target, draft)]
        inputs = {"inputs": prompt(5)} if inputs is None else inputs
        try:
            with pytest.raises(error, match=words) as caught:
                target.generate(**inputs, assistant_model=draft, **{"max_new_tokens": 4, **kwargs})
        finally:
            for hook in hooks:
                hook.remove()
        assert not calls, "a model ran before the refusal"
        assert "\n" not in str(caught.value), "one line"

    return check


# ----- arguments of the call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"num_beams": 2, "do_sample": True}, "num_beams=2"),
        ({"num_beams": 4, "num_return_sequences": 2}, "num_beams=4"),
        ({"penalty_alpha": 0.6, "top_k": 4, "trust_remote_code": True}, "generation mode"),
        ({"dola_layers": "low"}, "dola_layers='low'"),
        ({"use_cache": False}, "use_cache=False"),
        ({"assistant_tokenizer": "anything"}, "assistant_tokenizer"),
        ({"custom_generate": lambda model, **kwargs: None}, "custom_generate"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight=0.5"),
        ({"assistant_early_exit": 2}, "assistant_early_exit=2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2}, "prompt_lookup_num_tokens=3"),
        ({"max_matching_ngram_size": 2}, "max_matching_ngram_size=2"),
        ({"use_mtp": True}, "use_mtp=True"),
        ({"speculation_type": "dflash"}, "speculation_type='dflash'"),
        ({"assistant_confidence_threshold": 0.6}, "assistant_confidence_threshold=0.6"),
        ({"assistant_confidence_threshold": 0.0}, "assistant_confidence_threshold=0.0"),
        ({"num_assistant_tokens_schedule": "heuristic"}, "num_assistant_tokens_schedule='heuristic'"),
        ({"assistant_lookbehind": 5}, "assistant_lookbehind=5"),
        ({"target_lookbehind": 5}, "target_lookbehind=5"),
        ({"num_assistant_tokens": "most"}, "num_assistant_tokens must be 'auto' or an int of at least 1, got 'most'"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens must be 'auto' or an int of at least 1, got 0"),
        ({"num_assistant_tokens": 3.5}, "num_assistant_tokens must be 'auto' or an int of at least 1, got 3.5"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized'"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_arguments(refused, kwargs, words):
    # Versions that do not know an argument refuse it by name themselves.
    refused(rf"{re.escape(words)}|not used by the model: \['{next(iter(kwargs))}'\]", **kwargs)


def test_defaults_spelt_out_are_no_reason(refused):
    target, draft = target_of("llama"), draft_of("llama")
    vanilla = target.generate(prompt(5), max_new_tokens=4)
    spelt = {
        "num_beams": 1, "num_return_sequences": 1, "use_cache": True, "assistant_confidence_threshold": 0.4,
        "num_assistant_tokens_schedule": "constant", "assistant_lookbehind": 10, "target_lookbehind": 10,
        "output_attentions": False, "cache_implementation": "dynamic", "num_assistant_tokens": 20,
        "synced_gpus": False, "assistant_tokenizer": None, "custom_generate": None,
    }  # fmt: skip
    assert torch.equal(target.generate(prompt(5), max_new_tokens=4, assistant_model=draft, **spelt), vanilla)


@pytest.mark.parametrize("name", ["embedding", "output layer"])
def test_layers_that_are_spread_over_processes_cannot_be_borrowed(refused, monkeypatch, name):
    for function, value in (("is_initialized", True), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, function, lambda value=value: value)
    target = target_of("llama")
    layer = target.get_input_embeddings() if name == "embedding" else target.get_output_embeddings()
    monkeypatch.setattr(layer.weight, "ds_id", 0, raising=False)  # as ZeRO-3 marks what it spreads
    borrows = {"own_embeddings": name != "embedding", "own_lm_head": name != "output layer"}
    draft = new_draft(target, half=False, **borrows)
    refused(f"the {name} of LlamaForCausalLM is spread over 4 processes", draft=draft, synced_gpus=True)


def test_what_transformers_itself_refuses_beside_an_assistant():
    with pytest.raises(NotImplementedError, match="assistant_model|assistant model"):
        target_of("llama").generate(prompt(5), cache_implementation="paged", assistant_model=draft_of("llama"))


def test_tree_settings_saved_with_the_head(refused):
    draft = new_draft(target_of("llama"))
    for name in ("num_assistant_tokens", "assistant_tree_depth", "assistant_tree_top_k"):
        before = getattr(draft.generation_config, name)
        for value in (
            "auto" if name != "num_assistant_tokens" else "all",
            0,
            True,
            -1,
        ):
            setattr(draft.generation_config, name, value)
            refused(f"{name}", draft=draft)
        setattr(draft.generation_config, name, before)


def test_a_calls_own_number_of_nodes_overrides_the_heads():
    target, draft = target_of("llama"), set_tree(draft_of("llama", half=False), "paper")
    sizes = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for kwargs, size in (({}, 60), ({"num_assistant_tokens": 7}, 8), ({"num_assistant_tokens": 20}, 60)):
        sizes.clear()
        target.generate(prompt(5), max_new_tokens=40, assistant_model=draft.foretell([]), **kwargs)
        assert sizes[1] == size
    handle.remove()


# ----- tokenizers ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_with_another_vocabulary_is_named_once(monkeypatch):
    target, draft, said = target_of("llama"), new_draft(target_of("llama")), []
    vocab.record_tokenizer(draft.config, words("w"))
    monkeypatch.setattr(validation.logger, "warning", said.append)
    other = words("v")
    for _ in range(2):
        target.generate(prompt(5), max_new_tokens=4, assistant_model=draft, tokenizer=other)
    assert len(said) == 1
    assert "the head was trained with a vocabulary of hash" in said[0]


def test_a_tokenizer_is_compared_once(monkeypatch):
    target, draft, tokenizer, hashed = target_of("llama"), new_draft(target_of("llama")), words("w"), []
    vocab.record_tokenizer(draft.config, tokenizer)
    monkeypatch.setattr(validation, "check_tokenizer", lambda *both: hashed.append(both))
    for count in (1, 1):
        target.generate(prompt(5), max_new_tokens=4, assistant_model=draft, tokenizer=tokenizer)
        assert len(hashed) == count
    tokenizer.add_tokens(["more"])
    target.generate(prompt(5), max_new_tokens=4, assistant_model=draft, tokenizer=tokenizer)
    assert len(hashed) == 2


# ----- caches --------------------------------------------------------------------------------------------------------


def test_caches_that_forget(refused):
    class QuantizedLayer(type(DynamicCache(config=target_of("llama").config).layers[0])):
        """Stands for the layers of transformers that need another package."""

    cache = DynamicCache(config=target_of("llama").config)
    cache.layers[1] = QuantizedLayer()
    refused("cache layer 1 is a QuantizedLayer, whose stored entries cannot be rolled back", **{CACHE_KEY: cache})


# ----- targets -------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_target(refused):
    config = T5Config(
        vocab_size=VOCAB_SIZE,
        d_model=HIDDEN_SIZE,
        d_kv=16,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        decoder_start_token_id=0,
    )
    refused("encoder-decoder", T5ForConditionalGeneration(config).eval())


def other_target(model_type: str, **fields):
    """A causal LM of another family, of the width and the vocabulary of the tiny ones."""
    common = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "eos_token_id": None, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**common, **fields})).eval()


def test_a_target_with_several_residual_streams(refused):
    target = other_target(
        "gemma3n_text", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=16, laurel_rank=8,
        num_kv_shared_layers=1, layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    refused("several residual streams", target, fitting_draft(4))


def test_attentions_of_a_target_whose_state_is_restored():
    """What such a target can do is found out by a trial of its own; no token is emitted."""
    target = other_target(
        "lfm2", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        layer_types=["conv", "full_attention"] * 2,
    )  # fmt: skip
    if not capability_of(target, target.device).restores:
        pytest.skip("this version of transformers cannot put its states back")
    kwargs = {"max_new_tokens": 4, "output_attentions": True, "return_dict_in_generate": True}
    with pytest.raises(ValueError, match=r"output_attentions=True.*Lfm2ForCausalLM"):
        target.generate(prompt(5), assistant_model=fitting_draft(4), **kwargs)


def fitting_draft(layers: int) -> Eagle3DraftModel:
    """A head for any target of the tests' width, vocabulary and so many layers."""
    return Eagle3DraftModel(head_config(target_num_hidden_layers=layers)).eval()


def head_config(**fields) -> Eagle3DraftConfig:
    common = {
        "hidden_size": HIDDEN_SIZE, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": VOCAB_SIZE,
        "target_layer_ids": [1, 2, 3],
    }  # fmt: skip
    return Eagle3DraftConfig(**{**common, **fields})


# ----- heads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 32, "target_hidden_size": 96, "own_embeddings": True}, ("width 96", "hidden_size 64")),
        ({"vocab_size": 400, "draft_vocab_size": 400}, ("400 tokens", "320")),
        ({"target_num_hidden_layers": 6}, ("6 layers", "has 4")),
        ({"target_layer_ids": [2, 5, 9]}, ("index 9", "4 layers")),
    ],
    ids=["width", "vocabulary", "layers", "layer ids"],
)
def test_a_head_for_another_target_names_both_numbers(refused, fields, words):
    refused(".*".join(words), draft=Eagle3DraftModel(head_config(**fields)).eval())


def test_a_head_whose_vocabulary_is_not_known_yet(refused):
    draft = Eagle3DraftModel.from_target(target_of("llama"), draft_vocab_size=100)
    refused("only its size (100 of 320) is known".replace("(", r"\(").replace(")", r"\)"), draft=draft)


def test_a_head_that_automodel_opened_as_an_ordinary_model(refused, tmp_path):
    """A published head says it is a llama; opened so, transformers gives a random model and no error."""
    config = tiny("llama", num_hidden_layers=1).config
    config.draft_vocab_size = 160
    lost = AutoModel.from_config(config)
    lost.save_pretrained(tmp_path)
    for opened in (lost, AutoModel.from_pretrained(tmp_path)):
        assert type(opened).__name__ == "LlamaModel"
        refused("LlamaModel.*opened under the wrong class.*Eagle3DraftModel.from_pretrained", draft=opened)


def test_an_ordinary_assistant_is_left_to_transformers(no_deprecated_calls):
    target = target_of("llama")
    out = target.generate(prompt(5), max_new_tokens=4, assistant_model=tiny("llama", seed=2, num_hidden_layers=1))
    assert torch.equal(out, target.generate(prompt(5), max_new_tokens=4))
    stranger = tiny("llama", num_hidden_layers=1, vocab_size=200)
    with pytest.raises(ValueError, match="tokenizer"):
        target.generate(prompt(5), max_new_tokens=4, assistant_model=stranger)
    # transformers' own assisted loop makes a call that it has deprecated itself.
    no_deprecated_calls.lines.clear()


def test_a_draft_cannot_generate_alone():
    with pytest.raises(TypeError, match=r"target\.generate\(\.\.\., assistant_model=draft\)"):
        draft_of("llama").generate(prompt(5))
