"""Verbosity of transformers governs our loggers, and commands show our lines at level info."""

import importlib
import logging
import pkgutil
import re

import pytest
from transformers.utils import logging as transformers_logging

import eagle3_hf
from eagle3_hf.cli import main
from eagle3_hf.utils.logging import get_logger, info_shown
from support.processes import run_python


@pytest.fixture
def verbosity():
    before = transformers_logging.get_verbosity()
    yield transformers_logging.set_verbosity
    transformers_logging.set_verbosity(before)


def modules() -> list[str]:
    """All but those that would run something."""
    return [module.name for module in pkgutil.walk_packages(eagle3_hf.__path__, "eagle3_hf.")]


def test_every_logger_of_ours_obeys_set_verbosity(verbosity):
    loggers = [getattr(importlib.import_module(name), "logger", None) for name in modules()]
    loggers = [logger for logger in loggers if logger is not None]
    assert len(loggers) > 20
    for level in (logging.INFO, logging.ERROR, logging.WARNING):
        verbosity(level)
        assert {logger.getEffectiveLevel() for logger in loggers} == {level}
    library = logging.getLogger("transformers")
    for logger in loggers:
        ancestor = logger
        while ancestor is not None and ancestor is not library:
            ancestor = ancestor.parent
        assert ancestor is library, logger.name


LATER = ["info at 20", "warning at 20", "error at 20", "error at 40"]


def test_lines_are_shown_once_where_transformers_shows_its_own(fresh):
    """In a fresh interpreter: pytest has handlers of its own."""
    assert re.findall("<(.*)>", fresh.stderr["logs"]) == ["warning at None", "error at None", *LATER]


@pytest.mark.slow
def test_the_variable_of_transformers_sets_the_first_level():
    code = "from support.fresh_interpreter import logs; logs()"
    run = run_python(["-c", code], TRANSFORMERS_VERBOSITY="info", CI="")
    assert re.findall("<(.*)>", run.stderr) == ["info at None", "warning at None", "error at None", *LATER]


def test_commands_show_our_info_lines_and_not_those_of_transformers(monkeypatch, capsys):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    levels = []

    def run(arguments):
        names = "eagle3_hf.training.data.encoding", "transformers.modeling_utils"
        levels.append([logging.getLogger(name).isEnabledFor(logging.INFO) for name in names])
        return 0

    monkeypatch.setattr("eagle3_hf.commands.inspect.run", run)
    assert main(["inspect", "x"]) == 0
    monkeypatch.setenv("RANK", "1")  # the first process has said it
    assert main(["inspect", "x"]) == 0
    monkeypatch.delenv("RANK")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    assert main(["inspect", "x"]) == 0
    assert levels == [[True, False], [False, False], [False, False]]


def test_the_level_is_put_back_after_a_command(monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    logger = get_logger("eagle3_hf.training.data.encoding")
    before = logger.getEffectiveLevel()
    with pytest.raises(ValueError, match="stop"), info_shown():
        raise ValueError("stop")
    assert logger.getEffectiveLevel() == before
