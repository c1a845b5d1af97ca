"""CPU seconds of tests, with their fixtures and subprocesses: on a busy machine a clock says little.

`PYTHONPATH=.:tests python -m pytest -p support.cpu_seconds tests/decoding` prints the sums of each file and of the
dearest test functions. Not with `-n`.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest


DEAREST = 40  # functions that are shown
_seconds: Counter[str] = Counter()  # of each function, by its file and name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _used()
    result = yield
    _seconds[item.nodeid.partition("[")[0]] += _used() - before
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    files: Counter[str] = Counter()
    for name, seconds in _seconds.items():
        files[name.partition("::")[0]] += seconds
    terminalreporter.section(f"{sum(files.values()):.1f} CPU seconds")
    for name, seconds in [*files.most_common(), *_seconds.most_common(DEAREST)]:
        terminalreporter.write_line(f"{seconds:8.2f}  {name}")


def _used() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
