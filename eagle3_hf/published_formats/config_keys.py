"""The keys of published configs: one flat view of nested ones, and notes on keys that leave something open."""

import re
from typing import Any

from .detection import is_speculators
from .errors import HeadFormatError, dictionary
from .layer_ids import KEY, names_layers


# What a head records about its target and its training; exports carry it into other formats.
TARGET_KEYS: tuple[str, ...] = ("target_name_or_path", "target_model_type", "target_num_hidden_layers")
TARGET_KEYS += ("target_vocab_hash", "target_chat_template_hash", "held_out_accuracy")
# Keys that describe a file, its training or generation, or a part that no draft layer has.
_NOT_READ = {
    *("architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
    *("use_cache", "attention_dropout", "pretraining_tp", "max_window_layers", "use_bfloat16"),
    *("speculators_version", "speculators_model_type", "speculators_config", "embed_requires_grad", "algorithm"),
    *("draft_model_type", "has_no_defaults_at_init", "default_theta", "base_model_tp_plan"),
    *("ttt_length", "ttt_steps", "num_draft_tokens", "max_seq_len", "_attn_implementation", "_flash_attn_2_enabled"),
    *("parallel_draft_heads_num_layers", "parallel_draft_step", "next_layer_regular", "use_sliding_window"),
}
_READ = {
    *TARGET_KEYS,
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act"),
    *("max_position_embeddings", "initializer_range", "rms_norm_eps", "vocab_size", "draft_vocab_size"),
    *("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor"),
    *("target_hidden_size", "num_aux_hidden_states", "use_aux_hidden_state", "layer_ids"),
    *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm"),
    *("norm_output", "return_hidden_post_norm", "attention_bias", "qkv_bias", "mlp_bias", "bias", "layer_types"),
    *("sliding_window", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
    *("v_head_dim", "rope_interleave", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"),
    *("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "eh_proj_before_attn"),
    *("eagle_config", "quantization_config", "attn_implementation"),
}
# Keys that transformers 4 wrote into every config, and those copied from the config of a mixture-of-experts target.
_GENERIC = re.compile(
    r"^(output_|return_dict|is_|add_cross|tie_|chunk_size|pruned_heads|torchscript|tf_|finetuning_task|id2label|label2id"
    r"|problem_type|task_specific|tokenizer_class|prefix$|sep_token|decoder_start|cross_attention|max_length|min_length"
    r"|do_sample|early_stopping|num_beam|diversity|temperature|top_|typical_p|repetition|length_penalty|no_repeat"
    r"|encoder_no_repeat|bad_words|num_return|remove_invalid|exponential|suppress|begin_suppress|forced_|tokenizer"
    r"|moe_|n_routed|n_shared|n_group|num_experts|norm_topk|topk_|routed_scaling|scoring_func|first_k_dense"
    r"|aux_loss|seq_aux|ep_size|num_nextn|router_|pad_vocab|gradient_checkpointing|unsloth|trl_|num_local_experts"
    r"|decoder_sparse|mlp_only_layers|shared_expert|_)"
)


def is_without_meaning(key: str) -> bool:
    """Whether this key is known to have no influence on what the draft computes."""
    return key not in _READ and (key in _NOT_READ or _GENERIC.match(key) is not None)


def flat_view(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return one flat dict of the top level, `transformer_layer_config`, `eagle_config` and the caller's overrides.

    `eagle_config` itself is kept too, since what its layer ids mean depends on their place.

    Raises:
        HeadFormatError: a nested part is not a dict, or a key has two values.
    """
    layer, eagle = dictionary(config, "transformer_layer_config"), dictionary(config, "eagle_config")
    flat = {key: value for key, value in config.items() if key != "transformer_layer_config"}
    for key, value in layer.items():
        _merge(flat, key, value, "transformer_layer_config", conflicts=key in _READ and key != "tie_word_embeddings")
    for key, value in eagle.items():
        if key not in (KEY, "layer_ids") and not names_layers(key, value):
            _merge(flat, key, value, "eagle_config", conflicts=key in _READ)
    return {**flat, **overrides}


def _merge(flat: dict[str, Any], key: str, value: Any, where: str, conflicts: bool) -> None:
    if flat.get(key) is None:
        flat[key] = value
    elif conflicts and value is not None and flat[key] != value:
        raise HeadFormatError(
            f"its config says {key} {flat[key]!r} at the top, but {value!r} in {where}; load it with {key}= to choose"
        )


def key_notes(
    published: dict[str, Any], flat: dict[str, Any], overrides: dict[str, Any], names: set[str]
) -> list[str]:
    """Return warnings about what a published config leaves open.

    Args:
        published: The config as published.
        flat: Its flat view.
        overrides: Config fields given by the caller, about which nothing is left open.
        names: The tensor names in the file.
    """
    found = (_norm_output(flat, overrides, names), _residual(published, flat), _unknown(flat, overrides))
    return [note for note in found if note is not None]


def _norm_output(flat: dict[str, Any], overrides: dict[str, Any], names: set[str]) -> str | None:
    """Return a note on `norm_output`, which had another meaning in SpecForge until 2026-09."""
    value = flat.get("norm_output")
    midlayer = any(re.match(r"midlayer\.(?!\d)", name) for name in names)
    if value is None or not midlayer or "norm_output" in overrides or "final_norm" in overrides:
        return None
    if value:
        return (
            "its norm_output: true is read as engines read it (the normed output is fed back); SpecForge heads "
            "trained before that project's change of 2026-09 were fed the un-normed output: if acceptance is low, "
            "load the head with norm_output=False"
        )
    return (
        "its norm_output: false is read as engines read it (a final norm before lm_head, the un-normed output fed "
        "back); SpecForge heads trained before that project's change of 2026-09 have no final norm at all: if "
        "acceptance is low, load the head with final_norm=False"
    )


def _residual(published: dict[str, Any], flat: dict[str, Any]) -> str | None:
    if not is_speculators(published) or flat.get("norm_before_residual") is not None:
        return None
    return (
        "its config does not say norm_before_residual; speculators' default False is used, where vLLM assumes True: "
        "if acceptance is low, load the head with norm_before_residual=True"
    )


def _unknown(flat: dict[str, Any], overrides: dict[str, Any]) -> str | None:
    known = _READ | set(overrides)
    found = sorted(key for key, value in flat.items() if key not in known and value not in (None, False))
    keys = [key for key in found if not is_without_meaning(key) and not names_layers(key, flat[key])]
    return f"unknown config keys, which have no effect: {keys}" if keys else None
