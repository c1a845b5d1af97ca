"""Questions to measure on: of a chats file, a data set, files with `turns`, or the built-in set.

A file of questions has one object per line with `turns`, the user's turns of one conversation, and optionally
`question_id` and `category`, as in MT-bench and Spec-Bench. The built-in set (`questions.jsonl`) was written for this
package and is in the public domain (CC0).
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


BUILT_IN = Path(__file__).with_name("questions.jsonl")


@dataclass(frozen=True)
class Question:
    """One conversation to answer: its user's turns, in order.

    Attributes:
        id: Name of the question, unique within its task.
        task: Kind of the question, by which results are grouped.
        turns: The user's turns.
        system: System prompt, if the conversation begins with one.
    """

    id: str
    task: str
    turns: tuple[str, ...]
    system: str | None = None


def load_questions(source: Any = None, per_task: int | None = None, seed: int = 0) -> list[Question]:
    """Load questions, at most `per_task` of each task.

    Args:
        source: `None` for the built-in set; a folder of files with `turns`, each of which is a task; one such file,
            whose tasks are its categories; anything else that [`load_chats`] loads (a file of chats, a data set on the
            Hub), whose user turns are asked; or a list of questions, as texts or `Question`s.
        per_task: Number of questions of each task, chosen at random; `None` for all.
        seed: Seed of that choice. A smaller number chooses a part of what a larger one does.

    Raises:
        ValueError: the source has no questions, or cannot be read.
    """
    by_task: dict[str, list[Question]] = {}
    for question in _read(source):
        by_task.setdefault(question.task, []).append(question)
    if not by_task:
        raise ValueError(f'{source} holds no questions: expected lines such as {{"turns": ["What is the sea?"]}}')
    for task, questions in by_task.items():
        names = [question.id for question in questions]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{source}: two questions of {task} have the id {twice}: give each its own")
        random.Random(f"{seed} {task}").shuffle(questions)
    return [question for questions in by_task.values() for question in questions[:per_task]]


def across_tasks(questions: Iterable[Question], number: int) -> list[Question]:
    """Return a number of questions, the first of each task, then the second of each, and so on."""
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    places = [(place, task) for task, own in enumerate(by_task.values()) for place in range(len(own))]
    listed = list(by_task.values())
    return [listed[task][place] for place, task in sorted(places)[:number]]


def first_turn_ids(tokenizer: Any, question: Question, **template_kwargs: Any) -> list[int]:
    """Return the ids of a question's first turn, after its system prompt, followed by the generation prompt."""
    messages = [] if question.system is None else [{"role": "system", "content": question.system}]
    messages.append({"role": "user", "content": question.turns[0]})
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **template_kwargs)
    return list(encoded["input_ids"])


def fingerprint(questions: Iterable[Question]) -> str:
    """Return a hash of all that the questions say."""
    text = json.dumps([asdict(question) for question in questions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(source: Any) -> Iterator[Question]:
    if source is None:
        yield from _of_file(BUILT_IN)
    elif isinstance(source, (str, os.PathLike)):
        yield from _of_place(Path(source), source)
    elif isinstance(source, Sequence) and source and all(isinstance(item, (str, Question)) for item in source):
        for number, item in enumerate(source):
            yield item if isinstance(item, Question) else Question(str(number), "questions", (item,))
    else:
        yield from _of_chats(source, "chats")


def _of_place(path: Path, source: str | os.PathLike) -> Iterator[Question]:
    """Yield the questions of a folder, a file or a data set on the Hub."""
    if path.is_dir():
        files = [file for file in sorted(path.glob("*.jsonl")) if _has_turns(file)]
        if files:
            for file in files:
                yield from _of_file(file, task=file.stem)
            return
    elif path.is_file() and _has_turns(path):
        yield from _of_file(path)
        return
    yield from _of_chats(source, path.name.split(".")[0] or os.fspath(source))


def _has_turns(path: Path) -> bool:
    """Whether a file is one of questions with `turns`, by its first line."""
    if path.suffix not in (".jsonl", ".json"):
        return False
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    return b'"turns"' in first


def _of_file(path: Path, task: str | None = None) -> Iterator[Question]:
    """Yield the questions of a file with `turns`; without a given task, that of a question is its category."""
    from ..training.data.json_files import read_json

    for number, record in read_json(path):
        turns = record.get("turns") if isinstance(record, dict) else None
        if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) for turn in turns):
            raise ValueError(
                f'{path}, line {number}: expected an object with `turns`, such as {{"turns": ["What is the sea?"]}}'
            )
        own = record.get("category")
        name = record.get("question_id", record.get("id", number))
        kind = task or (own if isinstance(own, str) and own else path.stem)
        yield Question(str(name), kind, tuple(turns))


def _of_chats(source: Any, task: str) -> Iterator[Question]:
    """Yield the user turns of chats, in any shape that training data may have; chats without any are left out."""
    from ..training.data.dropped_chats import OddChatError
    from ..training.data.formats import read_example
    from ..training.data.sources import load_chats

    odd: OddChatError | None = None
    found = False
    for number, record in enumerate(load_chats(source)):
        try:
            example = read_example(record)
        except OddChatError as error:
            odd = error
            continue
        asked = [turn["content"] for turn in example.messages if turn["role"] == "user"]
        turns = tuple(turn for turn in (asked or [example.prompt]) if turn.strip())
        if turns:
            system = next((turn["content"] for turn in example.messages if turn["role"] == "system"), None)
            found = True
            yield Question(str(number), task, turns, system)
    if not found:
        reason = f" ({odd})" if odd is not None else ""
        raise ValueError(f"{source} holds no questions: none of its chats has a turn of a user{reason}")
