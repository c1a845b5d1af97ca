"""The options `--device`, `--device-map` and `--dtype`, which are the same in all commands, and their use."""

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
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # strategies of accelerate


def add_placement(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """Add the options `--device`, `--device-map` and `--dtype`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--device",
        type=device,
        help="device on which MODEL runs, such as cpu or cuda:1 (default: an accelerator if there is one; under a "
        "launcher, each process takes its own)",
    )
    where.add_argument(
        "--device-map",
        type=device_map,
        help=f"spread MODEL over several devices: {', '.join(_MAPS)}, or JSON by module",
    )
    add_dtype(parser, default=dtype, help="data type in which MODEL is loaded; auto keeps the one it was saved in")


def add_dtype(parser: argparse.ArgumentParser, **about: Any) -> None:
    """Add the option `--dtype`; `about` are further arguments of `add_argument`."""
    parser.add_argument("--dtype", type=dtype, metavar="{auto,float32,bfloat16,float16}", **about)


def dtype(text: str) -> str:
    """Parse a dtype, given by torch's name or a short one, and return torch's name.

    Raises:
        argparse.ArgumentTypeError: the name is unknown; the message lists the known ones.
    """
    if text not in _NAMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: choose from {', '.join(_NAMES)}")
    return _NAMES[text]


def device(text: str) -> str:
    """Parse a device of this machine.

    Raises:
        argparse.ArgumentTypeError: the text is not a device, or this machine does not have it.
    """
    import torch

    if text in _MAPS:
        raise argparse.ArgumentTypeError(f"{text} is not a device; pass it as --device-map")
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a device, such as cpu, cuda or cuda:1") from None
    here = ["cpu"]
    if torch.accelerator.is_available():
        kind: Any = torch.accelerator.current_accelerator()
        here += [kind.type, *(f"{kind.type}:{index}" for index in range(torch.accelerator.device_count()))]
    if str(found) not in (*here, "cpu:0"):
        raise argparse.ArgumentTypeError(f"this machine has no {text}, but {', '.join(here)}")
    return text


def device_map(text: str) -> str | dict[str, Any]:
    """Parse a strategy of accelerate, a single device, or a JSON object of devices by module.

    Raises:
        argparse.ArgumentTypeError: the text is none of them.
    """
    if text in _MAPS:
        return text
    if not text.startswith("{"):
        return device(text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is not valid JSON ({error})") from None


def load_target(arguments: argparse.Namespace) -> Any:
    """Load the causal language model MODEL on the devices and in the dtype that the options give.

    Raises:
        ValueError: several processes would each spread the model over all devices.
    """
    from transformers import AutoModelForCausalLM

    from ..utils.devices import own_device, warn_if_slow

    spread = arguments.device_map
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if spread is not None and processes > 1:
        raise ValueError(
            f"--device-map {spread} spreads the target over all devices, and each of the {processes} processes would "
            "do so: start one process, or leave --device-map out"
        )
    if spread is None:
        device = str(arguments.device or own_device())
        spread = None if device == "cpu" else {"": device}  # without a map, accelerate is not used
    target = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, device_map=spread)
    warn_if_slow(target, arguments.model)
    return target
