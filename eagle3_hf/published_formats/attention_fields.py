"""The config fields of a head's attention, grouped-query or latent (MLA), from the shapes of its projections."""

from typing import Any

from .errors import HeadFormatError
from .head_file import HeadFile


_PREFIX = "layers.0.self_attn."
# The tensors of an attention that compresses its keys and values, or its queries, to a low rank.
_LOW_RANK_QUERY = ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight")
_LATENT = (*_LOW_RANK_QUERY, "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight")


def attention_fields(head: HeadFile) -> dict[str, Any]:
    """Return the fields of the first layer's attention; `HeadFile` raises where they contradict the config."""
    return _latent(head) if _has_any(head, *_LATENT) else _grouped(head)


def _has_any(head: HeadFile, *names: str) -> bool:
    return any(head.has(f"{_PREFIX}{name}") for name in names)


def _grouped(head: HeadFile) -> dict[str, Any]:
    heads = head.positive("num_attention_heads")
    head_dim = head.divided_height(f"{_PREFIX}q_proj.weight", heads, "num_attention_heads")
    kv_heads = head.divided_height(f"{_PREFIX}k_proj.weight", head_dim, "head_dim")
    return {
        "num_attention_heads": heads,
        "head_dim": head.agreed("head_dim", head_dim),
        "num_key_value_heads": head.agreed("num_key_value_heads", kv_heads),
        "qk_norm": _has_any(head, "q_norm.weight", "k_norm.weight"),
        **_biases(head, "q_proj.bias", "k_proj.bias", "v_proj.bias"),
    }


def _latent(head: HeadFile) -> dict[str, Any]:
    """Multi-head latent attention (DeepSeek V2): its widths follow from its six matrices."""
    heads, low_rank = head.positive("num_attention_heads"), _has_any(head, *_LOW_RANK_QUERY)
    kv_rank = head.length(f"{_PREFIX}kv_a_layernorm.weight")
    rope = head.height(f"{_PREFIX}kv_a_proj_with_mqa.weight") - kv_rank
    query = f"{_PREFIX}{'q_b_proj' if low_rank else 'q_proj'}.weight"
    nope = head.divided_height(query, heads, "num_attention_heads") - rope
    value = head.divided_height(f"{_PREFIX}kv_b_proj.weight", heads, "num_attention_heads") - nope
    sizes = {"kv_lora_rank": kv_rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
    if low_rank:
        sizes["q_lora_rank"] = head.height(f"{_PREFIX}q_a_proj.weight")
    elif head.config.get("q_lora_rank") is not None:
        raise HeadFormatError(f"its config says q_lora_rank {head.config['q_lora_rank']}, but it has no q_a_proj")
    return {
        **{name: head.agreed(name, size) for name, size in sizes.items()},
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": rope,
        **({"rope_interleave": head.flag("rope_interleave")} if "rope_interleave" in head.config else {}),
        **_biases(head, "kv_a_proj_with_mqa.bias", "q_a_proj.bias"),
    }


def _biases(head: HeadFile, *inputs: str) -> dict[str, bool]:
    """`attention_bias` means the biases of all four projections (Llama), `qkv_bias` of all but the last (Qwen2)."""
    found, output = _has_any(head, *inputs), _has_any(head, "o_proj.bias")
    flags = {key: head.flag(key) for key in ("attention_bias", "qkv_bias", "bias")}
    # A bias that only the config knows counts as found: the comparison with the tensors then names what is missing.
    found = found or flags["attention_bias"] or flags["qkv_bias"]
    output = output or (flags["attention_bias"] and head.config.get("attention_output_bias") is not False)
    if flags["bias"] and not (found or output or head.has("fc.bias")):
        raise HeadFormatError("its config says `bias: true`, but none of its tensors is a bias")
    if (found or output) and False in (head.config.get("attention_bias"), head.config.get("qkv_bias")):
        raise HeadFormatError("its attention has biases, but its config says `attention_bias: false`")
    return {"attention_bias": found, "attention_output_bias": output}
