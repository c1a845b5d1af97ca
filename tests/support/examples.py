"""Scripts of `examples/`, which are no part of the package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """The module of `examples/NAME.py`, loaded once."""
    module_name = f"examples.{name.replace('/', '.')}"
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # where dataclasses look for the names in annotations
        spec.loader.exec_module(module)
    return sys.modules[module_name]
