"""Which features of a head a serving engine does not support, taken from the source of its loader.

The versions are vLLM 0.33, SGLang 0.5.23 and speculators 0.9. An engine skips tensors that it does not know, or leaves
parameters at random values, and the head then drafts badly without an error. So each difference is reported here, by
config field, before a file is written. In the messages "it" is the engine.
"""

from collections.abc import Iterator

from ..model.configuration_eagle3 import Eagle3DraftConfig


ENGINES = ("vllm", "sglang", "speculators")

# SGLang reads the ids as outputs of blocks. For these targets it takes them as they are if the first is not 1.
SGLANG_KEEPS_IDS = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe_lite")
# Only these targets return the output of their last block; the ids of gpt_oss are then taken as they are.
SGLANG_READS_LAST = ("gpt_oss", "minimax_m3", "nemotron_h", "laguna")

# RoPE types that vLLM and SGLang compute as transformers does, at every position.
_SAME_ROPE = ("default", "linear", "llama3", "yarn")


def unsupported_features(config: Eagle3DraftConfig, engine: str) -> list[str]:
    """Return what keeps `engine` from running a head of this config, one message per field; empty if nothing does.

    Args:
        config: The head's config.
        engine: "vllm", "sglang" or "speculators".
    """
    found = {"vllm": _vllm, "sglang": _sglang, "speculators": _speculators}[engine](config)
    return [*_everywhere(config), *found]


def has_windows(config: Eagle3DraftConfig) -> bool:
    """Whether a layer of this head has a sliding window."""
    return "sliding_attention" in (config.layer_types or ())


def _everywhere(config: Eagle3DraftConfig) -> Iterator[str]:
    if not config.final_norm:
        yield "final_norm=False: it always applies a norm before lm_head"
    if config.fc_bias:
        yield "fc_bias=True: its fc has no bias that a head can set separately"


def _vllm(config: Eagle3DraftConfig) -> Iterator[str]:
    yield from _only_silu(config)
    yield from _rope(config)
    if config.is_latent:
        yield from _mla(config)
        if not config.use_aux_hidden_state:
            yield "use_aux_hidden_state=False with kv_lora_rank: its MLA head always applies fc"
        if not config.rope_interleave:
            yield "rope_interleave=False: its MLA rotates interleaved pairs"
    elif config.qk_norm:
        if config.attention_output_bias:
            yield "a bias of o_proj together with qk_norm: its Qwen3 layer has none"
        if config.mlp_bias:
            yield "mlp_bias=True together with qk_norm: the MLP of its Qwen3 layer has none"
    elif config.attention_output_bias != config.attention_bias:
        yield _biases_differ(config)


def _sglang(config: Eagle3DraftConfig) -> Iterator[str]:
    yield from _only_silu(config)
    yield from _rope(config)
    yield from _sglang_layer(config)
    yield from _sglang_ids(config)
    if config.is_latent:
        yield from _mla(config)
        if config.num_hidden_layers > 1:
            yield f"num_hidden_layers={config.num_hidden_layers} with kv_lora_rank: it builds one MLA layer"
    captured = config.num_captured_layers * config.target_hidden_size
    if config.use_aux_hidden_state and captured == config.hidden_size:
        yield (f"features as wide as the draft ({captured}): it takes them for the draft's own output and skips fc")
    if "attention_factor" in config.rope_parameters and not config.is_latent:
        yield "rope_parameters['attention_factor']: it computes its own"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield "rope_parameters['partial_rotary_factor']: under transformers 5 it rotates whole heads"


def _sglang_layer(config: Eagle3DraftConfig) -> Iterator[str]:
    if config.norm_before_residual:
        yield "norm_before_residual=True: its residual is always the feature before the norm"
    if config.qk_norm:
        yield "qk_norm=True: its layer has no q_norm and k_norm, and would skip them"
    if config.attention_bias or config.attention_output_bias:
        yield "attention_bias: its projections of q, k and v have none, and would skip them"
    if config.mlp_bias:
        yield "mlp_bias=True: its MLP has none"
    if has_windows(config):
        yield "sliding_window: it takes one window for all layers from --speculative-draft-window-size, not from heads"


def _sglang_ids(config: Eagle3DraftConfig) -> Iterator[str]:
    ids, layers, target = config.target_layer_ids, config.target_num_hidden_layers, config.target_model_type
    if ids is None or not config.use_aux_hidden_state:
        return
    if ids[0] == 0:
        yield f"target_layer_ids {ids}: it numbers outputs of blocks, and the embedding's output (id 0) is not one"
    if ids[0] == 1 and target in SGLANG_KEEPS_IDS:
        yield f"target_layer_ids {ids}: for {target} targets it takes a first id of 1 for the output of block 1"
    if ids[-1] == layers and target not in SGLANG_READS_LAST:
        yield f"target_layer_ids {ids}: its {target or ''} target returns no output of the last block (id {layers})"


def _speculators(config: Eagle3DraftConfig) -> Iterator[str]:
    if config.is_latent:
        yield "kv_lora_rank (MLA): it has only layers of Llama and Qwen3"
    if not config.use_aux_hidden_state:
        yield "use_aux_hidden_state=False: it always builds fc"
    if config.target_hidden_size != config.hidden_size:
        yield (
            f"target_hidden_size {config.target_hidden_size} beside hidden_size {config.hidden_size}: it sizes fc by "
            "hidden_size alone"
        )
    if config.attention_output_bias != config.attention_bias:
        yield _biases_differ(config)
    if config.qk_norm and config.mlp_bias:
        yield "mlp_bias=True together with qk_norm: the MLP of its Qwen3 layer has none"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        yield "rope_parameters['partial_rotary_factor']: it rotates whole heads"


def _only_silu(config: Eagle3DraftConfig) -> Iterator[str]:
    if config.hidden_act != "silu":
        yield f"hidden_act={config.hidden_act!r}: it supports only silu"


def _rope(config: Eagle3DraftConfig) -> Iterator[str]:
    """Yield an unsupported RoPE type. The engines read every scaled type of an MLA head as DeepSeek's YaRN."""
    kind = config.rope_parameters["rope_type"]
    known = ("default", "yarn") if config.is_latent else _SAME_ROPE
    if kind not in known:
        yield (
            f"rope_type={kind!r}: it computes other frequencies than transformers for some lengths (equal for "
            f"{', '.join(known)}); load the head with rope_parameters=... of a supported type if that is close enough"
        )


def _mla(config: Eagle3DraftConfig) -> Iterator[str]:
    if config.q_lora_rank is None:
        yield "q_lora_rank=None: its MLA head reads queries through q_a_proj and q_b_proj"
    if "attention_factor" in config.rope_parameters:
        yield "rope_parameters['attention_factor'] with kv_lora_rank: it computes its own"
    if config.norm_before_fc:
        yield "norm_before_fc=True with kv_lora_rank: its MLA head has no input_norm"
    if config.attention_bias or config.attention_output_bias:
        yield "attention_bias with kv_lora_rank: it is not known to fill those biases"
    if config.mlp_bias:
        yield "mlp_bias=True with kv_lora_rank: its MLP has none"
    if has_windows(config):
        yield "sliding_window with kv_lora_rank: its MLA has no window"


def _biases_differ(config: Eagle3DraftConfig) -> str:
    return (
        f"attention_bias={config.attention_bias} beside attention_output_bias={config.attention_output_bias}: one "
        "flag sets the biases of q, k, v and o"
    )


__all__ = [
    "ENGINES",
    "SGLANG_KEEPS_IDS",
    "has_windows",
    "unsupported_features",
]
