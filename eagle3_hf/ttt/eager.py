"""The reference form of the attention of training-time test: slow, but easy to read. See `attention`."""

import torch


def ttt_attention(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    scaling: float,
    positions: torch.Tensor,
    window: int | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute one softmax over the causal step-0 keys and the queries' own keys of later steps.

    Args:
        query: (B, heads, Q, hd), the queries of the last step.
        keys: One (B, kv_heads, T, hd) tensor of step 0, then one (B, kv_heads, Q, hd) tensor per step.
        values: Like the keys; they may have another width.
        scaling: Factor on the scores.
        positions: (B or 1, Q), the position of each query in its sequence, 0 <= position < T.
        window: Number of rotary positions that a query sees, its own included; all up to its own when `None`.
        starts: (B or 1, Q), the first position of each query's document; 0 when `None`.

    Returns:
        (B, Q, heads, width of the values).
    """
    batch, heads, num_queries, head_dim = query.shape
    kv_heads, length = keys[0].shape[1:3]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, num_queries, head_dim)
    prefix = (grouped @ keys[0].unsqueeze(2).transpose(-1, -2)).float() * scaling  # (B, kv, group, Q, T)
    step, at, own_at = len(keys) - 1, torch.arange(length, device=query.device), positions[:, None, None, :, None]
    hidden, first = at > own_at, 1
    if window is not None:
        hidden, first = hidden | (at <= own_at + step - window), max(1, step - window + 1)
    if starts is not None:
        hidden = hidden | (at < starts[:, None, None, :, None])
    prefix = prefix.masked_fill(hidden, float("-inf"))
    own = [(grouped * key.unsqueeze(2)).sum(-1, dtype=torch.float32) * scaling for key in keys[first:]]
    scores = torch.cat([prefix, torch.stack(own, dim=-1)], dim=-1) if own else prefix
    weights = scores.softmax(-1).to(query.dtype)
    output = weights[..., :length] @ values[0].unsqueeze(2)
    for i, value in enumerate(values[first:]):
        output = output + weights[..., length + i, None] * value.unsqueeze(2)
    return output.reshape(batch, heads, num_queries, -1).transpose(1, 2)
