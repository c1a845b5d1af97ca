"""Attention of training-time test in memory linear in the length.

The causal part over the step-0 keys runs in fused kernels, which return their output `o` and log-sum-exp `l`. The few
scores `z_i` of a query with its own keys of later steps are merged exactly: `L = logsumexp(l, z_1, ..., z_s)` and
`exp(l - L) o + sum_i exp(z_i - L) v_i`. In the backward pass the kernels are given the merged output and `L`, and
return their part of the joint softmax's gradients. The results equal those of `eager.ttt_attention`, and no tensor of
queries by keys exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..utils.logging import get_logger
from .blocks import Block, blocks_of
from .eager import ttt_attention
from .kernels import Kernel, States, kernel_for


logger = get_logger(__name__)


@dataclass(frozen=True)
class Prefix:
    """The causal part of one step.

    Attributes:
        blocks: Blocks of visible pairs of query and step-0 key.
        positions: (B or 1, Q), the position of each query.
        width: Number of step-0 keys that a query sees, its own included; all when `None`.
    """

    blocks: Sequence[Block]
    positions: Tensor
    width: int | None = None

    def forward(self, states: States, scaling: float) -> tuple[Tensor, Tensor, list]:
        """Return output (B, heads, Q, value width), log-sum-exp (B, heads, Q) float32, and what the kernels keep."""
        if self._is_one:
            output, norm, kept = self._kernel(states, self.blocks[0]).forward(states, scaling, True, None)
            return output, norm, [kept]
        query, _, value = states
        batch, heads, num_queries, _ = query.shape
        output = query.new_zeros(batch, num_queries, heads, value.shape[-1]).transpose(1, 2)
        norm = query.new_full((batch, heads, num_queries), float("-inf"), dtype=torch.float32)
        kept = []
        for block in self.blocks:
            part, part_norm, state = self._run(block, states, scaling)
            kept.append(state)
            so_far, norms = output[block.batch, :, block.queries], norm[block.batch, :, block.queries]
            if block.more:
                merged = torch.logaddexp(norms, part_norm)
                part = so_far * (norms - merged).exp()[..., None] + part * (part_norm - merged).exp()[..., None]
                part_norm = merged
            so_far.copy_(part)
            norms.copy_(part_norm)
        return output, norm, kept

    def backward(
        self, gradient: Tensor, states: States, output: Tensor, norm: Tensor, scaling: float, kept: list
    ) -> list[Tensor]:
        """Return the gradients of query, key and value, given output and log-sum-exp of the whole softmax."""
        if self._is_one:
            kernel = self._kernel(states, self.blocks[0])
            return list(kernel.backward(gradient, states, output, norm, scaling, True, None, kept[0]))
        # The gradient of a key in many blocks is a sum of many parts, which half precision would round.
        shared = not all(block.causal for block in self.blocks)
        dtype = torch.promote_types(gradient.dtype, torch.float32) if shared else gradient.dtype
        sums = [torch.zeros_like(state, dtype=dtype) for state in states]
        for block, state in zip(self.blocks, kept, strict=True):
            parts = self._run_backward(block, gradient, states, output, norm, scaling, state)
            for total, part, where in zip(sums, parts, (block.queries, block.keys, block.keys), strict=True):
                total[block.batch, :, where] += part
        return [total.to(gradient.dtype) for total in sums]

    @property
    def _is_one(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].batch == slice(None)

    @staticmethod
    def _kernel(states: States, block: Block) -> Kernel:
        return kernel_for(states[0], states[2], block.masked)

    def _run(self, block: Block, states: States, scaling: float):
        states, mask = block.cut(states), block.mask(self.positions, self.width, states[0].dtype)
        return self._kernel(states, block).forward(states, scaling, block.causal, mask)

    def _run_backward(self, block: Block, gradient, states, output, norm, scaling, kept) -> States:
        states, mask = block.cut(states), block.mask(self.positions, self.width, states[0].dtype)
        gradient, output, norm = (part[block.batch, :, block.queries] for part in (gradient, output, norm))
        kernel = self._kernel(states, block)
        return kernel.backward(gradient, states, output, norm, scaling, block.causal, mask, kept)


class _Merged(torch.autograd.Function):
    """The attention of one step. Grouped keys and values are expanded to all heads only inside."""

    @staticmethod
    def forward(ctx, prefix: Prefix, scaling: float, query: Tensor, *states: Tensor) -> Tensor:
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        group = query.shape[1] // keys[0].shape[1]
        output, norm, kept = prefix.forward((query, *_expanded(keys[0], values[0], group)), scaling)
        if len(keys) > 1:
            output, norm = _merge_own(output, norm, query, keys[1:], values[1:], scaling, group)
        ctx.save_for_backward(query, output, norm, *states)
        ctx.prefix, ctx.scaling, ctx.kept = prefix, scaling, kept
        return output.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple:
        query, output, norm, *states = ctx.saved_tensors
        keys, values = states[: len(states) // 2], states[len(states) // 2 :]
        group = query.shape[1] // keys[0].shape[1]
        gradient = gradient.transpose(1, 2)
        expanded = query, *_expanded(keys[0], values[0], group)
        d_query, d_key, d_value = ctx.prefix.backward(gradient, expanded, output, norm, ctx.scaling, ctx.kept)
        d_keys, d_values = [_reduced(d_key, group)], [_reduced(d_value, group)]
        if len(keys) > 1:
            delta = (gradient * output).sum(-1, dtype=torch.float32)
            for key, value in zip(keys[1:], values[1:], strict=True):
                parts = _own_backward(gradient, query, key, value, norm, delta, ctx.scaling, group)
                d_query = d_query.add_(parts[0])
                d_keys.append(parts[1])
                d_values.append(parts[2])
        return None, None, d_query, *d_keys, *d_values


def _expanded(key: Tensor, value: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Repeat (B, kv_heads, T, width) to (B, heads, T, width)."""
    if group == 1:
        return key, value
    return key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


def _reduced(gradient: Tensor, group: int) -> Tensor:
    """Return the gradient with respect to the input of `_expanded`."""
    return gradient if group == 1 else gradient.unflatten(1, (-1, group)).sum(2)


def _grouped(query: Tensor, group: int) -> Tensor:
    """View (B, heads, ...) as (B, kv_heads, group, ...)."""
    return query.unflatten(1, (-1, group))


def _own_scores(query: Tensor, key: Tensor, scaling: float, group: int) -> Tensor:
    """Return (B, heads, Q) float32, the score of each query with its own key of a later step."""
    return (_grouped(query, group) * key[:, :, None]).sum(-1, dtype=torch.float32).flatten(1, 2) * scaling


def _merge_own(output, norm, query, keys, values, scaling, group) -> tuple[Tensor, Tensor]:
    """Merge the queries' own keys and values into output and log-sum-exp of the prefix."""
    scores = [_own_scores(query, key, scaling, group) for key in keys]
    total = torch.stack([norm, *scores]).logsumexp(0)
    merged = output * (norm - total).exp()[..., None].to(output.dtype)
    grouped = _grouped(merged, group)
    for score, value in zip(scores, values, strict=True):
        weight = (score - total).exp().to(output.dtype)
        grouped.addcmul_(_grouped(weight, group)[..., None], value[:, :, None])
    return merged, total


def _own_backward(gradient, query, key, value, norm, delta, scaling, group) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from one step's own keys."""
    weight = (_own_scores(query, key, scaling, group) - norm).exp()
    d_weight = (_grouped(gradient, group) * value[:, :, None]).sum(-1, dtype=torch.float32).flatten(1, 2)
    d_score = _grouped((weight * (d_weight - delta) * scaling).to(query.dtype), group)[..., None]
    weight = _grouped(weight.to(query.dtype), group)[..., None]
    d_query = (d_score * key[:, :, None]).flatten(1, 2)
    d_key = (d_score * _grouped(query, group)).sum(2)
    d_value = (weight * _grouped(gradient, group)).sum(2)
    return d_query, d_key, d_value


def fused_attention(
    query: Tensor, keys: list[Tensor], values: list[Tensor], scaling: float, prefix: Prefix, first: int = 1
) -> Tensor:
    """Compute what `ttt_attention` does, with `prefix` in place of positions, window and documents.

    Args:
        query: See `ttt_attention`.
        keys: See `ttt_attention`.
        values: See `ttt_attention`.
        scaling: See `ttt_attention`.
        prefix: The visible step-0 keys.
        first: The first later step whose key is inside the window.
    """
    dtype = _dtype(query)
    seen = [state.to(dtype) for states in (keys, values) for state in (states[0], *states[first:])]
    return _Merged.apply(prefix, scaling, query.to(dtype), *seen)


def can_fuse(query: Tensor, value: Tensor) -> bool:
    """Whether fused kernels exist for such heads and agree with the eager form. Tried once, on random states."""
    return _trial(query.device, _dtype(query), query.shape[-1], value.shape[-1])


def _dtype(query: Tensor) -> torch.dtype:
    device = query.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else query.dtype


@cache
def _trial(device: torch.device, dtype: torch.dtype, key_width: int, value_width: int) -> bool:
    try:
        with torch.enable_grad():
            error = max(_error(device, dtype, key_width, value_width, sampled) for sampled in (None, [3, 8, 21, 34]))
        problem: object = None if error < 0.05 else f"the kernels' results are off by {error:.2g}"
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, ValueError) as error:
        problem = error
    if problem is not None:
        logger.warning(
            f"training attention runs unfused, in memory that grows with the square of the length (on {device}, in "
            f"{dtype}, heads of {key_width} with values of {value_width}): {problem}"
        )
    return problem is None


def _error(
    device: torch.device, dtype: torch.dtype, key_width: int, value_width: int, sampled: list[int] | None
) -> float:
    """Return the largest relative difference of output and gradients from the eager ones in double precision."""
    generator, length = torch.Generator().manual_seed(0), 40
    positions = torch.tensor([sampled or range(length)])
    sizes = [(2, positions.shape[1], key_width)]  # heads, length, width: the query, then keys and values of two steps
    sizes += [(1, size, width) for width in (key_width, value_width) for size in (length, positions.shape[1])]
    inputs = [torch.randn(1, *size, generator=generator).to(dtype) for size in sizes]
    prefix = Prefix(blocks_of(length, None, None if sampled is None else [sampled]), positions.to(device))

    def attend(device, dtype, attention, *where):
        query, *states = (state.to(device, dtype).requires_grad_() for state in inputs)
        output = attention(query, states[:2], states[2:], key_width**-0.5, *where)
        gradients = torch.autograd.grad(output.square().sum(), [query, *states])
        return [tensor.detach().double().cpu() for tensor in (output, *gradients)]

    # The first call may come from within a checkpointed step, which must not count what is saved here as its own.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        mine = attend(device, dtype, fused_attention, prefix)
        expected = attend("cpu", torch.float64, ttt_attention, positions)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, expected, strict=True))
