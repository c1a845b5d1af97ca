"""What a hook remembers between its calls, as far as plain Python values show it.

By these values one set of hooks is told from another, a hook that counts its calls is known, and a trial that calls
hooks leaves nothing behind.
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


# Packages whose code in a forward is a model's own, distributes it, or is ours.
MODEL_CODE = {"torch", "transformers", "accelerate", "peft", "eagle3_hf", "builtins", "abc", "typing"}

_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS = (list, dict, set, deque)
_MOST_SETTINGS = 16  # longer lists and dicts are records rather than settings
_MOST_LOOKED_INTO = 1000
_MOST_NUMBERS = 1 << 16  # of a tensor that is told apart by its content
_DEEPEST = 2  # from a hook to the objects that it holds, to those that these hold


def root_package(module_name: str) -> str:
    return module_name.partition(".")[0]


def identity_of(code: Any) -> Any:
    """What is equal for two callables of the same code."""
    if isinstance(code, functools.partial):
        return identity_of(code.func)
    if isinstance(code, types.MethodType):
        return identity_of(code.__func__)
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
    """Not what an object of a library keeps for itself (a logger's handlers): that is not the hook's to put back."""
    root = root_package(kind.__module__)
    return kind is types.SimpleNamespace or (root not in MODEL_CODE and root not in sys.stdlib_module_names)


def _setting(value: Any) -> Any:
    """A hashable stand-in for a value; unknown objects are all alike."""
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, torch.Tensor):
        return _of_tensor(value)
    if isinstance(value, (list, tuple, deque, dict)) and len(value) <= _MOST_SETTINGS:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((name, _setting(item)) for name, item in items if isinstance(item, (*_SCALARS, torch.Tensor)))
    return identity_of(value) if isinstance(value, (types.FunctionType, types.MethodType)) else type(value)


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
