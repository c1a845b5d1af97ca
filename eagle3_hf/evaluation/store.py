"""Answers of a benchmark on disk, a line for each as it comes, so that nothing is lost when a run is stopped.

The first line describes the benchmark. A run with other settings must not add to it, since its figures would be mixed
with these. A cell is complete when its differences have been judged. What an interrupted run has left of a cell is
shown, but measured again: columns of a cell are compared because they ran next to each other.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from .differences import TextDifference
from .measure import Answer


fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_FORMAT = 1


class Store:
    """The file of one benchmark, open for one process.

    Args:
        path: The file; its folder is made.
        header: What describes the benchmark, as JSON values: groups of settings by name.

    Attributes:
        answers: Answers of each cell, by the column's name.
        differences: Judged differences of each complete cell.
        probes: What was seen of the machine over time: seconds of the same work, and cores that others used.

    Raises:
        ValueError: the file has another header, or is not one of a benchmark, or another process writes to it.
    """

    def __init__(self, path: str | os.PathLike, header: Mapping[str, Any]):
        self.path = Path(path)
        self.answers: dict[str, dict[str, Answer]] = {}
        self.differences: dict[str, list[TextDifference]] = {}
        self.probes: list[dict[str, float | None]] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = self.path.open("a+b")
        try:
            self._lock()
            self._read(json.loads(json.dumps(header)))
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file, so that another process may open it."""
        self._file.close()

    def is_complete(self, cell: str) -> bool:
        """Whether all columns of a cell have been measured and judged."""
        return cell in self.differences

    def begin(self, cell: str) -> None:
        """Forget what an interrupted run has left of a cell."""
        self._write({"kind": "begin", "cell": cell})

    def put(self, cell: str, column: str, answer: Answer) -> None:
        """Keep an answer."""
        self._write({"kind": "answer", "cell": cell, "column": column, "answer": answer.as_dict()})

    def finish(self, cell: str, differences: list[TextDifference]) -> None:
        """Keep the differences of a cell, which is then complete."""
        self._write({"kind": "judged", "cell": cell, "differences": [asdict(each) for each in differences]})

    def put_probe(self, seconds: float, others: float | None) -> None:
        """Keep what was seen of the machine."""
        self._write({"kind": "probe", "seconds": seconds, "others": others})

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self._apply(record)

    def _apply(self, record: Mapping[str, Any]) -> None:
        match record["kind"]:
            case "begin":
                self.answers.pop(record["cell"], None)
            case "answer":
                self.answers.setdefault(record["cell"], {})[record["column"]] = Answer.from_dict(record["answer"])
            case "judged":
                self.differences[record["cell"]] = [TextDifference(**each) for each in record["differences"]]
            case "probe":
                self.probes.append({"seconds": record["seconds"], "others": record["others"]})

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process is writing to {self.path}: wait for it, or name another file") from None

    def _read(self, header: dict[str, Any]) -> None:
        """Read what is there, or write the header. A last line that was cut off is dropped."""
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        if content and not lines and not b'{"kind": "header"'.startswith(content[:17]):
            raise ValueError(f"{self.path} is not a file of a benchmark: name another file")
        if whole < len(content):
            self._file.truncate(whole)
        if not lines:
            self._write({"kind": "header", "format": _FORMAT, **header})
            return
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                if number == 1:
                    self._check_header(record, header)
                self._apply(record)
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"{self.path}, line {number}: not a line of a benchmark ({error!r}): name another file"
                ) from None

    def _check_header(self, found: Any, header: Mapping[str, Any]) -> None:
        if not isinstance(found, dict) or found.get("kind") != "header" or found.get("format") != _FORMAT:
            raise ValueError(f"{self.path} is not a file of a benchmark of this version: name another file")
        changed = _first_change(found, header)
        if changed is not None:
            name, was, now = changed
            raise ValueError(
                f"{self.path} was measured with another {name} ({_shown(was)}) than this run's ({_shown(now)}): "
                "figures of the two cannot be mixed. Use the old one, name another file, or remove this one"
            )


def _first_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Return the name of the first value that differs, and both values; names of groups are left out."""
    for name in dict.fromkeys([*new, *old]):
        was, now = old.get(name), new.get(name)
        if name in ("kind", "format") or was == now:
            continue
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            deeper = _first_change(was, now)
            if deeper is not None:
                inner, was, now = deeper
                return (inner if name in ("machine", "settings") else f"{name.replace('_', ' ')}: {inner}"), was, now
        return name.replace("_", " "), was, now
    return None


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:160]}..."
