"""A rejected setting names the place that it comes from, and what to do there is enough."""

from contextlib import contextmanager

import pytest
import torch
from transformers import GenerationConfig, pipeline

from eagle3_hf.decoding import setting_origins, validation
from support.drafts import draft_of, target_of
from support.families import prompt
from support.tokenizers import words


# Field -> a value that is rejected. (Others that transformers validates itself, or older versions do not know.)
VALUES = {
    "assistant_ensemble_weight": 0.5,
    "assistant_early_exit": 2,
    "prompt_lookup_num_tokens": 3,
    "max_matching_ngram_size": 2,
    "dola_layers": "low",
    "use_mtp": True,
    "speculation_type": "dflash",
    "assistant_confidence_threshold": 0.6,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_lookbehind": 5,
    "target_lookbehind": 5,
}
OTHERS = {"use_cache": (False, True), "num_beams": (2, 1), "cache_implementation": ("quantized", None)}
REJECTED = [(name, value, validation._MEANINGLESS[name]) for name, value in VALUES.items()]
REJECTED += [(name, *values) for name, values in OTHERS.items()]
TARGETS = "not passed to this call, but comes from the target's own generation config"
PASSED = "set in the generation_config that was passed to this call"


def test_the_table_is_whole():
    assert set(VALUES) == set(validation._MEANINGLESS)


@pytest.fixture(scope="module")
def models():
    return target_of("llama"), draft_of("llama")


@contextmanager
def saved_with(target, **fields):
    """The target's generation config with these fields, as if it had been loaded with them."""
    before = target.generation_config
    target.generation_config = GenerationConfig(**{**before.to_diff_dict(), **fields})
    try:
        yield
    finally:
        target.generation_config = before


def generate(models, **kwargs) -> torch.Tensor:
    target, draft = models
    return target.generate(prompt(5), assistant_model=draft, **{"max_new_tokens": 4, **kwargs})


def rejection(models, **kwargs) -> str:
    calls = []
    handle = models[0].register_forward_pre_hook(lambda *args: calls.append(args))
    with pytest.raises(ValueError, match=".") as caught:
        generate(models, **kwargs)
    handle.remove()
    assert not calls
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value", "instead"), REJECTED, ids=[name for name, *_ in REJECTED])
def test_a_setting_saved_with_the_target(models, name, value, instead):
    target = models[0]
    with saved_with(target, **{name: value}):
        message = rejection(models)
        assert f"{name}={value!r}" in message
        assert TARGETS in message
        assert f"set target.generation_config.{name} = {instead!r}, or pass {name}={instead!r} to this call" in message
        assert generate(models, **{name: instead}).shape == (1, 9), "the second way out"
        setattr(target.generation_config, name, instead)
        assert generate(models).shape == (1, 9), "the first way out"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value", "instead"), REJECTED, ids=[name for name, *_ in REJECTED])
@pytest.mark.parametrize("saved_too", [False, True])
def test_a_setting_in_the_config_of_the_call(models, name, value, instead, saved_too, no_deprecated_calls):
    """Also where the target says the same, as beside a pipeline, which passes a copy."""
    with saved_with(models[0], **({name: value} if saved_too else {})):
        config = GenerationConfig(max_new_tokens=4, **{name: value})
        message = rejection(models, generation_config=config, max_new_tokens=None)
        assert f"{name}={value!r}" in message
        assert PASSED in message
        assert (f"(target.generation_config says {value!r} too)" in message) == saved_too
        assert generate(models, generation_config=config, **{name: instead}).shape == (1, 9)
    no_deprecated_calls.lines.clear()  # that both are passed is deprecated


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "value", "instead"), REJECTED, ids=[name for name, *_ in REJECTED])
@pytest.mark.parametrize("saved_too", [False, True])
def test_a_setting_among_the_keywords(models, name, value, instead, saved_too):
    """The keyword is what counts, also where the target says the same."""
    with saved_with(models[0], **({name: value} if saved_too else {})):
        message = rejection(models, **{name: value})
        if "not used by the model" in message:
            pytest.skip("unknown to this version of transformers")
        assert f"{name}={value!r}" in message
        assert TARGETS not in message
        assert PASSED not in message
        assert ("leave it out" if not saved_too else f"pass {name}={instead!r} to this call") in message


@pytest.mark.filterwarnings("ignore")
def test_a_keyword_of_another_value_than_the_saved_one(models):
    with saved_with(models[0], num_assistant_tokens_schedule="heuristic"):
        message = rejection(models, num_assistant_tokens_schedule="heuristic_transient")
        assert "num_assistant_tokens_schedule='heuristic_transient'" in message
        assert TARGETS not in message


def test_a_number_of_nodes_saved_with_the_target(models):
    with saved_with(models[0], num_assistant_tokens=7):
        assert generate(models).shape == (1, 9)
    models[0].generation_config.num_assistant_tokens = 0
    try:
        message = rejection(models)
    finally:
        models[0].generation_config.num_assistant_tokens = None
    assert "num_assistant_tokens=0 is rejected (num_assistant_tokens must be 'auto' or an int" in message
    assert TARGETS in message


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_over_a_target_with_a_saved_setting(models, no_deprecated_calls):
    """Earlier versions of transformers pass a copy of the target's config, and then both are named."""
    target, draft = models
    with saved_with(target, num_assistant_tokens_schedule="heuristic"):
        pipe = pipeline("text-generation", model=target, tokenizer=words("w"), assistant_model=draft)
        passes_copy = isinstance(getattr(pipe, "generation_config", None), GenerationConfig)
        expected = [PASSED, "says 'heuristic' too", r"pipe\.generation_config"] if passes_copy else [TARGETS]
        with pytest.raises(ValueError, match=".*".join(expected)):
            pipe("w5", max_new_tokens=4)
        assert pipe("w5", max_new_tokens=4, num_assistant_tokens_schedule="constant")
    no_deprecated_calls.lines.clear()


def test_a_config_that_was_merged_elsewhere_is_compared_with_the_targets(models):
    target, merged = models[0], GenerationConfig(num_assistant_tokens_schedule="heuristic")
    assert setting_origins.origin(target, merged, "num_assistant_tokens_schedule") == "call"
    with saved_with(target, num_assistant_tokens_schedule="heuristic"):
        assert setting_origins.origin(target, merged, "num_assistant_tokens_schedule") == "target"
