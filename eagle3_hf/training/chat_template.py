"""What a tokenizer's chat template puts around the turns of a chat, found by rendering, for any template.

Nothing is searched for in the template's source and no generation markers are needed: an answer is what the template
adds when the turn is rendered on top of its own prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase


# Stands for a text whose surroundings we want to see in a template's output.
SENTINEL = "eagle3-sentinel"

Message = Mapping[str, Any]


class ChatTemplate:
    """What a tokenizer's chat template puts around a turn.

    Args:
        tokenizer: with a `chat_template`.
        template_kwargs: extra variables of the template, as serving passes them (`enable_thinking=False`, say).
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

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The template's text. ValueError with the template's own words where it refuses the messages."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs
            )
        except (TemplateError, TypeError, KeyError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(f"the chat template refuses the roles ({roles}): {error}") from error
        return str(text)

    def tokenize(self, text: str) -> list[int]:
        """Ids of rendered text, which carries its special tokens already."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def user_turn(self) -> tuple[str, str]:
        """Text before the content of a first user turn, and the mark that ends it (may be empty)."""
        text = self.render([{"role": "user", "content": SENTINEL}], generation_prompt=True)
        before, found, after = text.partition(SENTINEL)
        if not found:
            raise ValueError("the chat template does not show the content of a user message")
        mark = self._special.search(after)
        return before, mark.group() if mark else after.strip()

    def end_of_turn(self, history: Sequence[Message] = ({"role": "user", "content": "Hello"},)) -> str:
        """Text from the end of an answer's content to its end-of-turn token; empty if the template writes none."""
        answer = {"role": "assistant", "content": SENTINEL}
        after = self.render([*history, answer], generation_prompt=False).rpartition(SENTINEL)[2]
        return self._split("", after)[1]

    def end_of_turn_id(self) -> int | None:
        """Id of the token that ends an answer, None if the template writes none."""
        # Up to the mark there may be whitespace; the mark is the last token.
        ids = self.tokenize(self.end_of_turn())
        return ids[-1] if ids else None

    def turn(self, messages: Sequence[Message], finished: bool = True) -> tuple[list[int], list[int]]:
        """Ids of the prompt of the last message, and of the answer that it is, as serving produces them."""
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
                raise ValueError(
                    "the chat template renders an answer without text differently from its generation prompt; "
                    f"the prompt ends with {prompt[-40:]!r}, the rendered turn with {rendered[-80:]!r}"
                )
            text = content + self.end_of_turn(messages[:-1])
        body, end = self._split(content.strip(), text)
        return body + end if finished else body

    def _split(self, content: str, text: str) -> tuple[str, str]:
        """Split an answer's text into body and the end up to the first special token behind it."""
        content_end = text.rfind(content) + len(content) if content else 0
        closing = self._closing.search(text)
        start = max(content_end, closing.start() if closing else len(text))
        mark = self._special.search(text, start)
        return text[:start], text[start : mark.end()] if mark else ""


def _without_opened_tag(prompt: str, content: str) -> str:
    """Drop from an answer a tag (`<think>`) with which the generation prompt already ends."""
    opened = re.search(r"(<[^<>\s]+>)(\s*)\Z", prompt)
    if opened is None or not content.startswith(opened[1]):
        return content
    return content.removeprefix(opened[1]).removeprefix(opened[2])
