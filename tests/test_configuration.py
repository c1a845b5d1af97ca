"""The canonical description of a head: what it fills in, what it refuses, and that it survives a file."""

import pytest
import torch
from transformers import AutoConfig

from eagle3_hf import Eagle3DraftConfig
from heads import FIELDS


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
}


def test_round_trip_through_a_file(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = make(**SWITCHES, **RECORDS, hidden_size=32, target_hidden_size=64, head_dim=8, rope_parameters=rope)
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    for loaded in (Eagle3DraftConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is Eagle3DraftConfig
        assert {**loaded.to_dict(), "_name_or_path": ""} == config.to_dict()
        assert loaded.dtype == torch.bfloat16
    assert config.to_dict()["model_type"] == "eagle3_draft"


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
]


@pytest.mark.parametrize("value", ["64", 64.0, 0, -4, True, [64]], ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are compared below
        make(**{name: value})
    assert str(caught.value) == f"{name} must be an integer of at least 1, got {value!r}"


@pytest.mark.parametrize("name", [*SWITCHES, "norm_before_fc", "own_lm_head"])
def test_switches_are_bools(name):
    with pytest.raises(ValueError, match=f"^{name} must be True or False, got 'yes'$"):
        make(**{name: "yes"})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"draft_vocab_size": 400}, r"draft_vocab_size \(400\) is larger than the target's vocab_size \(320\)"),
        ({"own_lm_head": False}, "has 320 rows, but draft_vocab_size is 128"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key_value_heads \(3\)"),
        ({"head_dim": 15}, "head_dim must be even for rotary positions, got 15"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"hidden_size": 32, "target_hidden_size": 64}, r"width 32 cannot borrow the embedding .* width 64.*own_emb"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        ({"hidden_act": "foo"}, "hidden_act 'foo' is unknown"),
        ({"hidden_act": ["silu"]}, r"hidden_act \['silu'\] is unknown"),
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
    ],
)
def test_contradictions_are_refused_with_both_numbers(overrides, words):
    with pytest.raises(ValueError, match=words):
        make(**overrides)
