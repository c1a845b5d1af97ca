"""Run in the interpreter that has speculators 0.9: its own forward on heads that we wrote, and heads of its own.

    python run_speculators.py FOLDER

FOLDER holds `inputs.safetensors` (features of each width, input_ids, target ids of the draft vocabulary), `jobs.json`
(`load`: folders of heads; `save`: folder -> settings of heads to make) and the folder `target`. Each head's folder
gets `outputs.safetensors`: the logits of three steps of training-time test.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig


STEPS = 3


@torch.no_grad()
def record(model: Eagle3DraftModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Its forward returns tokens only; the logits are caught on their way out of lm_head."""
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, arguments, output: logits.append(output.clone()))
    width = model.fc.in_features
    ids = inputs["input_ids"]
    model(
        hidden_states=inputs[f"features_{width}"],
        input_ids=ids,
        document_ids=torch.zeros_like(ids),
        position_ids=torch.arange(ids.shape[1])[None],
        ttt_steps=STEPS,
    )
    return {"logits": torch.stack(logits)}


def eager(config: Eagle3SpeculatorConfig) -> Eagle3SpeculatorConfig:
    config.transformer_layer_config._attn_implementation = "eager"
    return config


def load(folder: Path) -> Eagle3DraftModel:
    config = eager(Eagle3SpeculatorConfig.from_pretrained(folder))
    return Eagle3DraftModel.from_pretrained(folder, config=config).eval()


@torch.no_grad()
def make(settings: dict, target: Path, ids: torch.Tensor) -> Eagle3DraftModel:
    """A head of speculators' own making, with random weights."""
    layer = AutoConfig.for_model(**settings.pop("layer"))
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
        **settings,
    )
    model = Eagle3DraftModel(eager(config)).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if "norm" in name else 0.0))
    if settings["draft_vocab_size"] < layer.vocab_size:
        member = torch.zeros(layer.vocab_size, dtype=torch.bool)
        member[ids] = True
        model.load_vocab_mappings(member, ids - torch.arange(len(ids)))
    return model


def main(folder: Path) -> None:
    torch.manual_seed(0)
    inputs = load_file(folder / "inputs.safetensors")
    jobs = json.loads((folder / "jobs.json").read_text(encoding="utf-8"))
    for head in map(Path, jobs["load"]):
        save_file(record(load(head), inputs), head / "outputs.safetensors")
    for name, settings in jobs["save"].items():
        model = make(settings, folder / "target", inputs["draft_ids"])
        model.save_pretrained(name)
        save_file(record(model, inputs), Path(name) / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
