"""Heads written for engines: what comes back is the same head, and what an engine cannot run is never written."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

import eagle3_hf
from eagle3_hf import Eagle3DraftModel, export_head
from eagle3_hf.cli import main
from eagle3_hf.export import ENGINES, FORMATS, ExportError, needs_target_weights, unsupported_features
from eagle3_hf.model.modeling_eagle3 import Eagle3RotaryEmbedding
from support.engines.heads import HEADS, SGLANG, SPECULATORS, VLLM
from support.families import VOCAB_SIZE, tiny
from support.heads import new_head


CAN = [
    (name, engine) for name, (_, engines) in HEADS.items() for engine in FORMATS if engine in {*engines, FORMATS[-1]}
]
CANNOT = [(name, engine) for name, (_, engines) in HEADS.items() for engine in ENGINES if engine not in engines]
NOT_COMPARED = {"_name_or_path", "architectures", "dtype", "transformers_version"}


@pytest.fixture(scope="module")
def target():
    return tiny("llama")


def head(name: str, **overrides) -> Eagle3DraftModel:
    recorded = {"target_name_or_path": "org/target", "target_model_type": "llama", "target_num_hidden_layers": 8}
    return new_head(**{**recorded, **HEADS[name][0], **overrides})


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def canonical(draft: Eagle3DraftModel) -> dict:
    return {key: value for key, value in draft.config.to_dict().items() if key not in NOT_COMPARED}


# ----- round trips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), CAN)
def test_the_same_head_comes_back(name, engine, target, tmp_path):
    draft = head(name)
    folder = export_head(draft, tmp_path / "out", engine, target=target if name != "wide_target" else None)
    again = Eagle3DraftModel.from_pretrained(folder)
    tensors = again.state_dict()
    for key, tensor in draft.state_dict().items():
        assert torch.equal(tensors[key], tensor), key
        assert tensors[key].dtype == tensor.dtype, key
    expected = canonical(draft)
    if engine == SPECULATORS:  # whose files hold everything
        expected |= {"own_embeddings": True, "own_lm_head": True}
    assert canonical(again) == expected


def test_speculators_get_the_target_s_own_rows(target, tmp_path):
    draft = head("borrowed_lm_head")
    tensors = load_file(export_head(draft, tmp_path / "out", SPECULATORS, target=target) / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], target.get_input_embeddings().weight)
    assert torch.equal(tensors["lm_head.weight"], target.get_output_embeddings().weight)


@pytest.mark.parametrize("engine", FORMATS)
def test_dtype(engine, target, tmp_path):
    draft = head("plain")
    folder = export_head(draft, tmp_path / "out", engine, target=target, dtype="bfloat16")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        assert tensor.dtype == {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16), name
    assert torch.equal(tensors["fc.weight"], draft.fc.weight.bfloat16())
    assert read_config(folder)["dtype"] == "bfloat16"
    assert draft.dtype == torch.float32


def test_dtype_as_torch_names_it(tmp_path):
    folder = export_head(head("plain"), tmp_path / "out", VLLM, dtype=torch.float16)
    assert read_config(folder)["torch_dtype"] == "float16"
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, got 'int8'"):
        export_head(head("plain"), tmp_path / "other", VLLM, dtype="int8")


# ----- what engines read ---------------------------------------------------------------------------------------------


def test_layer_ids_of_each_engine(target, tmp_path):
    draft = head("plain", target_layer_ids=[2, 4, 5])
    configs = {e: read_config(export_head(draft, tmp_path / e, e, target=target)) for e in ENGINES}
    key = "eagle_aux_hidden_state_layer_ids"
    assert configs[VLLM][key] == configs[SPECULATORS][key] == [2, 4, 5]
    assert "eagle_config" not in configs[VLLM]
    assert configs[SGLANG]["eagle_config"] == {key: [1, 3, 4], "use_aux_hidden_state": True}
    assert "model_type" not in configs[SPECULATORS], "vLLM would take it for a flat config"


@pytest.mark.parametrize(
    ("model_type", "ids", "stored"),
    [
        ("llama", [3, 4, 6], [2, 3, 5]),
        ("deepseek_v3", [3, 4, 6], [3, 4, 6]),
        ("deepseek_v3", [2, 4, 6], [1, 3, 5]),
        ("gpt_oss", [2, 4, 7], [1, 3, 6]),
        ("gpt_oss", [4, 6, 8], [4, 6, 8]),
    ],
)
def test_layer_ids_where_sglang_counts_otherwise(model_type, ids, stored, tmp_path):
    draft = head("plain", target_layer_ids=ids, target_model_type=model_type)
    config = read_config(export_head(draft, tmp_path / "out", SGLANG))
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == stored


def test_names_of_later_layers(tmp_path):
    draft = head("two_layers")
    ours = load_file(export_head(draft, tmp_path / "vllm", VLLM) / "model.safetensors")
    theirs = load_file(export_head(draft, tmp_path / "sglang", SGLANG) / "model.safetensors")
    assert torch.equal(ours["layers.1.input_layernorm.weight"], theirs["layers.1.hidden_norm.weight"])
    assert "layers.1.input_layernorm.weight" not in theirs
    assert {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"} <= theirs.keys()


def test_no_map_for_the_whole_vocabulary(target, tmp_path):
    for engine in ENGINES:
        folder = export_head(head("whole_vocabulary"), tmp_path / engine, engine, target=target)
        assert not {"d2t", "t2d"} & load_file(folder / "model.safetensors").keys()


def test_sglang_takes_a_missing_lm_head_from_the_target(tmp_path):
    assert read_config(export_head(head("borrowed_lm_head"), tmp_path / "out", SGLANG))["draft_vocab_size"] is None


@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, engine) for name, engine in CAN if engine in (VLLM, SGLANG) and "rope_parameters" in HEADS[name][0]],
)
def test_old_and_new_readers_see_the_same_rope(name, engine, tmp_path):
    """transformers 4 knows rope_theta and rope_scaling, transformers 5 knows rope_parameters; some readers, both."""
    draft = head(name)
    fields = read_config(export_head(draft, tmp_path / "out", engine))
    old = {key: value for key, value in fields.items() if key != "rope_parameters"}
    new = {key: value for key, value in fields.items() if key not in ("rope_theta", "rope_scaling")}
    new.pop("partial_rotary_factor", None)
    for number, style in enumerate((fields, old, new)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(style), encoding="utf-8")
        config = AutoConfig.from_pretrained(folder)
        rotary, ours = Eagle3RotaryEmbedding(config), draft.rotary_emb
        assert torch.equal(rotary.inv_freq, ours.inv_freq)
        assert rotary.attention_scaling == ours.attention_scaling


# ----- what the target lends -----------------------------------------------------------------------------------------


def test_scaled_embeddings_travel_with_the_head(tmp_path):
    """Gemma scales inside its embedding module; vLLM would share the bare weight with the head."""
    gemma = tiny("gemma3")
    draft = head("plain", target_model_type="gemma3_text", target_num_hidden_layers=None)
    assert needs_target_weights(draft.config, VLLM)
    with pytest.raises(ExportError, match=r"scales its embedding inside the module; pass the target itself"):
        export_head(draft, tmp_path / "out", VLLM)
    again = Eagle3DraftModel.from_pretrained(export_head(draft, tmp_path / "out", VLLM, target=gemma))
    ids = torch.arange(VOCAB_SIZE)[None]
    assert torch.equal(again.embed_tokens(ids), gemma.get_input_embeddings()(ids))
    with pytest.raises(ExportError, match="SGLang shares the bare weight"):
        export_head(draft, tmp_path / "sglang", SGLANG, target=gemma)


def test_sglang_keeps_no_embedding_of_its_own(target, tmp_path):
    draft = head("own_embeddings")
    with pytest.raises(ExportError, match="must be compared with the target's; pass the target itself"):
        export_head(draft, tmp_path / "out", SGLANG, target=target.config)
    with pytest.raises(ExportError, match="differs from the target's, by which SGLang replaces it"):
        export_head(draft, tmp_path / "out", SGLANG, target=target)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    export_head(draft, tmp_path / "out", SGLANG, target=target)


def test_speculators_need_what_is_borrowed(target, tmp_path):
    for given in (None, target.config):
        with pytest.raises(ExportError) as error:
            export_head(head("borrowed_lm_head"), tmp_path / "out", SPECULATORS, target=given)
        assert "embed_tokens: " in str(error.value)
        assert "lm_head: " in str(error.value)
    assert not (tmp_path / "out").exists()


def test_verifier_of_speculators(target, tmp_path):
    draft = head("own_embeddings", target_name_or_path=None)
    with pytest.raises(ExportError, match="pass verifier="):
        export_head(draft, tmp_path / "out", SPECULATORS)
    with pytest.raises(ExportError, match="pass verifier="):
        export_head(draft, tmp_path / "out", SPECULATORS, verifier="/no/such/folder")
    moved = head("own_embeddings", target_name_or_path="/moved/away")
    saved = tiny("llama").config.__class__(**{**target.config.to_dict(), "_name_or_path": "org/saved"})
    folder = export_head(moved, tmp_path / "moved", SPECULATORS, target=saved)
    assert read_config(folder)["speculators_config"]["verifier"]["name_or_path"] == "org/saved"
    folder = export_head(draft, tmp_path / "hub", SPECULATORS, verifier="org/model")
    assert read_config(folder)["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    folder = export_head(draft, tmp_path / "local", SPECULATORS, verifier=str(tmp_path), target=target)
    assert read_config(folder)["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path.resolve())


def test_guessed_layer_ids_are_said_to_be_guesses(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("eagle3_hf.export.head.logger", logging.getLogger("head"))
    export_head(head("plain"), tmp_path / "sure", VLLM)
    assert caplog.text == ""
    export_head(head("plain", guessed_layer_ids=True), tmp_path / "guessed", VLLM)
    assert "The layer ids [1, 2, 4] of this head are a guess" in caplog.text


@pytest.mark.parametrize("as_config", [True, False])
def test_the_target_settles_layer_ids(as_config, target, tmp_path):
    draft = head("plain", target_layer_ids=None, target_num_hidden_layers=None)
    for to in FORMATS:
        with pytest.raises(ExportError, match="target_layer_ids: the head.s file names none.*pass target="):
            export_head(draft, tmp_path / "out", to)
    for to in (VLLM, FORMATS[-1]):
        folder = export_head(draft, tmp_path / to, to, target=target.config if as_config else target)
        assert Eagle3DraftModel.from_pretrained(folder).config.target_layer_ids == [2, 4, 5]
    assert draft.config.target_layer_ids is None


def test_another_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="trained for a target of 8 layers.*has 4"):
        export_head(head("plain"), tmp_path / "out", VLLM, target=tiny("llama", num_hidden_layers=4))
    assert not (tmp_path / "out").exists()


# ----- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "engine"), CANNOT)
def test_what_an_engine_cannot_run_is_refused_by_name(name, engine, target, tmp_path):
    draft = head(name)
    with pytest.raises(ExportError) as error:
        export_head(draft, tmp_path / "out", engine, target=None if name == "wide_target" else target)
    named = {
        "own_embeddings": "embed_tokens",
        "qkv_bias_qk_norm": "bias",
        "windows": "sliding_window",
        "gelu": "hidden_act",
        "no_final_norm": "final_norm",
        "one_layer_read": "features as wide as the draft (64)",
        "embedding_read": "target_layer_ids [0, 2, 4]",
        "last_block_read": "target_layer_ids [2, 4, 8]",
        "no_aux": "use_aux_hidden_state",
        "mla_halves": "rope_interleave" if engine == VLLM else "kv_lora_rank",
        "window_qk_norm": "sliding_window",
        "mla_full_rank_queries": "q_lora_rank" if engine != SPECULATORS else "kv_lora_rank",
        "yarn_attention_factor": "attention_factor",
        "dynamic": "rope_type='dynamic'",
        "partial": "partial_rotary_factor",
        "wide_target": "target_hidden_size 96 beside hidden_size 64",
    }
    first_field = next(iter(HEADS[name][0]), "")
    assert named.get(name, first_field) in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_every_reason_at_once(tmp_path):
    draft = head("norm_before_residual", qk_norm=True, fc_bias=True, hidden_act="gelu")
    with pytest.raises(ExportError) as error:
        export_head(draft, tmp_path / "out", SGLANG)
    for reason in ("norm_before_residual", "qk_norm", "fc_bias", "hidden_act"):
        assert f"- {reason}" in str(error.value)
    assert len(unsupported_features(draft.config, SGLANG)) == 4


def test_unset_vocabulary(tmp_path):
    draft = Eagle3DraftModel(head("plain").config)
    with pytest.raises(ExportError, match="draft vocabulary: only its size is known"):
        export_head(draft, tmp_path / "out", VLLM)


def test_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="unknown format 'tgi': choose from vllm, sglang, speculators, eagle3-hf"):
        export_head(head("plain"), tmp_path / "out", "tgi")


# ----- writing -------------------------------------------------------------------------------------------------------


def test_an_error_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        save_file(*args, **kwargs)
        raise OSError("disk full")

    monkeypatch.setattr("eagle3_hf.export.writing.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        export_head(head("plain"), tmp_path / "out", VLLM)
    assert list(tmp_path.iterdir()) == []


def test_folders_with_something_in_them(tmp_path):
    folder = tmp_path / "out"
    export_head(head("plain"), folder, VLLM)
    with pytest.raises(FileExistsError, match="is not empty"):
        export_head(head("plain"), folder, SGLANG)
    (folder / "notes.txt").write_text("mine")
    export_head(head("plain"), folder, SGLANG, overwrite=True)
    assert "eagle_config" in read_config(folder)
    assert "SGLang" in (folder / "README.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text("my card")
    export_head(head("plain"), folder, VLLM, overwrite=True)
    assert (folder / "README.md").read_text() == "my card"
    assert (folder / "notes.txt").read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [folder]  # no half of an export
    for files in (
        {"notes.txt": "mine"},
        {"config.json": '{"model_type": "llama"}', "model.safetensors": ""},
        {"config.json": "{"},
    ):
        other = tmp_path / f"other{len(files)}{len(str(files))}"
        other.mkdir()
        for name, text in files.items():
            (other / name).write_text(text)
        with pytest.raises(FileExistsError, match="holds no earlier export"):
            export_head(head("plain"), other, VLLM, overwrite=True)
        assert {file.name: file.read_text() for file in other.iterdir()} == files
    with pytest.raises(FileExistsError, match="is a file"):
        export_head(head("plain"), folder / "notes.txt", VLLM, overwrite=True)


def test_an_empty_folder_will_do(tmp_path):
    assert export_head(head("plain"), tmp_path, VLLM) == tmp_path
    assert sorted(file.name for file in tmp_path.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_the_draft_stays_as_it_is(target, tmp_path):
    draft = head("plain")
    before, config = {name: tensor.clone() for name, tensor in draft.state_dict().items()}, draft.config.to_dict()
    for to in FORMATS:
        export_head(draft, tmp_path / to, to, target=target, dtype="bfloat16")
    assert draft.config.to_dict() == config
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())


def test_export_is_public_and_lazy():
    assert "export_head" in eagle3_hf.__all__
    assert eagle3_hf.export_head is export_head


# ----- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target.save_pretrained(folder / "target")
    head("plain", target_name_or_path=None).save_pretrained(folder / "head")
    return folder


def test_convert(folders, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["convert", str(folders / "head"), out, "--to", "vllm", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "config.json" in printed
    assert "vllm serve TARGET" in printed
    assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
    assert main(["convert", str(folders / "head"), out, "--to", "sglang"]) == 1
    assert "is not empty: choose another folder, or replace the export in it with overwrite=True (--overwrite)" in (
        capsys.readouterr().err
    )
    (tmp_path / "out" / "notes.txt").write_text("mine")
    assert main(["convert", str(folders / "head"), out, "--to", "sglang", "--overwrite"]) == 0
    printed = capsys.readouterr().out
    assert "--speculative-algorithm EAGLE3" in printed
    assert f"wrote README.md, config.json, model.safetensors to {out}\n" in printed


def test_convert_takes_a_target_s_rows(folders, tmp_path, capsys):
    command = ["convert", str(folders / "head"), str(tmp_path / "out"), "--to", "speculators"]
    assert main(command) == 1
    assert "embed_tokens" in capsys.readouterr().err
    assert main([*command, "--target", str(folders / "target")]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == (VOCAB_SIZE, 64)


def test_convert_takes_rows_of_a_target_that_reads_images(target, tmp_path):
    text = {**target.config.to_dict(), "model_type": "qwen2_5_vl_text", "rope_parameters": {"rope_type": "default"}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, vocab_size=VOCAB_SIZE)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "target")
    head("plain", target_model_type=None).save_pretrained(tmp_path / "head")
    paths = str(tmp_path / "head"), str(tmp_path / "out")
    assert main(["convert", *paths, "--to", "speculators", "--target", str(tmp_path / "target")]) == 0
    rows = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(rows, model.get_input_embeddings().weight)


def test_convert_sets_what_a_file_leaves_open(folders, tmp_path, capsys):
    command = ["convert", str(folders / "head"), str(tmp_path / "out"), "--to", "vllm"]
    assert main([*command, "--set", "target_layer_ids=[1, 3, 8]", "--set", "norm_output=True"]) == 0
    written = read_config(tmp_path / "out")
    assert (written["eagle_aux_hidden_state_layer_ids"], written["norm_output"]) == ([1, 3, 8], True)
    for setting, words in (
        ("norm_outpt=true", "is not a field of"),
        ("norm_output=yes", "expected JSON"),
        ("x", "JSON"),
    ):
        assert main([*command, "--overwrite", "--set", setting]) == 1
        assert f"--set {setting}" in (said := capsys.readouterr().err)
        assert words in said


def test_convert_reads_no_weights_that_it_does_not_need(folders, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    command = ["convert", str(folders / "head"), str(tmp_path / "out"), "--to", "sglang"]
    assert main([*command, "--target", str(folders / "target")]) == 0


def test_convert_learns_of_a_scaled_embedding_from_the_target(tmp_path):
    """Heads of most publishers do not say what kind of model their target is."""
    tiny("gemma3").save_pretrained(tmp_path / "target")
    unknown = {"target_name_or_path": None, "target_model_type": None, "target_num_hidden_layers": None}
    head("plain", **unknown).save_pretrained(tmp_path / "head")
    command = ["convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "vllm"]
    assert main([*command, "--target", str(tmp_path / "target")]) == 0
    assert "embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")
