"""Layer ids of published configs: under every key, at every level, alone and together; and heads of other shapes."""

import itertools
import re

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.model.loading import describe_head
from eagle3_hf.published_formats import HeadFormatError
from eagle3_hf.published_formats.layer_ids import KEY, LayerIds, layer_ids
from support.families import tiny
from support.fuzz.config import ID_KEYS
from support.heads import new_head, published, write_folder


OUTPUTS, INDICES = [1, 9, 17], [2, 10, 18]  # the same layers, the reference's three of a target of 21
UNCLEAR = [4, 9, 17]  # neither begins with 1 nor are they the reference's three
KEYS = [KEY, *ID_KEYS]
PLACES = [(level, key) for level in ("", "eagle_config", "transformer_layer_config") for key in KEYS]
INDEX_PLACES = {("", KEY), ("transformer_layer_config", KEY), ("eagle_config", "layer_ids")}
OVERRIDE = "load it with target_layer_ids=[...]"


def config_with(*stored: tuple[tuple[str, str], list[int]], **more) -> dict:
    config: dict = dict(more)
    for (level, key), ids in stored:
        (config.setdefault(level, {}) if level else config)[key] = ids
    return config


def read(*stored, speculators=False, **more) -> tuple[LayerIds, list[str]]:
    notes: list[str] = []
    return layer_ids(config_with(*stored, **more), speculators, notes), notes


def dotted(place: tuple[str, str]) -> str:
    return ".".join(part for part in place if part)


# ----- one place -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES, ids=dotted)
def test_ids_at_one_place_are_never_ignored(place):
    """Where engines look their custom holds; elsewhere both readings are said."""
    for ids in (OUTPUTS, INDICES, UNCLEAR):
        found, notes = read((place, ids))
        raised = [i + 1 for i in ids]
        assert found.ids in (ids, raised)
        if place in INDEX_PLACES:
            assert found == LayerIds(ids)
            assert bool(notes) == (ids[0] == 1)
            continue
        assert found == {1: LayerIds(raised), 2: LayerIds(ids), 4: LayerIds(raised, guessed=True)}[ids[0]]
        if place == ("eagle_config", KEY):
            assert bool(notes) == found.guessed
        else:
            assert dotted(place) in notes[0]
        for note in notes:
            assert str(raised) in note
            assert "target_layer_ids=" in note


def test_a_first_id_of_1_at_the_top_is_noted_with_the_other_reading():
    found, (note,) = read((("", KEY), OUTPUTS))
    assert found == LayerIds(OUTPUTS)
    assert f"may read one layer too low; if acceptance is low, try target_layer_ids={INDICES}" in note


# ----- two places ----------------------------------------------------------------------------------------------------

PAIRS = list(itertools.combinations(PLACES, 2))


def test_equal_ids_at_two_places():
    """Warned of with both readings and the override wherever the two places different conventions."""
    for one, other in PAIRS:
        found, notes = read((one, OUTPUTS), (other, OUTPUTS))
        customs = {one in INDEX_PLACES, other in INDEX_PLACES}
        if customs == {True}:
            assert found == LayerIds(OUTPUTS), (one, other)
        elif customs == {False}:
            assert found == LayerIds(INDICES), (one, other)
        else:
            assert found == LayerIds(INDICES, guessed=True), (one, other)
            (note,) = notes
            assert dotted(one) in note
            assert dotted(other) in note
            assert f"indices {OUTPUTS}, or outputs of blocks and so the indices {INDICES}; {INDICES} are read" in note
            assert OVERRIDE in note


def test_ids_one_apart_at_two_places_need_no_guess():
    """The larger ones are indices, whatever the keys; but not where indices would be the smaller ones."""
    for one, other in PAIRS:
        for low, high in ((one, other), (other, one)):
            stored = (low, OUTPUTS), (high, INDICES)
            if low in INDEX_PLACES:
                with pytest.raises(HeadFormatError, match="not the same layers"):
                    read(*stored)
            else:
                assert read(*stored) == (LayerIds(INDICES), []), (low, high)


def test_ids_of_other_layers_at_two_places_are_refused_with_both():
    for one, other in PAIRS:
        with pytest.raises(HeadFormatError) as caught:
            read((one, OUTPUTS), (other, UNCLEAR))
        for part in (dotted(one), dotted(other), str(OUTPUTS), str(UNCLEAR), OVERRIDE):
            assert part in str(caught.value)


def test_three_places():
    top, nested, third = ("", KEY), ("eagle_config", KEY), ("eagle_config", "target_hidden_layer_ids")
    assert read((top, INDICES), (nested, OUTPUTS), (third, OUTPUTS)) == (LayerIds(INDICES), [])
    assert read((top, INDICES), (nested, INDICES), (third, OUTPUTS)) == (LayerIds(INDICES), [])
    found, (note,) = read((top, OUTPUTS), (nested, OUTPUTS), (third, OUTPUTS))
    assert found == LayerIds(INDICES, guessed=True)
    assert all(dotted(place) in note for place in (top, nested, third))
    with pytest.raises(HeadFormatError, match="not the same layers"):
        read((top, INDICES), (nested, OUTPUTS), (third, [i - 1 for i in OUTPUTS]))


def test_equal_ids_of_our_own_exports_are_indices_for_certain():
    """SGLang takes the ids of some targets as they are; our exports say then the same at both levels."""
    both = (("", KEY), UNCLEAR), (("eagle_config", KEY), UNCLEAR)
    assert read(*both, target_num_hidden_layers=20) == (LayerIds(UNCLEAR), [])
    assert read(*both)[0] == LayerIds([5, 10, 18], guessed=True)


def test_equal_ids_in_a_speculators_config_are_its_own():
    both = (("", KEY), UNCLEAR), (("eagle_config", KEY), UNCLEAR)
    found, (note,) = read(*both, speculators=True)
    assert found == LayerIds(UNCLEAR)
    assert str([5, 10, 18]) in note


# ----- keys and values -----------------------------------------------------------------------------------------------

NO_IDS = {
    "mlp_only_layers": [1, 2],
    "no_rope_layers": [1, 0, 1],
    "layer_types": ["full_attention"],
    "num_aux_layers": 3,
}
NO_IDS |= {"vision_feature_layer": [-2, 4], "target_num_hidden_layers": 32, "target_layer_types": ["full_attention"]}
NO_IDS |= {
    "cross_attention_layers": [3, 8],
    "use_aux_hidden_state_layers": True,
    "aux_layer_ids": None,
    "layer_ids": [],
}


@pytest.mark.parametrize(("key", "value"), NO_IDS.items(), ids=NO_IDS)
def test_what_names_no_layers_of_the_target(key, value):
    assert read((("", key), value), (("eagle_config", key), value)) == (LayerIds(None), [])


@pytest.mark.parametrize("value", ["1,9,17", "[1, 9, 17]", [1, "9"], [1, 1, 2], [-1, 4], [True, 1]], ids=str)
@pytest.mark.parametrize("key", ["aux_layer_ids", KEY])
def test_ids_that_cannot_be_meant_are_refused(key, value):
    with pytest.raises(HeadFormatError, match=rf"{key} must be distinct layer numbers.*target_layer_ids="):
        read((("", key), value))


# ----- whole heads ---------------------------------------------------------------------------------------------------


def folder_with(tmp_path, config: dict, tensors: dict | None = None, **fields):
    written, own = published(new_head(**fields))
    return write_folder(tmp_path, {**written, **config}, {**own, **(tensors or {})})


def test_a_wrong_guess_of_equal_ids_is_taken_back_with_the_target(tmp_path):
    """The largest is the number of the target's blocks: they were indices."""
    layers = tiny("llama").config.num_hidden_layers
    ids = [3, 5, layers]
    folder = folder_with(tmp_path, config_with((("", KEY), ids), (("eagle_config", KEY), ids)))
    draft = Eagle3DraftModel.from_pretrained(folder)
    assert draft.config.target_layer_ids == [i + 1 for i in ids]
    assert draft.bind(tiny("llama")).config.target_layer_ids == ids


def test_the_override_settles_equal_ids_and_is_silent(tmp_path):
    folder = folder_with(tmp_path, config_with((("", KEY), UNCLEAR), (("eagle_config", KEY), UNCLEAR)))
    described = describe_head(folder, target_layer_ids=UNCLEAR)
    assert described.fields["target_layer_ids"] == UNCLEAR
    assert described.notes == []


def test_ids_under_another_key_are_not_called_unknown(tmp_path):
    folder = folder_with(tmp_path, {"aux_layer_ids": OUTPUTS})
    described = describe_head(folder)
    assert described.fields["target_layer_ids"] == INDICES
    (note,) = described.notes
    assert "aux_layer_ids" in note


@pytest.mark.parametrize("fields", [{}, {"own_embeddings": True}], ids=str)
@pytest.mark.parametrize("target_hidden_size", [None, 64])
@pytest.mark.parametrize("ids", [[2, 5], [2, 3, 4, 5]], ids=str)
def test_another_number_of_ids_than_fc_is_made_for(tmp_path, fields, target_hidden_size, ids):
    config = {KEY: ids} if target_hidden_size is None else {KEY: ids, "target_hidden_size": target_hidden_size}
    folder = folder_with(tmp_path, config, **fields)
    words = rf"fc.weight reads 192 features, but {len(ids)} layers .* fc is made for 3 layers, .* names {len(ids)};"
    with pytest.raises(HeadFormatError, match=words):
        describe_head(folder)
    with pytest.raises(HeadFormatError, match=words):
        describe_head(folder, target_layer_ids=ids)
    assert describe_head(folder, target_layer_ids=[1, 2, 3]).fields["target_layer_ids"] == [1, 2, 3]


def test_a_target_of_another_width_may_still_be_left_out_of_the_config(tmp_path):
    fields = {"hidden_size": 32, "head_dim": 8, "target_hidden_size": 64, "own_embeddings": True}
    folder = folder_with(tmp_path, {KEY: [2, 3, 4], "target_hidden_size": None}, **fields)
    assert describe_head(folder).fields["target_hidden_size"] == 64


SHAPES = {
    "midlayer.mlp.experts.0.gate_proj.weight": "a mixture of experts",
    "midlayer.mlp.experts.gate_up_proj": "a mixture of experts",
    "midlayer.mlp.gate.weight": "a mixture of experts",
    "midlayer.mlp.router.weight": "a mixture of experts",
    "midlayer.mlp.shared_expert.up_proj.weight": "a mixture of experts",
    "layers.1.block_sparse_moe.gate.weight": "a mixture of experts",
    "midlayer.self_attn.qkv_proj.weight": "projections are fused",
    "midlayer.mlp.gate_up_proj.weight": "projections are fused",
    "midlayer.self_attn.sinks": "has sinks",
    "midlayer.self_attn.indexer.wk.weight": "is sparse",
    "midlayer.self_attn.g_proj.weight": "an output gate",
    "layers.1.linear_attn.conv1d.weight": "recurrent or convolutional",
    "midlayer.pre_feedforward_layernorm.weight": "norms before and after each part",
    "midlayer.hidden_norm.bias": "LayerNorms with biases",
    "norm.bias": "LayerNorms with biases",
    "midlayer.mlp.fc1.weight": "not a gated one",
    "fc.1.weight": "with several layers",
    "fc2.weight": "with several layers",
    "lm_head.bias": "has a bias",
    "midlayer.self_attn.q_proj.lora_A.weight": "adapters that are not merged",
}


@pytest.mark.parametrize(("name", "words"), SHAPES.items(), ids=SHAPES)
def test_draft_layers_of_another_shape_are_refused_as_what_they_are(tmp_path, name, words):
    folder = folder_with(tmp_path, {}, {name: torch.zeros(4)})
    with pytest.raises(HeadFormatError, match=rf"{words}.*\(tensor {re.escape(name)}\), which is not supported"):
        describe_head(folder)


def test_a_mixture_of_experts_without_the_dense_layer(tmp_path):
    """The dense matrices are not there; what is missing is not what is wrong with it."""
    config, tensors = published(new_head())
    tensors = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    for expert in range(2):
        tensors[f"midlayer.mlp.experts.{expert}.up_proj.weight"] = torch.zeros(8, 64)
    with pytest.raises(HeadFormatError, match="mixture of experts"):
        describe_head(write_folder(tmp_path, config, tensors))
