"""Run in an interpreter that has vLLM 0.33, on a CPU: its config classes and its draft models on heads that we wrote.

    python run_vllm.py FOLDER

FOLDER holds `inputs.safetensors` and `jobs.json` (`load`: folders of heads). Each head's folder gets
`outputs.safetensors` (its logits for a prompt and a chain) and `outputs.json` (what the engine made of its config).

Everything is vLLM's own but the attention kernel, which needs a GPU: a plain one stands in for it.
"""

import json
import sys
from pathlib import Path

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

from support.engines.parts import Bag, PlainAttention, fill_with_nan


vllm.platforms._current_platform = CpuPlatform()

from safetensors.torch import load_file, save_file  # noqa: E402
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.model_executor.layers import mla  # noqa: E402
from vllm.model_executor.layers.rotary_embedding import get_rope  # noqa: E402
from vllm.model_executor.models import ModelRegistry, deepseek_eagle3, llama, llama_eagle3, qwen3, qwen3_eagle3  # noqa: E402
from vllm.transformers_utils.config import get_config  # noqa: E402
from vllm.transformers_utils.configs.eagle import EAGLEConfig  # noqa: E402
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.eagle import eagle3_utils  # noqa: E402


MODULES = (deepseek_eagle3, llama_eagle3, qwen3_eagle3)
MODELS = {
    "Eagle3DeepseekV2ForCausalLM": deepseek_eagle3.Eagle3DeepseekV2ForCausalLM,
    "Eagle3LlamaForCausalLM": llama_eagle3.Eagle3LlamaForCausalLM,
    "Eagle3Qwen3ForCausalLM": qwen3_eagle3.Eagle3Qwen3ForCausalLM,
    "LlamaForCausalLMEagle3": llama_eagle3.Eagle3LlamaForCausalLM,
}
TARGET_LAYERS, VOCAB_SIZE = 8, 320


class Attention(PlainAttention):
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, per_layer_sliding_window=None, **kwargs):
        super().__init__(num_heads, head_size, scale, num_kv_heads, per_layer_sliding_window)


class LatentAttention(PlainAttention):
    """Keys and values expanded from the latent of each row, which is what the fused kernel means."""

    def __init__(self, num_heads, scale, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, kv_b_proj, **kwargs):
        super().__init__(num_heads, qk_nope_head_dim + qk_rope_head_dim, scale, num_heads, value_size=v_head_dim)
        self.widths, self.expand = [qk_nope_head_dim, v_head_dim], [kv_b_proj]

    def forward(self, query, latent, rotated, **kwargs):
        expanded = self.expand[0](latent)[0].view(len(latent), self.heads, -1)
        key, value = expanded.split(self.widths, dim=-1)
        rotated = rotated.view(len(latent), 1, -1).expand(-1, self.heads, -1)
        return super().forward(query, torch.cat([key, rotated], -1), value)


def read_config(folder: Path):
    """As vLLM's speculative config reads a draft's folder."""
    config = get_config(folder, trust_remote_code=False)
    if isinstance(config, (EAGLEConfig, SpeculatorsConfig)):
        return config
    return EAGLEConfig(config, method="eagle3", model_type="eagle")


def facts(config) -> dict:
    speculative = Bag(method="eagle3", draft_model_config=Bag(hf_config=config))
    layers = eagle3_utils.get_eagle3_aux_layers_from_config(speculative)
    rope = get_rope(
        config.head_dim,
        max_position=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
        dtype=torch.float32,
    )
    return {
        "architectures": config.architectures,
        "known": bool(set(config.architectures) & set(ModelRegistry.get_supported_archs())),
        "layers": list(layers) if layers else None,
        "reads_aux": eagle3_utils.requires_aux_hidden_states(speculative),
        "cos_sin": rope.cos_sin_cache[:200].tolist(),
    }


@torch.no_grad()
def logits(config, folder: Path, inputs: dict[str, torch.Tensor], below: VllmConfig) -> torch.Tensor:
    """(T + chain, V) of a prompt and a chain behind it."""
    model_config = Bag(
        hf_config=config,
        dtype=torch.float32,
        get_total_num_hidden_layers=lambda: TARGET_LAYERS,
        get_vocab_size=lambda: VOCAB_SIZE,
    )
    speculative = Bag(draft_model_config=model_config, parallel_drafting=False)
    stub = Bag(below, speculative_config=speculative, model_config=model_config, quant_config=None, cache_config=None)
    for module in MODULES:
        module.get_current_vllm_config = lambda: stub
    model = MODELS[config.architectures[0]](vllm_config=stub)
    fill_with_nan(model)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    if not getattr(model, "has_own_embed_tokens", False):
        model.model.embed_tokens.weight.data = inputs["embed_tokens"]
    if not getattr(model, "has_own_lm_head", False):
        model.lm_head.weight.data = inputs["lm_head"]
    for part in model.modules():
        if hasattr(part, "quant_method"):
            part.quant_method.process_weights_after_loading(part)
    width = model.model.fc.input_size if hasattr(model.model, "fc") else config.hidden_size
    hidden, ids, found = model.combine_hidden_states(inputs[f"features_{width}"][0]), inputs["input_ids"][0], []
    position = torch.arange(len(ids))
    for chain_ids in inputs["chain_ids"]:
        output, fed_back = model(ids, position, hidden)
        found.append(model.compute_logits(output))
        ids, position, hidden = chain_ids[None], position[-1:] + 1, fed_back[-1:]
    return torch.cat(found)


def main(folder: Path) -> None:
    inputs = load_file(folder / "inputs.safetensors")
    base = VllmConfig(compilation_config=CompilationConfig(mode=0, custom_ops=["none"]))
    for module in MODULES:
        module.get_draft_quant_config = lambda config: None
    llama.Attention = qwen3.Attention = Attention
    mla.MLAAttention = LatentAttention
    with set_current_vllm_config(base):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel()
        for head in map(Path, json.loads((folder / "jobs.json").read_text(encoding="utf-8"))["load"]):
            config = read_config(head)
            (head / "outputs.json").write_text(json.dumps(facts(config)), encoding="utf-8")
            save_file({"logits": logits(config, head, inputs, base)}, head / "outputs.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
