"""What every test runs under: no network, few threads, fixed seeds, and no deprecated call of transformers.

Tests with the marker `pairwise` or `each_choice` have several parameters that are independent of each other. Of the
product of all their levels only a design is run in which every two levels meet, or every level occurs (see
`support.covering`); `--all-settings` runs the full product, as `.ci/full` does. A case that is selected by its name is
run in any case.
"""

import gc
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any


# Read when the libraries are imported, so before them. A test that may download says so with the marker `network`.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["EAGLE3_HF_COST_TABLE"] = "0"  # no test may depend on what was measured before

import numpy as np
import pytest
import torch
from hypothesis import settings

from support import fresh_interpreter
from support.covering import covering
from support.fresh_interpreter import Fresh


REPOSITORY = Path(__file__).resolve().parents[1]
STRENGTHS = {"each_choice": 1, "pairwise": 2}  # of the designs, by the marker

# The same examples in every run, and no time limit for one: a busy machine is no failure.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-settings",
        action="store_true",
        help="full products of parameters in place of covering designs; slow losslessness tests: every prompt with "
        "every row of the settings table",
    )
    parser.addoption("--prompts", type=int, help="losslessness: another number of prompts of each family")
    parser.addoption("--random-calls", type=int, default=24, help="how many random calls to make")
    parser.addoption("--first-call", type=int, default=0, help="seed of the first random call")


@pytest.fixture(scope="session")
def all_settings(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--all-settings")


@pytest.hookimpl(trylast=True)  # when -k and -m have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thin the tests marked `pairwise` or `each_choice`."""
    if config.getoption("--all-settings"):
        return
    tests: dict[tuple, list[pytest.Function]] = {}
    for item in items:
        for marker, strength in STRENGTHS.items():
            if isinstance(item, pytest.Function) and item.get_closest_marker(marker):
                tests.setdefault((item.path, item.originalname, strength), []).append(item)
    left_out: dict[pytest.Item, None] = {}  # in order
    for (*_, strength), cases in tests.items():
        levels = [{name: id(level) for name, level in case.callspec.params.items()} for case in cases]
        chosen = set(covering(levels, strength))
        left_out |= {case: None for place, case in enumerate(cases) if place not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what the libraries hold, half a million objects.

    Trainer collects garbage in every run, which would take a third of the time of many tests.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, give each process a run of neighbouring tests, which share what has been computed once."""
    if config.getoption("dist") == "load":  # the default of -n
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


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
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """What a new interpreter shows of the package; one for all tests."""
    from eagle3_hf import Eagle3DraftModel
    from support.families import tiny

    folder = tmp_path_factory.mktemp("fresh")
    target = tiny("llama")
    target.save_pretrained(folder / "target")
    Eagle3DraftModel.from_target(target).save_pretrained(folder / "head")
    return fresh_interpreter.start(folder)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of golden data beside the repository; tests that need it skip where it is absent."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the repository")
    return folder
