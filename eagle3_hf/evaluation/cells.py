"""The plan of a benchmark: which questions are answered under which settings, and in which order."""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from .prompts import Question


MIXED = "mixed"  # the task of a batch whose questions are of several


@dataclass(frozen=True)
class Setting:
    """What all columns of a table share."""

    temperature: float
    batch_size: int
    max_new_tokens: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `generate`. The samplers are those of the temperature alone."""
        sampled = {"temperature": self.temperature, "top_k": 0} if self.temperature > 0 else {}
        return {"do_sample": self.temperature > 0, "max_new_tokens": self.max_new_tokens, **sampled}

    def __str__(self) -> str:
        decoding = f"temperature {self.temperature:g}" if self.temperature > 0 else "greedy"
        return f"{decoding}, batch size {self.batch_size}, at most {self.max_new_tokens} new tokens"


@dataclass(frozen=True)
class Conversation:
    """Questions that are answered together under one setting, turn by turn.

    Attributes:
        setting: The setting.
        questions: As many as the batch size says, with the same number of turns.
    """

    setting: Setting
    questions: tuple[Question, ...]

    @property
    def task(self) -> str:
        """The questions' task."""
        tasks = {question.task for question in self.questions}
        return tasks.pop() if len(tasks) == 1 else MIXED

    @property
    def key(self) -> str:
        """Name of the conversation in a benchmark."""
        names = [f"{question.task}/{question.id}" for question in self.questions]
        return json.dumps([names, *vars(self.setting).values()], ensure_ascii=False)

    @property
    def num_turns(self) -> int:
        """Number of turns of each question."""
        return len(self.questions[0].turns)


@dataclass(frozen=True)
class Cell:
    """One turn of a conversation: what all columns are measured on, next to each other."""

    conversation: Conversation
    turn: int

    @property
    def key(self) -> str:
        """Name of the cell in a benchmark."""
        return f"{self.conversation.key} turn {self.turn + 1}"

    def seed(self, seed: int) -> int:
        """Return the seed of all calls in this cell."""
        return int.from_bytes(hashlib.sha256(f"{seed} {self.key}".encode()).digest()[:4], "big")

    def shuffled(self, columns: Iterable[Any], seed: int) -> list[Any]:
        """Return the columns in the order in which this cell measures them."""
        order = list(columns)
        random.Random(f"{seed} {self.key}").shuffle(order)
        return order


def plan(
    questions: Sequence[Question],
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
    lengths: Sequence[int],
    seed: int,
) -> list[Conversation]:
    """Return all conversations in random order, so that a benchmark that is stopped early has some of everything.

    Raises:
        ValueError: there are fewer questions than a batch has.
    """
    conversations = []
    for batch_size in dict.fromkeys(batch_sizes):
        groups = batches(questions, batch_size)
        if not groups:
            raise ValueError(
                f"batch size {batch_size} needs that many questions with the same number of turns, but there are only "
                f"{len(questions)} questions: ask for more of each task, or for a smaller batch size"
            )
        for temperature, length in product(dict.fromkeys(temperatures), dict.fromkeys(lengths)):
            setting = Setting(float(temperature), batch_size, length)
            conversations += [Conversation(setting, group) for group in groups]
    random.Random(seed).shuffle(conversations)
    return conversations


def batches(questions: Sequence[Question], size: int) -> list[tuple[Question, ...]]:
    """Return full batches: of one task first, then of what is left over. A remainder is not measured.

    Args:
        questions: The questions.
        size: Number of questions of a batch; all of them have the same number of turns.
    """
    found: list[tuple[Question, ...]] = []
    by_task: dict[tuple[str, int], list[Question]] = {}
    for question in questions:
        by_task.setdefault((question.task, len(question.turns)), []).append(question)
    left: dict[int, list[Question]] = {}
    for (_, turns), members in by_task.items():
        full = len(members) // size * size
        found += [tuple(members[start : start + size]) for start in range(0, full, size)]
        left.setdefault(turns, []).extend(members[full:])
    for members in left.values():
        full = len(members) // size * size
        found += [tuple(members[start : start + size]) for start in range(0, full, size)]
    return found
