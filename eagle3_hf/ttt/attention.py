"""Attention of training-time test: causal over the prefix at step 0, one own-row key a step after that.

Row `t` of step `s` plays the draft that left the prefix at row `t` and is `s` tokens deep: it sees the step-0 keys of
rows `j <= t` and its own keys of steps `1..s`, exactly what cached drafting sees (paper section 3.2). It sits at
position `t + s`, a key of step `k` at its row plus `k`: a window counts from there.
"""

import torch


def ttt_attention(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scaling: float,
    rows: torch.Tensor,
    window: int | None = None,
) -> torch.Tensor:
    """Joint softmax over the causal step-0 keys and the own-row keys of later steps.

    Args:
        query: (B, heads, R, hd) of the last step.
        keys, values: One (B, kv_heads, T, hd) tensor of step 0, then one (B, kv_heads, R, hd) a step. The values may
            have another width than the keys.
        scaling: Factor on the scores.
        rows: (B or 1, R) row of each query, 0 <= rows < T.
        window: Positions that a query sees, its own included; all up to its own when `None`.

    Returns:
        (B, R, heads, width of the values).
    """
    batch, heads, num_rows, head_dim = query.shape
    kv_heads, length = keys[0].shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, num_rows, head_dim)
    prefix = (grouped @ keys[0].unsqueeze(2).transpose(-1, -2)).float() * scaling  # (B, kv, group, R, T)
    step, place, row = len(keys) - 1, torch.arange(length, device=query.device), rows[:, None, None, :, None]
    hidden, first = place > row, 1
    if window is not None:
        hidden, first = hidden | (place <= row + step - window), max(1, step - window + 1)
    prefix = prefix.masked_fill(hidden, float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, dtype=torch.float32) * scaling for key in keys[first:]]
    scores = torch.cat([prefix, torch.stack(own, dim=-1)], dim=-1) if own else prefix
    weights = scores.softmax(-1).to(query.dtype)
    output = weights[..., :length] @ values[0].unsqueeze(2)
    for i, value in enumerate(values[first:]):
        output = output + weights[..., length + i, None] * value.unsqueeze(2)
    return output.reshape(batch, heads, num_rows, -1).transpose(1, 2)


class TTTAttention:
    """The `attend` of a training-time-test unroll: remembers every step's keys and values, per draft layer.

    Attributes:
        rows: (B or 1, R) rows that the coming steps run on; the later steps' rows must be the same at every step.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self._steps: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def __call__(
        self,
        module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The output of one layer at the next step; rows and step already say where the queries and keys sit."""
        keys, values = self._steps.setdefault(module.layer_idx, ([], []))
        keys.append(key)
        values.append(value)
        return ttt_attention(query, keys, values, module.scaling, self.rows, module.sliding_window)
