"""Pearson's test of a distribution."""

import torch


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's statistic; texts expected less than five times count together."""
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any(), "a text that cannot be"
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = torch.tensor((int(kept.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
