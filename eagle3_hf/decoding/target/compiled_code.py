"""Running the uncompiled code of a compiled target, in the threads that draft with it.

Compiled code calls neither our hooks nor our mask functions, and the switches of torch (`torch.compiler.set_stance`)
affect the whole process. So only the compiled callables of this target are replaced, by functions that depend on the
thread: threads inside the block run the module's own code, all others the compiled code, and other models stay
compiled. The last thread that leaves the block restores the callables.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...utils.logging import get_logger


logger = get_logger(__name__)

# Attributes of a module that its call goes through; accelerate keeps the forward that it wraps under the second name.
_FORWARDS = ("forward", "_old_forward", "_forward")
_CALL = "_compiled_call_impl"  # what `module.compile()` sets


class _Slot(NamedTuple):
    """The attribute that holds a compiled callable, and the code that was compiled."""

    module: nn.Module
    name: str
    compiled: Callable
    own: Callable


class _Switch:
    """Replaces a compiled callable while threads draft: they run the module's own code, others the compiled code."""

    def __init__(self, slot: _Slot):
        self.slot = slot
        self.threads: Counter[int] = Counter()
        self.inherited = slot.name not in slot.module.__dict__
        threads, compiled, own = self.threads, slot.compiled, slot.own

        # With its attributes, by which torch inlines a compiled function into another one.
        @functools.wraps(compiled)
        def switch(*args: Any, **kwargs: Any) -> Any:
            return (own if threading.get_ident() in threads else compiled)(*args, **kwargs)

        switch._torchdynamo_inline = own  # type: ignore[attr-defined]
        self.function = switch

    def put_in(self) -> None:
        self.slot.module.__dict__[self.slot.name] = self.function

    def take_out(self) -> None:
        """Restore the compiled callable, unless other code has replaced ours since."""
        fields, name = self.slot.module.__dict__, self.slot.name
        if fields.get(name) is not self.function:
            return
        if self.inherited:
            del fields[name]
        else:
            fields[name] = self.slot.compiled


_lock = threading.Lock()
_switches: dict[tuple[int, str], _Switch] = {}  # by module and name; a switch keeps its module alive


@contextmanager
def uncompiled(target: PreTrainedModel) -> Iterator[None]:
    """Run a compiled target's own code in this block, in this thread alone.

    Raises:
        ValueError: a compiled forward is wrapped in a function, so that its own code cannot be reached.
    """
    with _lock:
        slots = [slot for module in target.modules() for slot in _slots(module)]
        entered = [_enter(slot) for slot in slots]
    try:
        if entered:
            logger.warning_once(
                f"{type(target).__name__} is compiled, but with a draft head it runs uncompiled, since hooks and tree "
                "attention do not reach a compiled forward. The text is the same."
            )
        yield
    finally:
        with _lock:
            for switch in entered:
                _leave(switch)


def _enter(slot: _Slot) -> _Switch:
    switch = _switches.get((id(slot.module), slot.name))
    if switch is None or slot.compiled is not switch.function:
        switch = _switches[id(slot.module), slot.name] = _Switch(slot)
        switch.put_in()
    switch.threads[threading.get_ident()] += 1
    return switch


def _leave(switch: _Switch) -> None:
    thread, key = threading.get_ident(), (id(switch.slot.module), switch.slot.name)
    switch.threads[thread] -= 1
    if not switch.threads[thread]:
        del switch.threads[thread]
    if not switch.threads:
        switch.take_out()
        if _switches.get(key) is switch:
            del _switches[key]


def _slots(module: nn.Module) -> Iterator[_Slot]:
    """Yield the compiled callables of one module."""
    fields = module.__dict__
    if fields.get(_CALL) is not None:
        yield _Slot(module, _CALL, fields[_CALL], module._call_impl)
    if "_orig_mod" in module._modules:  # what `torch.compile(module)` gives
        yield _Slot(module, "forward", fields["forward"], module.get_submodule("_orig_mod").__call__)
        return
    for name in _FORWARDS:
        # A forward may also have been compiled on the class.
        found = getattr(module, name, None) if name == "forward" else fields.get(name)
        if found is not None and hasattr(found, "_torchdynamo_orig_callable"):
            yield from _forward_slot(module, name, found)


def _forward_slot(module: nn.Module, name: str, found: Any) -> Iterator[_Slot]:
    """Yield the slot of a callable with the attributes of a compiled one: that, a switch of ours, or a wrapper."""
    switch = _switches.get((id(module), name))
    if switch is not None and found is switch.function:
        yield _Slot(module, name, found, switch.slot.own)
    elif getattr(found, "_torchdynamo_disable", False):
        return
    elif _is_compiled(found):
        own = found._torchdynamo_orig_callable
        bound = getattr(found, "__self__", None)
        yield _Slot(module, name, found, own if bound is None else own.__get__(bound))
    elif not _is_wrapped_by_accelerate(module, name, found):
        raise ValueError(
            f"the compiled {name} of a {type(module).__name__} in the target is wrapped in another function, so its "
            "own code cannot be reached, and hooks and tree attention do not reach compiled code: wrap it before "
            "compiling, or use module.compile()"
        )


def _is_compiled(found: Any) -> bool:
    """Return whether torch.compile made this, and it is not a wrapper to which `functools.wraps` copied attributes."""
    return getattr(found, "__wrapped__", None) is found._torchdynamo_orig_callable


def _is_wrapped_by_accelerate(module: nn.Module, name: str, found: Any) -> bool:
    """Return whether this forward wraps `_old_forward`, which has its own slot."""
    switch = _switches.get((id(module), "_old_forward"))
    inner = module.__dict__.get("_old_forward") if switch is None else switch.slot.compiled
    return name == "forward" and inner is not None and getattr(found, "__wrapped__", None) is inner
