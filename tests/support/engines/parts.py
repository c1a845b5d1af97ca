"""What stands in for the GPU and the server when an engine's draft model runs on a CPU. Needs torch only."""

import torch
from torch import nn


class Bag:
    """Attributes of its own, over those of another object."""

    def __init__(self, below=None, **attributes):
        self.__dict__.update(attributes, below=below)

    def __getattr__(self, name):
        if self.__dict__["below"] is None:
            raise AttributeError(name)
        return getattr(self.__dict__["below"], name)


class PlainAttention(nn.Module):
    """Causal attention of rows `(n, heads * size)` over all rows so far, with a window if the layer has one."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, window=None, value_size=None):
        super().__init__()
        self.heads, self.kv_heads, self.scale, self.window = num_heads, num_kv_heads, scale, window
        self.size, self.value_size = head_size, value_size or head_size
        self.keys, self.values = (torch.empty(0, num_kv_heads, size) for size in (self.size, self.value_size))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        new, groups = len(query), self.heads // self.kv_heads
        self.keys = torch.cat([self.keys, key.view(new, self.kv_heads, self.size)])
        self.values = torch.cat([self.values, value.reshape(new, self.kv_heads, self.value_size)])
        keys, values = self.keys.repeat_interleave(groups, 1), self.values.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query.view(new, self.heads, self.size), keys) * self.scale
        distance = torch.arange(len(keys) - new, len(keys))[:, None] - torch.arange(len(keys))
        unseen = (distance < 0) | (distance >= (self.window or len(keys) + 1))
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).reshape(new, -1)


def fill_with_nan(model: nn.Module) -> None:
    """Before loading, so that whatever a file does not fill shows in the logits."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(torch.nan)
