"""Starting a new head from its target: config, output layer, final norm, and the last blocks where shapes allow."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .borrowed import COMPUTE_DTYPES, call_on_module_device
from .config_fields import is_integer, is_number
from .configuration_eagle3 import Eagle3DraftConfig
from .target_check import default_layer_ids
from .target_modules import decoder_blocks, num_target_layers, table_shape


# RoPE types that depend only on the position, so that a draft can share them.
_PORTABLE_ROPE = ("default", "linear", "llama3", "yarn")
# A head's width where the target has none to copy.
_HEAD_DIM = 64
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon")
# An attention's projections of `[embedding, feature]`, and those of what the attention made itself.
_READ_THE_PAIR = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
_READ_A_LATENT = ("q_b_proj", "kv_b_proj", "o_proj")


def new_head_config(target, vocab_size: int, draft_vocab_size: int, overrides: dict) -> Eagle3DraftConfig:
    """The usual one-layer head for `target`, as wide as it; any field can be overridden.

    A head of another width has its own embeddings, and heads and MLP in proportion to its width.
    """
    text = target.config.get_text_config()
    block = _last_block_config(text)
    reads_final_output = overrides.get("use_aux_hidden_state") is False
    fields = {
        **_widths(block, overrides),
        "own_embeddings": _embedding_width(target) != overrides.get("hidden_size", text.hidden_size),
        "target_hidden_size": text.hidden_size,
        "max_position_embeddings": _longest_text(text),
        "rms_norm_eps": _norm_eps(block),
        "rope_parameters": _portable_rope(text),
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "target_layer_ids": None if reads_final_output else default_layer_ids(num_target_layers(target)),
        "target_num_hidden_layers": num_target_layers(target),
        "target_name_or_path": getattr(target.config, "_name_or_path", None) or None,
        "target_model_type": target.config.model_type,
    }
    if overrides.get("kv_lora_rank") is not None:  # latent attention: its own widths say these
        del fields["num_key_value_heads"], fields["head_dim"]
    return Eagle3DraftConfig(**{**fields, **overrides})


def _last_block_config(text) -> Any:
    """The config that the last block was built from, where fields may differ by layer (Gemma 4).

    It is the block that a head is started from.
    """
    return text.per_layer_config[-1] if getattr(text, "is_heterogeneous", False) else text


def _embedding_width(target) -> int:
    shape = table_shape(target.get_input_embeddings())
    return target.config.get_text_config().hidden_size if shape is None else shape[1]


def _widths(block, overrides: dict) -> dict:
    """Widths of residual stream, attention and MLP: the target's, or in proportion where `hidden_size` differs."""
    width = overrides.get("hidden_size", block.hidden_size)
    heads, groups, head_dim = _attention_widths(block, overrides)
    mlp = _mlp_width(block)
    if width != block.hidden_size:
        head_dim = min(head_dim, width - width % 2)
        heads = overrides.get("num_attention_heads") or max(1, width // head_dim)
        groups = groups if heads % groups == 0 else 1
        mlp = max(1, mlp * width // block.hidden_size)
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "head_dim": head_dim,
    }


def _attention_widths(block, overrides: dict) -> tuple[int, int, int]:
    """Number of heads, of heads that share a key, and width of one: the target's, or ours if it has none (Mamba)."""
    heads = getattr(block, "num_attention_heads", None)
    if heads is None:  # its `head_dim`, if any, is that of a recurrent state
        head_dim = overrides.get("head_dim") or min(_HEAD_DIM, block.hidden_size - block.hidden_size % 2)
        heads = overrides.get("num_attention_heads")
        if heads is None:
            return max(1, block.hidden_size // head_dim), 1, head_dim
        return heads, 1, overrides.get("head_dim") or block.hidden_size // heads
    groups = heads // (getattr(block, "num_key_value_heads", None) or heads)
    head_dim = overrides.get("head_dim") or getattr(block, "head_dim", None) or block.hidden_size // heads
    return heads, groups, head_dim


def _mlp_width(block) -> int:
    """Width of the MLP. The experts of mixture-of-experts targets are narrow; the draft's MLP is dense."""
    width = getattr(block, "intermediate_size", None) or 0
    if isinstance(width, list):
        width = max(width)
    return max(width, 2 * block.hidden_size)


def _norm_eps(block) -> float:
    """What the target's norms add to a variance; families name it differently, or leave the usual name `None`."""
    found: list[Any] = [getattr(block, name, None) for name in _NORM_EPS]
    return next((eps for eps in found if is_number(eps) and eps > 0), 1e-5)


def _longest_text(text) -> int:
    """The target's longest text, 2048 where it has no limit (XLNet has -1)."""
    length: Any = getattr(text, "max_position_embeddings", None)
    return length if is_integer(length) and length > 0 else 2048


def _portable_rope(text) -> dict:
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in _PORTABLE_ROPE and not rope.get("partial_rotary_factor"):
        return dict(rope)
    return {"rope_type": "default", "rope_theta": Eagle3DraftConfig.default_theta}


def special_ids(target) -> list[int]:
    """The eos, pad and bos ids of the target's generation config, which every draft vocabulary contains."""
    config = getattr(target, "generation_config", None)
    found: set[int] = set()
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(config, name, None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(found)


@torch.no_grad()
def dense_rows(linear: nn.Module, ids: torch.Tensor, width: int, chunk: int = 256) -> torch.Tensor:
    """Rows `ids` of a linear layer's weight, (len(ids), width) float32, computed by calling it on unit vectors.

    That works for quantised, offloaded, tied and biased layers, whatever dtype and device their weights have.
    """
    probe = next((p for p in linear.parameters() if p.dtype in COMPUTE_DTYPES), None)
    device = probe.device if probe is not None and probe.device.type != "meta" else torch.device("cpu")
    dtype = probe.dtype if probe is not None else torch.float32
    bias = linear(torch.zeros(1, width, device=device, dtype=dtype))
    columns = []
    for start in range(0, width, chunk):
        unit = torch.eye(width, device=device, dtype=dtype)[start : start + chunk]
        columns.append((linear(unit) - bias)[:, ids.to(bias.device)].float().cpu())
    return torch.cat(columns).T.contiguous()


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, without the dropout of adapters; afterwards each part has its own mode again."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


@torch.no_grad()
def warm_start_head(draft, target) -> None:
    """Copy the draft vocabulary's rows of the target's output layer, if the widths agree."""
    config, head = draft.config, target.get_output_embeddings()
    if head is None or not config.own_lm_head or config.hidden_size != config.target_hidden_size:
        return
    shape = table_shape(head)
    if shape is not None and shape[1] != config.hidden_size:
        return
    with _evaluating(head):
        rows = dense_rows(head, draft.draft_vocab_ids().cpu(), config.hidden_size)
    draft.lm_head.weight.copy_(rows.to(draft.lm_head.weight))


@torch.no_grad()
def warm_start_body(draft, target) -> None:
    """Copy all but the output layer, where shapes agree: final norm, attention and MLP of the last blocks.

    `fc` starts as a pass-through of the highest feature.
    """
    config = draft.config
    if config.hidden_size != config.target_hidden_size:
        return
    if config.final_norm:
        _copy_gain(draft.norm, getattr(_decoder(target), "norm", None), config.hidden_size)
    if config.own_embeddings and _embedding_width(target) == config.hidden_size:
        _copy_embeddings(draft.embed_tokens, target.get_input_embeddings())
    if config.use_aux_hidden_state:
        draft.fc.weight.normal_(std=config.initializer_range)
        draft.fc.weight[:, -config.target_hidden_size :] += torch.eye(
            config.hidden_size, device=draft.fc.weight.device
        )
    blocks = decoder_blocks(target)
    for layer, block in zip(reversed(draft.layers), reversed(blocks), strict=False):
        _copy_block(layer, block, config.hidden_size)


def _decoder(target) -> Any:
    return target.get_decoder() if hasattr(target, "get_decoder") else None


def _copy_block(layer: Any, block: nn.Module, width: int) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        _copy_weight(getattr(layer.mlp, name), getattr(getattr(block, "mlp", None), name, None))
    _copy_gain(layer.post_attention_layernorm, _norm_before_mlp(block), width)
    attention = getattr(block, "self_attn", None)
    if not layer.is_first:
        _copy_gain(layer.input_layernorm, _norm_before_attention(block), width)
    for name, module in layer.self_attn.named_children():
        other = getattr(attention, name, None)
        if name in _READ_THE_PAIR and layer.is_first:
            _copy_feature_half(module, other, width)
        elif name in _READ_THE_PAIR or name in _READ_A_LATENT:
            _copy_weight(module, other)
        elif name.endswith("a_layernorm"):
            _copy_gain(module, other, module.weight.shape[0])


def _norm_before_mlp(block: nn.Module) -> nn.Module | None:
    """The norm before a block's MLP. Gemma 2 and 3 name it differently; OLMo 2, without a first norm, has none."""
    before_mlp = getattr(block, "pre_feedforward_layernorm", None)
    if before_mlp is None and hasattr(block, "input_layernorm"):
        before_mlp = getattr(block, "post_attention_layernorm", None)
    return before_mlp


def _norm_before_attention(block: nn.Module) -> nn.Module | None:
    """The norm before a block's attention; blocks without a first norm (OLMo 2) have none."""
    return getattr(block, "input_layernorm", None)


def _copy_gain(mine: Any, norm: nn.Module | None, width: int) -> None:
    """Copy what `norm` multiplies its normalised input by: its weight, or one plus its weight (Gemma).

    It is computed by calling the norm on a vector of signs, whose normalised form is itself.
    """
    weight = _plain_weight(norm)
    if norm is None or weight is None or weight.shape != (width,):
        return
    signs = torch.ones(1, width, device=weight.device, dtype=torch.float32)
    signs[:, 1::2] = -1
    norm = copy.deepcopy(norm).float()  # in half precision a bias would not cancel out, and LayerNorm takes no float32
    gain = (norm(signs).float() - norm(-signs).float()) * signs / 2  # a bias cancels out
    mine.weight.copy_(gain[0].to(mine.weight))


def _copy_embeddings(mine: nn.Embedding, embed: nn.Module, chunk: int = 8192) -> None:
    """Copy embeddings by calling the target's, which may scale them (Gemma), be quantised or on another device."""
    call = call_on_module_device(embed)
    for start in range(0, mine.num_embeddings, chunk):
        ids = torch.arange(start, min(start + chunk, mine.num_embeddings), device=mine.weight.device)
        mine.weight[ids] = call(ids).to(mine.weight)


def _copy_feature_half(mine: Any, other: nn.Module | None, width: int) -> None:
    """Copy to the half of the columns that reads the feature; the half that reads the embedding stays random."""
    source = _plain_weight(other)
    if source is not None and source.shape == (mine.out_features, width):
        mine.weight[:, width:] = source.to(mine.weight)


def _copy_weight(mine: Any, other: nn.Module | None) -> None:
    source = _plain_weight(other)
    if source is not None and source.shape == mine.weight.shape:
        mine.weight.copy_(source.to(mine.weight))


def _plain_weight(module: nn.Module | None) -> torch.Tensor | None:
    """The weight of a module if it is an ordinary float tensor in memory (not packed, not offloaded)."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dtype not in COMPUTE_DTYPES or weight.device.type == "meta":
        return None
    if type(weight.data) is not torch.Tensor:  # packed; its dtype is the one that it computes in
        return None
    return weight
