"""The parts of a draft head around its attention: rotary positions and the layer."""

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from .attention import Attend, Eagle3Attention, Eagle3LatentAttention, Rotary
from .configuration_eagle3 import Eagle3DraftConfig
from .rope import default_frequencies


class Eagle3RotaryEmbedding(LlamaRotaryEmbedding):
    """The draft's own RoPE. Frequencies stay in float32 whatever dtype the head is moved to."""

    compute_default_rope_parameters = staticmethod(default_frequencies)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 and self.inv_freq.device.type != "meta":
            fresh = type(self)(self.config).inv_freq.to(self.inv_freq.device)
            self.register_buffer("inv_freq", fresh, persistent=False)
            self.register_buffer("original_inv_freq", fresh.clone(), persistent=False)
        return self


class Eagle3DecoderLayer(nn.Module):
    """One draft layer. The first takes the embedding and the feature apart; the residual is the un-normed feature."""

    def __init__(self, config: Eagle3DraftConfig, layer_idx: int):
        super().__init__()
        self.is_first = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = (Eagle3LatentAttention if config.is_latent else Eagle3Attention)(config, layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        residual = hidden
        if self.is_first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            inputs = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(inputs, rotary, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
