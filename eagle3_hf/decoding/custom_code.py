"""Code of others in a target's forward: hooks, exchanged forwards, classes from elsewhere.

Decoding takes for granted that a forward depends on ids, mask, positions and cache alone. A hook that adds a vector at
the newest position, or acts on one-token forwards only, breaks that, and nothing in the config says so. What stands
here finds such code, names it, and tells one set of it from another; `proof` tries it.

Hooks may also remember their calls. What they hold in plain Python values is seen, told apart, and put back after a
trial: see `Memory`.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel


# Packages whose code in a forward is a model's own, distributes it, or is ours. Hooks of peft are tried, but for those
# that choose an adapter for each row: activated LoRA counts its positions from the end of each forward.
_MODEL_CODE = {"torch", "transformers", "accelerate", "peft", "eagle3_hf", "builtins", "abc", "typing"}
_HOOK_CODE = _MODEL_CODE - {"peft"}
_HOOKS_OF_PEFT = {"_adapter_names_pre_forward_hook"}

_METHODS = {"forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"}
_ACCELERATE_HOOK = "_hf_hook"
_EXCHANGEABLE = {*_METHODS, _ACCELERATE_HOOK}

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
_MOST_SETTINGS = 16  # longer lists and dicts are records rather than settings
_MOST_LOOKED_INTO = 1000
_MOST_NUMBERS = 1 << 16  # of a tensor that is told apart by its content
_DEEPEST = 2  # from a hook to the objects that it holds, to those that these hold


class CustomCode(NamedTuple):
    """One piece of custom code.

    Attributes:
        name: in words, for messages.
        code: the hook, function or class.
    """

    name: str
    code: Any

    @property
    def identity(self) -> tuple:
        """Equal for pieces of the same code in the same place: a closure made anew for each call is the same piece."""
        return self.name, _identity(self.code)


def custom_code(target: PreTrainedModel) -> list[CustomCode]:
    """The code in a target's forward that is neither transformers' nor of a package known to leave positions alone.

    Not custom: hooks by which transformers captures outputs, our own, those of accelerate and of FSDP.
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
    for hook in chain(own["_forward_pre_hooks"].values(), own["_forward_hooks"].values()):
        if _is_custom(hook):
            yield CustomCode(f"the forward hook {_name(hook)} on {place}", hook)
    for method in _METHODS & own.keys():
        if not _is_model_code(own[method]):
            yield CustomCode(f"the exchanged {method} of {place}", own[method])
    hook = own.get(_ACCELERATE_HOOK)  # accelerate runs hooks of any origin
    for part in getattr(hook, "hooks", [hook] if hook is not None else []):
        if _root(type(part).__module__) not in _HOOK_CODE:
            yield CustomCode(f"the accelerate hook {type(part).__name__} on {place}", part)


def _global_hooks() -> Iterator[Callable]:
    yield from torch_module._global_forward_pre_hooks.values()
    yield from torch_module._global_forward_hooks.values()


def _is_custom(hook: Any) -> bool:
    return _origin(hook) not in _HOOK_CODE and not (_origin(hook) == "peft" and _name(hook) in _HOOKS_OF_PEFT)


def _is_custom_class(kind: type) -> bool:
    if any(_root(base.__module__) not in _MODEL_CODE for base in kind.__mro__):
        return True
    return not _is_model_code(getattr(kind, "forward", None))  # a method that was exchanged on the class


def _is_model_code(function: Any) -> bool:
    inner = getattr(function, "_torchdynamo_orig_callable", None)  # under `torch.compile(model.forward)`
    return function is None or _origin(inner or function) in _MODEL_CODE


def _is_of_quantizer(target: PreTrainedModel, module: nn.Module) -> bool:
    """A quantised model's linear layers are those of its quantiser's package."""
    return getattr(target, "is_quantized", False) and next(module.children(), None) is None


def _origin(code: Any) -> str:
    """The package that a callable's code is from; `functools.wraps` does not hide it."""
    while isinstance(code, functools.partial):
        code = code.func
    function = getattr(code, "__func__", code)
    names = getattr(function, "__globals__", None)
    if names is not None:
        return _root(names.get("__name__") or "")
    return _root(getattr(type(code), "__module__", ""))


def _root(module_name: str) -> str:
    return module_name.partition(".")[0]


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _identity(code: Any) -> Any:
    """What is equal for two callables of the same code."""
    if isinstance(code, functools.partial):
        return _identity(code.func)
    if isinstance(code, types.MethodType):
        return _identity(code.__func__)
    return getattr(code, "__code__", type(code) if not isinstance(code, type) else code)


class _Value(NamedTuple):
    """A value that a hook can reach.

    Attributes:
        holder: a dict or a closure's cell.
        name: in the holder; of a cell, the variable's.
        value, setting: at first sight.
    """

    holder: Any
    name: str
    value: Any
    setting: Any

    def now(self) -> Any:
        return self.holder.get(self.name) if isinstance(self.holder, dict) else self.holder.cell_contents

    def put_back(self) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.name] = self.value
        else:
            self.holder.cell_contents = self.value


class Memory:
    """The Python values that a hook can reach and change: its closure, its object, the globals that it names.

    Args:
        hook: any callable, or a class, which remembers nothing.
    """

    def __init__(self, hook: Any):
        self._values: list[_Value] = []
        self._contents: list[tuple[Any, Any]] = []  # container, a copy of it
        self._seen: set[int] = set()
        if not isinstance(hook, type):
            self._look_into(hook, 0)

    def settings(self, without: AbstractSet[str] = frozenset()) -> tuple:
        """What the values were at first sight, hashable."""
        return tuple((value.name, value.setting) for value in self._values if value.name not in without)

    def changed(self) -> set[str]:
        """Names whose values are no longer what they were."""
        return {value.name for value in self._values if _setting(value.now()) != value.setting}

    def has_counted(self) -> bool:
        """Whether a number, text or flag has changed; what was only added, and tensors, do not count."""
        values = [(value.value, value.now()) for value in self._values]
        return any(_scalars_differ(*pair) for pair in [*values, *self._entries()])

    def restore(self) -> None:
        """Put all back as it was at first sight. (Tensors changed in place stay changed.)"""
        for container, copy in self._contents:
            if not _same_items(container, copy):
                container.clear()
                (container.update if isinstance(container, (dict, set)) else container.extend)(copy)
        for value in self._values:
            if value.now() is not value.value:
                value.put_back()

    def _entries(self) -> Iterator[tuple[Any, Any]]:
        """Entries of containers: as they were and as they are."""
        for container, copy in self._contents:
            if isinstance(copy, dict):
                yield from ((entry, container.get(name)) for name, entry in copy.items())
            elif not isinstance(copy, set):
                yield from zip(copy, container, strict=False)

    def _look_into(self, code: Any, depth: int) -> None:
        if id(code) in self._seen:
            return
        self._seen.add(id(code))
        if isinstance(code, functools.partial):
            self._look_into(code.func, depth)
            self._take_all({str(i): value for i, value in enumerate(code.args)} | code.keywords, depth)
        elif isinstance(code, types.MethodType):
            self._look_into(code.__func__, depth)
            self._take_all(getattr(code.__self__, "__dict__", {}), depth)
        elif isinstance(code, types.FunctionType):
            self._look_into_function(code, depth)
        else:
            self._take_all(getattr(code, "__dict__", {}), depth)
            if depth == 0 and isinstance(call := vars(type(code)).get("__call__"), types.FunctionType):
                self._look_into_function(call, depth)

    def _look_into_function(self, function: types.FunctionType, depth: int) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                self._take(cell, name, cell.cell_contents, depth)
        for name in function.__code__.co_names:
            if name in function.__globals__:
                self._take(function.__globals__, name, function.__globals__[name], depth)

    def _take_all(self, holder: dict[str, Any], depth: int) -> None:
        for name, value in list(holder.items()):
            self._take(holder, name, value, depth)

    def _take(self, holder: Any, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type, PreTrainedModel)):
            return
        self._values.append(_Value(holder, name, value, _setting(value)))
        self._take_contents(value)
        if depth < _DEEPEST and not isinstance(value, (*_SCALARS, *_CONTAINERS, torch.Tensor, nn.Module)):
            self._look_into(value, depth + 1)

    def _take_contents(self, value: Any) -> None:
        if type(value) not in _CONTAINERS or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._contents.append((value, value.copy()))
        if len(value) <= _MOST_LOOKED_INTO:
            for item in list(value.values() if isinstance(value, dict) else value):
                self._take_contents(item)


def _setting(value: Any) -> Any:
    """A hashable stand-in for a value; unknown objects are all alike."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (list, tuple, deque, dict)) and len(value) <= _MOST_SETTINGS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((name, _setting(item)) for name, item in items if isinstance(item, (*_SCALARS, torch.Tensor)))
    return _identity(value) if isinstance(value, (types.FunctionType, types.MethodType)) else type(value)


def _of_tensor(tensor: torch.Tensor) -> Any:
    """By content where that is small, such as a vector that is made anew for each call."""
    if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() <= _MOST_NUMBERS:
        content = tensor.detach().reshape(-1).contiguous().view(torch.uint8).cpu()
        return tuple(tensor.shape), tensor.dtype, hash(content.numpy().tobytes())
    return id(tensor), None if tensor.is_inference() else tensor._version


def _scalars_differ(before: Any, now: Any) -> bool:
    return isinstance(before, _SCALARS) and isinstance(now, _SCALARS) and before != now


def _same_items(container: Any, copy: Any) -> bool:
    if len(container) != len(copy) or isinstance(copy, set):
        return container == copy if isinstance(copy, set) else False
    if isinstance(copy, dict):
        return all(container.get(name, copy) is value for name, value in copy.items())
    return all(one is other for one, other in zip(container, copy, strict=True))
