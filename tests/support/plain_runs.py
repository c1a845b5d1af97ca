"""Plain runs that are computed once: many tests compare with the same one.

Only runs that cannot come out otherwise are kept: of targets that the whole session shares and that nobody has changed
(no hook, no exchanged forward, the same settings and weights), with arguments that are plain values or tensors. All
other runs are made anew.
"""

from collections.abc import Callable, Hashable
from copy import deepcopy
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, SynthIDTextWatermarkingConfig, WatermarkingConfig


Result = TypeVar("Result")
KEPT = 64  # runs of each target, the newest

_shared: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = WeakKeyDictionary()


class _Unknown(Exception):
    """An argument of which it is not known whether it is the same again."""


def share(target: PreTrainedModel) -> PreTrainedModel:
    """Keep plain runs of this target from now on. Tests leave it as they found it, or change it by hooks only."""
    _shared.setdefault(target, {})
    return target


def once(target: PreTrainedModel, arguments: dict[str, Any], seed: int, run: Callable[[], Result]) -> Result:
    """The result of `run`, which calls the target with `arguments` from `seed`, or a copy of an earlier result.

    The default generator is left as the run has left it.
    """
    if target not in _shared or not _is_untouched(target):
        return run()
    try:
        key = seed, _state(target), _hashable(arguments)
    except _Unknown:
        return run()
    kept = _shared[target]
    if key not in kept:
        kept[key] = run(), torch.get_rng_state()
        if len(kept) > KEPT:
            del kept[next(iter(kept))]
    result, generator = kept[key]
    torch.set_rng_state(generator)
    return deepcopy(result)


def _is_untouched(target: PreTrainedModel) -> bool:
    for module in target.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Where hidden states were asked for once, transformers leaves hooks of its own that collect them.
        if any(not getattr(hook, "__module__", "").startswith("transformers.utils.") for hook in hooks):
            return False
        if "forward" in vars(module) or module.training:
            return False
    return True


def _state(target: PreTrainedModel) -> Hashable:
    tensors = [*target.parameters(), *target.buffers()]
    weights = [(tensor.dtype, tensor._version, tensor.detach().double().sum().item()) for tensor in tensors]
    configs = target.config.to_json_string(use_diff=False), target.generation_config.to_json_string(use_diff=False)
    return type(target), "generate" in vars(target), target.config._attn_implementation, *configs, *weights


def _hashable(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value).__name__, value
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_hashable, value)
    if isinstance(value, dict):
        return "dict", *((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, (WatermarkingConfig, SynthIDTextWatermarkingConfig)):
        return type(value).__name__, _hashable(value.to_dict())
    raise _Unknown
