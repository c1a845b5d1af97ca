"""The state that a hook keeps between its calls, as far as it consists of Python values.

By these values, the capability probe distinguishes differently configured hooks, recognizes hooks that count their
calls, and restores the state after calling them.
"""

import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel


# Packages whose code in a forward is a model's own, distributes the model, or is ours.
MODEL_CODE = {"torch", "transformers", "accelerate", "peft", "eagle3_hf", "builtins", "abc", "typing"}

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
_MOST_SETTINGS = 16  # longer lists and dicts are records rather than settings
_MOST_LOOKED_INTO = 1000
_MOST_NUMBERS = 1 << 16  # in a tensor that is compared by its content
_DEEPEST = 2  # from a hook to the objects that it holds, to those that these hold


def root_package(module_name: str) -> str:
    return module_name.partition(".")[0]


def identity_of(code: Any) -> Any:
    """Return a value that is equal for two callables of the same code."""
    if isinstance(code, functools.partial):
        return identity_of(code.func)
    if isinstance(code, types.MethodType):
        return identity_of(code.__func__)
    return getattr(code, "__code__", type(code) if not isinstance(code, type) else code)


class _Value(NamedTuple):
    """A value that a hook can reach.

    Attributes:
        holder: A dict or a closure's cell.
        name: Key in the dict, or name of the variable.
        value: The value when it was found.
        setting: A hashable stand-in for it.
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
    """The Python values that a hook can reach and change: in its closure, its object and the globals that it uses.

    Args:
        hook: Any callable, or a class, which has no state.
    """

    def __init__(self, hook: Any):
        self._values: list[_Value] = []
        self._contents: list[tuple[Any, Any]] = []  # container, a copy of it
        self._seen: set[int] = set()
        if not isinstance(hook, type):
            self._look_into(hook, 0)

    def settings(self, without: AbstractSet[str] = frozenset()) -> tuple:
        """Return the values when they were found, as hashable stand-ins."""
        return tuple((value.name, value.setting) for value in self._values if value.name not in without)

    def changed(self) -> set[str]:
        """Return the names of values that have changed."""
        return {value.name for value in self._values if _setting(value.now()) != value.setting}

    def has_counted(self) -> bool:
        """Return whether a number, text or flag has changed. Added values and tensors do not count."""
        values = [(value.value, value.now()) for value in self._values]
        return any(_scalars_differ(*pair) for pair in [*values, *self._entries()])

    def restore(self) -> None:
        """Restore all values. (Tensors that were changed in place stay changed.)"""
        for container, copy in self._contents:
            if not _same_items(container, copy):
                container.clear()
                (container.update if isinstance(container, (dict, set)) else container.extend)(copy)
        for value in self._values:
            if value.now() is not value.value:
                value.put_back()

    def _entries(self) -> Iterator[tuple[Any, Any]]:
        """Yield the entries of containers, before and now."""
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
        elif depth == 0 or _is_looked_into(type(code)):
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


def _is_looked_into(kind: type) -> bool:
    """Return whether objects of a class are searched: not those of libraries, such as a logger's handlers."""
    root = root_package(kind.__module__)
    return kind is types.SimpleNamespace or (root not in MODEL_CODE and root not in sys.stdlib_module_names)


def _setting(value: Any) -> Any:
    """Return a hashable stand-in for a value. Unknown objects of one class have the same."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (list, tuple, deque, dict)) and len(value) <= _MOST_SETTINGS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((name, _setting(item)) for name, item in items if isinstance(item, (*_SCALARS, torch.Tensor)))
    return identity_of(value) if isinstance(value, (types.FunctionType, types.MethodType)) else type(value)


def _of_tensor(tensor: torch.Tensor) -> Any:
    """Return a stand-in by content for a small tensor, such as a vector that is created anew for each call."""
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
