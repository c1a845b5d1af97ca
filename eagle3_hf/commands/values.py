"""Types of options: an invalid value is rejected when the command line is parsed, not when it is first used."""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def count(text: str) -> int:
    """Parse an integer of at least 1."""
    return _whole(text, 1)


def amount(text: str) -> int:
    """Parse an integer of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got {text!r}")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return value


def not_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"name": 2}}')
    return value


def json_or_file(text: str) -> str:
    """Check that the text is a JSON object or the name of a file, and return it unchanged."""
    if text.lstrip().startswith("{"):
        json_object(text)
    elif not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a JSON object nor a local file")
    return text


def place(text: str) -> str:
    """Return the name of a folder or a Hub id; it must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; expected a local folder or a Hub id")
    return text


def words(text: str) -> str:
    """Return a text that a model is to read; it must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the text is empty; expected at least one word")
    return text


def nonempty(text: str) -> str:
    """Return a name, which must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty")
    return text


def path(text: str) -> Path:
    """Parse the name of a file or folder; it must not be empty."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; expected a file or folder")
    return Path(text)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file.

    Raises:
        ValueError: the file is not UTF-8.
        OSError: the file does not exist, or is a folder.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is a folder, not a text file" if path.is_dir() else f"{path}: no such file")
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None


def check_output_folder(folder: str | os.PathLike) -> None:
    """Check that a folder can be created and written to, before any work is done for it.

    Raises:
        OSError: it cannot; the message gives the reason.
    """
    wanted = Path(folder).absolute()
    nearest = next(place for place in (wanted, *wanted.parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(f"{folder} cannot be an output folder: {nearest} is a file")
    try:
        tempfile.TemporaryFile(dir=nearest).close()  # permissions are not enough: the file system may be read-only
    except OSError as error:
        raise OSError(f"{folder} cannot be an output folder: nothing can be written to {nearest} ({error})") from None
