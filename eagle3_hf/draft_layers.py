"""The parts of a draft head: its attention (cached for drafting, or unrolled for training), rotary and layer."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from .configuration_eagle3 import Eagle3DraftConfig


# From (module, query, key, value) of one pass, (B, heads, n, hd) each, to the attention output (B, n, heads, hd).
Attend = Callable[["Eagle3Attention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class DraftCache:
    """Keys and values of the draft's rows, one growing buffer per layer.

    `length` rows are committed; rows of a tree being grown are written behind them and forgotten by `rollback`.
    """

    def __init__(self, num_layers: int):
        self.length = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * num_layers
        self._filled = [0] * num_layers

    def append(self, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, kv_heads, n, hd) behind what is there; returns views of everything written so far."""
        start, end = self._filled[layer_idx], self._filled[layer_idx] + key.shape[2]
        keys, values = self._room(layer_idx, key, end)
        keys[:, :, start:end], values[:, :, start:end] = key, value
        self._filled[layer_idx] = end
        return keys[:, :, :end], values[:, :, :end]

    def commit(self) -> None:
        """What is written now is the prefix that later rows build on."""
        self.length = self._filled[0]

    def rollback(self) -> None:
        """Forget the rows written since `commit`."""
        self._filled = [self.length] * len(self._filled)

    def _room(self, layer_idx: int, like: torch.Tensor, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = self._buffers[layer_idx]
        if buffers is None or buffers[0].shape[2] < needed:
            shape = (like.shape[0], like.shape[1], 2 * needed + 64, like.shape[3])
            grown = like.new_zeros(shape), like.new_zeros(shape)
            if buffers is not None:
                for new, old in zip(grown, buffers, strict=True):
                    new[:, :, : old.shape[2]] = old
            self._buffers[layer_idx] = buffers = grown
        return buffers


class CachedAttention:
    """The `attend` of drafting: transformers' sdpa or eager attention over a [`DraftCache`].

    Args:
        cache: Rows so far, extended in place; `None` for one stand-alone causal pass.
        visible: (B, 1, n, past + n) bool, which rows each new row sees; causal when `None`.
    """

    def __init__(self, cache: DraftCache | None = None, visible: torch.Tensor | None = None):
        self.cache = cache
        self.visible = visible

    def __call__(
        self, module: "Eagle3Attention", query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        if self.cache is not None:
            key, value = self.cache.append(module.layer_idx, key, value)
        implementation = module.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        mask = self._mask(query, key.shape[2], additive=implementation == "eager")
        return attention(module, query, key, value, mask, scaling=module.scaling, dropout=0.0, is_causal=False)[0]

    def _mask(self, query: torch.Tensor, num_keys: int, additive: bool) -> torch.Tensor | None:
        visible, length = self.visible, query.shape[2]
        if visible is None and length > 1:
            visible = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - length)
            visible = visible[None, None]
        if visible is None or not additive:
            return visible
        return torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)


class Eagle3RotaryEmbedding(LlamaRotaryEmbedding):
    """The draft's own RoPE. Frequencies stay in float32 whatever dtype the head is moved to."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 and self.inv_freq.device.type != "meta":
            fresh = LlamaRotaryEmbedding(self.config).inv_freq.to(self.inv_freq.device)
            self.register_buffer("inv_freq", fresh, persistent=False)
            self.register_buffer("original_inv_freq", fresh.clone(), persistent=False)
        return self


class Eagle3Attention(nn.Module):
    """Llama attention; the first layer reads `[embedding, feature]`, so its projections are 2H wide."""

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False  # masks are always given
        width = config.hidden_size * (2 if layer_idx == 0 else 1)
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(hidden).view(shape), self.k_proj(hidden).view(shape)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotary)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        return self.o_proj(attend(self, query, key, value).reshape(*hidden.shape[:-1], -1))


class Eagle3DecoderLayer(nn.Module):
    """One draft layer. The first takes the embedding and the feature apart; the residual is the un-normed feature."""

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.is_first = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = Eagle3Attention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, rotary, attend: Attend) -> torch.Tensor:
        residual = hidden
        if self.is_first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
