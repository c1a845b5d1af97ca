"""Heads that accelerate has offloaded (`device_map`): on which device they compute, and what they cannot do.

The weights of an offloaded module are on the meta device, without numbers, until a hook around its forward loads them.
Drafting only calls modules, so it works; what reads the weights themselves does not.
"""

from collections.abc import Iterator

import torch
from torch import nn


def device_of_head(head: nn.Module) -> torch.device:
    """The one device on which all of a head computes, offloaded or not.

    Raises:
        ValueError: weights without numbers, or parts on several devices.
    """
    devices = require_weights(head)
    if len(devices) != 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"this draft head is spread over several devices ({places}): load it onto one, for example with "
            'device_map={"": 0}, since a head of one layer is faster there than any transfer'
        )
    return next(iter(devices))


def require_weights(head: nn.Module) -> dict[torch.device, str]:
    """The devices on which a head computes, each with the name of a weight that is used there.

    Raises:
        ValueError: a weight without numbers, which no hook loads.
    """
    devices: dict[torch.device, str] = {}
    for name, module in head.named_modules():
        for weight, tensor in module.named_parameters(recurse=False):
            device, full = _execution_device(module, tensor), f"{name}.{weight}"
            if device is None:
                raise ValueError(
                    f"this draft head has no weights: {full} is on the meta device, and no hook is going to load it. "
                    "Load the head without a device_map that says 'meta', and put adapters on a head before it is "
                    "offloaded"
                )
            devices.setdefault(device, full)
    return devices


def is_offloaded(head: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in head.parameters())


def require_resident(head: nn.Module, what: str) -> None:
    """Check that the weights themselves are in memory.

    Raises:
        ValueError: they are offloaded; the message says how to load the head for `what`.
    """
    if is_offloaded(head):
        offloaded = [name for name, parameter in head.named_parameters() if parameter.is_meta]
        raise ValueError(
            f"{what} needs the weights of the draft head in memory, but {len(offloaded)} of its tensors are offloaded "
            f"({offloaded[0]}, ...): load it without device_map, or with one that has neither 'cpu' beside a GPU nor "
            "'disk'"
        )


def _execution_device(module: nn.Module, tensor: torch.Tensor) -> torch.device | None:
    if not tensor.is_meta:
        return tensor.device
    return next((torch.device(device) for device in _execution_devices(module)), None)


def _execution_devices(module: nn.Module) -> Iterator[torch.device | int | str]:
    """The devices of accelerate's hooks that load weights."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        device = getattr(part, "execution_device", None)
        if device is not None and getattr(part, "offload", False):
            yield device
