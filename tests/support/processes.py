"""Python in processes of its own, which can import the package and the tests' helpers.

A new interpreter spends seconds on imports. Where a test needs a process that may be killed or limited, but not one
that starts anew, it forks this one.
"""

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


TESTS = Path(__file__).parents[1]


def run_python(arguments: Sequence[object], seconds: float = 300, **variables: str) -> subprocess.CompletedProcess:
    """Run the interpreter with these arguments, however it ends.

    Args:
        arguments: those of the interpreter, such as `["-c", code, "argument"]`.
        seconds: after which it is stopped and the test fails.
        variables: of the environment, besides this process's own.
    """
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def run_forked(function: Callable[..., Any], *arguments: Any, seconds: float = 300) -> tuple[int, str]:
    """Call a function in a fork of this process, however it ends: what it changes here is not changed there.

    Returns:
        The exit code, minus the number of the signal that killed it, and the traceback of what the function raised.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    process.start()
    sender.close()  # so that the end of a process that was killed is the end of what can be read
    if not receiver.poll(seconds):
        process.kill()
        raise TimeoutError(f"{function.__name__} took more than {seconds} seconds in a fork")
    try:
        raised = receiver.recv()
    except EOFError:
        raised = ""
    process.join()
    return process.exitcode, raised


def _call(sender: Connection, function: Callable[..., Any], arguments: tuple) -> None:
    try:
        function(*arguments)
    except BaseException:
        sender.send(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def run_in_two(script: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a script, with `folder` as its argument, in two processes of torch.distributed, which must end well."""
    path = folder / "script.py"
    path.write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = run_python([*launch, path, folder], seconds=400)
    assert run.returncode == 0, run.stderr[-4000:]
    return run
