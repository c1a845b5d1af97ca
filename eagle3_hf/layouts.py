"""Published heads: which dialect a folder speaks, and its config in our canonical words.

Dialects are told apart by content (config keys, tensor names and shapes), never by a `model_type` or class name, since
published heads claim to be `llama` and other projects use our class names. Source of the facts: the SafeAILab
reference implementation and the heads published with it.
"""

import os
import zipfile
from typing import Any, NamedTuple


# Renames of checkpoint keys to ours, in the form of transformers' `key_mapping` (pattern -> replacement).
WEIGHT_RENAMINGS = {r"^midlayer\.": "layers.0."}

# Config keys by which other dialects give themselves away; each is refused by name until its loader exists.
FOREIGN_KEYS = {
    "speculators_model_type": "speculators",
    "transformer_layer_config": "speculators",
    "dflash_config": "DFlash",
    "eagle_config": "SpecForge / ModelOpt",
    "target_model_type": "SpecForge",
    "eagle_aux_hidden_state_layer_ids": "vLLM",
    "num_aux_hidden_states": "vLLM / NeMo",
    "norm_output": "EAGLE-3.1",
    "fc_norm": "EAGLE-3.1",
    "norm_before_fc": "speculators / vLLM",
    "norm_before_residual": "speculators / vLLM",
    "q_lora_rank": "MLA",
    "kv_lora_rank": "MLA",
    "quantization_config": "quantised",
}
# `norm_output: false` is no "off": to SpecForge it means that there is no final norm at all.
_FOREIGN_EVEN_IF_FALSE = {"norm_output"}

_SUPPORTED = "Supported: heads saved by eagle3_hf and the SafeAILab layout (`midlayer.*`, `fc.weight`)."
_FLOAT_DTYPES = ("float32", "float16", "bfloat16", "float64")
_SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAFETENSORS_DTYPES |= {"I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
# From these the widths are read; what else is missing or left over is named after loading.
_NEEDED: tuple[str, ...] = ("fc.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight")
_NEEDED += ("midlayer.mlp.gate_proj.weight",)


class HeadFormatError(ValueError):
    """A folder that is no EAGLE-3 head, a damaged one, or one in a dialect that is not supported."""


class TensorInfo(NamedTuple):
    """What a weights file says about one tensor; `dtype` as torch spells it, `"float16"`."""

    shape: tuple[int, ...]
    dtype: str


def is_own_layout(config: dict[str, Any]) -> bool:
    """Whether `config.json` was written by `Eagle3DraftConfig` (told by its fields)."""
    return "target_layer_ids" in config and "target_hidden_size" in config and "own_embeddings" in config


# ----- what is in a weights file -------------------------------------------------------------------------------------


def read_tensor_table(path: str | os.PathLike) -> dict[str, TensorInfo]:
    """Names, shapes and dtypes of the tensors of a `.safetensors` or `.bin` file; no code in the file is ever run.

    Raises:
        HeadFormatError: the file is truncated or corrupt, or a pickle that wants to run code.
    """
    try:
        if str(path).endswith(".safetensors"):
            return _safetensors_table(path)
        return _pickle_table(path)
    except HeadFormatError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise HeadFormatError(
            f"{os.fspath(path)} cannot be read as a weights file ({type(error).__name__}: {reason}). It is truncated, "
            "corrupt, or holds code instead of plain tensors (never executed). Download it again, or ask its author "
            "for a safetensors file."
        ) from error


def _safetensors_table(path) -> dict[str, TensorInfo]:
    from safetensors import safe_open

    table = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file object is no mapping
            part = file.get_slice(name)
            dtype = part.get_dtype()
            table[name] = TensorInfo(tuple(part.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype.lower()))
    return table


def _pickle_table(path) -> dict[str, TensorInfo]:
    import torch

    # Only a zip file can be mapped into memory; the format of old torch versions cannot.
    state = torch.load(path, map_location="meta", weights_only=True, mmap=zipfile.is_zipfile(path) or None)
    strangers = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if strangers:
        raise HeadFormatError(
            f"{os.fspath(path)} holds {strangers[:5]} that are no tensors: a training checkpoint, not the weights of "
            "a head"
        )
    return {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in state.items()}


def float_dtype(tensors: dict[str, TensorInfo]) -> str | None:
    """The dtype of the head's largest matrix `fc`; `None` without one.

    Raises:
        HeadFormatError: quantised weights, or a vocabulary map that a cast to a float dtype has rounded.
    """
    if "d2t" in tensors and "int" not in tensors["d2t"].dtype:
        raise HeadFormatError(f"d2t must be integer offsets, got {tensors['d2t'].dtype}, which rounds them")
    if "fc.weight" not in tensors:
        return None
    dtype = tensors["fc.weight"].dtype
    if dtype not in _FLOAT_DTYPES:
        raise HeadFormatError(f"fc.weight has dtype {dtype}: quantised heads are not supported, use the original one")
    return dtype


# ----- config dictionaries -------------------------------------------------------------------------------------------


def canonical_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    """Translate a published `config.json` and the shapes of its tensors into `Eagle3DraftConfig` fields.

    Raises:
        HeadFormatError: not an EAGLE-3 head, a dialect that is not supported yet, named, or a config that contradicts
            the tensors, with both numbers.
    """
    for key, family in FOREIGN_KEYS.items():
        if config.get(key) or (key in _FOREIGN_EVEN_IF_FALSE and config.get(key) is not None):
            raise HeadFormatError(
                f"this head is in the {family} dialect (its config has `{key}`), which is not supported yet. "
                + _SUPPORTED
            )
    if config.get("use_aux_hidden_state") is False:
        raise HeadFormatError(
            "this head reads the last hidden state alone (its config has `use_aux_hidden_state: false`), which is not "
            "supported yet. " + _SUPPORTED
        )
    check_is_head(config, set(tensors))
    return _safeailab(config, {name: info.shape for name, info in tensors.items()})


def check_is_head(config: dict[str, Any], names: set[str]) -> None:
    """Raise unless the names are those of the SafeAILab layout, saying what they look like instead."""
    kind = config.get("architectures") or config.get("model_type") or "unknown"
    has_layer = any(name.startswith("midlayer.") for name in names)
    numbered = any(name.startswith("midlayer.0.") for name in names)
    if "fc.weight" in names and has_layer and not numbered:
        return
    if numbered:
        reason = "its layers are numbered (`midlayer.0.*`): ModelOpt's deep dialect, which is not supported yet"
    elif has_layer:
        reason = "missing tensors ['fc.weight']: its `midlayer.*` tensors are there"
    elif "fc.weight" in names and "layers.0.hidden_norm.weight" in names:
        reason = "its layer is named `layers.0.*`: the speculators / ModelOpt dialect, which is not supported yet"
    elif "fc.weight" in names:
        reason = "it has `fc.weight` but no `midlayer.*`: an EAGLE-1/EAGLE-2 head or an unknown dialect"
    elif any("embed_tokens" in name or "wte" in name for name in names):
        reason = f"this is an ordinary model with {len(names)} tensors, not an EAGLE-3 draft head: no `fc.weight`"
    else:
        reason = f"no EAGLE-3 tensors (`fc.weight`, `midlayer.*`) among its {len(names)} tensors"
    raise HeadFormatError(f"{reason} (the config says {kind}). {_SUPPORTED}")


def _safeailab(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The reference's layout: no hints in the config, so widths come from the tensors (algorithm: paper section 3)."""
    missing = [name for name in _NEEDED if name not in shapes]
    if missing:
        raise HeadFormatError(f"missing tensors {missing}")
    hidden, captured = _matrix(shapes, "fc.weight")
    heads, vocab_size = _positive(config, "num_attention_heads"), _positive(config, "vocab_size")
    target_hidden = hidden if config.get("target_hidden_size") is None else _positive(config, "target_hidden_size")
    head_dim = _matrix(shapes, "midlayer.self_attn.q_proj.weight")[0] // heads
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": _matrix(shapes, "midlayer.mlp.gate_proj.weight")[0],
        "head_dim": head_dim,
        "num_key_value_heads": _matrix(shapes, "midlayer.self_attn.k_proj.weight")[0] // max(1, head_dim),
        "draft_vocab_size": shapes["lm_head.weight"][0] if "lm_head.weight" in shapes else vocab_size,
    }
    if captured != 3 * target_hidden:
        raise HeadFormatError(
            f"fc.weight reads {captured} features, but three layers of a target of width {target_hidden} give "
            f"{3 * target_hidden}: this is not an EAGLE-3 head (an EAGLE-1/2 head reads one), or target_hidden_size "
            "is missing from its config"
        )
    _check_borrowed(config, shapes, target_hidden)
    for name, size in sizes.items():
        if config.get(name) not in (None, size):
            raise HeadFormatError(f"its config says {name} {config[name]}, but its tensors are made for {size}")
    copied: tuple[str, ...] = ("hidden_act", "max_position_embeddings", "rms_norm_eps", "initializer_range")
    copied += ("pad_token_id", "bos_token_id", "eos_token_id")
    return {
        **{key: config[key] for key in copied if config.get(key) is not None},
        **sizes,
        "target_hidden_size": target_hidden,
        "num_hidden_layers": 1,  # published configs are known to say the target's number here
        "num_attention_heads": heads,
        "vocab_size": vocab_size,
        "own_lm_head": "lm_head.weight" in shapes,
        "own_embeddings": "embed_tokens.weight" in shapes,
        "target_layer_ids": None,
        "rope_parameters": _rope_parameters(config),
    }


def _check_borrowed(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], target_hidden: int) -> None:
    """What a file leaves out must be there to borrow: an embedding of the same width, a head of all V rows."""
    hidden, vocab_size = shapes["fc.weight"][0], config["vocab_size"]
    if "embed_tokens.weight" not in shapes and hidden != target_hidden:
        raise HeadFormatError(
            f"missing tensors ['embed_tokens.weight']: a head of width {hidden} cannot borrow the embedding of a "
            f"target of width {target_hidden}"
        )
    size = config.get("draft_vocab_size") or shapes.get("d2t", (vocab_size,))[0]
    if "lm_head.weight" not in shapes and size != vocab_size:
        raise HeadFormatError(
            f"missing tensors ['lm_head.weight']: a head with a draft vocabulary of {size} cannot borrow the "
            f"target's, which has {vocab_size} rows"
        )


def _matrix(shapes: dict[str, tuple[int, ...]], name: str) -> tuple[int, ...]:
    if len(shapes[name]) != 2 or 0 in shapes[name]:
        raise HeadFormatError(f"{name} must be a matrix, got shape {shapes[name]}")
    return shapes[name]


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HeadFormatError(f"its config must have `{name}`, an integer of at least 1; it says {value!r}")
    return value


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The head's own RoPE, base 10000 when the file names none; the target's is never inherited."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise HeadFormatError(f"its config's rope_parameters / rope_scaling must be a dict, got {rope!r}")
    rope = dict(rope)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope
