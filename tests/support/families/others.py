"""Tiny random targets of every family in docs/families.md, besides the few of `families` that most tests use."""

from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from eagle3_hf.decoding.target.capability import VerifyMode
from eagle3_hf.decoding.target.capability_probe import capability_of
from support.families import SPECIFIC as WELL_TESTED
from support.families import VOCAB_SIZE, WINDOW, common, move_vectors


# Some families and some of their capabilities are newer than the oldest version that we support.
IS_OLD = version.parse(transformers.__version__) < version.parse("5.24")
LAYERS = 4
FULL_AND_WINDOW = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR_AND_FULL = ["linear_attention", "full_attention"] * (LAYERS // 2)
# GPT-2's and its time's names for the same sizes.
GPT2_NAMES = {"n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA_NET = {
    "layer_types": LINEAR_AND_FULL, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}

TREES: dict[str, dict[str, Any]] = {
    "qwen2_sw": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": FULL_AND_WINDOW,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **EXPERTS},
    "mixtral": {"model_type": "mixtral", **LOCAL_EXPERTS},
    "gemma": {"model_type": "gemma"},
    "phi3_sw": {"model_type": "phi3", "sliding_window": WINDOW},
    "phi": {"model_type": "phi"},
    "olmo3": {"model_type": "olmo3", "sliding_window": WINDOW, "layer_types": FULL_AND_WINDOW},
    "granite": {"model_type": "granite"},
    "granitemoe": {"model_type": "granitemoe", **LOCAL_EXPERTS},
    "glm": {"model_type": "glm"},
    "glm4": {"model_type": "glm4"},
    "glm4_moe": {"model_type": "glm4_moe", **ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "cohere": {"model_type": "cohere", "logit_scale": 1.0},
    "cohere2": {
        "model_type": "cohere2", "sliding_window": WINDOW, "layer_types": FULL_AND_WINDOW, "logit_scale": 1.0,
    },
    "smollm3": {"model_type": "smollm3"},
    "llama4_text": {
        "model_type": "llama4_text", **LOCAL_EXPERTS, "num_experts_per_tok": 1, "intermediate_size_mlp": 128,
        "attention_chunk_size": WINDOW,
    },
    "ministral": {
        "model_type": "ministral", "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * LAYERS,
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": WINDOW},
    "stablelm": {"model_type": "stablelm"},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gptj": {"model_type": "gptj", **GPT2_NAMES, "rotary_dim": 8},
    "gpt2": {"model_type": "gpt2", **GPT2_NAMES},
    "falcon": {"model_type": "falcon", "alibi": False},
    "opt": {"model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64, "init_std": 0.15},
    "biogpt": {"model_type": "biogpt"},
    "xglm": {
        "model_type": "xglm", "d_model": 64, "num_layers": LAYERS, "attention_heads": 4, "ffn_dim": 128,
        "init_std": 0.15,
    },
    "codegen": {"model_type": "codegen", **GPT2_NAMES, "rotary_dim": 8},
    "persimmon": {"model_type": "persimmon"},
    "nemotron": {"model_type": "nemotron"},
    "exaone4": {"model_type": "exaone4", "sliding_window": WINDOW, "layer_types": FULL_AND_WINDOW},
    "hunyuan": {"model_type": "hunyuan_v1_dense"},
    "ernie4_5": {"model_type": "ernie4_5"},
    "seed_oss": {"model_type": "seed_oss"},
    "minimax_m2": {"model_type": "minimax_m2", **LOCAL_EXPERTS, "rotary_dim": 16},
    "dots1": {
        "model_type": "dots1", **ROUTED, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "layer_types": ["full_attention"] * LAYERS,
    },
    "gemma4_text": {
        "model_type": "gemma4_text", "sliding_window": WINDOW, "layer_types": FULL_AND_WINDOW,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE,
        "global_head_dim": 32,
    },
}  # fmt: skip
CHAINS: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "model_type": "gpt_neo", "num_layers": LAYERS, "num_heads": 4, "window_size": WINDOW,
        "attention_types": [[["global", "local"], LAYERS // 2]],
    },
    "falcon_alibi": {"model_type": "falcon", "alibi": True},
    "bloom": {"model_type": "bloom", "n_layer": LAYERS, "n_head": 4},
    "mpt": {
        "model_type": "mpt", "d_model": 64, "n_layers": LAYERS, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 512,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "qwen3_next": {
        "model_type": "qwen3_next", **DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA_NET},
    "mamba2": {
        "model_type": "mamba2", "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8,
    },
    "falcon_h1": {
        "model_type": "falcon_h1", **MAMBA_HEADS, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_chunk_size": 8,
    },
    "granitemoehybrid": {
        "model_type": "granitemoehybrid", **MAMBA_HEADS, **LOCAL_EXPERTS, "layer_types": ["mamba", "attention"] * 2,
        "mamba_expand": 2, "shared_intermediate_size": 64, "mamba_chunk_size": 8, "position_embedding_type": "rope",
    },
    "bamba": {"model_type": "bamba", **MAMBA_HEADS, "attn_layer_indices": [1, 3], "mamba_chunk_size": 8},
}  # fmt: skip
PLAIN: dict[str, dict[str, Any]] = {
    "mamba": {"model_type": "mamba", "state_size": 8},
    "jamba": {
        "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8,
        "num_experts": 2,
    },
    "recurrent_gemma": {"model_type": "recurrent_gemma", "lru_width": 64, "attention_window_size": WINDOW},
}  # fmt: skip
OTHERS = {**TREES, **CHAINS, **PLAIN}


def tiny_other(name: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A new target of the family `name`, of this module or of `families`; as `families.tiny`."""
    specific = {**WELL_TESTED.get(name, {}), **OTHERS.get(name, {})}
    fields = {**common(specific["model_type"]), "num_hidden_layers": LAYERS, **specific, **overrides}
    if len(fields.get("layer_types", ())) > fields["num_hidden_layers"]:
        fields["layer_types"] = fields["layer_types"][: fields["num_hidden_layers"]]
    config = AutoConfig.for_model(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        move_vectors(model)
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model.eval()


def tiny_or_skip(name: str, **overrides) -> PreTrainedModel:
    """`tiny_other`, but a test is skipped where an older transformers does not know the family or its fields."""
    try:
        return tiny_other(name, **overrides)
    except Exception as error:
        if IS_OLD:
            pytest.skip(f"{name} with transformers {transformers.__version__}: {type(error).__name__}")
        raise


def chain_target(name: str):
    """A target that verifies chains. Some families' states were dropped by the forwards of older versions."""
    target = tiny_or_skip(name)
    if IS_OLD and capability_of(target).mode is VerifyMode.PLAIN:
        pytest.skip(f"{name} decodes plainly with transformers {transformers.__version__}")
    return target
