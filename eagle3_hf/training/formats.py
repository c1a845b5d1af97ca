"""The shapes that training data comes in, told apart by their columns, and what each means as a chat.

Whatever the shape, a row becomes one of three things: `messages` (roles and contents, to be put through the chat
template), text (a prompt that may be empty, and what follows it, served without a template), or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


Message = dict[str, Any]

# Columns that make a shape, in the order in which they are looked for.
SHAPES: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids", "labels"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
    "prompt": ("prompt",),
    "text": ("text",),
}

_DESCRIPTIONS = (
    "`messages` (role and content of each turn)",
    "`conversations` (ShareGPT: from and value)",
    "`instruction`, `output` and maybe `input` (Alpaca)",
    "`prompt` and `completion` (text or messages)",
    "`text`",
    "`input_ids` with `labels`",
)

# ShareGPT has no standard but usage.
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True)
class Example:
    """One row, whatever shape it came in: messages, or text with its prompt.

    Attributes:
        messages: turns for the chat template; empty where the row is text.
        prompt: text that comes before what is to be learnt.
        text: text to be learnt (all of it, but for what no head can learn).
        finished: False if the last answer or the text was cut: its end is then not to be learnt.
        tools: what the template may be told of tools.
    """

    messages: list[Message]
    prompt: str = ""
    text: str = ""
    finished: bool = True
    tools: list[Any] | None = None


def recognise(columns: Iterable[str]) -> str:
    """Name of the shape with these columns (a key of `SHAPES`).

    Raises:
        ValueError: none; the columns found and the shapes known are named.
    """
    found = list(columns)
    for name, needed in SHAPES.items():
        if set(needed) <= set(found):
            return name
    known = "; ".join(_DESCRIPTIONS)
    raise ValueError(f"no known shape of training data has the columns {', '.join(found) or '(none)'}. Known: {known}")


def read_example(row: Mapping[str, Any], shape: str) -> Example:
    """A row of a shape as messages or text.

    Raises:
        ValueError: a turn that cannot be read: no role, a role nobody knows, content that is not text.
    """
    finished = row.get("finished") is not False
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    if shape == "text":
        return Example([], text=_text(row["text"]), finished=False)
    if shape == "completion" and isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return Example([], prompt=row["prompt"], text=row["completion"], finished=finished)
    return Example(_messages(row, shape), finished=finished, tools=_without_nulls(tools) or None)


def _messages(row: Mapping[str, Any], shape: str) -> list[Message]:
    if shape == "messages":
        turns: Sequence[Mapping[str, Any]] = _turns(row["messages"])
    elif shape == "sharegpt":
        turns = _without_leading_answer([_sharegpt_turn(turn) for turn in _turns(row["conversations"])])
    elif shape == "alpaca":
        turns = _alpaca_turns(row)
    elif shape == "completion":
        turns = [*_as_turns(row["prompt"], "user"), *_as_turns(row["completion"], "assistant")]
    else:
        turns = _as_turns(row["prompt"], "user")
    return [_checked(turn) for turn in turns or ()]


def _turns(value: Any) -> list[Mapping[str, Any]]:
    """The turns of a chat, which some datasets keep as JSON."""
    turns = json.loads(value) if isinstance(value, str) and value else value or []
    odd = next((turn for turn in turns if not isinstance(turn, Mapping)), None)
    if odd is not None:
        raise ValueError(f"a turn is {type(odd).__name__} ({str(odd)[:80]!r}), not an object with role and content")
    return list(turns)


def _sharegpt_turn(turn: Mapping[str, Any]) -> Message:
    if turn.get("from") is None:
        return dict(turn)  # `conversations` of role and content are common too
    role = _SHAREGPT_ROLES.get(str(turn["from"]).lower())
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise ValueError(f"a turn of `conversations` is from {turn['from']!r}; known are {known}")
    return {"role": role, "content": turn.get("value")}


def _without_leading_answer(turns: list[Message]) -> list[Message]:
    """Chats cut out of longer ones begin with an answer whose question is lost."""
    start = 0
    while start < len(turns) and turns[start].get("role") == "assistant":
        start += 1
    return turns[start:]


def _alpaca_turns(row: Mapping[str, Any]) -> list[Message]:
    request = "\n\n".join(part for part in (row["instruction"], row.get("input")) if part)
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*turns, *_as_turns(request, "user"), *_as_turns(row["output"], "assistant")]


def _as_turns(value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [dict(turn) for turn in _turns(value)]


def _checked(turn: Mapping[str, Any]) -> Message:
    """A turn without the nulls that columnar storage adds, its content one text."""
    message = {**_without_nulls(turn), "content": turn.get("content")}
    if not message.get("role"):
        raise ValueError(f"a turn has no role, only {', '.join(message) or 'nothing'}")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        message["content"] = "".join(_part_text(part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise ValueError(f"the content of a turn ({message['role']}) is {type(content).__name__}, not text")
    return message


def _without_nulls(value: Any) -> Any:
    """Undo what columnar storage does to objects: each has the keys of all, null where it had none."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part.get("type", "text") != "text":
        raise ValueError(f"a turn has a part of type {part['type']!r}: heads are trained on text only")
    return str(part.get("text") or "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`text` is {type(value).__name__}, not text")
    return value
