"""Lines of a text file, in UTF-8 or UTF-16, compressed or not, as its bytes tell and not its name.

A file that is not text, has another encoding or was cut off is an error that names the line.
"""

import bz2
import codecs
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from datasets import DownloadManager


_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_ZSTD = b"\x28\xb5\x2f\xfd"
_NO_TEXT = {b"PAR1": "a parquet file", b"PK\x03\x04": "a zip archive", b"ARROW1": "an Arrow file"}

# A broken compressed file; each module has an exception of its own.
_TORN = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

_BOM = "\ufeff"


@dataclass(frozen=True)
class Unreadable:
    """Replaces a record that cannot be read in a file that can.

    Attributes:
        why: what is wrong with the record.
    """

    why: str


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text file with their numbers, from 1 on.

    Raises:
        ValueError: the file is not text, or not in UTF-8, UTF-16 or UTF-32; the message names the line.
    """
    try:
        with _open(path) as file:
            head = file.read(16)
            kind = next((kind for magic, kind in _NO_TEXT.items() if head.startswith(magic)), None)
            if kind is not None:
                raise ValueError(f"{path} is {kind} by its content: rename it, or unpack it")
            file.seek(0)
            yield from _decoded(path, file, _encoding(head))
    except _TORN as error:
        raise ValueError(f"{path}: the compressed file is broken or was cut off ({error})") from error


def encoding_of(path: Path) -> str:
    """Return the Unicode encoding of a text file."""
    with _open(path) as file:
        encoding = _encoding(file.read(4))
    return "utf-8-sig" if encoding == "utf-8" else encoding  # with a mark or without


def _open(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        magic = file.read(6)
    if magic.startswith(_ZSTD):
        return Path(DownloadManager().extract(str(path))).open("rb")
    opener: Any = next((opener for start, opener in _OPENERS.items() if magic.startswith(start)), open)
    return opener(path, "rb")


def _encoding(head: bytes) -> str:
    """Return the encoding of a file that begins with these bytes, by its byte order mark or the zeros in it."""
    if head.startswith((codecs.BOM_UTF8, b"\0\0\0\0")):
        return "utf-8"
    return json.detect_encoding(head)


def _decoded(path: Path, file: IO[bytes], encoding: str) -> Iterator[tuple[int, str]]:
    lines: Iterable[Any] = file if encoding == "utf-8" else io.TextIOWrapper(file, encoding, newline="\n")
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            text = line if isinstance(line, str) else line.decode("utf-8")
            # Files that were put together have marks inside too.
            yield number, text.removeprefix(_BOM)
    except UnicodeDecodeError as error:
        number += encoding != "utf-8"  # there the line was not handed out yet
        raise _not_unicode(path, number, error) from error


def _not_unicode(path: Path, number: int, error: UnicodeDecodeError) -> ValueError:
    """Return the error for a line that is not in the encoding that the file seems to have."""
    message = f"{path}, line {number}: not {error.encoding.upper()} ({error.reason})"
    if error.encoding != "utf-8":
        return ValueError(f"{message}; was the file cut off?")
    start = max(0, error.start - 20)
    latin = error.object[start : error.end + 20].decode("cp1252", "replace").strip()
    return ValueError(
        f"{message}: byte {error.object[error.start]:#04x}. In Latin-1 the place reads {latin!r}; if that is right, "
        "convert the file (iconv -f latin1 -t utf-8)"
    )
