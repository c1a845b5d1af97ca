"""The whole-run scripts, on a tiny target: the same commands, the same configs, fewer steps."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.commands.train import parse
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import chats


EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = ["train_llama31_8b", "train_70b_device_map"]
CONFIGS = ["llama31_8b", "llama33_70b"]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_configs_are_understood(name, tmp_path):
    """Every line means something to the command, and nothing contradicts."""
    path = EXAMPLES / "configs" / f"{name}.yaml"
    options = ["--train_data", "chats.jsonl", "--output_dir", str(tmp_path), "--bf16", "false", "--use_cpu"]
    model, data, args = parse([str(path), *options])
    assert model.dtype == "bfloat16"
    assert (args.ttt_steps, args.packing, args.metric_for_best_model) == (7, True, "eval_tau")
    assert data.tau_prompts > 0
    assert 0 < args.learning_rate <= 1e-4
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("name", RUNS)
def test_the_scripts_are_sound_bash(name):
    subprocess.run(["bash", "-n", str(EXAMPLES / f"{name}.sh")], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("name", "gpus"), [(RUNS[0], "1"), (RUNS[0], "2"), (RUNS[1], "1")])
def test_a_whole_run(name, gpus, tmp_path):
    """Prompts to answers to a head that decodes, with a card, and for an engine; run twice, nothing is lost."""
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    config = tiny_target(tokenizer).config
    config.num_hidden_layers = 8  # enough for the layers that every engine can read
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    prompts = [{"messages": chat["messages"][:1]} for chat in chats(12)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]),
        "TARGET": str(tmp_path / "target"),
        "PROMPTS": str(tmp_path / "prompts.jsonl"),
        "WORK": str(tmp_path / "run"),
        "NEW_TOKENS": "24",
        "GPUS": gpus,
        "DEVICE_MAP": "cpu",
        "ACCELERATE_USE_CPU": "true",
    }
    few = {
        "max_steps": 4, "eval_steps": 2, "save_steps": 2, "held_out": 2, "tau_prompts": 1, "tau_new_tokens": 8,
        "draft_vocab_size": 200, "max_length": 128, "dataset_num_proc": 1, "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 2, "dtype": "float32", "bf16": "false", "use_cpu": "true",
    }  # fmt: skip
    command = [
        "bash",
        str(EXAMPLES / f"{name}.sh"),
        *(word for key, value in few.items() for word in (f"--{key}", str(value))),
    ]
    for _ in range(2):
        run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
        assert run.returncode == 0, run.stderr[-4000:]
    head = Eagle3DraftModel.from_pretrained(tmp_path / "run" / "head")
    assert "eval_tau" in json.loads((tmp_path / "run" / "head" / "eval_results.json").read_text())
    assert "| held-out prompts, greedy |" in (tmp_path / "run" / "head" / "README.md").read_text()
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    ids, options = torch.tensor([tokenizer("The sea")["input_ids"]]), {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=head, **options), target.generate(ids, **options))
    served = Eagle3DraftModel.from_pretrained(tmp_path / "run" / "vllm")
    assert torch.equal(served.draft_vocab_ids(), head.draft_vocab_ids())
