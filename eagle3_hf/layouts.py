"""Published heads: which dialect a folder speaks, and its config in our canonical words.

Dialects are told apart by content (config keys, tensor names and shapes), never by a `model_type` or class name, since
published heads claim to be `llama` and other projects use our class names. Source of the facts: the SafeAILab
reference implementation and the heads published with it.
"""

import os
from typing import Any


# Renames of checkpoint keys to ours, in the form that transformers' own loading understands (pattern, replacement).
WEIGHT_RENAMINGS = [(r"^midlayer\.", "layers.0.")]

# Config keys by which other dialects give themselves away; each is refused by name until its loader exists.
FOREIGN_KEYS = {
    "speculators_model_type": "speculators",
    "transformer_layer_config": "speculators",
    "eagle_config": "SpecForge / ModelOpt",
    "dflash_config": "DFlash",
    "fc_norm": "EAGLE-3.1",
    "norm_output": "EAGLE-3.1",
    "target_model_type": "SpecForge",
}


class HeadFormatError(ValueError):
    """A folder that is no EAGLE-3 head, a damaged one, or one in a dialect that is not supported."""


def is_own_layout(config: dict[str, Any]) -> bool:
    """Whether `config.json` was written by `Eagle3DraftConfig` (told by its fields)."""
    return "target_layer_ids" in config and "target_hidden_size" in config and "own_embeddings" in config


def read_tensor_shapes(path: str | os.PathLike) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a `.safetensors` or `.bin` file; no tensor code of the file is ever run.

    Raises:
        HeadFormatError: the file is truncated or corrupt, or a pickle that wants to run code.
    """
    try:
        if str(path).endswith(".safetensors"):
            return _safetensors_shapes(path)
        return _pickle_shapes(path)
    except Exception as error:
        raise HeadFormatError(
            f"{os.fspath(path)} cannot be read as a weights file ({type(error).__name__}: {error}). It is truncated, "
            "corrupt, or holds code instead of plain tensors (never executed). Download it again, or ask its author "
            "for a safetensors file."
        ) from error


def _safetensors_shapes(path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _pickle_shapes(path) -> dict[str, tuple[int, ...]]:
    import torch

    state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def canonical_config(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Translate a published `config.json` and the shapes of its tensors into `Eagle3DraftConfig` fields.

    Raises:
        HeadFormatError: not an EAGLE-3 head, or a dialect that is not supported yet, named.
    """
    for key, family in FOREIGN_KEYS.items():
        if config.get(key) is not None:
            raise HeadFormatError(
                f"this head is in the {family} dialect (its config has `{key}`), which is not supported yet. "
                "Supported: heads saved by eagle3_hf and the SafeAILab layout (`midlayer.*`, `fc.weight`)."
            )
    names = set(shapes)
    if "fc.weight" not in names or not any(name.startswith("midlayer.") for name in names):
        raise HeadFormatError(_not_a_head(config, names))
    return _safeailab(config, shapes)


def _not_a_head(config: dict[str, Any], names: set[str]) -> str:
    kind = config.get("architectures") or config.get("model_type") or "unknown"
    if any("embed_tokens" in name or "wte" in name for name in names) and "fc.weight" not in names:
        return (
            f"this is an ordinary model ({kind}) with {len(names)} tensors, not an EAGLE-3 draft head: no `fc.weight`"
        )
    if "fc.weight" in names:
        return (
            f"this looks like an EAGLE-1/EAGLE-2 head or an unknown dialect ({kind}): it has `fc.weight` but no "
            "`midlayer.*` tensors, which every EAGLE-3 head of the SafeAILab layout has"
        )
    return f"no EAGLE-3 tensors (`fc.weight`, `midlayer.*`) among the {len(names)} tensors of this folder ({kind})"


def _safeailab(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The reference's layout: no hints in the config, so widths come from the tensors (algorithm: paper section 3)."""
    hidden, captured = shapes["fc.weight"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    query_rows = shapes["midlayer.self_attn.q_proj.weight"][0]
    target_hidden = config.get("target_hidden_size") or hidden
    if captured != 3 * target_hidden:
        raise HeadFormatError(
            f"fc.weight reads {captured} features, but three layers of a target of width {target_hidden} give "
            f"{3 * target_hidden}: this is not an EAGLE-3 head (an EAGLE-1/2 head reads one), or target_hidden_size "
            "is missing from its config"
        )
    fields = {
        "hidden_size": hidden,
        "target_hidden_size": target_hidden,
        "intermediate_size": shapes["midlayer.mlp.gate_proj.weight"][0],
        "num_hidden_layers": 1,  # published configs are known to say the target's number here
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": query_rows // heads,
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else None,
        "own_lm_head": "lm_head.weight" in shapes,
        "own_embeddings": "embed_tokens.weight" in shapes,
        "target_layer_ids": None,
        "rope_parameters": _rope_parameters(config),
    }
    copied = ("hidden_act", "max_position_embeddings", "rms_norm_eps", "initializer_range", "dtype", "torch_dtype")
    copied += ("pad_token_id", "bos_token_id", "eos_token_id")
    fields.update({key: config[key] for key in copied if config.get(key) is not None})
    return fields


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The head's own RoPE, base 10000 when the file names none; the target's is never inherited."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope
