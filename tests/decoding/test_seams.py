"""What we assume of transformers and torch, one test for each assumption: an update that breaks one is named here.

Parts that came with a later release than the oldest one supported are tested where they exist.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    cache_utils,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.generation import GenerateDecoderOnlyOutput, logits_process
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.masking_utils import AttentionMaskInterface

from eagle3_hf.decoding import validation
from eagle3_hf.decoding.output import processors
from eagle3_hf.decoding.target.runner import CACHE_KEY
from eagle3_hf.model.features import FeatureReader
from support.drafts import Recorder, cache_of, target_of
from support.families import FAMILIES, prompt, tiny


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# ----- generate ------------------------------------------------------------------------------------------------------


def test_signatures_that_our_wrappers_repeat():
    decoding = parameters(GenerationMixin._assisted_decoding)
    assert decoding[:2] == ["self", "input_ids"]
    wanted = ["logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer", "inputs_tensor"]
    assert set(wanted) < set(decoding), "generate passes inputs_tensor only if the signature names it"
    assert parameters(GenerationMixin._validate_generation_mode) == [
        "self", "generation_mode", "generation_config", "generation_mode_kwargs",
    ]  # fmt: skip
    if hasattr(GenerationMixin, "_extract_generation_mode_kwargs"):
        assert parameters(GenerationMixin._extract_generation_mode_kwargs) == [
            "self", "custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer",
        ]  # fmt: skip


def test_signatures_that_the_loop_calls():
    assert parameters(GenerationMixin._prefill)[:4] == ["self", "input_ids", "generation_config", "model_kwargs"]
    assert "num_new_tokens" in parameters(GenerationMixin._update_model_kwargs_for_generation)
    assert "next_sequence_length" in parameters(GenerationMixin.prepare_inputs_for_generation)
    assert CACHE_KEY in parameters(GenerationMixin.prepare_inputs_for_generation)


def test_the_decoding_method_is_looked_up_by_name_on_the_class(monkeypatch):
    assert GENERATION_MODES_MAPPING[GenerationMode.ASSISTED_GENERATION] == "_assisted_decoding"
    reached = []

    def stand_in(self, input_ids, **kwargs):
        reached.append(sorted(kwargs))
        return input_ids

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", stand_in)
    target = target_of("llama")
    out = target.generate(prompt(3), assistant_model=target, max_new_tokens=2, streamer=Recorder())
    assert torch.equal(out, prompt(3))
    wanted = {"logits_processor", "stopping_criteria", "generation_config", "assistant_model", "streamer"}
    wanted |= {"attention_mask", "position_ids", "use_cache", CACHE_KEY}
    assert wanted <= set(reached[0])


def test_no_model_brings_its_own_version_of_what_we_wrap():
    models = Path(transformers.__file__).parent / "models"
    pattern = re.compile(r"def (_assisted_decoding|_validate_generation_mode|_extract_generation_mode_kwargs)\b")
    owners = [file.name for file in models.glob("*/*.py") if pattern.search(file.read_text(encoding="utf-8"))]
    assert not owners


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_decoding_method_is_handed(family, monkeypatch):
    seen = {}

    def stand_in(self, input_ids, **kwargs):
        seen.update(kwargs)
        return input_ids

    monkeypatch.setattr(GenerationMixin, "_sample", stand_in)
    target = target_of(family)
    target.generate(prompt(5), max_new_tokens=3)
    assert seen.get("attention_mask") is None or bool((seen["attention_mask"] == 1).all())
    assert seen["position_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert isinstance(seen[CACHE_KEY], DynamicCache)
    assert seen[CACHE_KEY].get_seq_length() == 0
    assert seen["generation_config"].max_length == 8, "the limit in tokens of the whole text is always set"
    padded = torch.tensor([[0, 0, 1, 1, 1]])
    target.generate(prompt(5), attention_mask=padded, max_new_tokens=3)
    assert torch.equal(seen["attention_mask"], padded)
    assert seen["position_ids"][0, 2:].tolist() == [0, 1, 2]


def test_defaults_that_transformers_fills_in():
    """What cannot be told from unset; a changed default would make us refuse plain calls, or ignore an argument."""
    config = target_of("llama")._prepare_generation_config(None)[0]
    assert config.num_assistant_tokens == validation._DEFAULT_NUM_ASSISTANT_TOKENS
    for name, default in validation._MEANINGLESS.items():
        assert getattr(config, name, None) == default, name


def test_every_assistant_field_is_known():
    """A new way to steer assistants must be refused or given a meaning, not be ignored."""
    known = {"num_assistant_tokens", *validation._MEANINGLESS, "is_assistant"}
    words = re.compile("assist|lookup|lookbehind|specul|draft|mtp|ngram_size")
    not_ours = {"no_repeat_ngram_size", "encoder_no_repeat_ngram_size"}
    fields = {name for name in GenerationConfig().to_dict() if words.search(name)} | {
        name for name in vars(GenerationConfig()) if words.search(name)
    }
    assert fields - not_ours <= known


def test_the_output_takes_attributes_beside_its_keys():
    out = GenerateDecoderOnlyOutput(sequences=prompt(2), **{CACHE_KEY: DynamicCache()})
    before = list(out.keys()), len(out.to_tuple())
    out.speculation = "anything"
    assert (list(out.keys()), len(out.to_tuple())) == before
    assert out.speculation == "anything"
    assert cache_of(out) is out[CACHE_KEY]


def test_vanilla_streams_one_token_a_call():
    streamer = Recorder()
    out = target_of("llama").generate(prompt(3), max_new_tokens=2, streamer=streamer)
    tokens = out[0, 3:].tolist()
    assert streamer.calls == [((1, 3), prompt(3)[0].tolist()), ((1,), tokens[:1]), ((1,), tokens[1:]), "end"]


def test_processors_and_criteria_are_lists_to_call():
    processors, criteria = LogitsProcessorList(), StoppingCriteriaList()
    scores = torch.zeros(1, 4)
    assert processors(prompt(2), scores) is scores
    assert criteria(prompt(2), None).shape == (1,)


def test_the_warpers_we_know_by_name_exist_and_look_at_no_ids():
    assert len(processors.PREFIX_FREE_WARPERS) == len(processors._WARPER_NAMES)
    scores = torch.randn(3, 50)
    arguments = {
        "TemperatureLogitsWarper": 0.7, "TopKLogitsWarper": 5, "TopPLogitsWarper": 0.8, "MinPLogitsWarper": 0.1,
        "TypicalLogitsWarper": 0.9, "EpsilonLogitsWarper": 0.01, "EtaLogitsWarper": 0.01,
    }  # fmt: skip
    for name in processors._WARPER_NAMES:
        warper = getattr(logits_process, name)(arguments[name])
        whole = warper(None, scores.clone())
        rows = torch.cat([warper(None, row[None].clone()) for row in scores])
        torch.testing.assert_close(whole, rows)


# ----- sampling ------------------------------------------------------------------------------------------------------


def test_multinomial_is_an_exponential_race():
    for seed in range(20):
        probabilities = torch.randn(1, 500).softmax(-1)
        torch.manual_seed(seed)
        drawn, after = torch.multinomial(probabilities, 1), torch.get_rng_state()
        torch.manual_seed(seed)
        raced = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
        assert torch.equal(raced, drawn)
        assert torch.equal(torch.get_rng_state(), after)


# ----- masks, caches, hidden states ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_mask_interfaces_take_what_we_rewrite(name):
    interface = inspect.unwrap(AttentionMaskInterface._global_mapping[name])
    wanted = {"q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "device"}
    assert wanted <= set(parameters(interface))
    assert "allow_is_causal_skip" in parameters(interface) or inspect.getfullargspec(interface).varkw


def test_masks_are_made_with_keywords(monkeypatch):
    seen = []
    plain = inspect.unwrap(AttentionMaskInterface._global_mapping["sdpa"])

    def spy(*args, **kwargs):
        seen.append((args, set(kwargs)))
        return plain(*args, **kwargs)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", spy)
    with torch.no_grad():
        tiny("llama", num_hidden_layers=2)(prompt(4))
    assert seen, "a model's forward asks the global mapping at each call"
    for args, names in seen:
        assert not args
        assert {"mask_function", "kv_length", "kv_offset", "device"} <= names


def test_attention_implementations_have_names_in_the_config():
    target = tiny("llama", num_hidden_layers=1)
    assert target.config._attn_implementation == "sdpa"
    target.set_attn_implementation("eager")
    assert target.config.get_text_config()._attn_implementation == "eager"
    assert "flash_attention_2" in AttentionInterface().valid_keys()


def test_the_implementation_of_attention_can_be_exchanged_in_the_config(monkeypatch):
    """Attention asks its config at each call, and under this name."""
    target, asked = tiny("llama", num_hidden_layers=1), []
    sdpa = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *a, **k: asked.append(1) or sdpa(*a, **k))
    target.set_attn_implementation("eager")
    target(prompt(4))
    assert not asked
    target.config._attn_implementation_internal = "sdpa"
    target(prompt(4))
    assert asked


def test_plain_decoding_takes_what_a_decoding_method_is_handed():
    """For targets that cannot verify a draft, the call goes on there."""
    wanted = ["logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"]
    assert set(wanted) < set(parameters(GenerationMixin._sample))


def test_states_of_recurrent_layers_have_these_names():
    mixin = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
    if mixin is None:
        pytest.skip("this version keeps recurrent states outside the layers of a cache")
    layer = cache_utils.LinearAttentionLayer()
    assert all(hasattr(layer, name) for name in ("conv_states", "recurrent_states"))


def test_cache_layers_have_the_fields_we_cut():
    cache = DynamicCache(config=target_of("gemma3").config)
    kinds = {type(layer) for layer in cache.layers}
    assert kinds == {DynamicLayer, DynamicSlidingWindowLayer}
    for layer in cache.layers:
        assert not layer.is_initialized
        layer.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        assert layer.is_initialized
        assert layer.keys.shape == layer.values.shape == (1, 2, 3, 4)
        if type(layer) is DynamicSlidingWindowLayer:
            assert (layer.sliding_window, layer.cumulative_length) == (12, 3)
    assert issubclass(StaticLayer, object)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_the_blocks_outputs_but_for_the_last(family):
    target = target_of(family)
    layers = target.config.num_hidden_layers
    with torch.no_grad(), FeatureReader(target, list(range(layers + 1))) as reader:
        states = target(prompt(6), output_hidden_states=True).hidden_states
        features = reader.take().split(64, dim=-1)
    assert len(states) == layers + 1
    for index in range(layers):
        assert torch.equal(features[index], states[index]), index
    assert not torch.allclose(features[layers], states[layers]), "the last one is given after the final norm"
    torch.testing.assert_close(target.get_decoder().norm(features[layers]), states[layers])


def test_logits_can_be_asked_for_the_last_tokens():
    target = target_of("llama")
    assert target._supports_logits_to_keep()
    with torch.no_grad():
        assert target(prompt(6), logits_to_keep=4).logits.shape == (1, 4, 320)


# ----- candidate generators ------------------------------------------------------------------------------------------


def test_candidate_generators_are_called_with_these_names():
    assert parameters(CandidateGenerator.get_candidates)[:2] == ["self", "input_ids"]
    assert parameters(CandidateGenerator.update_candidate_strategy) == ["self", "input_ids", "scores", "num_matches"]
    if hasattr(CandidateGenerator, "requires_model_outputs"):
        assert CandidateGenerator.requires_model_outputs is False
