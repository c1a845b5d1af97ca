"""Finding custom code in a target's forward: hooks, replaced methods, classes that are not of transformers.

Verification assumes that a forward only depends on ids, mask, positions and cache. A hook that adds a vector at the
newest position, or only acts on forwards over one token, breaks this, and the config does not tell. This module finds
and names such code; `capability_probe.py` tests it.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from .hook_memory import MODEL_CODE, identity_of, root_package


# Hooks of peft are tested (activated LoRA counts positions from the end of each forward), except those that choose an
# adapter for each sequence.
_HOOK_CODE = MODEL_CODE - {"peft"}
_HOOKS_OF_PEFT = {"_adapter_names_pre_forward_hook"}

_METHODS = {"forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"}
_ACCELERATE_HOOK = "_hf_hook"
_EXCHANGEABLE = {*_METHODS, _ACCELERATE_HOOK}


class CustomCode(NamedTuple):
    """One piece of custom code.

    Attributes:
        name: Description for messages.
        code: The hook, function or class.
    """

    name: str
    code: Any

    @property
    def identity(self) -> tuple:
        """Equal for the same code in the same place, even if it is a closure that is created anew for each call."""
        return self.name, identity_of(self.code)


def custom_code(target: PreTrainedModel) -> list[CustomCode]:
    """Return the code in a target's forward that is not of transformers or another package known to be harmless.

    Hooks by which transformers captures outputs, our own, and those of accelerate and FSDP are not custom code.
    """
    found = [CustomCode(f"the global hook {_name(hook)}", hook) for hook in _global_hooks() if _is_custom(hook)]
    classes: dict[type, bool] = {}
    for module in target.modules():
        kind = type(module)
        if kind not in classes:
            classes[kind] = _is_custom_class(kind)
            if classes[kind] and not _is_of_quantizer(target, module):
                found.append(CustomCode(f"the class {kind.__name__}", kind))
        own = module.__dict__
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or not _EXCHANGEABLE.isdisjoint(own):
            found += _of_module(target, module)
    return found


def _of_module(target: nn.Module, module: nn.Module) -> Iterator[CustomCode]:
    own = module.__dict__
    place = next(path for path, other in target.named_modules() if other is module) or type(target).__name__
    # Copies, since another thread may add hooks meanwhile.
    for hook in [*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values()]:
        if _is_custom(hook):
            yield CustomCode(f"the forward hook {_name(hook)} on {place}", hook)
    for method in _METHODS & own.keys():
        if not _is_model_code(own[method]):
            yield CustomCode(f"the replaced {method} of {place}", own[method])
    hook = own.get(_ACCELERATE_HOOK)  # accelerate runs hooks of any origin
    for part in getattr(hook, "hooks", [hook] if hook is not None else []):
        if root_package(type(part).__module__) not in _HOOK_CODE:
            yield CustomCode(f"the accelerate hook {type(part).__name__} on {place}", part)


def _global_hooks() -> Iterator[Callable]:
    yield from list(torch_module._global_forward_pre_hooks.values())
    yield from list(torch_module._global_forward_hooks.values())


def _is_custom(hook: Any) -> bool:
    return _origin(hook) not in _HOOK_CODE and not (_origin(hook) == "peft" and _name(hook) in _HOOKS_OF_PEFT)


def _is_custom_class(kind: type) -> bool:
    if any(root_package(base.__module__) not in MODEL_CODE for base in kind.__mro__):
        return True
    return not _is_model_code(getattr(kind, "forward", None))  # a method that was replaced on the class


def _is_model_code(function: Any) -> bool:
    inner = getattr(function, "_torchdynamo_orig_callable", None)  # under `torch.compile(model.forward)`
    return function is None or _origin(inner or function) in MODEL_CODE


def _is_of_quantizer(target: PreTrainedModel, module: nn.Module) -> bool:
    """Return whether a module is a layer of a quantized model, which belongs to the quantizer's package."""
    return getattr(target, "is_quantized", False) and next(module.children(), None) is None


def _origin(code: Any) -> str:
    """Return the package of a callable's code, also if `functools.wraps` has copied another name to it."""
    while isinstance(code, functools.partial):
        code = code.func
    function = getattr(code, "__func__", code)
    names = getattr(function, "__globals__", None)
    if names is not None:
        return root_package(names.get("__name__") or "")
    return root_package(getattr(type(code), "__module__", ""))


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)
