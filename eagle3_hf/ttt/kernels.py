"""torch's fused attention kernels with their log-sum-exp, and their own backward passes.

A kernel takes queries, keys and values (b, heads, n, width), the same number of heads of each, and a mask that is
added to the scores. Its backward pass takes output and log-sum-exp from the caller. Given those of a softmax over more
keys than the block has, it returns the block's share of the gradients, because it computes only with `exp(scores -
log-sum-exp)` and `sum(gradient * output)` (Liu et al., Ring Attention, arXiv 2310.01889).
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional


aten = torch.ops.aten

States = tuple[Tensor, ...]  # query, key, value


class Kernel(Protocol):
    """A fused attention kernel with an explicit backward pass."""

    def forward(self, states: States, scaling: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        """Return the output, shaped like the query, the log-sum-exp (b, heads, n), and state for `backward`."""
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
        """Return the gradients of query, key and value."""
        ...


class CpuFlash:
    """torch's flash attention on CPUs, for any dtype; keys and values have the same width."""

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
    """torch's flash attention on CUDA, for half precision without a mask."""

    def forward(self, states, scaling, causal, mask):
        output, norm, *kept = aten._scaled_dot_product_flash_attention(*states, 0.0, causal, scale=scaling)
        return output, norm, kept[:6]

    def backward(self, gradient, states, output, norm, scaling, causal, mask, kept):
        *lengths, seed, offset = kept
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, *states, output, norm.contiguous(), *lengths, 0.0, causal, seed, offset, scale=scaling
        )


class CudaEfficient:
    """torch's memory-efficient attention on CUDA, for any dtype, with masks.

    It needs the log-sum-exp of a multiple of 32 queries, and a mask in which the keys of every query start aligned.
    """

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
    """Runs a kernel on heads of any width; values may have another width than the keys.

    Zeros appended to queries and keys change no score, and zeros appended to values give output columns to drop.
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
    """Return the kernel for such heads on their device.

    Raises:
        NotImplementedError: there is none for this device.
    """
    if query.device.type == "cpu":
        return Padded(CpuFlash())
    if query.device.type != "cuda":
        raise NotImplementedError(f"no fused kernel that returns its log-sum-exp is known for {query.device.type}")
    flash = query.dtype in (torch.float16, torch.bfloat16) and max(query.shape[-1], value.shape[-1]) <= 256
    return Padded(CudaFlash() if flash and not masked else CudaEfficient(), multiple=8)
