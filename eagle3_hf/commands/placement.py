"""Where a command runs its target and in which dtype: one rule, and three options that are alike in all commands."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any


_NAMES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
}
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # of accelerate


def add_placement(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """The options `--device`, `--device-map` and `--dtype`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--device",
        type=device,
        help="of MODEL, such as cpu or cuda:1 (default: an accelerator where there is one, under a launcher each "
        "process its own)",
    )
    where.add_argument(
        "--device-map", type=device_map, help=f"spread MODEL over devices: {', '.join(_MAPS)}, or JSON by module"
    )
    add_dtype(parser, default=dtype, help="of MODEL; auto is as it was saved")


def add_dtype(parser: argparse.ArgumentParser, **about: Any) -> None:
    parser.add_argument("--dtype", type=dtype, metavar="{auto,float32,bfloat16,float16}", **about)


def dtype(text: str) -> str:
    """A dtype by torch's name or the short one.

    Raises:
        argparse.ArgumentTypeError: it is none of them; they are named.
    """
    if text not in _NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype: choose from {', '.join(_NAMES)}")
    return _NAMES[text]


def device(text: str) -> str:
    """A device that is here.

    Raises:
        argparse.ArgumentTypeError: it is no device, or none of this machine.
    """
    import torch

    if text in _MAPS:
        raise argparse.ArgumentTypeError(f"{text} is no device, but a --device-map")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device, such as cpu, cuda or cuda:1") from None
    here = ["cpu"]
    if torch.accelerator.is_available():
        kind: Any = torch.accelerator.current_accelerator()
        here += [kind.type, *(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))]
    if str(found) not in (*here, "cpu:0"):
        raise argparse.ArgumentTypeError(f"there is no {text} here, but {', '.join(here)}")
    return text


def device_map(text: str) -> str | dict[str, Any]:
    """A strategy of accelerate's, a single device, or devices by module.

    Raises:
        argparse.ArgumentTypeError: it is none of them.
    """
    if text in _MAPS:
        return text
    if not text.startswith("{"):
        return device(text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON ({error})") from None


def load_target(arguments: argparse.Namespace) -> Any:
    """The causal language model MODEL where, and in the dtype, that the options say.

    Raises:
        ValueError: several processes would each spread it over all devices.
    """
    from transformers import AutoModelForCausalLM

    from ..utils.devices import own_device

    spread = arguments.device_map
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if spread is not None and processes > 1:
        raise ValueError(
            f"--device-map {spread} spreads the target over devices, but there are {processes} processes, each of "
            "which would: start one, or leave --device-map out"
        )
    if spread is None:
        device = str(arguments.device or own_device())
        spread = None if device == "cpu" else {"": device}  # without a map accelerate is not asked
    return AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, device_map=spread)
