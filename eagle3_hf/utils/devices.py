"""The device of this process, and the devices of a model as text for reports."""

import os
from typing import Any

import torch

from .logging import get_logger


logger = get_logger(__name__)


def own_device() -> torch.device:
    """Return the accelerator of this process, under a launcher that of its `LOCAL_RANK`, or the CPU if there is none.

    Raises:
        ValueError: a launcher has started more processes than there are accelerators.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind: Any = torch.accelerator.current_accelerator()
    rank, count = int(os.environ.get("LOCAL_RANK", 0)), torch.accelerator.device_count()
    if rank >= count:
        raise ValueError(
            f"this is process {rank} (LOCAL_RANK), but this machine has only {count} {kind.type} device(s): start one "
            "process per device"
        )
    return torch.device(kind.type, rank)


def warn_if_slow(model: Any, name: str) -> None:
    """Warn of a model in half precision on a CPU that computes this much more slowly than float32."""
    if is_slow(model):
        logger.warning(
            f"{name} is loaded in {str(model.dtype).removeprefix('torch.')}, for which this CPU has no instructions, "
            "so that it can be many times slower than in float32: pass --dtype float32"
        )


def is_slow(model: Any) -> bool:
    """Return whether a model is in half precision on a CPU that has no instructions for it."""
    on_cpu = any(parameter.device.type == "cpu" for parameter in model.parameters())
    return on_cpu and model.dtype in (torch.bfloat16, torch.float16) and not _computes(model.dtype)


def _computes(dtype: torch.dtype) -> bool:
    """Whether this CPU, by its instructions, computes in `dtype`; true where torch does not tell."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return True


def place_in_words(model: Any) -> str:
    """Return devices and dtype of a model as text, such as `"cuda:0 (NVIDIA H100), bfloat16"`."""
    devices = sorted({parameter.device for parameter in model.parameters()}, key=str)
    return f"{', '.join(map(_device_in_words, devices))}, {str(model.dtype).removeprefix('torch.')}"


def _device_in_words(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads)"
    if device.type == "meta":
        return "offloaded"
    module: Any = getattr(torch, device.type, None)
    name = module.get_device_name(device) if hasattr(module, "get_device_name") else None
    return f"{device} ({name})" if name else str(device)
