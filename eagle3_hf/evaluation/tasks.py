"""Reads questions to measure on: JSONL files with `turns`, one per task, as in MT-bench and Spec-Bench."""

import json
import os
from pathlib import Path


def load_tasks(folder: str | os.PathLike, questions: int) -> dict[str, list[str]]:
    """Return the first turn of the first `questions` questions of every `*.jsonl` in a folder, by task name.

    Raises:
        ValueError: there is no such file, a file has no questions, or a line has no `turns`.
    """
    tasks = {path.stem: _first_turns(path)[:questions] for path in sorted(Path(folder).glob("*.jsonl"))}
    if not tasks:
        raise ValueError(f"{folder} is not a folder that holds *.jsonl files of questions")
    return tasks


def _first_turns(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        turns = [json.loads(line)["turns"][0] for line in lines]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: every line must be an object with `turns`: {error!r}") from error
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise ValueError(f'{path} holds no questions: expected lines such as {{"turns": ["What is the sea?"]}}')
    return turns
