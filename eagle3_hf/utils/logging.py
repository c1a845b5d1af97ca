"""Loggers below transformers' own, so that its verbosity applies to this package too."""

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
    """Return the logger of a module of this package.

    Level and handlers are those of the logger `transformers`: `transformers.utils.logging.set_verbosity_info()` and
    `TRANSFORMERS_VERBOSITY=info` show messages of level info. `logging.getLogger("eagle3_hf")` is the parent of all
    loggers of this package and can be given another level.

    Args:
        name: The module's `__name__`.
    """
    transformers_logging.get_verbosity()  # the first call gives the logger its handler and level
    logging.getLogger(_NAME).parent = logging.getLogger("transformers")
    return transformers_logging.get_logger(name)


@contextmanager
def info_shown() -> Iterator[None]:
    """Show this package's messages of level info, but not the many of transformers.

    If `TRANSFORMERS_VERBOSITY` is set it takes precedence. Of several processes only the first shows more.
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
    """Undo [`info_shown`] for the rest of the run, since transformers' own option sets a level."""
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
