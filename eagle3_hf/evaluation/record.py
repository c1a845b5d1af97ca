"""The file of a record: texts of a target, and the pool of candidates that a head has at every position of them.

A record is an `.npz` archive (read without pickle) with `header.json` and, for each text, the arrays of
[`RecordedText`]. It is written beside its name and renamed when it is complete.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .pools import Pool


FORMAT = 1
_HEADER = "header.json"
_ARRAYS = ("prompt", "text", "sizes", "tokens", "parents", "increments")
_NOISE_ARRAYS = ("log_z", "log_z_sizes", "noise_ids", "log_noise")
_LARGEST_HALF = float(np.finfo(np.float16).max)


class RecordError(ValueError):
    """A file is not a complete record of this version."""


@dataclass
class Header:
    """What was recorded, and how.

    Attributes:
        target, head: Names or paths of the models.
        depth, top_k: The largest growth: levels, and children of a node.
        max_new_tokens: The greatest length of a text.
        options: The other arguments of `generate`; `{}` for greedy decoding.
        draft_vocab_size: Size of the head's vocabulary.
        is_coupled: Whether the pools are ranked with the coming noise (coupled sampling).
        versions: Versions of this package, transformers and torch; dtype and device of the target.
        tasks: The task of each text, in their order.
        seeds: The seed of each text.
        format: Version of the file format.
    """

    target: str
    head: str
    depth: int
    top_k: int
    max_new_tokens: int
    options: dict[str, Any]
    draft_vocab_size: int
    is_coupled: bool
    versions: dict[str, str]
    tasks: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    format: int = FORMAT


@dataclass(frozen=True, eq=False)
class RecordedText:
    """A prompt, the text behind it, and the pools.

    A round can begin at the positions 1 to T - 1 of a text of T tokens: its root is the token before the position.

    Args:
        task: Name of the task.
        prompt: (P,) int32 ids.
        text: (T,) int32 ids of the new tokens.
        max_new_tokens: The greatest length of the text: decoding drafts for positions before it only.
        sizes: (T - 1,) int32 number of nodes of each position's pool.
        tokens, parents, increments: int32, int16 and float16: those of all pools, one after the other (see [`Pool`]).
        log_z: float16, those of all pools, or `None`.
        log_z_sizes: (T - 1,) int32 how many each pool has, or `None`.
        noise_ids: (U,) int32 the ids that occur in prompt or text, ascending, or `None`.
        log_noise: (S, U) float16 logarithm of the noise of these ids at the first S steps, or `None`. Step 0 gives
            the first token of the text.
    """

    task: str
    prompt: np.ndarray
    text: np.ndarray
    max_new_tokens: int
    sizes: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    increments: np.ndarray
    log_z: np.ndarray | None = None
    log_z_sizes: np.ndarray | None = None
    noise_ids: np.ndarray | None = None
    log_noise: np.ndarray | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_begins", np.r_[0, np.cumsum(self.sizes, dtype=np.int64)])
        if self.log_z_sizes is not None:
            object.__setattr__(self, "_log_z_begins", np.r_[0, np.cumsum(self.log_z_sizes, dtype=np.int64)])

    @classmethod
    def of_pools(
        cls,
        task: str,
        prompt: list[int],
        text: list[int],
        max_new_tokens: int,
        pools: list[Pool],
        noise_ids: np.ndarray | None = None,
        log_noise: np.ndarray | None = None,
    ) -> "RecordedText":
        """Return the text with the pool of each position from 1 on, in the precision of the file.

        Raises:
            ValueError: a pool is too large.
        """
        largest = max(map(len, pools), default=0)
        if largest > np.iinfo(np.int16).max:
            raise ValueError(
                f"a pool has {largest} nodes, and a record at most 32767: record fewer levels or children"
            )
        half = [np.clip(pool.increments, -_LARGEST_HALF, 0.0).astype(np.float16) for pool in pools]
        log_z = [pool.log_z for pool in pools if pool.log_z is not None]
        return cls(
            task,
            np.array(prompt, dtype=np.int32),
            np.array(text, dtype=np.int32),
            max_new_tokens,
            np.array([len(pool) for pool in pools], dtype=np.int32),
            _joined([pool.tokens for pool in pools], np.int32),
            _joined([pool.parents for pool in pools], np.int16),
            _joined(half, np.float16),
            None if noise_ids is None else _joined(log_z, np.float16),
            None if noise_ids is None else np.array([len(own) for own in log_z], dtype=np.int32),
            None if noise_ids is None else noise_ids.astype(np.int32),
            None if log_noise is None else log_noise.astype(np.float16),
        )

    def pool(self, position: int) -> Pool:
        """Return the pool of a round that begins at a position, as large as it was recorded.

        Raises:
            IndexError: no round can begin there.
        """
        if not 1 <= position < len(self.text):
            raise IndexError(f"a round can begin at 1 to {len(self.text) - 1} of this text, not at {position}")
        own = slice(*self._begins[position - 1 : position + 1])  # type: ignore[attr-defined]
        log_z = None
        if self.log_z is not None:
            log_z = self.log_z[slice(*self._log_z_begins[position - 1 : position + 1])]  # type: ignore[attr-defined]
            log_z = log_z.astype(np.float32)
        return Pool(self.tokens[own], self.parents[own], self.increments[own].astype(np.float32), log_z)

    def log_noise_of(self, step: int, token: int) -> float | None:
        """Return the logarithm of the noise of a token at a step.

        It is `None` for greedy texts, for tokens that occur in neither prompt nor text, and for steps far behind the
        end.
        """
        if self.noise_ids is None or self.log_noise is None or step >= len(self.log_noise):
            return None
        at = int(np.searchsorted(self.noise_ids, token))
        if at == len(self.noise_ids) or self.noise_ids[at] != token:
            return None
        return float(self.log_noise[step, at])


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([part.astype(dtype) for part in parts]) if parts else np.zeros(0, dtype=dtype)


class RecordWriter:
    """Writes a record, as a context manager. The file has its name once the block is left without an exception.

    Args:
        path: Where the record is written.
        header: Its header; tasks and seeds are added with each text.
    """

    def __init__(self, path: str | os.PathLike, header: Header):
        self.path = Path(path)
        self.header = header
        self._part = _part(self.path)

    def __enter__(self) -> "RecordWriter":
        self._archive = zipfile.ZipFile(self._part, "w", zipfile.ZIP_DEFLATED, compresslevel=6)
        return self

    def add(self, text: RecordedText, seed: int) -> None:
        """Write one text."""
        index = len(self.header.tasks)
        for name in _ARRAYS + (_NOISE_ARRAYS if self.header.is_coupled else ()):
            with self._archive.open(f"{index}/{name}.npy", "w") as file:
                np.lib.format.write_array(file, np.ascontiguousarray(getattr(text, name)), allow_pickle=False)
        self.header.tasks.append(text.task)
        self.header.seeds.append(seed)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._archive.writestr(_HEADER, json.dumps(asdict(self.header), indent=1))
        self._archive.close()
        if kind is None:
            os.replace(self._part, self.path)
        else:
            self._part.unlink(missing_ok=True)


class Record:
    """A record that was read; its texts are read one by one.

    ```
    record = Record.load("greedy.npz")
    for text in record:
        pool = text.pool(1)
    ```

    Args:
        path: The file.
        header: Its header.
    """

    def __init__(self, path: Path, header: Header):
        self.path = path
        self.header = header

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Record":
        """Open a record.

        Raises:
            RecordError: there is no such file, it is incomplete or damaged, or has another format.
        """
        path = Path(path)
        if not path.is_file():
            hint = (
                f": {_part(path)} is a record that was not finished, record it again" if _part(path).exists() else ""
            )
            raise RecordError(f"{path} is not a file{hint}")
        try:
            with zipfile.ZipFile(path) as archive:
                fields = json.loads(archive.read(_HEADER))
                present = set(archive.namelist())
        except (zipfile.BadZipFile, KeyError, OSError, json.JSONDecodeError) as error:
            raise RecordError(f"{path} is not a complete record ({error}): record it again") from error
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            found = fields.get("format") if isinstance(fields, dict) else None
            raise RecordError(f"{path} has the record format {found!r}, expected {FORMAT}: record it again")
        try:
            header = Header(**fields)
        except TypeError as error:
            raise RecordError(f"{path} has a header that is not one of a record: {error}") from error
        arrays = _ARRAYS + (_NOISE_ARRAYS if header.is_coupled else ())
        needed = {f"{index}/{name}.npy" for index in range(len(header.tasks)) for name in arrays}
        if not needed <= present:
            raise RecordError(f"{path} lacks {sorted(needed - present)[0]}: record it again")
        return cls(path, header)

    def __len__(self) -> int:
        return len(self.header.tasks)

    def __iter__(self) -> Iterator[RecordedText]:
        with np.load(self.path, allow_pickle=False) as archive:
            yield from (self._read(archive, index) for index in range(len(self)))

    def __getitem__(self, index: int) -> RecordedText:
        with np.load(self.path, allow_pickle=False) as archive:
            return self._read(archive, range(len(self))[index])

    def _read(self, archive: Any, index: int) -> RecordedText:
        names = _ARRAYS + (_NOISE_ARRAYS if self.header.is_coupled else ())
        try:
            arrays = {name: archive[f"{index}/{name}"] for name in names}
        except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
            raise RecordError(f"{self.path} is damaged in text {index} ({error}): record it again") from error
        return RecordedText(task=self.header.tasks[index], max_new_tokens=self.header.max_new_tokens, **arrays)

    def describe(self) -> str:
        """Return one line: models, size, and bytes for each new token."""
        header = self.header
        tokens = sum(len(text.text) for text in self)
        size = self.path.stat().st_size
        drawn = f"sampled ({header.options})" if header.options else "greedy"
        return (
            f"{self.path.name}: {header.head} for {header.target}, {len(self)} texts, {drawn}, {tokens} tokens, pools "
            f"of {header.depth} levels and {header.top_k} children, {size / 1e6:.1f} MB, "
            f"{size / max(1, tokens):.0f} bytes a token"
        )


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")
