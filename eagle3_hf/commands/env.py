"""`eagle3-hf env`: versions and devices, for bug reports."""

import argparse
import importlib.metadata
import os
import platform


_PACKAGES = (
    "eagle3-hf", "transformers", "torch", "accelerate", "peft", "datasets", "safetensors", "huggingface-hub",
    "bitsandbytes", "openai", "vllm", "sglang", "speculators", "trl",
)  # fmt: skip


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "env",
        help="print versions and devices, for bug reports",
        description="Print what a bug report needs: versions of this package and of those it works with, and devices.",
    )
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    for name, value in environment().items():
        print(f"- {name}: {value}")
    return 0


def environment() -> dict[str, str]:
    """Return versions and devices by name."""
    import torch

    found = {name: _version(name) for name in _PACKAGES}
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = "none" if kind is None else f"{torch.accelerator.device_count()} {kind.type}"
    if kind is not None and kind.type == "cuda":
        devices += f" ({torch.cuda.get_device_name()}), CUDA {torch.version.cuda}"
    return {
        **{name: version for name, version in found.items() if version},
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "accelerators": devices,
        "CPU": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
