"""Loggers that hang under transformers' own, so that its verbosity governs ours too."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.utils import logging as transformers_logging


if TYPE_CHECKING:
    from transformers.utils.logging import TransformersLogger


_NAME = __name__.partition(".")[0]


def get_logger(name: str) -> "TransformersLogger":
    """The logger of a module of ours, by its `__name__`.

    Level and handlers are those of the logger `transformers`: `transformers.utils.logging.set_verbosity_info()` and
    `TRANSFORMERS_VERBOSITY=info` show what our modules say at level info. `logging.getLogger("eagle3_hf")` is above
    all of ours, for a level of their own.
    """
    transformers_logging.get_verbosity()  # gives the logger its handler and level on first use
    logging.getLogger(_NAME).parent = logging.getLogger("transformers")
    return transformers_logging.get_logger(name)


@contextmanager
def info_shown() -> Iterator[None]:
    """Show our lines at level info, not those of transformers, which would be a flood.

    Where `TRANSFORMERS_VERBOSITY` is set it decides; of several processes only the first says more.
    """
    ours = logging.getLogger(_NAME)
    before = ours.level
    if not os.environ.get("TRANSFORMERS_VERBOSITY") and os.environ.get("RANK", "0") == "0":
        ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)


def follow_transformers() -> None:
    """Undo [`info_shown`] for the rest of the run: a level was asked for by transformers' own option."""
    logging.getLogger(_NAME).setLevel(logging.NOTSET)


@contextmanager
def shown_with_ours(name: str) -> Iterator[None]:
    """Show the lines of another library, by the name of its logger, wherever ours are shown, for one block.

    A level that somebody has set for that logger is left alone.
    """
    other = logging.getLogger(name)
    before = other.parent
    if other.level == logging.NOTSET:
        other.parent = logging.getLogger(_NAME)
    try:
        yield
    finally:
        other.parent = before
