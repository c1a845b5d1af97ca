"""Modules that a head borrows from its target, called on their device and in their dtype."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn


# Weights may be stored as packed integers or eight-bit floats; these are the dtypes that modules compute in.
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass
class Borrowed:
    """A head's embedding and output layer for one call, its own or its target's.

    Callables, so that offloaded and quantised modules of a target work.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]


def call_on_module_device(
    module: nn.Module, compute_dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that calls a module of another model.

    The input is moved to the module's device and dtype, and the output back to the input's device. Offloaded modules,
    on the `meta` device, move their input themselves. The weights of a quantised module do not show the dtype that it
    computes in; for these, `compute_dtype` is that of the rest of their model.
    """
    weight = next(chain(module.parameters(), module.buffers()), None)
    if weight is None:
        return module
    module_dtype = weight.dtype if weight.dtype in COMPUTE_DTYPES else compute_dtype

    def call(inputs: torch.Tensor) -> torch.Tensor:
        dtype = module_dtype if inputs.is_floating_point() and module_dtype is not None else inputs.dtype
        device = inputs.device if weight.device.type == "meta" else weight.device
        return module(inputs.to(device, dtype)).to(inputs.device)

    return call


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype that a model computes in: that of its first parameter that is not packed."""
    return next((p.dtype for p in model.parameters() if p.dtype in COMPUTE_DTYPES), None)
