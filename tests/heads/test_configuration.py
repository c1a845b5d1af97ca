"""The canonical description of a head: what it fills in, what it refuses, and that it survives a file."""

import contextlib
import copy
import json
import pickle
import random
import re
import tracemalloc

import pytest
import torch
from transformers import AutoConfig

from eagle3_hf import Eagle3DraftConfig
from support.heads import FIELDS


def make(**overrides) -> Eagle3DraftConfig:
    return Eagle3DraftConfig(**{**FIELDS, **overrides})


def test_defaults_that_depend_on_other_fields():
    config = Eagle3DraftConfig(hidden_size=64, num_attention_heads=4, vocab_size=100)
    assert config.target_hidden_size == 64
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert config.draft_vocab_size == 100
    assert config.target_layer_ids is None
    assert config.num_captured_layers == 3
    assert not config.tie_word_embeddings
    assert config.window(0) is None
    assert make(attention_bias=True).attention_output_bias is True
    assert make(attention_bias=True, attention_output_bias=False).attention_output_bias is False


LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": None, "head_dim": None}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 7}
ALONE = {"use_aux_hidden_state": False, "target_layer_ids": None}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def test_head_sizes_of_latent_attention_follow_from_its_own():
    config = make(**LATENT)
    assert config.is_latent
    assert (config.head_dim, config.num_key_value_heads) == (8, 4)
    assert not make().is_latent


def test_a_head_without_fc_reads_the_final_output():
    config = make(**ALONE)
    assert (config.target_layer_ids, config.num_captured_layers) == ([-1], 1)
    assert make(use_aux_hidden_state=False, target_layer_ids=[-1], target_num_hidden_layers=2).num_captured_layers == 1


def test_windows_are_those_of_the_sliding_layers():
    types = ("full_attention", "sliding_attention")
    config = make(num_hidden_layers=2, layer_types=types, sliding_window=7)
    assert [config.window(0), config.window(1)] == [None, 7]
    assert config.layer_types == list(types)
    assert make(layer_types=["full_attention"], sliding_window=7).window(0) is None


def test_number_of_captured_layers_is_that_of_the_ids():
    assert make(target_layer_ids=[1, 4]).num_captured_layers == 2
    assert make(target_layer_ids=(0, 2, 3, 8)).target_layer_ids == [0, 2, 3, 8]


def test_rope_base_is_the_references_unless_given():
    assert make().rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    given = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    given["original_max_position_embeddings"] = 64
    assert make(rope_parameters=dict(given)).rope_parameters == given


def test_vocabulary_is_the_targets_for_transformers():
    """transformers compares `get_text_config().vocab_size` of target and assistant."""
    assert make().get_text_config().vocab_size == FIELDS["vocab_size"]


SWITCHES = {
    "norm_before_residual": True,
    "guessed_layer_ids": True,
    "attention_output_bias": False,
    "rope_interleave": False,
    "norm_output": True,
    "fc_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
    "fc_bias": True,
    "qk_norm": True,
    "own_embeddings": True,
}
RECORDS = {
    "target_name_or_path": "someone/model",
    "target_model_type": "llama",
    "target_num_hidden_layers": 8,
    "target_vocab_hash": "ab12",
    "target_chat_template_hash": "cd34",
    "held_out_accuracy": [0.75, 0.5],
}


def test_round_trip_through_a_file(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = make(**SWITCHES, **RECORDS, hidden_size=32, target_hidden_size=64, head_dim=8, rope_parameters=rope)
    config.dtype = torch.bfloat16
    assert_round_trip(config, tmp_path)
    assert config.to_dict()["model_type"] == "eagle3_draft"


@pytest.mark.parametrize("overrides", [LATENT, {**LATENT, "q_lora_rank": 20}, WINDOW, ALONE, {"final_norm": False}])
def test_other_kinds_of_heads_survive_a_file(tmp_path, overrides):
    config = make(**overrides, dtype=torch.bfloat16)
    assert_round_trip(config, tmp_path)


def test_what_transformers_adds_to_a_downloaded_config_is_no_strange_key(caplog):
    config = Eagle3DraftConfig.from_dict({**make().to_dict(), "_commit_hash": "0123abcd"})
    assert not caplog.records
    assert config.to_dict() == make().to_dict()


def assert_round_trip(config, tmp_path) -> None:
    config.save_pretrained(tmp_path)
    for loaded in (Eagle3DraftConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is Eagle3DraftConfig
        assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
        assert loaded.dtype == torch.bfloat16


SIZES = [
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "sliding_window",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "target_num_hidden_layers",
]


@pytest.mark.parametrize("value", ["64", 64.0, 0, -4, True, [64]], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are compared below
        make(**{name: value})
    assert re.fullmatch(
        rf"{name} must be an integer from 1 to \d+(, or None)?, got {re.escape(repr(value))}", str(caught.value)
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", 2**31), ("num_hidden_layers", 257), ("head_dim", 2**17), ("vocab_size", 10**30)],
)
def test_sizes_that_no_head_has_are_refused_before_anything_is_built(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be an integer from 1 to \d+(, or None)?, got {value}$"):
        make(**{name: value})


@pytest.mark.parametrize("name", [*SWITCHES, "norm_before_fc", "own_lm_head", "use_aux_hidden_state", "final_norm"])
def test_switches_are_bools(name):
    with pytest.raises(ValueError, match=f"^{name} must be True or False, got 'yes'$"):
        make(**{name: "yes"})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"draft_vocab_size": 400}, r"draft_vocab_size \(400\) is larger than the target's vocab_size \(320\)"),
        ({"own_lm_head": False}, "has 320 tokens, but draft_vocab_size is 128"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 15}, "head_dim must be even for rotary positions, got 15"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"hidden_size": 32, "target_hidden_size": 64}, r"width 32 cannot borrow the embedding .* width 64.*own_emb"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number above 0, got '1e-5'"),
        ({"hidden_act": "foo"}, "hidden_act must be the name of an activation function of transformers, got 'foo'"),
        ({"hidden_act": ["silu"]}, r"hidden_act must be .* got \['silu'\]"),
        ({"rope_parameters": "default"}, "rope_parameters must be a dict like .*, got 'default'"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type 'mrope' is unknown; known: default, dynamic, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters .*Missing required keys.*factor"),
        ({"target_layer_ids": 5}, "must be ascending, distinct hidden_states indices >= 0 .*got 5"),
        ({"target_layer_ids": []}, r"got \[\]"),
        ({"target_layer_ids": [2, 1, 4]}, r"got \[2, 1, 4\]"),
        ({"target_layer_ids": [2, 2, 4]}, r"got \[2, 2, 4\]"),
        ({"target_layer_ids": [-1, 2, 4]}, r"got \[-1, 2, 4\]"),
        ({"target_layer_ids": ["a", "b"]}, r"got \['a', 'b'\]"),
        ({"target_layer_ids": [1.0, 2.0]}, r"got \[1.0, 2.0\]"),
        ({"target_num_hidden_layers": 3}, r"\[1, 2, 4\] go beyond .* 3 layers, so the largest id is 3"),
        ({"target_layer_ids": [-1]}, r"got \[-1\]"),
        ({"target_layer_ids": [1, 2, 10**6]}, r"got \[1, 2, 1000000\]"),
        (
            {"target_layer_ids": [0, 2], "guessed_layer_ids": True},
            r"\[0, 2\] were not guessed.*guessed_layer_ids=False",
        ),
        ({"target_num_hidden_layers": 2, "guessed_layer_ids": True}, r"\[1, 2, 4\] go beyond .* 2 layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0, got nan"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a finite number above 0, got 0"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number above 0"),
        ({"initializer_range": float("inf")}, "initializer_range must be a finite number, at least 0, got inf"),
        ({"initializer_range": -0.1}, "initializer_range must be a finite number, at least 0, got -0.1"),
        ({"eos_token_id": ["2"]}, r"eos_token_id must be a token id, a list of them, or None, got \['2'\]"),
        ({"pad_token_id": 1.5}, "pad_token_id must be a token id, or None, got 1.5"),
        ({"target_name_or_path": 5}, "target_name_or_path must be a string, or None, got 5"),
        ({"dtype": "float99"}, "float99"),
        ({"id2label": 5}, "id2label|items"),
        # one feature
        ({**ALONE, "target_layer_ids": [1, 2, 4]}, r"final output alone .*but target_layer_ids is \[1, 2, 4\]"),
        ({**ALONE, "fc_norm": True, "fc_bias": True}, r"has no fc .*set \['fc_norm', 'fc_bias'\] to False"),
        ({**ALONE, "hidden_size": 32, "target_hidden_size": 64, "own_embeddings": True}, "to make 32 .* of 64 "),
        ({"final_norm": False, "norm_output": True}, "norm_output=True .* final_norm=False .*set norm_output=False"),
        # windows
        ({"sliding_window": 7}, r"sliding_window is 7, but layer_types does not say which layers slide"),
        ({"layer_types": ["sliding_attention"]}, "needs sliding_window"),
        ({**WINDOW, "num_hidden_layers": 2}, "layer_types has 1 entries, but num_hidden_layers is 2"),
        ({**WINDOW, "layer_types": ["chunked_attention"]}, r"must be a list of .*got \['chunked_attention'\]"),
        ({**WINDOW, "layer_types": "sliding_attention"}, "must be a list of .*got 'sliding_attention'"),
        ({**WINDOW, "layer_types": [["x"]]}, r"got \[\['x'\]\]"),
        # latent attention
        ({"v_head_dim": 8, "q_lora_rank": 4}, r"\['q_lora_rank', 'v_head_dim'\] belong to latent .*set kv_lora_rank"),
        (
            {"kv_lora_rank": 8, "v_head_dim": 8},
            r"kv_lora_rank=8\) also needs \['qk_nope_head_dim', 'qk_rope_head_dim'\]",
        ),
        ({**LATENT, "head_dim": 16}, r"head_dim \(16\) .* qk_rope_head_dim is 8: leave head_dim out"),
        ({**LATENT, "num_key_value_heads": 2}, "num_key_value_heads is 2 and num_attention_heads 4"),
        ({**LATENT, "qk_norm": True}, "set qk_norm=False"),
        ({**LATENT, "qk_rope_head_dim": 7}, "must be even for rotary positions, got 7"),
        ({**LATENT, "rope_parameters": {"partial_rotary_factor": 0.5}}, r"all of qk_rope_head_dim \(8\).*factor 0.5"),
        # rotary numbers
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is unknown"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one for all layers"),
        ({"rope_parameters": {"rope_theta": 0.0}}, "rope_theta must be a finite number above 0, got 0.0"),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta must be a finite number above 0, got '1e4'"),
        ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta must be a finite number above 0, got nan"),
        ({"rope_parameters": {"rope_theta": 1e-300}}, "frequencies that are not finite"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2.0}},
            "factor must be a finite number above 0, got -2.0",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": True}}, "factor must be .* got True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": -1}}, "mscale must be .* least 0, got -1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
            "truncate must be True or False, got 1",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}}, "give no frequencies"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2}, "give no frequencies"),
        ({"rope_parameters": {"partial_rotary_factor": 1.5}}, "factor 1.5 of head_dim 16 rotates 24 numbers"),
        ({"rope_parameters": {"partial_rotary_factor": 0.01}}, "factor 0.01 of head_dim 16 rotates 0 numbers"),
        (
            {"rope_parameters": LONGROPE | {"long_factor": [1.0]}},
            "long_factor has 1 numbers, but 8 pairs of head_dim 16",
        ),
        ({"rope_parameters": LONGROPE | {"short_factor": ["a"] * 8}}, "short_factor must be a list of finite numbers"),
        ({"rope_parameters": LONGROPE | {"short_factor": 3}}, "short_factor must be a list of finite numbers.*got 3"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_type 'mrope' is unknown"),
    ],
)
def test_contradictions_are_refused_with_both_numbers(overrides, words):
    with pytest.raises(ValueError, match=words):
        make(**overrides)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("hidden_size", "64", "must be an integer from 1 to .*, got '64'"),
        ("draft_vocab_size", 0, "must be an integer from 1 to .*, got 0"),
        ("norm_output", 1, "must be True or False, got 1"),
        ("target_layer_ids", [3, 1], r"must be ascending, .*, got \[3, 1\]"),
        ("layer_types", ["chunked_attention"], r"must be a list of .*, got \['chunked_attention'\]"),
        ("rope_parameters", {"rope_type": "mrope"}, ": rope_type 'mrope' is unknown"),
        ("hidden_act", "foo", "must be the name of .*, got 'foo'"),
        ("eos_token_id", "2", "must be a token id, .*, got '2'"),
    ],
)
def test_fields_are_checked_when_they_are_set_later(name, value, words):
    config = make()
    before = getattr(config, name)
    with pytest.raises(ValueError, match=f"^{name}.*{words}"):
        setattr(config, name, value)
    assert getattr(config, name) == before
    with pytest.raises(ValueError, match=f"^{name}.*{words}"):
        Eagle3DraftConfig.from_dict(make().to_dict(), **{name: value})


def test_fields_that_must_agree_are_compared_when_a_config_is_loaded_and_saved(tmp_path):
    with pytest.raises(ValueError, match=r"draft_vocab_size \(400\) is larger"):
        Eagle3DraftConfig.from_dict(make().to_dict(), draft_vocab_size=400)
    config = make()
    config.num_key_value_heads = 3
    with pytest.raises(ValueError, match="not a multiple of num_key_value_heads"):
        config.save_pretrained(tmp_path)


def test_none_asks_for_what_follows_from_other_fields():
    config = make(hidden_size=32, target_hidden_size=64, own_embeddings=True)
    config.target_hidden_size = config.num_key_value_heads = config.head_dim = None
    assert (config.target_hidden_size, config.num_key_value_heads, config.head_dim) == (32, 4, 8)


def test_equal_configs_have_equal_fields():
    assert make() == make()
    assert make() != make(norm_output=True)
    config = make(**WINDOW, rope_parameters=dict(LONGROPE))
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config


def test_the_rotary_description_that_is_passed_stays_as_it_is():
    given = {"rope_type": "linear", "factor": 2.0, "attention_factor": None}
    make(rope_parameters=given)
    assert given == {"rope_type": "linear", "factor": 2.0, "attention_factor": None}


@pytest.mark.parametrize("rope_type", ["yarn", "longrope", "llama3", "linear", "dynamic"])
def test_unset_numbers_are_left_out(rope_type):
    rope = LONGROPE | {"rope_type": rope_type, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = make(rope_parameters={**rope, "attention_factor": None, "beta_fast": None, "truncate": None})
    assert not any(value is None for value in config.rope_parameters.values())
    assert config.rope_parameters["rope_theta"] == 10000.0


BASES = [FIELDS, {**FIELDS, **LATENT, "q_lora_rank": 20}, {**FIELDS, **WINDOW}, {**FIELDS, **ALONE}]
BASES += [{**FIELDS, "rope_parameters": LONGROPE}]
BASES += [{**FIELDS, "rope_parameters": LONGROPE | {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}}]
ODD_VALUES = [None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**70, 10**400, 0.0, -0.5, 0.5, 1.0, 64.0, 1e-300, 1e300]
ODD_VALUES += [
    float("nan"),
    float("inf"),
    "",
    "x",
    "64",
    "yarn",
    "silu",
    "float99",
    [],
    [1],
    [-1],
    [[1]],
    ["x"],
    [None],
]
ODD_VALUES += [{}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "longrope"}, {"type": "linear", "factor": 1e300}]


def text_of(config) -> str:
    fields = {name: value for name, value in config.to_dict().items() if name != "transformers_version"}
    return json.dumps({**fields, "model_type": None}, sort_keys=True)  # NaN is equal to itself as a word


def test_whatever_a_file_holds_is_a_config_or_a_value_error():
    """Mutated fields, ours and those of transformers; a config that passes makes the same again from its own file."""
    names, chance = sorted(make().to_dict()), random.Random(0)
    tracemalloc.start()
    passed = 0
    for _ in range(600):
        fields = json.loads(json.dumps(chance.choice(BASES)))
        for _ in range(chance.randint(1, 3)):
            if isinstance(fields.get("rope_parameters"), dict) and chance.random() < 0.4:
                rope = fields["rope_parameters"]
                rope[chance.choice([*rope, "rope_theta", "partial_rotary_factor"])] = chance.choice(ODD_VALUES)
            else:
                fields[chance.choice(names)] = chance.choice(ODD_VALUES)
        with contextlib.suppress(ValueError):
            config = Eagle3DraftConfig(**fields)
            passed += 1
            again = Eagle3DraftConfig(**json.loads(text_of(config)))
            assert text_of(again) == text_of(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert 20 < passed < 400
