"""Where a target comes from and where it runs: options that are the same in all commands, and their use."""

import argparse
import importlib.util
import json
import os
from typing import Any

from .values import nonempty


_NAMES = {
    "auto": "auto",
    **dict.fromkeys(("float32", "fp32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
}
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # strategies of accelerate


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the options `--revision` and `--trust_remote_code`, for what `from_pretrained` loads of MODEL."""
    parser.add_argument("--revision", type=nonempty, help="branch, tag or commit of MODEL on the Hub")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the code in MODEL's repository; that of a head is never run",
    )


def source_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that `--revision` and `--trust_remote_code` give."""
    given = {option: getattr(arguments, option, None) for option in ("revision", "trust_remote_code")}
    return {option: value for option, value in given.items() if value}


def load_tokenizer(arguments: argparse.Namespace) -> Any:
    """Load MODEL's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(arguments.model, **source_options(arguments))


def add_placement(parser: argparse.ArgumentParser, dtype: str = "auto") -> None:
    """Add `--device`, `--device_map`, `--dtype`, `--load_in_4bit` and `8bit`, and the options of `add_source`."""
    add_source(parser)
    quantized = parser.add_mutually_exclusive_group()
    for bits in (4, 8):
        quantized.add_argument(
            f"--load_in_{bits}bit", action="store_true", help=f"quantize MODEL to {bits} bits (needs bitsandbytes)"
        )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--device",
        type=device,
        help="device on which MODEL runs, such as cpu or cuda:1 (default: an accelerator if there is one; under a "
        "launcher, each process takes its own)",
    )
    where.add_argument(
        "--device_map",
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
        raise argparse.ArgumentTypeError(f"{text} is not a device; pass it as --device_map")
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


def quantization(arguments: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that `--load_in_4bit` or `--load_in_8bit` gives.

    Raises:
        ValueError: bitsandbytes is missing.
    """
    given = [option for option in ("load_in_4bit", "load_in_8bit") if getattr(arguments, option, False)]
    if not given:
        return {}
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"--{given[0]} needs bitsandbytes, which is missing: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    return {"quantization_config": BitsAndBytesConfig(**{given[0]: True})}


def load_target(arguments: argparse.Namespace) -> Any:
    """Load the causal language model MODEL on the devices and in the dtype that the options give.

    Raises:
        ValueError: several processes would each spread the model over all devices.
    """
    from transformers import AutoModelForCausalLM

    from ..utils.devices import own_device, warn_if_slow

    options = {**source_options(arguments), **quantization(arguments)}
    spread = arguments.device_map
    processes = int(os.environ.get("WORLD_SIZE", 1))
    if spread is not None and processes > 1:
        raise ValueError(
            f"--device_map {spread} spreads the target over all devices, and each of the {processes} processes would "
            "do so: start one process, or leave --device_map out"
        )
    if spread is None:
        device = str(arguments.device or own_device())
        spread = None if device == "cpu" else {"": device}  # without a map, accelerate is not used
    target = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, device_map=spread, **options)
    warn_if_slow(target, arguments.model)
    return target
