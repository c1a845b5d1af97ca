"""Damaged heads: a clear error or a correct head, never a crash of another kind, a hang or a gigabyte (see `fuzz`)."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.published_formats import HeadFormatError
from support.fuzz import cases as fuzz
from support.fuzz.heads import HEADS, IDS, Published, write
from support.processes import run_forked


load = Eagle3DraftModel.from_pretrained


def sound(name: str) -> Published:
    head = copy.copy(HEADS[name]())
    head.config, head.tensors = copy.deepcopy(head.config), dict(head.tensors)
    head.generation, head.wanted = copy.deepcopy(head.generation), {}
    return head


def changed(folder: Path, name: str, change) -> Path:
    head = sound(name)
    change(head)
    write(folder, head)
    return folder


def refusal(folder: Path, **kwargs) -> str:
    with pytest.raises(HeadFormatError) as caught:
        load(folder, **kwargs)
    fuzz.check_words(folder, str(caught.value))
    return str(caught.value)


# ----- the fuzzer itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_undamaged_they_load_as_published(tmp_path, name):
    case = fuzz.Case(0, name, sound(name), fuzz.random.Random(0))
    write(tmp_path, case.published)
    assert fuzz.judge(case, tmp_path, decode=True) == "loaded"


@pytest.mark.parametrize("field", ["norm_before_residual", "rms_norm_eps", "target_layer_ids", "rope_parameters"])
def test_a_wrong_field_is_found(tmp_path, field):
    case = fuzz.Case(0, "ModelOpt", sound("ModelOpt"), fuzz.random.Random(0))
    case.published.expected = {**case.published.expected, field: "another"}
    write(tmp_path, case.published)
    with pytest.raises(fuzz.Finding, match=f"{field} is .*'another' was published"):
        fuzz.judge(case, tmp_path, decode=False)


def test_a_wrong_tensor_is_found(tmp_path):
    head = sound("ModelOpt")
    write(tmp_path, head)
    draft = load(tmp_path)
    fuzz.check_tensors(fuzz.read_tensors(tmp_path), draft)
    with torch.no_grad():
        draft.fc.weight[3, 4] += 1e-6
    with pytest.raises(fuzz.Finding, match="fc.weight is not as in the file"):
        fuzz.check_tensors(fuzz.read_tensors(tmp_path), draft)


def write_summary(path: Path, count: int, seed: int) -> None:
    fuzz.prepare()
    path.write_text(json.dumps(fuzz.run_cases(count, seed, decode_every=4)))


def run(path: Path, count: int, seed: int, seconds: float) -> dict:
    """The fuzzer's summary, from a process of its own whose memory is limited."""
    code, raised = run_forked(write_summary, path, count, seed, seconds=seconds)
    assert code == 0, raised[-3000:]
    summary = json.loads(path.read_text())
    sys.stdout.write(f"{summary}\n")
    return summary


def assert_no_findings(summary: dict, count: int) -> None:
    assert summary["findings"] == []
    assert summary["refused"] + summary["loaded"] == count
    # With fewer of either the mutations would be too mild or too wild to prove anything.
    assert summary["refused"] > count / 2
    assert summary["loaded"] > count / 6
    assert summary["grown"] < fuzz.MEMORY


def test_some_damaged_heads(tmp_path):
    assert_no_findings(run(tmp_path / "summary.json", 100, seed=0, seconds=300), 100)


@pytest.mark.slow
def test_two_thousand_damaged_heads(tmp_path):
    assert_no_findings(run(tmp_path / "summary.json", 2000, seed=1, seconds=1800), 2000)


# ----- what it has found ---------------------------------------------------------------------------------------------


def test_an_adapter_beside_the_head_is_not_laid_over_it(tmp_path):
    folder = changed(tmp_path, "SafeAILab", lambda head: None)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else", "peft_type": "LORA"}')
    assert "holds an adapter (adapter_config.json)" in refusal(folder)


def test_a_stray_shard_of_a_distributed_checkpoint_is_not_loaded_instead(tmp_path):
    folder = changed(tmp_path, "SafeAILab", lambda head: None)
    other = {name: torch.zeros_like(t) for name, t in sound("SafeAILab").tensors.items()}
    save_file(other, folder / "shard-00001-model-00001-of-00001.safetensors")
    assert "of a distributed checkpoint" in refusal(folder)


def test_an_index_that_names_more_than_its_shards_hold(tmp_path):
    folder = changed(tmp_path, "SafeAILab shards", lambda head: None)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["midlayer.1.mlp.up_proj.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))
    assert "its index names tensors that its shards do not hold: ['midlayer.1.mlp.up_proj.weight']" in refusal(folder)


@pytest.mark.parametrize("metadata", [{}, {"metadata": 1}], ids=["none", "a number"])
def test_an_index_without_metadata(tmp_path, metadata):
    folder = changed(tmp_path, "SafeAILab shards", lambda head: None)
    file = folder / "model.safetensors.index.json"
    where = json.loads(file.read_text())["weight_map"]
    file.write_text(json.dumps({**metadata, "weight_map": where}))
    assert "has no `metadata`, which transformers needs" in refusal(folder)
    file.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert torch.equal(load(folder).fc.weight, sound("SafeAILab shards").tensors["fc.weight"])


@pytest.mark.parametrize("name", ["..", ".", "", "a\x00b", "../model.safetensors", "/etc/passwd"])
def test_an_index_that_leads_out_of_the_folder(tmp_path, name):
    folder = changed(tmp_path, "SafeAILab shards", lambda head: None)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["fc.weight"] = name
    file.write_text(json.dumps(index))
    assert "a file outside its folder, which is not read" in refusal(folder)


def test_views_of_one_storage_become_tensors_of_their_own(tmp_path):
    def share(head):
        whole = torch.randn(max(t.numel() for t in head.tensors.values()))
        parts = {name: whole[: t.numel()].view(t.shape) for name, t in head.tensors.items() if t.is_floating_point()}
        head.state = {**head.tensors, **parts}

    draft = load(changed(tmp_path / "a", "SafeAILab .bin", share))
    other = draft.layers[0].mlp.up_proj.weight.clone()
    with torch.no_grad():
        draft.layers[0].mlp.gate_proj.weight.zero_()
    assert torch.equal(draft.layers[0].mlp.up_proj.weight, other)
    draft.save_pretrained(tmp_path / "b")


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(64, 192, device="meta"), "has shapes, but no values for ['fc.weight']"),
        (torch.ones(64, 192).to_sparse(), "fc.weight is sparse or quantised, not a plain tensor"),
        (torch.zeros(1).expand(10**6, 10**6), "claims shape (1000000, 1000000), more bytes than the file has"),
    ],
    ids=["meta", "sparse", "giant"],
)
def test_tensors_that_only_a_pickle_can_hold(tmp_path, tensor, words, old):
    def change(head):
        head.state, head.file = {**head.tensors, "fc.weight": tensor}, f"{'old/' if old else ''}pytorch_model.bin"

    assert words in refusal(changed(tmp_path, "SafeAILab", change))


def test_names_that_are_no_strings(tmp_path):
    folder = changed(
        tmp_path, "SafeAILab .bin", lambda head: setattr(head, "state", {**head.tensors, 7: torch.ones(2)})
    )
    assert "names a tensor 7, which is not a string" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("window", None),
        ("to_dict", 3),
        ("_attn_implementation", True),
        ("attn_implementation", "somebody/kernel"),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("transformers_weights", "other.safetensors"),
        ("self", 1),
    ],
)
@pytest.mark.parametrize("loader", [load, AutoModel.from_pretrained], ids=["ours", "AutoModel"])
def test_keys_of_our_own_layout_that_no_head_has_do_nothing(tmp_path, caplog, loader, key, value):
    draft = loader(changed(tmp_path, "own", lambda head: head.config.update({key: value})))
    assert draft.config.window(0) is None
    assert draft.config._attn_implementation == "sdpa"
    assert torch.equal(draft.fc.weight, sound("own").tensors["fc.weight"])
    assert (f"not understood and have no effect: ['{key}']" in caplog.text) == bool(value)


def test_what_the_caller_says_of_attention_holds_all_the_same(tmp_path):
    folder = changed(tmp_path, "own", lambda head: head.config.update(attn_implementation="somebody/kernel"))
    for loader in (load, AutoModel.from_pretrained):
        assert loader(folder, attn_implementation="eager").config._attn_implementation == "eager"
    assert AutoConfig.from_pretrained(folder, attn_implementation="eager")._attn_implementation == "eager"


def test_long_values_are_told_in_short_by_the_config_too(tmp_path):
    folder = changed(tmp_path, "own", lambda head: head.config.update(hidden_act="y" * 10**5))
    with pytest.raises(ValueError, match=r"hidden_act .*got 'y+ \[\.\.\.\]") as caught:
        AutoModel.from_pretrained(folder)
    assert len(str(caught.value)) < fuzz.LONGEST


def test_our_own_layout_is_known_by_any_two_of_its_fields(tmp_path):
    draft = load(changed(tmp_path / "a", "own", lambda head: head.config.pop("own_lm_head")))
    assert draft.config.target_layer_ids == [1, 2, 4]
    words = refusal(changed(tmp_path / "b", "own shards", lambda head: head.config.pop("own_embeddings")))
    assert "tensors that no part of an EAGLE-3 head uses: ['embed_tokens.weight']" in words


GENERATION = [
    ({"num_assistant_tokens": "many"}, "says num_assistant_tokens 'many': it must be an integer from 1"),
    ({"assistant_tree_depth": 10**18}, "says assistant_tree_depth 1000000000000000000: it must be an integer from 1"),
    ({"assistant_tree_top_k": True}, "says assistant_tree_top_k True"),
    ({"assistant_coupled_sampling": 4}, "says assistant_coupled_sampling 4"),
    ({"eos_token_id": "end"}, "says eos_token_id 'end': it must be a token id"),
]


@pytest.mark.parametrize(("settings", "words"), GENERATION)
def test_tree_settings_that_are_none(tmp_path, settings, words):
    assert words in refusal(changed(tmp_path, "own", lambda head: head.generation.update(settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "hot"},
        {"cache_implementation": {}},
        {"max_new_tokens": -3},
        {"validate": 1, "to_dict": 2},
        {"watermarking_config": [1]},
    ],
)
def test_other_generation_settings_do_not_concern_a_draft(tmp_path, settings):
    folder = changed(tmp_path / "a", "own", lambda head: head.generation.update(settings, assistant_tree_depth=3))
    draft = load(folder)
    assert draft.generation_config.assistant_tree_depth == 3
    draft.save_pretrained(tmp_path / "b")


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '{"a":' * 990 + "1" + "}" * 990])
def test_a_generation_config_that_is_no_json(tmp_path, content):
    folder = changed(tmp_path, "SafeAILab", lambda head: None)
    (folder / "generation_config.json").write_text(content)
    assert "generation_config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["SafeAILab", "own"])
@pytest.mark.parametrize(("key", "value"), [("dtype", 1e-300), ("vocab_size", float("inf")), ("alpha", 1000.0)])
def test_entries_of_rope_that_mean_nothing(tmp_path, caplog, name, key, value):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, key: value}
    draft = load(changed(tmp_path / "a", name, lambda head: head.config.update(rope_parameters=rope)))
    assert draft.config.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    assert f"entries of its rope parameters that are not understood and have no effect: ['{key}']" in caplog.text
    draft.save_pretrained(tmp_path / "b")
    assert load(tmp_path / "b").config.rope_parameters == draft.config.rope_parameters


def test_two_descriptions_of_rope(tmp_path, caplog):
    two = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}
    draft = load(changed(tmp_path, "SafeAILab", lambda head: head.config.update(two)))
    assert draft.config.rope_parameters["rope_type"] == "default"
    assert "rope_parameters of type 'default' and a rope_scaling of type 'linear'" in caplog.text


def test_a_theta_that_no_float_can_hold(tmp_path):
    folder = changed(tmp_path, "SafeAILab", lambda head: head.config.update(rope_theta=10**400))
    assert "rope_theta must be a positive number" in refusal(folder)


def test_a_dtype_that_rounds_other_tensors_is_said_aloud(tmp_path, caplog):
    def mix(head):
        head.tensors["fc.weight"] = head.tensors["fc.weight"].half()

    folder = changed(tmp_path, "SafeAILab", mix)
    assert load(folder).dtype == torch.float16
    assert (
        "the head is loaded as float16, which rounds its ['float32'] tensors ['midlayer.hidden_norm.weight (layers."
        in caplog.text
    )
    exact = load(folder, dtype=torch.float32)
    assert torch.equal(exact.norm.weight, sound("SafeAILab").tensors["norm.weight"])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool])
def test_a_map_of_integers_too_narrow(tmp_path, dtype):
    def narrow(head):
        head.tensors["d2t"] = head.tensors["d2t"].to(dtype)
        del head.tensors["t2d"]

    assert "which cannot hold them" in refusal(changed(tmp_path, "SafeAILab", narrow))


def test_a_map_that_is_neither_offsets_nor_ids_is_refused_as_offsets(tmp_path):
    folder = changed(tmp_path, "SafeAILab", lambda head: head.tensors.update(d2t=torch.arange(128)))
    assert "which t2d does not mark" in refusal(folder)


def test_unknown_kinds_of_attention(tmp_path, caplog):
    def change(head):
        head.config["transformer_layer_config"]["layer_types"] = ["sliding_attention", "chunked_attention"]

    draft = load(changed(tmp_path, "speculators layers", change))
    assert draft.config.layer_types == ["sliding_attention", "full_attention"]
    assert "its layer_types ['chunked_attention'] are not known" in caplog.text


@pytest.mark.parametrize("ids", [[], [1, 3, 4], "none"])
def test_a_head_without_fc_reads_no_layer_ids(tmp_path, ids):
    draft = load(changed(tmp_path, "no features", lambda head: head.config["eagle_config"].update({IDS: ids})))
    assert draft.config.target_layer_ids == [-1]


@pytest.mark.parametrize("value", ["y" * 10**5, list(range(5000)), 10**1500])
def test_long_values_are_told_in_short(tmp_path, value):
    assert "[...]" in refusal(changed(tmp_path, "SafeAILab", lambda head: head.config.update(norm_output=value)))


@pytest.mark.parametrize("fields", [("hidden_size", "intermediate_size"), ("num_attention_heads", "hidden_size")])
def test_sizes_whose_product_overflows(tmp_path, fields):
    sizes = dict.fromkeys(fields, 2**31 - 1)
    refusal(changed(tmp_path, "own", lambda head: head.config.update(sizes, target_hidden_size=2**31 - 1)))
