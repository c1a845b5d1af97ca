"""The machine on which a benchmark runs: what it is, how busy others keep it, and the memory that a call needs."""

import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from ..utils.devices import place_in_words


_STAT, _OWN_STATUS, _CLEAR = Path("/proc/stat"), Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # what clears VmHWM, see proc(5)


def describe_machine(target) -> dict[str, Any]:
    """Return device, dtype, threads and versions, which must be the same in all parts of a benchmark."""
    return {
        "device": place_in_words(target),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eagle3_hf": _own_version(),
    }


def _own_version() -> str:
    """Return this package's version; the package imports this room, so that it is asked at run time."""
    return getattr(sys.modules.get(__name__.partition(".")[0]), "__version__", "unknown")


def _processor() -> str:
    """Return the name of the CPU."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what was asked of it."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


@dataclass(frozen=True)
class _Times:
    wall: float
    machine: float  # seconds of all cores that were not idle
    own: float


class OthersLoad:
    """Measures how many cores other processes keep busy.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock = clock
        self._last = self._times()

    def since_last(self) -> float | None:
        """Return the mean number of cores that others used since the last call; `None` where it is unknown."""
        last, self._last = self._last, self._times()
        if last is None or self._last is None or self._last.wall - last.wall < 0.05:  # of a few ticks nothing follows
            return None
        busy = (self._last.machine - last.machine) - (self._last.own - last.own)
        return max(0.0, busy / (self._last.wall - last.wall))

    def _times(self) -> _Times | None:
        try:
            ticks = [int(value) for value in _STAT.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
        own = os.times()
        return _Times(self._clock(), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), own.user + own.system)


class PeakMemory:
    """The largest memory in use from now on: of a CUDA device, otherwise of this process.

    Args:
        device: The target's device.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._measured = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
        except OSError:
            self._measured = False

    def peak(self) -> int | None:
        """Return bytes, or `None` where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._measured or self._device.type != "cpu":
            return None
        found = re.search(r"^VmHWM:\s*(\d+) kB", _OWN_STATUS.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
