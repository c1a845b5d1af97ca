"""What a tokenizer's chat template puts around the turns of a chat, found by rendering, for any template.

The template's source is not searched and no generation markers are needed: an answer is what the template adds when
the turn is rendered after its own prompt.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from .dropped_chats import OddChatError


# A text whose surroundings are looked for in a template's output.
SENTINEL = "eagle3-sentinel"

# Keys under which chat APIs and templates keep the thoughts of an answer, apart from its content.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# Tags that models put around their thoughts, for templates that do not show theirs.
KNOWN_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)

# What templates raise for a chat that they were not written for, on purpose or unintentionally.
_REJECTIONS = (TemplateError, TypeError, LookupError, AttributeError, ValueError, RecursionError)

_QUESTION = {"role": "user", "content": "Hello"}

Message = Mapping[str, Any]


class ChatTemplate:
    """What a tokenizer's chat template puts around a turn.

    Args:
        tokenizer: a tokenizer with a `chat_template`.
        template_kwargs: extra variables for the template, as serving passes them (`enable_thinking=False`, say).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; set `tokenizer.chat_template` to the target's own")
        self.tokenizer = tokenizer
        self.kwargs = dict(template_kwargs or {})
        added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        added |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        # Ids of every special token, also of those that no attribute of the tokenizer names.
        self.special_ids = sorted(set(added.values()))
        specials = sorted(added, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, specials)) or r"(?!)")
        self._closing = re.compile(rf"(?:\s|{self._special.pattern})*\Z")

    def with_tools(self, tools: Sequence[Any] | None) -> "ChatTemplate":
        """Return the same template with these tools."""
        if not tools:
            return self
        other = copy.copy(self)
        other.kwargs = {**self.kwargs, "tools": list(tools)}
        return other

    def has_special(self, text: str) -> bool:
        """Whether the text contains a special token of the tokenizer, as text that is rendered already does."""
        return self._special.search(text) is not None

    @cached_property
    def reasoning(self) -> tuple[str, str, str] | None:
        """The message key that the template reads thoughts from, and the tags that it puts around them; else None.

        They are found by rendering an answer with thoughts: the opening tag is what is new before the thoughts (or the
        end of the prompt), and the closing tag is what lies between the thoughts and the content.
        """
        prompt = self.render([_QUESTION], generation_prompt=True)
        for key in REASONING_KEYS:
            answer = {"role": "assistant", "content": SENTINEL, key: SENTINEL + "-thoughts"}
            text = self._render_or_empty([_QUESTION, answer])
            before, found, after = text.partition(SENTINEL + "-thoughts")
            if found and SENTINEL in after:
                opening = before.removeprefix(prompt).strip() if before.startswith(prompt) else ""
                opening = opening or _last_tag(before)
                return key, opening, after.partition(SENTINEL)[0].strip()
        return None

    @cached_property
    def reasoning_tags(self) -> tuple[tuple[str, str], ...]:
        """Pairs of tags that enclose thoughts: the template's own, else those that models are known to use."""
        if self.reasoning is not None and all(self.reasoning[1:]):
            return (self.reasoning[1:],)
        return KNOWN_TAGS

    def _render_or_empty(self, messages: Sequence[Message]) -> str:
        try:
            return self.render(messages, generation_prompt=False)
        except ValueError:
            return ""

    def with_thoughts(self, message: Message) -> Message:
        """Put the thoughts of an answer where the template looks for them: under its key, or before the content."""
        thoughts = next((message[key] for key in REASONING_KEYS if message.get(key)), None)
        if thoughts is None:
            return message
        plain = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        if self.reasoning is not None:
            return {**plain, self.reasoning[0]: thoughts}
        opening, closing = self.reasoning_tags[0]
        thoughts = f"{opening}\n{str(thoughts).strip()}\n{closing}\n\n"
        return {**plain, "content": thoughts + str(message.get("content") or "")}

    def message(self, text: str) -> dict[str, Any]:
        """Turn what a target wrote after its prompt into a message that the template can render again.

        What the template itself writes before an answer (a space, the name of a channel) is left to it. Thoughts stay
        in the content, as they were written, unless the template would show them there as part of the answer: then
        they go under its key for thoughts.
        """
        if self.reasoning is not None and not self._digests_thoughts:
            key, opening, closing = self.reasoning
            thoughts, found, content = text.partition(closing)
            if found:
                return {"role": "assistant", "content": content, key: thoughts.removeprefix(opening)}
        return {"role": "assistant", "content": text.removeprefix(self._frame)}

    @cached_property
    def _frame(self) -> str:
        """What the template writes between a prompt and the content of its answer, except for empty thoughts."""
        prompt = self.render([_QUESTION], generation_prompt=True)
        answered = self._render_or_empty([_QUESTION, {"role": "assistant", "content": SENTINEL}])
        frame = answered.removeprefix(prompt).partition(SENTINEL)[0] if answered.startswith(prompt) else ""
        return "" if any(tag in frame for pair in self.reasoning_tags for tag in pair) else frame

    @cached_property
    def _digests_thoughts(self) -> bool:
        """Whether the template finds thoughts in the content by itself, and writes nothing before them."""
        assert self.reasoning is not None
        _, opening, closing = self.reasoning
        answer = {"role": "assistant", "content": f"{opening}\n{SENTINEL}-thoughts\n{closing}\n\n{SENTINEL}"}
        prompt = self.render([_QUESTION], generation_prompt=True)
        shown = self._render_or_empty([_QUESTION, answer]).removeprefix(prompt).lstrip()
        return SENTINEL + "-thoughts" not in shown or shown.startswith((opening, SENTINEL))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """Render messages.

        Raises:
            OddChatError: the template rejects the messages; its own words are in the error.
        """
        chat: Any = list(messages)
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs
            )
        except _REJECTIONS as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise OddChatError(
                f"the chat template rejects it ({str(error)[:80]})",
                f"the chat template rejects the roles ({roles}): {error}",
            ) from error
        return str(text)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of rendered text, which contains its special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def user_turn(self) -> tuple[str, str]:
        """Return the text before the content of a first user turn, and the mark that ends the turn (may be empty)."""
        text = self.render([{"role": "user", "content": SENTINEL}], generation_prompt=True)
        before, found, after = text.partition(SENTINEL)
        if not found:
            raise ValueError("the chat template does not show the content of a user message")
        mark = self._special.search(after)
        return before, mark.group() if mark else after.strip()

    def end_of_turn(self, history: Sequence[Message] = (_QUESTION,)) -> str:
        """Return the text from the end of an answer's content to its end-of-turn token; empty if there is none."""
        answer = {"role": "assistant", "content": SENTINEL}
        after = self.render([*history, answer], generation_prompt=False).rpartition(SENTINEL)[2]
        return self._split("", after)[1]

    def end_of_turn_id(self) -> int | None:
        """Return the id of the token that ends an answer, None if the template writes none."""
        # Up to the mark there may be whitespace; the mark is the last token.
        ids = self.tokenize(self.end_of_turn())
        return ids[-1] if ids else None

    def turn(self, messages: Sequence[Message], finished: bool = True) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt of the last message, and those of this answer, as serving produces them."""
        prompt = self.render(messages[:-1], generation_prompt=True)
        answer = self._answer(prompt, messages, finished)
        prompt_ids = self.tokenize(prompt)
        ids = self.tokenize(prompt + answer)
        if ids[: len(prompt_ids)] != prompt_ids:
            # The tokenizer merged across the border, which serving cannot: there the prompt is tokenised alone.
            ids = prompt_ids + self.tokenize(answer)
        return prompt_ids, ids[len(prompt_ids) :]

    def _answer(self, prompt: str, messages: Sequence[Message], finished: bool) -> str:
        content = messages[-1].get("content")
        content = _without_opened_tag(prompt, content) if isinstance(content, str) else ""
        rendered = self.render(messages, generation_prompt=False)
        text = rendered[len(prompt) :]
        if not rendered.startswith(prompt) or content.strip() not in text:
            # The template rewrites even the last answer; serving appends what the model wrote to the prompt.
            if not content.strip():
                raise OddChatError(
                    "an answer without text, which the chat template renders differently from its generation prompt",
                    "the chat template renders an answer without text differently from its generation prompt; "
                    f"the prompt ends with {prompt[-40:]!r}, the rendered turn with {rendered[-80:]!r}",
                )
            text = content + self.end_of_turn(messages[:-1])
        elif content.strip():
            text = self._without_empty_thoughts(text, text.rfind(content.strip()))
        body, end = self._split(content.strip(), text)
        return body + end if finished else body

    def _without_empty_thoughts(self, text: str, start: int) -> str:
        """Drop the empty block that some templates write before an answer without thoughts; no model wrote it."""
        inserted = text[:start].strip()
        for opening, closing in self.reasoning_tags:
            if inserted.startswith(opening) and inserted.endswith(closing):
                between = inserted.removeprefix(opening).removesuffix(closing)
                return text if between.strip() else text[start:]
        return text

    def _split(self, content: str, text: str) -> tuple[str, str]:
        """Split an answer's text into body and end, which reaches to the first special token after the body."""
        content_end = text.rfind(content) + len(content) if content else 0
        closing = self._closing.search(text)
        start = max(content_end, closing.start() if closing else len(text))
        mark = self._special.search(text, start)
        return text[:start], text[start : mark.end()] if mark else ""


def _without_opened_tag(prompt: str, content: str) -> str:
    """Drop a tag (`<think>`) at the beginning of an answer if the generation prompt already ends with it."""
    opened = re.search(r"(<[^<>\s]+>)(\s*)\Z", prompt)
    if opened is None or not content.startswith(opened[1]):
        return content
    return content.removeprefix(opened[1]).removeprefix(opened[2])


def _last_tag(text: str) -> str:
    """Return the tag (`<think>`) with which a text ends, else an empty text."""
    tag = re.search(r"([<\[][^<>\[\]\s]+[>\]])\s*\Z", text)
    return tag[1] if tag else ""
