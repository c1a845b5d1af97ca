"""The config and the tensor names of a head as each serving engine reads them; plain dicts, without weights.

Layer ids are `hidden_states` indices here, in vLLM and in speculators; SGLang numbers outputs of blocks, one less.
"""

from typing import Any

from ..model.configuration_eagle3 import Eagle3DraftConfig
from ..published_formats import TARGET_KEYS
from .unsupported import SGLANG_KEEPS_IDS, has_windows


# Drafted tokens per round in the commands that model cards show, as in vLLM's own examples.
CHAIN = 3

_LAYER_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "vocab_size",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_MLA_FIELDS = (
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleave",
)
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def vllm_config(config: Eagle3DraftConfig, dtype: str) -> dict[str, Any]:
    """Return vLLM's config: flat, with the ids at the top level.

    A head without auxiliary features says so in `eagle_config`.
    """
    fields = _flat(config, dtype)
    if config.use_aux_hidden_state:
        fields["eagle_aux_hidden_state_layer_ids"] = config.target_layer_ids
    else:
        fields["eagle_config"] = {"use_aux_hidden_state": False}
    return fields


def sglang_config(config: Eagle3DraftConfig, dtype: str) -> dict[str, Any]:
    """Return SGLang's config: flat, with the ids in `eagle_config`, numbered as SGLang does.

    SGLang does not read the ids at the top level; they tell every other reader what the nested ones mean.
    """
    fields = _flat(config, dtype)
    fields["eagle_config"] = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if config.use_aux_hidden_state:
        fields["eagle_aux_hidden_state_layer_ids"] = config.target_layer_ids
        fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = sglang_layer_ids(config)
    if not config.own_lm_head:
        fields["draft_vocab_size"] = None  # then SGLang uses the target's lm_head
    return fields


def sglang_layer_ids(config: Eagle3DraftConfig) -> list[int]:
    """Return the ids as SGLang numbers them: outputs of blocks, except for targets whose ids it takes as they are."""
    ids = config.target_layer_ids or []
    kept = config.target_model_type in SGLANG_KEEPS_IDS and ids[0] != 2
    last = config.target_model_type == "gpt_oss" and ids[-1] == config.target_num_hidden_layers
    return list(ids) if kept or last else [index - 1 for index in ids]


def speculators_config(
    config: Eagle3DraftConfig, dtype: str, verifier: str, verifier_architectures: list[str]
) -> dict[str, Any]:
    """Return the nested config of speculators 0.9.

    Every flag is written, since vLLM and speculators have different defaults.

    Args:
        config: The head's config.
        dtype: The dtype of the exported tensors, such as `"bfloat16"`.
        verifier: Hub id or folder of the target.
        verifier_architectures: The target's `architectures`.
    """
    layer = {**_layer(config), "model_type": "qwen3" if config.qk_norm else "llama"}
    if config.num_captured_layers != 3:
        layer["num_aux_hidden_states"] = config.num_captured_layers  # vLLM does not count the ids
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": CHAIN,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": config.target_layer_ids,
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in _FLAGS},
        **_dtype(dtype),
        **_target(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
        "transformer_layer_config": layer,
    }


def engine_tensor_name(name: str, engine: str) -> str:
    """Return the engine's name of a tensor: SGLang calls the input norm of later layers `hidden_norm`."""
    parts = name.split(".")
    if engine == "sglang" and parts[0] == "layers" and parts[1] != "0" and parts[2] == "input_layernorm":
        parts[2] = "hidden_norm"
    return ".".join(parts)


def _flat(config: Eagle3DraftConfig, dtype: str) -> dict[str, Any]:
    """Return the part that vLLM's and SGLang's configs share; every transformers version knows its `model_type`."""
    fields = {
        **_layer(config),
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(config, name) for name in _FLAGS},
        **_dtype(dtype),
        **_target(config),
    }
    if config.use_aux_hidden_state:
        fields["num_aux_hidden_states"] = config.num_captured_layers
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    if config.attention_output_bias != config.attention_bias:
        # vLLM's Qwen3 layer does this anyway; the key informs other readers.
        fields["attention_output_bias"] = config.attention_output_bias
    if config.qk_norm:
        fields |= {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
    if config.is_latent:
        fields |= {"model_type": "deepseek_v3", "architectures": ["Eagle3DeepseekV2ForCausalLM"]}
        fields |= {name: getattr(config, name) for name in _MLA_FIELDS}
        fields["first_k_dense_replace"] = config.num_hidden_layers  # no layer of a head is a mixture of experts
    return fields


def _layer(config: Eagle3DraftConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in _LAYER_FIELDS}
    fields |= {"tie_word_embeddings": False, **_rope(config)}
    if has_windows(config):
        fields |= {"layer_types": config.layer_types, "sliding_window": config.sliding_window}
        if config.qk_norm:
            fields |= {"use_sliding_window": True, "max_window_layers": 0}
    return fields


def _rope(config: Eagle3DraftConfig) -> dict[str, Any]:
    """Return the RoPE under the keys of transformers 5 (one dict) and of transformers 4 (base and scaling)."""
    parameters = dict(config.rope_parameters)
    fields = {"rope_parameters": parameters, "rope_theta": parameters["rope_theta"]}
    if "partial_rotary_factor" in parameters:
        fields["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    scaling = {k: v for k, v in parameters.items() if k not in ("rope_theta", "partial_rotary_factor")}
    if scaling != {"rope_type": "default"}:
        fields["rope_scaling"] = scaling
    return fields


def _dtype(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "torch_dtype": dtype}


def _target(config: Eagle3DraftConfig) -> dict[str, Any]:
    """Return what the head records about its target. No engine reads it; it is checked when loaded here."""
    values = {name: getattr(config, name) for name in TARGET_KEYS}
    return {name: value for name, value in values.items() if value is not None}


__all__ = [
    "CHAIN",
    "engine_tensor_name",
    "sglang_config",
    "sglang_layer_ids",
    "speculators_config",
    "vllm_config",
]
