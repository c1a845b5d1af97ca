"""The engines themselves read what we write. Each runs in an interpreter of its own, named by an environment variable;
without it the tests skip. `.ci/engines` makes the one for speculators.

| variable | has | what is compared |
|---|---|---|
| `EAGLE3_HF_SPECULATORS_PYTHON` | speculators 0.9 | logits of three steps, both ways |
| `EAGLE3_HF_VLLM_PYTHON` | vLLM 0.33 | config, layers read, rotary table, logits of a prompt and a chain |
| `EAGLE3_HF_SGLANG_PYTHON` | SGLang 0.5.23 | the same |

vLLM and SGLang are built for GPUs. Here their own code reads the config, maps the weights and runs the draft model, on
a CPU; only the attention kernel is a stand-in. Neither serves anything here: the scheduler, the target that hands out
its features, tensor parallelism, and in SGLang MLA heads beyond their config, are not run.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from eagle3_hf import Eagle3DraftModel, export_head
from eagle3_hf.model.attention import CachedAttention, DraftCache
from eagle3_hf.ttt.attention import TTTAttention
from support.engines.heads import HEADS, SGLANG, SPECULATORS, VLLM
from support.families import HIDDEN_SIZE, VOCAB_SIZE, tiny
from support.heads import DRAFT_VOCAB, new_head


STEPS, LENGTH, TOLERANCE = 3, 14, 2e-5


def interpreter(variable: str) -> str:
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no interpreter")
    return path


def run(python: str, script: str, folder: Path) -> None:
    """The script's own errors end the test with its own words."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, str(tests / "support" / "engines" / script), str(folder)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-6000:]


def engine_inputs() -> dict[str, torch.Tensor]:
    """Features of one, three and four layers and of three wider ones; tokens; the target ids of a draft vocabulary."""
    generator = torch.Generator().manual_seed(0)
    widths = [HIDDEN_SIZE * count for count in (1, 3, 4)] + [96 * 3]
    return {
        **{f"features_{width}": torch.randn(1, LENGTH, width, generator=generator) for width in widths},
        "input_ids": torch.randint(1, VOCAB_SIZE, (1, LENGTH), generator=generator),
        "chain_ids": torch.randint(1, VOCAB_SIZE, (STEPS,), generator=generator),
        "draft_ids": torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values,
    }


def features_of(draft: Eagle3DraftModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return inputs[f"features_{draft.config.num_captured_layers * draft.config.target_hidden_size}"]


@torch.no_grad()
def our_logits(draft: Eagle3DraftModel, inputs: dict[str, torch.Tensor], target=None) -> torch.Tensor:
    """(steps, 1, T, D): tokens teacher-forced, the head's own output fed back, zeros beyond the last token."""
    borrowed, rows = draft.borrow(target), torch.arange(LENGTH)[None]
    hidden = draft.fuse(features_of(draft, inputs))
    attend, logits = TTTAttention(rows), []
    for step in range(STEPS):
        attend.step = step
        ids = nn.functional.pad(inputs["input_ids"][:, step:], (0, step))
        output = draft.run_layers(hidden, borrowed.embed(ids), rows + step, attend)
        logits.append(draft.compute_logits(output, borrowed))
        hidden = draft.feedback(output)
    return torch.stack(logits)


def compared(draft: Eagle3DraftModel, logits: torch.Tensor) -> torch.Tensor:
    """All steps; with windows the first only: speculators' training lets later steps see as far back as the first,
    where we, and the engines that serve, count the window from the row's own position."""
    return logits[:1] if draft.config.sliding_window else logits


# ----- speculators ---------------------------------------------------------------------------------------------------


OURS = [name for name, (_, engines) in HEADS.items() if SPECULATORS in engines]
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": VOCAB_SIZE,
    "pad_token_id": 0,
}
QWEN3 = {**LAYER, "model_type": "qwen3"}
BASE = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
WINDOWS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 4,
    "use_sliding_window": True,
}
THEIRS = {
    "plain": {**BASE, "layer": LAYER},
    "norms_before": {**BASE, "layer": LAYER, "norm_before_residual": True, "norm_before_fc": True},
    "eagle31": {**BASE, "layer": LAYER, "fc_norm": True, "norm_output": True},
    "qwen3": {**BASE, "layer": QWEN3, "norm_before_residual": True},
    "two_layers": {**BASE, "layer": {**LAYER, "num_hidden_layers": 2}},
    "whole_vocabulary": {**BASE, "layer": LAYER, "draft_vocab_size": VOCAB_SIZE},
    "biases": {**BASE, "layer": {**LAYER, "attention_bias": True, "mlp_bias": True}},
    "qwen3_bias": {**BASE, "layer": {**QWEN3, "attention_bias": True}},
    "windows": {**BASE, "layer": {**QWEN3, **WINDOWS}},
    "four_layers_read": {**BASE, "layer": LAYER, "eagle_aux_hidden_state_layer_ids": [1, 2, 4, 6]},
}


class SpeculatorsRun:
    """One run of speculators on every head of this file."""

    def __init__(self, folder: Path, python: str):
        self.folder, self.target, self.inputs = folder, tiny("llama"), engine_inputs()
        self.target.save_pretrained(folder / "target")
        save_file(self.inputs, folder / "inputs.safetensors")
        self.ours = {name: new_head(**HEADS[name][0], target_name_or_path=str(folder / "target")) for name in OURS}
        for name, draft in self.ours.items():
            export_head(draft, folder / "ours" / name, SPECULATORS, target=self.target)
        jobs = {
            "load": [str(folder / "ours" / name) for name in OURS],
            "save": {str(folder / "theirs" / name): settings for name, settings in THEIRS.items()},
        }
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        run(python, "run_speculators.py", folder)

    def outputs(self, whose: str, name: str) -> torch.Tensor:
        return load_file(self.folder / whose / name / "outputs.safetensors")["logits"]


@pytest.fixture(scope="module")
def speculators(tmp_path_factory) -> SpeculatorsRun:
    return SpeculatorsRun(tmp_path_factory.mktemp("speculators"), interpreter("EAGLE3_HF_SPECULATORS_PYTHON"))


@pytest.mark.parametrize("name", OURS)
def test_speculators_computes_our_heads_logits(speculators, name):
    draft = speculators.ours[name]
    expected = our_logits(draft, speculators.inputs, speculators.target)
    found = speculators.outputs("ours", name)
    torch.testing.assert_close(compared(draft, found), compared(draft, expected), rtol=0, atol=TOLERANCE)
    assert expected.std() > 0.05, "logits that small would agree whatever was computed"


@pytest.mark.parametrize("name", THEIRS)
def test_heads_that_speculators_saved_give_the_same_logits_here(speculators, name):
    draft = Eagle3DraftModel.from_pretrained(speculators.folder / "theirs" / name).eval()
    found, expected = our_logits(draft, speculators.inputs), speculators.outputs("theirs", name)
    torch.testing.assert_close(compared(draft, found), compared(draft, expected), rtol=0, atol=TOLERANCE)
    assert draft.config.target_layer_ids == THEIRS[name]["eagle_aux_hidden_state_layer_ids"]
    assert expected.std() > 0.05


# ----- vLLM and SGLang -----------------------------------------------------------------------------------------------


# Targets whose ids SGLang takes otherwise; all have eight layers.
OTHER_TARGETS = {
    "deepseek": {"target_model_type": "deepseek_v3", "target_layer_ids": [3, 4, 6]},
    "deepseek_from_2": {"target_model_type": "deepseek_v3", "target_layer_ids": [2, 4, 6]},
    "gpt_oss": {"target_model_type": "gpt_oss", "target_layer_ids": [2, 4, 7], "target_num_hidden_layers": 8},
    "gpt_oss_to_the_last": {
        "target_model_type": "gpt_oss",
        "target_layer_ids": [4, 6, 8],
        "target_num_hidden_layers": 8,
    },
}


def exported_heads(engine: str) -> dict[str, dict]:
    """Config fields of every head that the engine can run."""
    heads = {name: fields for name, (fields, engines) in HEADS.items() if engine in engines}
    return heads | (OTHER_TARGETS if engine == SGLANG else {})


class EngineRun:
    """One run of an engine's own draft models on every head that it can run."""

    def __init__(self, folder: Path, engine: str, python: str):
        self.folder, self.inputs, self.target = folder, engine_inputs(), tiny("llama")
        lent = self.target.get_input_embeddings(), self.target.get_output_embeddings()
        for name, module in zip(("embed_tokens", "lm_head"), lent, strict=True):
            self.inputs[name] = module.weight.detach().clone()
        save_file(self.inputs, folder / "inputs.safetensors")
        self.heads = {name: new_head(**fields) for name, fields in exported_heads(engine).items()}
        for name, draft in self.heads.items():
            export_head(draft, folder / name, engine)
        jobs = {"load": [str(folder / name) for name in self.heads]}
        (folder / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
        run(python, f"run_{engine}.py", folder)

    def facts(self, name: str) -> dict:
        return json.loads((self.folder / name / "outputs.json").read_text(encoding="utf-8"))

    def logits(self, name: str) -> torch.Tensor:
        return load_file(self.folder / name / "outputs.safetensors")["logits"]


@torch.no_grad()
def chain_logits(draft: Eagle3DraftModel, inputs: dict[str, torch.Tensor], target) -> torch.Tensor:
    """(T + steps - 1, D): a prompt, then one row at a time, each fed the output of the row before."""
    borrowed = draft.borrow(target)
    cache, hidden, ids, found = DraftCache(draft.config.num_hidden_layers), features_of(draft, inputs), None, []
    hidden, ids, position = draft.fuse(hidden), inputs["input_ids"], torch.arange(LENGTH)[None]
    for chain_ids in inputs["chain_ids"]:
        output = draft.run_layers(hidden, borrowed.embed(ids), position, CachedAttention(cache))
        cache.commit()
        found.append(draft.compute_logits(output, borrowed)[0])
        hidden, ids, position = draft.feedback(output)[:, -1:], chain_ids[None, None], position[:, -1:] + 1
    return torch.cat(found)


def assert_logits(run: EngineRun, name: str) -> None:
    draft, found = run.heads[name], run.logits(name)
    expected = chain_logits(draft, run.inputs, run.target)
    if found.shape[-1] != expected.shape[-1]:  # vLLM scatters them over the target's vocabulary
        found = found[:, draft.draft_vocab_ids()]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert expected.std() > 0.05


def assert_rotary(run: EngineRun, name: str) -> None:
    """Cosines and sines side by side, of the first 200 positions."""
    found = torch.tensor(run.facts(name)["cos_sin"])
    cos, sin = run.heads[name].rotary_emb(torch.zeros(1), torch.arange(200)[None])
    half = cos.shape[-1] // 2
    torch.testing.assert_close(found, torch.cat([cos[0, :, :half], sin[0, :, :half]], -1), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> EngineRun:
    return EngineRun(tmp_path_factory.mktemp("vllm"), VLLM, interpreter("EAGLE3_HF_VLLM_PYTHON"))


@pytest.mark.parametrize("name", exported_heads(VLLM))
def test_vllm_reads_our_config(vllm, name):
    facts, config = vllm.facts(name), vllm.heads[name].config
    assert facts["known"], facts["architectures"]
    assert facts["reads_aux"] == config.use_aux_hidden_state
    assert facts["layers"] == (config.target_layer_ids if config.use_aux_hidden_state else None)
    if not config.is_latent:
        assert_rotary(vllm, name)


@pytest.mark.parametrize("name", exported_heads(VLLM))
def test_vllm_computes_our_heads_logits(vllm, name):
    assert_logits(vllm, name)


@pytest.fixture(scope="module")
def sglang(tmp_path_factory) -> EngineRun:
    return EngineRun(tmp_path_factory.mktemp("sglang"), SGLANG, interpreter("EAGLE3_HF_SGLANG_PYTHON"))


@pytest.mark.parametrize("name", exported_heads(SGLANG))
def test_sglang_reads_our_config(sglang, name):
    facts, config = sglang.facts(name), sglang.heads[name].config
    assert facts["known"], facts["architectures"]
    assert facts["reads_aux"] == config.use_aux_hidden_state
    assert facts["captured"] == (config.target_layer_ids if config.use_aux_hidden_state else None)
    if not config.is_latent:
        assert_rotary(sglang, name)


@pytest.mark.parametrize("name", [name for name in exported_heads(SGLANG) if "mla" not in name])
def test_sglang_computes_our_heads_logits(sglang, name):
    assert_logits(sglang, name)
