"""Python in processes of its own, which can import the package and the tests' helpers."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


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


def run_in_two(script: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a script, with `folder` as its argument, in two processes of torch.distributed, which must end well."""
    path = folder / "script.py"
    path.write_text(script)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = run_python([*launch, path, folder], seconds=400)
    assert run.returncode == 0, run.stderr[-4000:]
    return run
