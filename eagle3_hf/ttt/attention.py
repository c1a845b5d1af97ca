"""Attention of training-time test: causal over the prefix at step 0, one own-row key a step after that.

Row `t` of step `s` plays the draft that left the prefix at row `t` and is `s` tokens deep: it sees the step-0 keys of
rows `j <= t` and its own keys of steps `1..s`, exactly what cached drafting sees (paper section 3.2).
"""

import torch


def ttt_attention(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scaling: float, rows: torch.Tensor
) -> torch.Tensor:
    """Joint softmax over the causal step-0 keys and the own-row keys of later steps.

    Args:
        query: (B, heads, R, hd) of the last step.
        keys, values: One (B, kv_heads, T, hd) tensor of step 0, then one (B, kv_heads, R, hd) a step.
        scaling: Factor on the scores.
        rows: (B or 1, R) row of each query, 0 <= rows < T.

    Returns:
        (B, R, heads, hd).
    """
    batch, heads, num_rows, head_dim = query.shape
    kv_heads, length = keys[0].shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, num_rows, head_dim)
    prefix = (grouped @ keys[0].unsqueeze(2).transpose(-1, -2)).float() * scaling  # (B, kv, group, R, T)
    future = torch.arange(length, device=query.device) > rows[:, None, None, :, None]
    prefix = prefix.masked_fill(future, float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, dtype=torch.float32) * scaling for key in keys[1:]]
    scores = torch.cat([prefix, torch.stack(own, dim=-1)], dim=-1) if own else prefix
    weights = scores.softmax(-1).to(query.dtype)
    output = weights[..., :length] @ values[0].unsqueeze(2)
    for step, value in enumerate(values[1:]):
        output = output + weights[..., length + step, None] * value.unsqueeze(2)
    return output.reshape(batch, heads, num_rows, head_dim).transpose(1, 2)


class TTTAttention:
    """The `attend` of a training-time-test unroll: remembers every step's keys and values, per draft layer.

    Attributes:
        rows: (B or 1, R) rows that the coming steps run on; the later steps' rows must be the same at every step.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._steps: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def __call__(self, module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = self._steps.setdefault(module.layer_idx, ([], []))
        keys.append(key)
        values.append(value)
        return ttt_attention(query, keys, values, module.scaling, self.rows)
