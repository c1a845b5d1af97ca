"""Tells the published formats apart, and rejects what is not an autoregressive EAGLE-3 head, saying what it is."""

import re
from collections.abc import Mapping
from typing import Any

from .errors import HeadFormatError
from .names import canonical_name
from .shapes import other_shape


_FIRST = "layers.0."
_SUPPORTED = "EAGLE-3 heads have `fc.weight` and a layer that reads [embedding, feature] (`midlayer.*`, `layers.0.*`)."
# Config keys of other methods, and the method that has them.
_OTHER_METHODS = {
    "dflash_config": "DFlash",
    "dspark_config": "DSpark",
    "domino_config": "Domino",
    "ptd_token_id": "P-EAGLE",
    "mask_token_id": "P-EAGLE or DFlash",
    "parallel_drafting": "P-EAGLE",
}
_QUANTISED = re.compile(
    r"\.(weight_packed|weight_scale|weight_scale_inv|weight_scale_2|input_scale|qweight|qzeros|scales)$"
)


def is_own_format(config: Mapping[str, Any]) -> bool:
    """Whether `Eagle3DraftConfig` wrote this `config.json`: it has at least two of the fields that only we write."""
    return sum(key in config for key in ("target_layer_ids", "own_embeddings", "own_lm_head", "guessed_layer_ids")) > 1


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether the layer's config is nested, as speculators writes it."""
    return "transformer_layer_config" in config or "speculators_model_type" in config


def is_head_config(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is a draft head's, as far as that can be told without the tensors."""
    claims = [str(name).lower() for name in config.get("architectures") or ()]
    keys = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    return (
        is_own_format(config)
        or config.get("speculators_model_type") == "eagle3"
        or any(config.get(key) is not None for key in keys)
        or any("eagle3" in name for name in claims)
    )


def format_name(config: Mapping[str, Any], names: set[str]) -> str:
    """Return which project writes such folders. This is for people to read; no decision depends on it.

    Args:
        config: The published config.
        names: The tensor names in the file.
    """
    if is_own_format(config):
        return "eagle3_hf"
    mla = ", MLA" if any("kv_a_proj_with_mqa" in name for name in names) else ""
    if is_speculators(config):
        return "speculators" + mla
    if any(name.startswith("model.layers.") for name in names):
        return "NeMo AutoModel" + mla
    if reads_no_features(config):
        return "ModelOpt without auxiliary features" + mla
    if any(re.match(r"midlayer\.\d", name) for name in names):
        return "ModelOpt, layers numbered under midlayer" + mla
    if any(name.startswith("layers.0.") for name in names):
        return "ModelOpt / TorchSpec / vLLM export" + mla
    claims = str(config.get("architectures"))
    if "rope_theta" not in config and "eagle_config" not in config and "'LlamaForCausalLM'" in claims:
        return "SafeAILab"
    return ("AngelSlim" if "Eagle3LlamaForCausalLM" in claims else "SpecForge / ModelOpt / TorchSpec") + mla


def check_is_head(config: Mapping[str, Any], names: set[str]) -> None:
    """Check that config keys and tensor names are those of an EAGLE-3 head.

    Args:
        config: The published config.
        names: The tensor names in the file.

    Raises:
        HeadFormatError: they are not; the message says what they are instead.
    """
    reason = _other_method(config, names) or _not_a_head({canonical_name(name) for name in names}, config)
    reason = reason or other_shape(names)
    if reason is not None:
        kind = config.get("architectures") or config.get("model_type") or "unknown"
        raise HeadFormatError(f"{reason} (the config says {kind}). {_SUPPORTED}")


def _other_method(config: Mapping[str, Any], names: set[str]) -> str | None:
    eagle = config.get("eagle_config")
    flags = {**config, **(eagle if isinstance(eagle, dict) else {})}
    for key, method in _OTHER_METHODS.items():
        if flags.get(key) not in (None, False):
            return f"this is a {method} head (its config has `{key}`), which does not draft one token after another"
    algorithm = config.get("speculators_model_type")
    if algorithm not in (None, "eagle3"):
        return f"this is a {algorithm} speculator (`speculators_model_type`), not EAGLE-3"
    if any(canonical_name(name) == "mask_hidden" for name in names):
        return "this is a P-EAGLE head (it has `mask_hidden`), which drafts all tokens in parallel"
    return _variant(flags, names) or _quantised(config, names)


def _variant(flags: Mapping[str, Any], names: set[str]) -> str | None:
    """Recognise relatives of EAGLE-3 whose layer computes something else."""
    if flags.get("eh_proj_before_attn") or any(re.search(r"(^|\.)(eh_proj|enorm|hnorm)\.", name) for name in names):
        return "this head projects [embedding, hidden] before its attention (`eh_proj`), which is not EAGLE-3's layer"
    if flags.get("use_mtp_layernorm"):
        return "this head has the norms of a multi-token-prediction layer (`use_mtp_layernorm`)"
    for key in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if flags.get(key) is False:
            return f"this head leaves out a norm of EAGLE-3's layer (`{key}: false`)"
    steps = flags.get("parallel_draft_step")
    if isinstance(steps, int) and steps > 1:
        return f"this head drafts {steps} tokens in parallel (`parallel_draft_step`), not one after another"
    later = [name for name in names if re.match(r"midlayer\.[1-9]\d*\.hidden_norm\.", name)]
    if later or (flags.get("next_layer_regular") is False and any(re.match(r"(mid)?layers?\.1\.", n) for n in names)):
        return "this is a Megatron deep head (layers `midlayer.N` that read features), which only TensorRT-LLM runs"
    return None


def _quantised(config: Mapping[str, Any], names: set[str]) -> str | None:
    scales = sorted(name for name in names if _QUANTISED.search(name))
    if config.get("quantization_config") or scales:
        which = f"tensor {scales[0]}" if scales else "`quantization_config`"
        return f"this head is quantised ({which}), which is not supported: use the original one"
    return None


def reads_no_features(config: Mapping[str, Any]) -> bool:
    """Whether the head reads only the target's last hidden state, and therefore has no `fc`."""
    eagle = config.get("eagle_config")
    nested = eagle.get("use_aux_hidden_state") if isinstance(eagle, dict) else None
    return config.get("use_aux_hidden_state") is False or nested is False


def _not_a_head(names: set[str], config: Mapping[str, Any]) -> str | None:
    """Return what the canonical names look like, or `None` where they are a head's."""
    fuses = "fc.weight" in names
    reads_feature = f"{_FIRST}hidden_norm.weight" in names
    # Only EAGLE-3 heads have a vocabulary map: a file with one is a head, and a tensor that it lacks is named later.
    has_layer = any(name.startswith(_FIRST) for name in names)
    if has_layer and ((fuses and (reads_feature or "d2t" in names)) or (not fuses and reads_no_features(config))):
        return None
    if reads_feature and not fuses:
        return (
            "missing tensors ['fc.weight']: the rest of a head is there, but its config does not say "
            "`use_aux_hidden_state: false`"
        )
    if fuses:
        return (
            "it has `fc.weight`, but no layer that reads a feature (`midlayer.hidden_norm`, `layers.0.hidden_norm`): "
            "an EAGLE-1/EAGLE-2 head or an unknown format"
        )
    if any("embed_tokens" in name or "wte" in name for name in names):
        return f"this is an ordinary model with {len(names)} tensors, not an EAGLE-3 draft head: no `fc.weight`"
    return f"no EAGLE-3 tensors (`fc.weight`, `midlayer.*`) among its {len(names)} tensors"
