"""Attention of the draft's layers: grouped queries as in Llama, or latent (MLA) as in DeepSeek; and the draft's cache.

What a position attends to differs between drafting and training, so a layer receives a function `attend`:
[`CachedAttention`] when drafting, `TTTAttention` in training. Both respect a layer's window.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_eagle3 import Eagle3DraftConfig
from .grouped_attention import AdditiveMasks, grouped_attention
from .norms import Eagle3RMSNorm


# What a layer calls: from (module, query, key, value), each (B, heads, n, width), to the output (B, n, heads, width).
Attend = Callable[["DraftAttention", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# cos and sin, (B or 1, n or 1, rotary width); the first half of sin is negated (see `apply_rotary`).
Rotary = tuple[torch.Tensor, torch.Tensor]


class DraftCache:
    """Keys and values of the draft (and position ids, where a layer has a window), in growing buffers per layer.

    `length` entries are committed; those of a tree being grown are written behind them and dropped by `rollback`.

    Args:
        num_layers: Of the draft.
        window: How many positions are seen at most, the own one included, whatever a layer's window; `None` for all.

    Attributes:
        valid: (B, length) bool, which committed entries count: sequences of different lengths leave gaps. `None`: all.
        positions: (B, length) of the committed entries, kept only beside `valid`.
    """

    def __init__(self, num_layers: int, window: int | None = None):
        self.length = 0
        self.window = window
        self.valid: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self._buffers: list[tuple[torch.Tensor, ...] | None] = [None] * num_layers
        self._filled = [0] * num_layers

    def append(self, layer_idx: int, *states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Write states (B, heads, n, width) behind what is there; returns views of everything written so far.

        A layer's states are the same ones at every call; their heads and widths may differ from each other.
        """
        start, end = self._filled[layer_idx], self._filled[layer_idx] + states[0].shape[2]
        buffers = self._room(layer_idx, states, end)
        for buffer, state in zip(buffers, states, strict=True):
            buffer[:, :, start:end] = state
        self._filled[layer_idx] = end
        return tuple(buffer[:, :, :end] for buffer in buffers)

    @property
    def num_layers(self) -> int:
        return len(self._buffers)

    def committed(self, layer_idx: int) -> tuple[torch.Tensor, ...]:
        """Views of a layer's committed states (B, heads, length, width)."""
        return tuple(buffer[:, :, : self.length] for buffer in self._buffers[layer_idx] or ())

    def commit(self) -> None:
        """Make what is written so far the prefix that later entries build on."""
        self.length = self._filled[0]

    def mark(self, positions: torch.Tensor, valid: torch.Tensor) -> None:
        """Set which of the entries committed last count, and their positions; both (B, n)."""
        if self.valid is None or self.positions is None:
            before = self.length - valid.shape[1]
            self.valid = valid.new_ones(valid.shape[0], before)
            self.positions = torch.arange(before, device=positions.device).expand(valid.shape[0], -1)
        self.valid = torch.cat([self.valid, valid], dim=1)
        self.positions = torch.cat([self.positions, positions], dim=1)

    def forget(self, sequence: int, position: int) -> None:
        """Drop what one sequence of the batch has from this position on."""
        if self.valid is not None and self.positions is not None:
            self.valid[sequence] &= self.positions[sequence] < position

    def rollback(self) -> None:
        """Drop the entries written since `commit`."""
        self._filled = [self.length] * len(self._filled)

    def _room(self, layer_idx: int, like: tuple[torch.Tensor, ...], needed: int) -> tuple[torch.Tensor, ...]:
        buffers = self._buffers[layer_idx]
        if buffers is None or buffers[0].shape[2] < needed:
            size = 2 * needed + 64
            grown = tuple(state.new_zeros(*state.shape[:2], size, state.shape[3]) for state in like)
            if buffers is not None:
                for new, old in zip(grown, buffers, strict=True):
                    new[:, :, : old.shape[2]] = old
            self._buffers[layer_idx] = buffers = grown
        return buffers


class CachedAttention:
    """The `attend` of drafting: transformers' sdpa or eager attention over a [`DraftCache`].

    Args:
        cache: What came before, extended in place; `None` for one causal pass without a cache.
        visible: (B, 1, n, past + n) bool, which entries each new one sees, windows aside; causal when `None`.
    """

    def __init__(self, cache: DraftCache | None = None, visible: torch.Tensor | None = None):
        self.cache = cache
        self.visible = visible
        self._masks = AdditiveMasks()  # for all layers of a pass

    def __call__(
        self,
        module: "DraftAttention",
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The output at `position_ids` (B or 1, n); a window counts positions, not entries of the cache."""
        states: tuple[torch.Tensor, ...] = key, value
        window = self._window(module)
        if window is not None:
            states = key, value, position_ids.expand(query.shape[0], -1)[:, None, :, None]
        if self.cache is not None:
            states = self.cache.append(module.layer_idx, *states)
        visible = self._causal(query, states[0].shape[2]) if self.visible is None else self.visible
        if window is not None:
            recent = states[2].transpose(-1, -2) > position_ids[:, None, :, None] - window
            visible = recent if visible is None else recent & visible
        implementation = module.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        mask = _additive(visible, query.dtype) if implementation == "eager" else visible
        with grouped_attention(self._masks):
            return attention(
                module, query, states[0], states[1], mask, scaling=module.scaling, dropout=0.0, is_causal=False
            )[0]

    def _window(self, module: "DraftAttention") -> int | None:
        windows = (module.sliding_window, None if self.cache is None else self.cache.window)
        return min((window for window in windows if window is not None), default=None)

    @staticmethod
    def _causal(query: torch.Tensor, num_keys: int) -> torch.Tensor | None:
        length = query.shape[2]
        if length == 1:
            return None
        return torch.ones(length, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - length)[None, None]


def _additive(visible: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if visible is None:
        return None
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, rotary: Rotary, interleaved: bool = False
) -> list[torch.Tensor]:
    """Rotary positions of query and key (B, heads, n, width); numbers beyond the rotary width pass as they are.

    Args:
        interleaved: Pairs are (0, 1), (2, 3), ... instead of halves. They come out as halves, in query and key alike.
    """
    (cos, sin), heads = rotary, (query.shape[1], key.shape[1])
    width = cos.shape[-1]
    states = torch.cat([query[..., :width], key[..., :width]], 1)
    if interleaved:
        states = states.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    # Half a width further is the other number of each pair. In the first half it is subtracted: sin is negative there.
    turned = torch.addcmul(states * cos[:, None], states.roll(width // 2, -1), sin[:, None]).split(heads, 1)
    if query.shape[-1] == width:
        return list(turned)
    return [torch.cat([part, whole[..., width:]], -1) for part, whole in zip(turned, (query, key), strict=True)]


class Eagle3Attention(nn.Module):
    """Llama attention; the first layer reads `[embedding, feature]`, so its projections are 2H wide."""

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.sliding_window = config.window(layer_idx)
        self.is_causal = False  # masks are always given
        width = config.hidden_size * (2 if layer_idx == 0 else 1)
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias)
        if config.qk_norm:
            self.q_norm = Eagle3RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = Eagle3RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        shape = (*hidden.shape[:-1], -1, self.head_dim)
        query, key = self.q_proj(hidden).view(shape), self.k_proj(hidden).view(shape)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary(query.transpose(1, 2), key.transpose(1, 2), rotary)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        return self.o_proj(attend(self, query, key, value).reshape(*hidden.shape[:-1], -1))


class Eagle3LatentAttention(nn.Module):
    """Latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1), with projections 2H wide in the first layer.

    A head's query and key have a part without positions and a rotary part; all heads share the key's rotary part.
    """

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        latent, nope, rope, value = config.latent_widths
        self.widths = [nope, rope]
        self.num_key_value_groups = 1
        self.scaling = (nope + rope) ** -0.5 * _yarn_scale(config) ** 2
        self.sliding_window = config.window(layer_idx)
        self.is_causal = False  # masks are always given
        width = config.hidden_size * (2 if layer_idx == 0 else 1)
        heads, bias, eps = config.num_attention_heads, config.attention_bias, config.rms_norm_eps
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, heads * (nope + rope), bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = Eagle3RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent + rope, bias=bias)
        self.kv_a_layernorm = Eagle3RMSNorm(latent, eps)
        self.kv_b_proj = nn.Linear(latent, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, config.hidden_size, bias=config.attention_output_bias)

    def forward(self, hidden: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        config, shape = self.config, (*hidden.shape[:-1], self.config.num_attention_heads, -1)
        queries = self.q_proj(hidden) if config.q_lora_rank is None else self._low_rank_query(hidden)
        query, query_turned = queries.view(shape).transpose(1, 2).split(self.widths, dim=-1)
        latent, key_turned = self.kv_a_proj_with_mqa(hidden).tensor_split([config.kv_lora_rank], dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(shape).transpose(1, 2)
        key, value = expanded.tensor_split(self.widths[:1], dim=-1)
        query_turned, key_turned = apply_rotary(query_turned, key_turned[:, None], rotary, config.rope_interleave)
        query = torch.cat([query, query_turned], dim=-1)
        key = torch.cat([key, key_turned.expand(-1, key.shape[1], -1, -1)], dim=-1)
        return self.o_proj(attend(self, query, key, value).reshape(*hidden.shape[:-1], -1))

    def _low_rank_query(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))


DraftAttention = Eagle3Attention | Eagle3LatentAttention


def _yarn_scale(config: Eagle3DraftConfig) -> float:
    """YaRN's factor on the scale of latent attention's queries and keys; 1 without `mscale_all_dim`."""
    rope = config.rope_parameters
    factor = rope.get("factor", 1.0)
    if rope["rope_type"] == "default" or factor <= 1:
        return 1.0
    return 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(factor) + 1.0
