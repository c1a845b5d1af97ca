"""Scripts that two processes run side by side, for what takes more than one."""

import os
import subprocess
import sys
from pathlib import Path


def run_in_two(script: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a script, with `folder` as its argument, in two processes of torch.distributed that can import the tests."""
    path = folder / "script.py"
    path.write_text(script)
    tests = Path(__file__).parents[1]
    paths = os.pathsep.join([str(tests.parent), str(tests), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    run = subprocess.run(
        [*launch, str(path), str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run
