"""Attention of training-time test with all its scores at once: slow, and plain to read. See `attention`."""

import torch


def ttt_attention(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scaling: float,
    rows: torch.Tensor,
    window: int | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Joint softmax over the causal step-0 keys and the own-row keys of later steps: the obvious way, with all scores.

    Args:
        query: (B, heads, R, hd) of the last step.
        keys, values: One (B, kv_heads, T, hd) tensor of step 0, then one (B, kv_heads, R, hd) a step. The values may
            have another width than the keys.
        scaling: Factor on the scores.
        rows: (B or 1, R) row of each query, 0 <= rows < T.
        window: Positions that a query sees, its own included; all up to its own when `None`.
        starts: (B or 1, R) first row of each query's document; row 0 when `None`.

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
    if starts is not None:
        hidden = hidden | (place < starts[:, None, None, :, None])
    prefix = prefix.masked_fill(hidden, float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, dtype=torch.float32) * scaling for key in keys[first:]]
    scores = torch.cat([prefix, torch.stack(own, dim=-1)], dim=-1) if own else prefix
    weights = scores.softmax(-1).to(query.dtype)
    output = weights[..., :length] @ values[0].unsqueeze(2)
    for i, value in enumerate(values[first:]):
        output = output + weights[..., length + i, None] * value.unsqueeze(2)
    return output.reshape(batch, heads, num_rows, -1).transpose(1, 2)
