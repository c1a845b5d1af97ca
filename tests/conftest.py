"""What every test runs under: no network, few threads, fixed seeds, and no deprecated call of transformers."""

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path


# Read when the libraries are imported, so before them. A test that may download says so with the marker `network`.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from hypothesis import settings


REPOSITORY = Path(__file__).resolve().parents[1]

# The same examples in every run, and no time limit for one: a busy machine is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-settings", action="store_true", help="losslessness: every prompt with every row of the settings table"
    )
    parser.addoption("--random-calls", type=int, default=60, help="how many random calls to make")
    parser.addoption("--first-call", type=int, default=0, help="seed of the first random call")


@pytest.fixture(scope="session")
def all_settings(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--all-settings")


def pytest_configure() -> None:
    """One thread: tiny models gain nothing from more, and pools that spin on the same cores lose very much."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


class DeprecationRecorder(logging.Handler):
    """Keeps the log lines that announce a removal. Raising here instead could be swallowed by the code under test."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "deprecat" in message.lower():
            self.lines.append(message)


@pytest.fixture(autouse=True)
def no_deprecated_calls() -> Iterator[DeprecationRecorder]:
    """Fail a test in which transformers logged a deprecation: it is a call that a coming version will not take."""
    recorder = DeprecationRecorder()
    logger = logging.getLogger("transformers")
    logger.addHandler(recorder)
    try:
        yield recorder
    finally:
        logger.removeHandler(recorder)
    if recorder.lines:
        pytest.fail("transformers logged a deprecation:\n" + "\n".join(recorder.lines))


@pytest.fixture(autouse=True)
def logs_reach_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our loggers hang under transformers', which keeps its lines from the root, where `caplog` listens."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what Trainer and collators use
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden data beside the repository; tests that need it skip where it is absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the repository")
    return folder
