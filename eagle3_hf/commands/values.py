"""Values of options: what means nothing is refused when the command line is read, not when it is first used."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any


def count(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def amount(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = _number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number from 0 on."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 on")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def json_object(text: str) -> dict[str, Any]:
    """Names and values in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object, such as {{"name": 2}}')
    return value


def json_or_file(text: str) -> str:
    """JSON, or the file that holds it; either stays a text."""
    if text.lstrip().startswith("{"):
        json_object(text)
    elif not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a JSON object nor a file here")
    return text


def place(text: str) -> str:
    """A folder or a Hub id: any name but an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name; expected a local folder or a Hub id")
    return text


def path(text: str) -> Path:
    """A file or folder: any name but an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name; expected that of a file or folder")
    return Path(text)


def read_lines(path: Path) -> list[str]:
    """Lines of a text file.

    Raises:
        ValueError: it is not UTF-8.
        OSError: it is not there, or no file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is a folder, not a text file" if path.is_dir() else f"{path}: no such file")
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None


def check_output_folder(folder: str | os.PathLike) -> None:
    """Refuse a folder that cannot be made or written to, before any work is done for it.

    Raises:
        OSError: with the reason.
    """
    wanted = Path(folder).absolute()
    nearest = next(place for place in (wanted, *wanted.parents) if place.exists())
    if not nearest.is_dir():
        raise NotADirectoryError(f"{folder} cannot be an output folder: {nearest} is a file")
    try:
        tempfile.TemporaryFile(dir=nearest).close()  # rights alone do not tell: a file system may be read-only
    except OSError as error:
        raise OSError(f"{folder} cannot be an output folder: nothing can be written to {nearest} ({error})") from None
