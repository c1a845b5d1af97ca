"""Sizers that calls share: within this process by head and target, and their costs with later processes, on disk."""

import hashlib
import json
import platform
from collections.abc import Hashable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers

from ...model.tree_settings import TreeSettings
from . import cost_table
from .sizing import ACCELERATOR, CPU, FixedSizes, TreeSizer


_FORM = 1  # of what is written; another number makes older entries unknown
_ROUNDS = 64  # after which costs are written again

# head -> target -> key of a kind of call -> its sizer
_found: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Hashable, TreeSizer]]] = WeakKeyDictionary()
_keys: WeakKeyDictionary[TreeSizer, tuple[str, int]] = WeakKeyDictionary()  # key on disk, and rounds when written


def sizer_of(draft: Any, target: Any, limits: TreeSettings, batch_size: int, kind: tuple[Hashable, ...]) -> TreeSizer:
    """Return the sizer that calls of this kind share.

    Args:
        draft: The head.
        target: The target.
        limits: The largest tree.
        batch_size: Number of sequences.
        kind: Everything else that costs or acceptance depend on (device, dtype, threads, sampling, lock-step).
    """
    sizers = _found.setdefault(draft, WeakKeyDictionary()).setdefault(target, {})
    key = limits, batch_size, kind
    if key not in sizers:
        is_cpu = target.device.type == "cpu"
        sizer = TreeSizer(limits, batch_size, CPU if is_cpu else ACCELERATOR, waits=is_cpu)
        on_disk = _key_on_disk(draft, target, limits, batch_size, kind)
        with suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError):  # written by others, or damaged
            sizer.restore(cost_table.read(on_disk))
        _keys[sizer] = on_disk, 0
        sizers[key] = sizer
    return sizers[key]


def keep(sizes: TreeSizer | FixedSizes) -> None:
    """Write what a sizer has learnt of costs to disk, if it has seen enough rounds since they were last written."""
    if not isinstance(sizes, TreeSizer) or sizes not in _keys:
        return
    key, written = _keys[sizes]
    if sizes.num_rounds - written >= _ROUNDS:
        cost_table.write(key, sizes.state())
        _keys[sizes] = key, sizes.num_rounds


def _key_on_disk(draft: Any, target: Any, limits: TreeSettings, batch_size: int, kind: tuple[Hashable, ...]) -> str:
    """Return a hash of all that costs depend on: versions, machine, device, both models, and the kind of call."""
    device, machine = target.device, platform.machine()
    with suppress(RuntimeError, AttributeError):  # a CPU, and the meta device of offloaded weights, have no names
        machine = torch.get_device_module(device).get_device_name(device)
    shapes = [
        sorted((name, list(parameter.shape), str(parameter.dtype)) for name, parameter in model.named_parameters())
        for model in (target, draft)
        if isinstance(model, torch.nn.Module)
    ]
    parts = [
        *(_FORM, torch.__version__, transformers.__version__, platform.node(), machine, type(target).__name__, shapes),
        *(str(limits), batch_size, [str(part) for part in kind]),
        getattr(target.config, "_attn_implementation", None),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
