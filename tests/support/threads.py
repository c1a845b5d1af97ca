"""Threads beside the one that decodes."""

import threading
from contextlib import contextmanager


@contextmanager
def another_thread(is_there=True):
    """Beside a thread that might draw, but does not."""
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    if is_there:
        thread.start()
    try:
        yield
    finally:
        leave.set()
        if is_there:
            thread.join()
