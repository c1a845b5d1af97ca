"""Looks into calls of `generate` from outside: methods of the decoding loop, wrapped for the calls of one thread.

Decoding itself knows nothing of it. Watchers of several threads wait for each other.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


_lock = threading.RLock()


@contextmanager
def wrapped(owner: type, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Let a function run in place of a method inside the block, for calls of this thread.

    Args:
        owner: The class.
        name: Name of its method.
        wrapper: Called with the original method and its arguments, `self` the first of them; returns the result.
    """
    with _lock:
        original, thread = getattr(owner, name), threading.get_ident()

        def method(self, *args, **kwargs):
            if threading.get_ident() != thread:
                return original(self, *args, **kwargs)
            return wrapper(original, self, *args, **kwargs)

        setattr(owner, name, method)
        try:
            yield
        finally:
            setattr(owner, name, original)
