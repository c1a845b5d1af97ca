"""Questions to measure on: JSONL files with `turns`, one file a task, in the manner of MT-bench and Spec-Bench."""

import json
import os
from pathlib import Path


def load_tasks(folder: str | os.PathLike, questions: int) -> dict[str, list[str]]:
    """The first turns of the first `questions` questions of every `*.jsonl` in a folder, by task name.

    Raises:
        ValueError: no such file, or a line without `turns`.
    """
    tasks = {}
    for path in sorted(Path(folder).glob("*.jsonl")):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:questions]
        try:
            tasks[path.stem] = [json.loads(line)["turns"][0] for line in lines]
        except (KeyError, IndexError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: every line must be an object with `turns`: {error!r}") from error
    if not tasks:
        raise ValueError(f"{folder} holds no *.jsonl of questions")
    return tasks
