"""Moving small numbers between host and device: when the host may wait, and transfers for which it does not.

`torch.tensor(list, device=...)`, and lists as indices, copy from memory that the device cannot read by itself, so that
the host waits until everything before the copy has run. Here the numbers of one purpose travel together, from pinned
memory, and the host goes on at once.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch


# Backends of torch that copy from pinned memory in the background.
_PINNING = ("cuda", "xpu")


def makes_host_wait(device: torch.device) -> bool:
    """Return whether the host waits for the device whenever it reads from it, as it does for an accelerator.

    There, a round reads as rarely as possible, and computes for all nodes of a tree what it may need of a few. On a
    CPU, where that computation is the larger cost, it reads whenever this saves work.
    """
    return device.type != "cpu"


class Uploaded(NamedTuple):
    """What has been uploaded together, as views of one tensor.

    Attributes:
        ints: (n,) int64.
        floats: (m,) float32.
        flags: (k,) bool.
    """

    ints: torch.Tensor
    floats: torch.Tensor
    flags: torch.Tensor


def upload(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return integers as a tensor (n,) int64, without waiting for the device if that allows it."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    return _moved(torch.frombuffer(array("q", values), dtype=torch.int64), device)


def upload_parts(
    device: torch.device, ints: Iterable[int], floats: Iterable[float] = (), flags: bytes | bytearray = b""
) -> Uploaded:
    """Copy numbers of several kinds to a device in one transfer, see [`upload`].

    Args:
        device: Where they are needed.
        ints: At least one integer.
        floats: Numbers that become float32.
        flags: One byte for each truth value, 0 or 1.
    """
    buffer = bytearray(array("q", ints).tobytes())
    first = len(buffer)
    buffer += array("f", floats).tobytes()
    second = len(buffer)
    buffer += flags
    table = _moved(torch.frombuffer(buffer, dtype=torch.uint8), device)
    return Uploaded(
        table[:first].view(torch.int64), table[first:second].view(torch.float32), table[second:].view(torch.bool)
    )


def download(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host, if the device can do so in the background.

    Returns:
        A function that returns the copy, and waits until it is complete.
    """
    if tensor.device.type not in _PINNING:
        here = tensor.to("cpu", non_blocking=tensor.device.type == "cpu")
        return lambda: here
    copy = tensor.to("cpu", non_blocking=True)
    copied = torch.Event(device=tensor.device)
    copied.record(torch.get_device_module(tensor.device).current_stream(tensor.device))

    def finished() -> torch.Tensor:
        copied.synchronize()
        return copy

    return finished


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type in _PINNING:
        tensor = tensor.pin_memory()
    # On a CPU nothing is copied. `non_blocking` is passed all the same, since `evaluation/op_counts.py` counts there
    # where the host would wait for an accelerator.
    return tensor.to(device, non_blocking=device.type in (*_PINNING, "cpu"))
