"""Turns of a chat in the various forms of datasets, as the messages that a chat template takes.

The differences between datasets are handled here: names of keys and roles, content in parts, thoughts, tool calls, and
weights.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .dropped_chats import OddChatError


Message = dict[str, Any]

# Names that datasets have for the roles of chat APIs; there is no standard.
_ROLES = {
    "user": ("human", "prompter"),
    "assistant": ("gpt", "chatgpt", "bing", "bard", "claude", "model", "bot", "chatbot", "ai", "function_call"),
    "tool": ("observation", "function_response", "tool_response"),
    "system": (),
    "developer": (),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in (role, *names)}

_CONTENT_KEYS = ("content", "value", "text", "parts")

# A turn may also be a question with its answer.
_PAIRS = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"))

_TEXT_PARTS = ("text", "input_text", "output_text")
_THOUGHT_PARTS = ("thinking", "reasoning")


def read_turns(value: Any, column: str) -> list[Message]:
    """Read the turns of a chat, which some datasets keep as JSON.

    Raises:
        OddChatError: the value is not a list of turns, or one of them cannot be read.
    """
    turns = parse_json(value, column) if isinstance(value, str) and value.strip() else value or []
    if isinstance(turns, Mapping):
        turns = [turns]
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise OddChatError(f"`{column}` is no list of turns", f"`{column}` is {_shown(turns)}, not a list of turns")
    return [message for turn in turns for message in _read_turn(turn, column)]


def parse_json(text: str, column: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OddChatError(f"`{column}` is a text, but not JSON", f"`{column}` is {_shown(text)}: {error}") from error


def _read_turn(turn: Any, column: str) -> list[Message]:
    if not isinstance(turn, Mapping):
        raise OddChatError("a turn without a role", f"a turn is {_shown(turn)}, not an object with role and content")
    if turn.get("role") is None and turn.get("from") is None:
        for question, answer in _PAIRS:
            if turn.get(question) is not None and turn.get(answer) is not None:
                return [message("user", turn[question]), message("assistant", turn[answer])]
        names = ", ".join(map(str, turn)) or "nothing"
        raise OddChatError("a turn without a role", f"a turn has no role, only {names}")
    rest = {key: value for key, value in turn.items() if key not in ("role", "from", *_CONTENT_KEYS)}
    content = next((turn[key] for key in _CONTENT_KEYS if turn.get(key) is not None), None)
    return [message(_role(turn, column), content, **rest)]


def _role(turn: Mapping[str, Any], column: str) -> str:
    """Return the role under its name in chat APIs; an unknown one is left to the chat template, which may know it."""
    name = turn["role"] if turn.get("role") is not None else turn["from"]
    if not isinstance(name, str):
        raise OddChatError("a role that is no text", f"the role of a turn is {_shown(name)}, not text")
    role = _ROLE_OF.get(name.strip().lower())
    if role is None and turn.get("role") is None:
        known = ", ".join(_ROLE_OF)
        raise OddChatError(
            f"a turn is from {name[:40]!r}",
            f"a turn of `{column}` is from {name!r}; known are {known}: rename or drop it",
        )
    return role or name


def message(role: str, content: Any, **rest: Any) -> Message:
    """Make a message with one text as its content, and without the nulls that columnar storage adds."""
    text, thoughts = _text_of(role, content)
    read: Message = {"role": role, "content": text, **without_nulls(rest)}
    if thoughts:
        read.setdefault("reasoning_content", thoughts)
    if read.get("tool_calls"):
        read["tool_calls"] = [_read_call(call) for call in _list_of_calls(read["tool_calls"])]
    if role == "assistant":
        learnt(read)
    return read


def _text_of(role: str, content: Any) -> tuple[str, str]:
    """Return the text of a turn, and the thoughts beside it."""
    if content is None or isinstance(content, str):
        # With tool calls APIs have null as the content; servers pass an empty text to templates.
        return content or "", ""
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, Sequence):
        raise OddChatError(
            "the content of a turn is no text", f"the content of a turn ({role}) is {_shown(content)}, not text"
        )
    text, thoughts = "", ""
    for part in parts:
        kind, words = _part(role, part)
        if kind in _THOUGHT_PARTS:
            thoughts += words
        else:
            text += words
    return text, thoughts


def _part(role: str, part: Any) -> tuple[str, str]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        raise OddChatError(
            "the content of a turn is no text", f"the content of a turn ({role}) has a part that is {_shown(part)}"
        )
    kind = part.get("type") or "text"
    if kind not in (*_TEXT_PARTS, *_THOUGHT_PARTS):
        raise OddChatError(
            f"a part of type {str(kind)[:40]!r}",
            f"a turn ({role}) has a part of type {kind!r}: heads are trained on text only",
        )
    words = part.get(kind) if kind in _THOUGHT_PARTS and part.get(kind) is not None else part.get("text")
    if words is not None and not isinstance(words, str):
        raise OddChatError(
            "the content of a turn is no text", f"a part of a turn ({role}) has {_shown(words)} in place of its text"
        )
    return kind, words or ""


# ----- tools and weights ---------------------------------------------------------------------------------------------


def _list_of_calls(calls: Any) -> list[Any]:
    calls = parse_json(calls, "tool_calls") if isinstance(calls, str) else calls
    calls = [calls] if isinstance(calls, Mapping) else calls
    odd = calls if not isinstance(calls, list) else next((c for c in calls if not isinstance(c, Mapping)), None)
    if odd is not None:
        raise OddChatError("`tool_calls` is no list of calls", f"`tool_calls` holds {_shown(odd)}, not a call")
    return calls


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Read a call with its arguments as an object, as servers pass it to templates; APIs send them as JSON."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _read_call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "arguments": {} if arguments is None else arguments}


def read_tools(value: Any) -> list[Any] | None:
    """Read descriptions of tools for the chat template: a list, its JSON, or a list of JSON."""
    tools = parse_json(value, "tools") if isinstance(value, str) and value.strip() else value or None
    tools = [tools] if isinstance(tools, Mapping) else tools
    if tools is not None and not isinstance(tools, list):
        raise OddChatError("`tools` is no list", f"`tools` is {_shown(tools)}, not a list")
    return [
        parse_json(tool, "tools") if isinstance(tool, str) else without_nulls(tool) for tool in tools or ()
    ] or None


def learnt(answer: Mapping[str, Any]) -> bool:
    """Whether an answer is to be learnt: not with `weight` 0. Fractions are not supported.

    Raises:
        OddChatError: the weight is not 0, 1 or null.
    """
    weight = answer.get("weight")
    if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
        raise OddChatError(
            "a weight other than 0 and 1",
            f"the `weight` of an answer is {weight!r}; known are 0 (not learnt), 1 and null (learnt)",
        )
    return weight is None or bool(weight)


def without_nulls(value: Any) -> Any:
    """Remove the nulls that columnar storage adds to objects, each of which has the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return f"{type(value).__name__} ({str(value)[:80]!r})"
