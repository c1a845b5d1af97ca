"""Run in an interpreter that has SGLang 0.5.23, on a CPU: its config class and its draft model on heads that we wrote.

    python run_sglang.py FOLDER

FOLDER and the outputs are as in `run_vllm.py`. Everything is SGLang's own but the attention kernel, which needs a
GPU: a plain one stands in for it.
"""

import json
import sys
import types
from pathlib import Path

import torch

from support.engines.parts import Bag, PlainAttention, fill_with_nan


# Without a GPU it looks for a kernel here, which is not called below.
sys.modules["vllm"] = types.ModuleType("vllm")
sys.modules["vllm._custom_ops"] = types.ModuleType("vllm._custom_ops")
sys.modules["vllm._custom_ops"].rotary_embedding = None

from safetensors.torch import load_file, save_file  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.models import deepseek_v2, gpt_oss, llama, llama_eagle3  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402


ONE_PROCESS = {"pp_group": None, "tp_size": 1, "tp_rank": 0, "tp_group": None, "attn_tp_size": 1, "attn_tp_rank": 0}
TARGETS = {
    "deepseek_v3": deepseek_v2.DeepseekV2ForCausalLM,
    "gpt_oss": gpt_oss.GptOssForCausalLM,
    "llama": llama.LlamaForCausalLM,
}
TARGET_LAYERS = 8


class RadixAttention(PlainAttention):
    def __init__(self, num_heads, head_dim, scaling, num_kv_heads, **kwargs):
        super().__init__(num_heads, head_dim, scaling, num_kv_heads)

    def forward(self, query, key, value, forward_batch):
        return super().forward(query, key, value)


def captured(config) -> list[int] | None:
    """The layers at whose entry SGLang's target model then takes the residual stream: `hidden_states` indices."""
    eagle = config.eagle_config
    if not eagle["use_aux_hidden_state"]:
        return None
    target = Bag(
        pp_group=Bag(is_last_rank=True),
        model=Bag(),
        config=Bag(num_hidden_layers=TARGET_LAYERS),
    )
    target_class = TARGETS[getattr(config, "target_model_type", None) or "llama"]
    target_class.set_eagle3_layers_to_capture(target, eagle["eagle_aux_hidden_state_layer_ids"])
    return target.model.layers_to_capture


def native(model: torch.nn.Module) -> torch.nn.Module:
    """Plain PyTorch in the place of kernels, as SGLang has it for every operation."""
    for part in model.modules():
        if "forward_native" in dir(part):
            part._forward_method = part.forward_native
    return model


@torch.no_grad()
def run(config, folder: Path, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(T + chain, D) logits of a prompt and a chain behind it, and the first positions of the rotary table."""
    model = native(llama_eagle3.LlamaForCausalLMEagle3(config)).float()
    fill_with_nan(model)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    if getattr(config, "target_hidden_size", config.hidden_size) == config.hidden_size:
        model.model.embed_tokens.weight.data = inputs["embed_tokens"]  # as its worker does, whatever the file holds
    if model.load_lm_head_from_target:
        model.lm_head.weight.data = inputs["lm_head"]
    width = model.model.fc.in_features if config.eagle_config["use_aux_hidden_state"] else config.hidden_size
    hidden, ids, found = inputs[f"features_{width}"][0], inputs["input_ids"][0], []
    position = torch.arange(len(ids))
    for chain_ids in inputs["chain_ids"]:
        batch = Bag(
            mm_input_embeds=None,
            spec_info=Bag(hidden_states=hidden),
            forward_mode=Bag(is_extend=lambda: False, is_decode=lambda: False),
        )
        output, (fed_back,) = model.model(ids, position, batch)
        found.append(output @ model.lm_head.weight.T)
        ids, position, hidden = chain_ids[None], position[-1:] + 1, fed_back[-1:]
    return torch.cat(found), model.model.layers[0].self_attn.rotary_emb.cos_sin_cache[:200]


def main(folder: Path) -> None:
    inputs = load_file(folder / "inputs.safetensors")
    llama.RadixAttention = RadixAttention
    llama_eagle3.LogitsProcessor = lambda config: None
    llama_eagle3.get_spec = lambda: Bag(speculative_draft_window_size=None)
    for head in map(Path, json.loads((folder / "jobs.json").read_text(encoding="utf-8"))["load"]):
        settings = ModelConfig(str(head), is_draft_model=True, dtype="float32")
        config = settings.hf_config
        facts = {
            "architectures": config.architectures,
            "known": bool(set(config.architectures) & set(ModelRegistry.get_supported_archs())),
            "captured": captured(config),
            "reads_aux": config.eagle_config["use_aux_hidden_state"],
        }
        if getattr(config, "kv_lora_rank", None) is None:
            with get_parallel().override(**ONE_PROCESS):
                logits, table = run(config, head, inputs)
            save_file({"logits": logits}, head / "outputs.safetensors")
            facts["cos_sin"] = table.tolist()
        (head / "outputs.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
