"""Heads whose weights accelerate keeps elsewhere (`device_map`): where they compute, and what they cannot do.

The weights of an offloaded module are on the meta device, without numbers, until a hook around its forward fetches
them. Drafting only calls modules, so it works; whatever reads weights themselves does not.
"""

from collections.abc import Iterator

import torch
from torch import nn


def home_of(head: nn.Module) -> torch.device:
    """The one device on which all of a head computes, offloaded or not.

    Raises:
        ValueError: weights without numbers, or parts on several devices.
    """
    homes = require_weights(head)
    if len(homes) != 1:
        places = ", ".join(f"{name} on {device}" for device, name in homes.items())
        raise ValueError(
            f"this draft head is spread over several devices ({places}): load it onto one, for example with "
            'device_map={"": 0}, since a head of one layer is faster there than any transfer'
        )
    return next(iter(homes))


def require_weights(head: nn.Module) -> dict[torch.device, str]:
    """The devices on which a head computes, and a weight that is used there.

    Raises:
        ValueError: a weight without numbers, which nothing fetches.
    """
    homes: dict[torch.device, str] = {}
    for name, module in head.named_modules():
        for weight, tensor in module.named_parameters(recurse=False):
            home, full = _home(module, tensor), f"{name}.{weight}"
            if home is None:
                raise ValueError(
                    f"this draft head has no weights: {full} is on the meta device, and nothing is going to fetch it. "
                    "Load the head without a device_map that says 'meta', and put adapters on a head before it is "
                    "offloaded"
                )
            homes.setdefault(home, full)
    return homes


def is_offloaded(head: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in head.parameters())


def require_resident(head: nn.Module, what: str) -> None:
    """Raise unless the weights themselves are there.

    Raises:
        ValueError: they are offloaded; says what cannot be done, and how to load the head for it.
    """
    if is_offloaded(head):
        offloaded = [name for name, parameter in head.named_parameters() if parameter.is_meta]
        raise ValueError(
            f"{what} needs the weights of the draft head in memory, but {len(offloaded)} of its tensors are offloaded "
            f"({offloaded[0]}, ...): load it without device_map, or with one that has neither 'cpu' beside a GPU nor "
            "'disk'"
        )


def _home(module: nn.Module, tensor: torch.Tensor) -> torch.device | None:
    if not tensor.is_meta:
        return tensor.device
    return next((torch.device(device) for device in _execution_devices(module)), None)


def _execution_devices(module: nn.Module) -> Iterator[torch.device | int | str]:
    """Of the hooks of accelerate that fetch weights."""
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):
        device = getattr(part, "execution_device", None)
        if device is not None and getattr(part, "offload", False):
            yield device
