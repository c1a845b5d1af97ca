"""The shapes of training data, which their columns tell apart, and how each becomes a chat.

Whatever the shape, an example becomes one of three things: `messages` (roles and contents, to be put through the chat
template), text (a prompt that may be empty, and what follows it, served without a template), or tokens. The columns
that an example fills tell its shape, since a file may mix shapes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .dropped_chats import OddChatError
from .records import decoded, plain_name
from .turns import Message, message, parse_json, read_tools, read_turns


# Columns with the turns of a chat, in the order of their precedence: the first that has any is the chat.
_TURNS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")

# Columns with a question, and columns with its answer. `chosen` is the answer preferred to `rejected`, as text or as
# turns, which may be those of the whole chat.
_QUESTIONS = ("prompt", "question", "instruction", "query", "problem", "input")
_ANSWERS = ("completion", "response", "answer", "output", "solution", "chosen")

# Pairs that are standards of their own: other columns of an example belong to them.
_STANDARDS = (("instruction", "output"), ("prompt", "completion"))

# What may stand beside them.
_SYSTEM = ("system", "system_prompt")
_BESIDE = ("finished", "tools", "context", "history")

TOKENS = ("input_ids", "labels")
COLUMNS = frozenset((*_TURNS, *_QUESTIONS, *_ANSWERS, *_SYSTEM, *_BESIDE, "text", *TOKENS))

_DESCRIPTIONS = (
    "`messages` (role and content of each turn)",
    "`conversations` (ShareGPT: from and value)",
    f"a question ({', '.join(_QUESTIONS)}) and its answer ({', '.join(_ANSWERS)}; Alpaca: `instruction`, `input`, "
    "`output`)",
    "`text`",
    "`input_ids` with `labels`",
)


@dataclass(frozen=True)
class Example:
    """One example, whatever its shape was: messages, or text with its prompt.

    Attributes:
        messages: turns for the chat template; empty where the example is text.
        prompt: text before the text to be learnt.
        text: text to be learnt (all of it except what no head can learn).
        finished: False if the last answer or the text was cut: its end is then not to be learnt.
        tools: descriptions of tools for the chat template.
    """

    messages: list[Message]
    prompt: str = ""
    text: str = ""
    finished: bool = True
    tools: list[Any] | None = None


def column_for(name: str) -> str:
    """Return the column that a name means: tables made by hand have capitals and spaces in their headings."""
    return name.strip().lower()


def recognise(columns: Iterable[str]) -> frozenset[str]:
    """Return the shapes that have these columns: `tokens`, or some of `turns`, `completion`, `questions`, `text`.

    Raises:
        ValueError: there is no known shape; the message names the columns and the known shapes.
    """
    found = [plain_name(column) for column in columns]
    if set(TOKENS) <= set(found):
        return frozenset(["tokens"])
    shapes = {
        "turns": any(name in found for name in (*_TURNS, "chosen")),
        "completion": "prompt" in found and any(name in found for name in _ANSWERS),
        "questions": any(name in found for name in _QUESTIONS),
        "text": "text" in found,
    }
    if not any(shapes.values()):
        known = "; ".join(_DESCRIPTIONS)
        raise ValueError(
            f"no known shape of training data has the columns {', '.join(found) or '(none)'}. Known: {known}"
        )
    return frozenset(shape for shape, there in shapes.items() if there)


def read_example(record: Mapping[str, Any]) -> Example:
    """Read a record of a dataset as messages or text.

    Raises:
        OddChatError: the record has no known shape or several, or a turn cannot be read.
    """
    try:
        values = {name: value for name, value in decoded(record).items() if value is not None}
        example = _example(values)
        _check_characters(example)
    except RecursionError as error:
        raise OddChatError("nested too deeply") from error
    return example


def _example(values: dict[str, Any]) -> Example:
    finished = values.get("finished") not in (False, "false", "False")
    tools = read_tools(values.get("tools"))
    chat = next((name for name in _TURNS if values.get(name) not in (None, [], "")), None)
    if chat is not None:
        turns = read_turns(values[chat], chat)
        # Chats of ShareGPT were cut out of longer ones, and begin with an answer whose question is lost.
        turns = _without_leading_answers(turns) if chat == "conversations" else turns
        return Example(_with_system(turns, values), finished=finished, tools=tools)
    question, answer = _question_and_answer(values)
    if question is None:
        return _without_question(values, answer, finished, tools)
    if answer is None and "text" in values:
        raise OddChatError(f"`{question}` beside `text`", f"`{question}` and `text`: which is the chat? Remove one")
    if question == "prompt" and answer is not None and _are_texts(values, question, answer):
        return Example([], prompt=values[question], text=values[answer], finished=finished, tools=tools)
    turns = _question_turns(values, question)
    turns = turns if answer is None else _answered(turns, _as_turns(values[answer], "assistant", answer), answer)
    return Example(_with_system(turns, values), finished=finished, tools=tools)


def _question_and_answer(values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the names of the columns that hold a question and its answer.

    Raises:
        OddChatError: several columns could.
    """
    for question, answer in _STANDARDS:
        if question in values and answer in values:
            return question, answer
    questions = [name for name in _QUESTIONS if name in values]
    if "instruction" in questions and "input" in questions:  # what the instruction is about
        questions.remove("input")
    answers = [name for name in _ANSWERS if name in values]
    for names, meaning in ((questions, "question"), (answers, "answer")):
        if len(names) > 1:
            listed = " and ".join(f"`{name}`" for name in names)
            raise OddChatError(
                f"{listed} could each be the {meaning}",
                f"{listed} could each be the {meaning}: remove or rename all but one (dataset.remove_columns)",
            )
    return next(iter(questions), None), next(iter(answers), None)


def _without_question(
    values: Mapping[str, Any], answer: str | None, finished: bool, tools: list[Any] | None
) -> Example:
    if "text" in values:
        if not isinstance(values["text"], str):
            raise OddChatError("`text` is no text", f"`text` is {type(values['text']).__name__}, not text")
        return Example([], text=values["text"], finished=False)
    if answer is None:
        if not any(name in values for name in _TURNS):
            raise OddChatError("none of the columns of a chat is filled")
        return Example([])
    turns = _as_turns(values[answer], "assistant", answer)
    if all(turn["role"] == "assistant" for turn in turns):
        raise OddChatError(
            f"`{answer}` without a question", f"`{answer}` is an answer, but no column has its question"
        )
    return Example(_with_system(turns, values), finished=finished, tools=tools)


def _are_texts(values: Mapping[str, Any], *names: str) -> bool:
    """Whether an example consists of two texts, as completion endpoints serve them."""
    texts = all(isinstance(values[name], str) and not _holds_turns(values[name]) for name in names)
    return texts and not any(values.get(name) for name in (*_SYSTEM, "context", "history"))


def _question_turns(values: Mapping[str, Any], question: str) -> list[Message]:
    """Return what was said before, and the question with what it is about."""
    turns = _as_turns(values[question], "user", question)
    about = [values.get("input") if question == "instruction" else None, values.get("context")]
    about = [part for part in about if part]
    if about:
        if len(turns) != 1 or not all(isinstance(part, str) for part in about):
            raise OddChatError("`context` or `input` that cannot be put behind its question")
        turns[0]["content"] = "\n\n".join(part for part in (turns[0]["content"], *about) if part)
    return _history(values.get("history")) + turns


def _history(value: Any) -> list[Message]:
    pairs = parse_json(value, "history") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(pairs, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise OddChatError("`history` is no list of pairs of a question and its answer")
    return [turn for asked, told in pairs for turn in (message("user", asked), message("assistant", told))]


def _answered(turns: list[Message], answer: list[Message], column: str) -> list[Message]:
    """Join a question with its answer, which may be turns that repeat the question."""
    if not answer or answer[0]["role"] in ("assistant", "tool"):
        return turns + answer
    # A system prompt may stand before the question in one of the two only.
    begins = (
        answer[: len(turns)] == turns or [turn for turn in answer if turn["role"] != "system"][: len(turns)] == turns
    )
    if not begins:
        raise OddChatError(
            f"the turns of `{column}` begin with another question",
            f"the turns of `{column}` begin with {answer[0]['content'][:80]!r}, which is not the question beside it",
        )
    return answer


def _as_turns(value: Any, role: str, column: str) -> list[Message]:
    if isinstance(value, str) and not _holds_turns(value):
        return [message(role, value)]
    if not isinstance(value, (str, Sequence, Mapping)):
        raise OddChatError(
            f"`{column}` is neither text nor turns",
            f"`{column}` is {type(value).__name__} ({str(value)[:80]!r}), neither text nor turns",
        )
    return read_turns(value, column)


def _holds_turns(text: str) -> bool:
    """Whether a text is turns in JSON, as in some tables."""
    if not text.lstrip().startswith("[{"):
        return False
    try:
        turns = json.loads(text)
    except ValueError:
        return False
    return all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns)


def _without_leading_answers(turns: list[Message]) -> list[Message]:
    start = 0
    while start < len(turns) and turns[start]["role"] == "assistant":
        start += 1
    return turns[start:]


def _with_system(turns: list[Message], values: Mapping[str, Any]) -> list[Message]:
    """Add the system prompt that has a column of its own, unless the turns begin with one."""
    system = next((values[name] for name in _SYSTEM if values.get(name)), None)
    if system is None or (turns and turns[0]["role"] in ("system", "developer")):
        return turns
    return [message("system", system), *turns]


def _check_characters(example: Example) -> None:
    for text in _texts([example.messages, example.prompt, example.text, example.tools]):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = text[max(0, error.start - 20) : error.end]
            raise OddChatError(
                "half of a character (a lone surrogate)", f"half of a character (a lone surrogate) in {place!r}"
            ) from error


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, including the names of keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
