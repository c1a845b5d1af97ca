"""Answers by the target to the prompts of any dataset, since a head should be trained on the target's own outputs.

Every answer of a chat is generated again, in order, with the new answers as history. Tool calls stay as they are,
since the outputs of the tools belong to them. A chat ends where an answer was cut.

Each process appends finished chats to a file of its own beside the output (`OUT.part-000-of-001`). A line names the
number of its prompt and a hash of everything it depends on, so that a run which was stopped anywhere, even in the
middle of a line, resumes with any number of processes. The process that finishes last writes the output, in the order
of the prompts. Batches and their random numbers depend on the prompts alone, so that the result is the same.
"""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from datasets import Dataset
from tqdm.auto import tqdm

from ...utils.logging import get_logger
from ..data.dropped_chats import DroppedChats, OddChatError
from ..data.formats import read_example, recognise
from ..data.sources import Source, load_chats
from .local_writer import Conversation, WritingSettings
from .synthesis import drop_torn_line


logger = get_logger(__name__)


class Writer(Protocol):
    """What writes answers: `TargetWriter` in this process, or `ServerWriter` through another program.

    Attributes:
        batched: whether the chats of a batch share their random numbers.
    """

    batched: bool

    def write(
        self, batches: Sequence[Sequence[Conversation]], settings: WritingSettings
    ) -> Iterator[list[Conversation]]: ...


class Regeneration:
    """A dataset's prompts on their way to answers.

    Args:
        prompts: whatever `load_chats` takes, in any shape that has turns. A chat that ends with a question gets an
            answer to it too, so that prompts alone are enough.
        output_path: the JSONL file with one object per line: `messages`, `decoding` (`greedy`, or
            `temperature_` with its value), `finished`, and `index` and `source`, by which a later run recognises them.
        settings: how answers are chosen.
        batch_size: number of chats that a target in this process writes at once.
        part: `(i, n)`: of n processes this is the i-th; each takes every n-th batch.
        about: templates with `{text}`, see `about_texts`.
        split: see `load_chats`.

    Attributes:
        pending: number of chats that this process still has to write.

    Raises:
        ValueError: the data has no turns, or the output holds answers to other prompts or with other settings.
    """

    def __init__(
        self,
        prompts: Source,
        output_path: str | os.PathLike[str],
        settings: WritingSettings,
        *,
        batch_size: int = 32,
        part: tuple[int, int] = (0, 1),
        about: Sequence[str] = (),
        split: str | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= part[0] < part[1]:
            raise ValueError(f"part is {part}; it must be (i, n) with 0 <= i < n")
        self.path = Path(output_path)
        self.settings = settings
        self.part = part
        chats = load_chats(prompts, split=split)
        if about:
            chats = about_texts(chats, about, settings.seed)
        self.conversations = _conversations(chats, settings)
        self._sources = {chat.index: _source(chat, settings) for chat in self.conversations}
        self._known = self._done()
        # Chats of similar length share a batch, the longest first: if there is too little memory, it shows at once.
        order = sorted(self.conversations, key=lambda chat: (-_size(chat), chat.index))
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        self._batches = [batch for batch in batches[part[0] :: part[1]] if self._new(batch)]
        self.pending = sum(len(self._new(batch)) for batch in self._batches)

    def run(self, writer: Writer, *, progress: bool = True) -> int:
        """Write what is missing, and return the number of chats that this call has written.

        Raises:
            RuntimeError: not one of the prompts could be answered; the message says why.
        """
        if not self.pending:
            self.merge()
            return 0
        drop_torn_line(self._part_path)
        # Chats of a batch share their random numbers: a batch that is there in part is written again as a whole.
        batches = self._batches if writer.batched else [[chat] for batch in self._batches for chat in self._new(batch)]
        total, written, failed = sum(map(len, batches)), 0, 0
        enough = 10 if self._known else min(10, self.pending)  # so many failures are not due to single prompts
        with tqdm(total=total, desc="Answering", unit="chat", disable=not progress) as bar:
            for chats in writer.write(batches, self.settings):
                new = self._new(chats)
                self._append(new)
                problems = [chat for chat in new if chat.problem]
                if problems and not failed:
                    logger.warning("Chat %d has no answer: %s.", problems[0].index, problems[0].problem)
                failed += len(problems)
                written += len(new) - len(problems)
                if failed >= enough and not written:
                    raise RuntimeError(
                        f"none of the first {failed} prompts could be answered; the last: {problems[-1].problem}"
                    )
                bar.update(len(chats))
        if failed:
            logger.warning("%d of %d chats could not be answered and are left out.", failed, self.pending)
        self.merge()
        return written

    def _new(self, chats: Sequence[Conversation]) -> list[Conversation]:
        return [chat for chat in chats if chat.index not in self._known]

    @property
    def _part_path(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part-{self.part[0]:03d}-of-{self.part[1]:03d}")

    def _parts(self) -> list[Path]:
        return sorted(self.path.parent.glob(f"{self.path.name}.part-*-of-*"))

    def _append(self, chats: Iterable[Conversation]) -> None:
        lines = [json.dumps(self._record(chat), ensure_ascii=False) + "\n" for chat in chats]
        with self._part_path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(lines))

    def _record(self, chat: Conversation) -> dict[str, Any]:
        if chat.problem:  # so that whoever merges knows that nothing is to come
            return {"index": chat.index, "source": self._sources[chat.index], "problem": chat.problem}
        record: dict[str, Any] = {"messages": chat.messages}
        if chat.tools:
            record["tools"] = json.dumps(chat.tools, ensure_ascii=False)  # a text: tools have no columns in common
        decoding = "greedy" if chat.greedy else f"temperature_{self.settings.temperature:g}"
        record |= {"decoding": decoding, "finished": chat.finished}
        return record | {"index": chat.index, "source": self._sources[chat.index]}

    def _done(self) -> set[int]:
        """Return the indices of the chats that are in the output or in a part.

        Raises:
            ValueError: there are answers to other prompts, or with other settings.
        """
        done = set()
        for path in (self.path, *self._parts()):
            for line in _lines(path):
                index, source = line.get("index"), line.get("source")
                if index is None or source is None:
                    raise ValueError(f"{path} was not written by this command: choose another output")
                if index not in self._sources:
                    raise ValueError(f"{path} answers prompt {index}, which is not among the prompts of this run")
                if source != self._sources[index]:
                    changed = _what_changed(source, self._sources[index])
                    raise ValueError(
                        f"{path} answers prompt {index} with {changed}: use the options of that run, or choose "
                        "another output"
                    )
                if "problem" not in line:  # those are tried again
                    done.add(index)
        return done

    def merge(self) -> None:
        """Write the output in the order of the prompts once every process has finished, and remove the parts."""
        parts = self._parts()
        if not parts:
            return
        try:
            with contextlib.ExitStack() as stack:
                # Open files stay readable if another process merges them and removes their names.
                paths = [self.path, *parts] if self.path.exists() else parts
                files = [stack.enter_context(path.open("rb")) for path in paths]
                partial = self._join(files)
        except FileNotFoundError:  # another process was faster
            return
        if partial is not None:
            partial.replace(self.path)
            for path in parts:
                path.unlink(missing_ok=True)

    def _join(self, files: Sequence[BinaryIO]) -> Path | None:
        """Write a new file of all chats in order; return None while some of them are missing."""
        places: dict[
            int, tuple[BinaryIO, int]
        ] = {}  # file and offset of a chat's line, since all lines may not fit into memory
        failed: set[int] = set()
        for file in files:
            for offset, line in _lines_of(file):
                if "problem" in line:
                    failed.add(line["index"])
                else:
                    places[line["index"]] = file, offset
        if len(failed | set(places)) < len(self.conversations):
            return None
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with partial.open("wb") as output:
            for index in sorted(places):
                file, offset = places[index]
                file.seek(offset)
                output.write(file.readline())
        return partial


def _conversations(chats: Dataset, settings: WritingSettings) -> list[Conversation]:
    """Return the chats to answer; examples without a question are left out and counted."""
    shapes = recognise(chats.column_names)
    if not shapes & {"turns", "questions"}:
        (shape,) = shapes
        raise ValueError(f"examples of {shape} have no questions to answer: pass chats or prompts")
    conversations: list[Conversation] = []
    dropped = DroppedChats()
    for index, record in enumerate(chats):
        try:
            conversations.append(_conversation(index, record, settings))
        except OddChatError as error:
            dropped.add(index, error)
    if dropped:
        message = f"{len(dropped)} of {len(chats)} examples have nothing to answer and are dropped:\n{dropped}"
        if not conversations:
            raise ValueError(message)
        logger.warning("%s", message)
    return conversations


def _conversation(index: int, record: Mapping[str, Any], settings: WritingSettings) -> Conversation:
    example = read_example(record)
    messages = [{"role": "user", "content": example.prompt}] if example.prompt else example.messages
    greedy = random.Random(f"{settings.seed}/{index}").random() < settings.greedy_share
    return Conversation(index, script_of(messages), tools=example.tools, greedy=greedy)


def script_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Return the messages with None for every answer to be written.

    Raises:
        OddChatError: there is no question.
    """
    script: list[dict[str, Any] | None] = []
    for message in messages:
        if message.get("role") != "assistant" or message.get("tool_calls"):
            script.append(message)
        elif script and script[-1] is not None and script[-1].get("role") != "system":
            script.append(None)  # an answer that follows a question
    if script and script[-1] is not None and script[-1].get("role") in ("user", "tool"):
        script.append(None)
    if None not in script:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise OddChatError("no question to answer", f"no question among the roles ({roles})")
    return script[: len(script) - script[::-1].index(None)]


def about_texts(chats: Dataset, templates: Sequence[str], seed: int = 0) -> Dataset:
    """Make prompts about texts that the target wrote before: the last answer of every chat is put into a template.

    A head that was trained on short chats only drafts badly after long prompts. So let the target write long answers
    first, and then ask it about them, for a summary, say.

    Args:
        chats: chats with answers.
        templates: user turns with `{text}` in them, one drawn for each chat; a second `{text}` takes the next chat's
            answer, and so on, so that prompts can have any length.
        seed: seed of the drawing.

    Raises:
        ValueError: a template has no `{text}`, or there are no answers.
    """
    for template in templates:
        if "{text}" not in template:
            raise ValueError(f"the template {template[:80]!r} has no {{text}} for the text to ask about")
    texts = [text for record in chats if (text := _last_answer(record)) is not None]
    if not texts:
        raise ValueError("no chat ends with an answer, so there is no text to ask about: write some first")
    prompts = []
    for i in range(len(texts)):
        pieces = random.Random(f"{seed}/about/{i}").choice(templates).split("{text}")
        filled = pieces[0] + "".join(texts[(i + j) % len(texts)] + piece for j, piece in enumerate(pieces[1:]))
        prompts.append({"prompt": filled})
    return Dataset.from_list(prompts)


def _last_answer(record: Mapping[str, Any]) -> str | None:
    """Return the text of a chat's last answer; `None` if it does not end with one, or cannot be read."""
    try:
        example = read_example(record)
    except OddChatError:
        return None
    if not example.messages:
        return example.text or None
    last = example.messages[-1]
    is_answer = last["role"] == "assistant" and (last["content"] or not last.get("tool_calls"))
    return last["content"] if is_answer else None


def _size(chat: Conversation) -> int:
    return sum(len(str(message.get("content") or "")) for message in chat.script if message is not None)


def _source(chat: Conversation, settings: WritingSettings) -> str:
    """Return short hashes of everything that a chat's answers depend on: of the prompt, then of every setting."""
    parts = [[chat.script, chat.tools], *asdict(settings).values()]
    texts = (json.dumps(part, sort_keys=True, ensure_ascii=False) for part in parts)
    return "-".join(hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts)


def _what_changed(before: str, now: str) -> str:
    names = ["another prompt", *(f"another {field.name}" for field in fields(WritingSettings))]
    pairs = zip(names, str(before).split("-"), now.split("-"), strict=False)
    return " and ".join(name for name, old, new in pairs if old != new) or "other settings"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's complete lines; a missing file has none."""
    # The output may not exist yet, and another process may just have merged a part.
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from (line for _, line in _lines_of(file))


def _lines_of(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield offset and object of every complete line; an incomplete last line is left out."""
    offset = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            content = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{file.name}, line {number}: not JSON ({error}); remove the line and start again"
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"{file.name} was not written by this command: choose another output")
        yield offset, content
        offset += len(line)
