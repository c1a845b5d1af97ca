"""torch's fused attention kernels with their log-sum-exp, and their own backward passes.

A kernel takes queries, keys and values (b, heads, n, width), equally many heads of each, and a mask that is added to
the scores. Its backward pass takes output and log-sum-exp from the caller: given those of a softmax over more keys
than the block has, it gives the block's share of the gradients, because it computes with `exp(scores - log-sum-exp)`
and `sum(gradient * output)` alone (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


aten = torch.ops.aten

States = tuple[Tensor, ...]  # query, key, value


class Kernel(Protocol):
    def forward(self, states: States, scaling: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        """Output like the query, natural log-sum-exp (b, heads, n), and what `backward` wants back."""
        ...

    def backward(
        self,
        gradient: Tensor,
        states: States,
        output: Tensor,
        norm: Tensor,
        scaling: float,
        causal: bool,
        mask: Tensor | None,
        kept: Any,
    ) -> States:
        """Gradients of query, key and value."""
        ...


class CpuFlash:
    """Any dtype; keys and values of one width."""

    def forward(self, states, scaling, causal, mask):
        output, norm = aten._scaled_dot_product_flash_attention_for_cpu(
            *states, 0.0, causal, attn_mask=mask, scale=scaling
        )
        return output, norm, None

    def backward(self, gradient, states, output, norm, scaling, causal, mask, kept):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *states, output, norm, 0.0, causal, attn_mask=mask, scale=scaling
        )


class CudaFlash:
    """Half precision, no mask."""

    def forward(self, states, scaling, causal, mask):
        output, norm, *kept = aten._scaled_dot_product_flash_attention(*states, 0.0, causal, scale=scaling)
        return output, norm, kept[:6]

    def backward(self, gradient, states, output, norm, scaling, causal, mask, kept):
        *lengths, seed, offset = kept
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, *states, output, norm.contiguous(), *lengths, 0.0, causal, seed, offset, scale=scaling
        )


class CudaEfficient:
    """Any dtype, masks; wants log-sum-exps of a multiple of 32 rows, and masks whose every row starts aligned."""

    def forward(self, states, scaling, causal, mask):
        query = states[0]
        output, norm, *kept = aten._scaled_dot_product_efficient_attention(
            *states, _aligned(mask, query), True, 0.0, causal, scale=scaling
        )
        return output, norm[..., : query.shape[2]], kept

    def backward(self, gradient, states, output, norm, scaling, causal, mask, kept):
        padded = functional.pad(norm, (0, -norm.shape[-1] % 32), value=float("inf"))
        wanted = [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(
            gradient, *states, _aligned(mask, states[0]), output, padded, *kept, 0.0, wanted, causal, scale=scaling
        )[:3]


def _aligned(mask: Tensor | None, query: Tensor) -> Tensor | None:
    if mask is None:
        return None
    keys = mask.shape[-1]
    return functional.pad(mask, (0, -keys % 16))[..., :keys].expand(*query.shape[:3], keys)


class Padded:
    """A kernel on heads of any width, values of another width than the keys included.

    Zeros behind queries and keys change no score, and zeros behind values are columns of the output to be dropped.
    """

    def __init__(self, kernel: Kernel, multiple: int = 1):
        self._kernel = kernel
        self._multiple = multiple

    def forward(self, states, scaling, causal, mask):
        output, norm, kept = self._kernel.forward(self._pad(states), scaling, causal, mask)
        return output[..., : states[2].shape[-1]], norm, kept

    def backward(self, gradient, states, output, norm, scaling, causal, mask, kept):
        *padded, gradient, output = self._pad((*states, gradient, output))
        gradients = self._kernel.backward(gradient, tuple(padded), output, norm, scaling, causal, mask, kept)
        return tuple(part[..., : state.shape[-1]] for part, state in zip(gradients, states, strict=True))

    def _pad(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        widest = max(tensor.shape[-1] for tensor in tensors)
        width = widest + -widest % self._multiple
        return tuple(t if t.shape[-1] == width else functional.pad(t, (0, width - t.shape[-1])) for t in tensors)


def kernel_for(query: Tensor, value: Tensor, masked: bool) -> Kernel:
    """The kernel for heads like these, on their device.

    Raises:
        NotImplementedError: none is known there.
    """
    if query.device.type == "cpu":
        return Padded(CpuFlash())
    if query.device.type != "cuda":
        raise NotImplementedError(f"no fused kernel that gives its log-sum-exp is known for {query.device.type}")
    flash = query.dtype in (torch.float16, torch.bfloat16) and max(query.shape[-1], value.shape[-1]) <= 256
    return Padded(CudaFlash() if flash and not masked else CudaEfficient(), multiple=8)
