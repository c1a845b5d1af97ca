"""From chats to token ids and the exact set of tokens to learn, for any chat template.

A chat becomes the ids that serving produces: the prompt as the template renders it with `add_generation_prompt`,
followed by the answer and its end-of-turn token.

Templates may rewrite history (drop the thoughts of earlier answers, say). The sequence is always the one that serving
sees at the *last* answer; an earlier answer is supervised as far as the sequence still equals, id for id, what serving
produced at that earlier turn, and not at all where it was rewritten or split into other tokens.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ...ttt.loss import IGNORE_INDEX
from .chat_template import ChatTemplate, Message
from .dropped_chats import OddChatError
from .formats import Example
from .options import EncodingOptions
from .turns import learnt


@dataclass
class Encoded:
    """Ids of one example, and which of them are to be learnt.

    Attributes:
        input_ids: `(T)`.
        labels: `(T)`: `labels[j] = input_ids[j]` where token j is a supervised target, else -100.
        hidden: number of tokens that are not learnt only because of `mask_reasoning`.
    """

    input_ids: list[int]
    labels: list[int]
    hidden: int = 0


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | ChatTemplate,
    messages: Sequence[Message],
    *,
    max_length: int | None,
    finished: bool = True,
    last_turn_only: bool = False,
    mask_reasoning: bool = False,
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Return the token ids of a chat and, of every answer, the tokens to learn.

    For an answer at indices a..b (b = its end-of-turn token) the supervised targets are x_{a+1}..x_b: the first token
    of an answer always comes from the target itself.

    Args:
        tokenizer: a tokenizer with the chat template that serving uses (or a `ChatTemplate`, which is prepared once
            for many chats).
        messages: `role` and `content` of each turn, thoughts either in the content or under a key of their own
            (`reasoning_content`). An answer with `weight` 0 is not learnt. What follows the last answer to be learnt
            is left out.
        max_length: tokens kept from the beginning of the chat; None keeps all.
        finished: False if the last answer was cut: it then has no end-of-turn token.
        last_turn_only: learn from the last answer only.
        mask_reasoning: do not learn thoughts, nor the tags around them.
        template_kwargs: extra variables for the template.

    Returns:
        `input_ids` (T) and `labels` (T): `labels[j] = input_ids[j]` where token j is a supervised target, else -100.

    Raises:
        ValueError: `max_length` is below 1, there is no chat template, or the template rejects the messages.
    """
    options = EncodingOptions(max_length, template_kwargs, last_turn_only, mask_reasoning)
    template = tokenizer if isinstance(tokenizer, ChatTemplate) else ChatTemplate(tokenizer, template_kwargs)
    encoded = encode_messages(template, messages, finished, options)
    return {"input_ids": encoded.input_ids[:max_length], "labels": encoded.labels[:max_length]}


def encode_messages(
    template: ChatTemplate, messages: Sequence[Message], finished: bool, options: EncodingOptions
) -> Encoded:
    """Do what `encode_chat` does, for a template that serves many chats, and without cutting."""
    messages = [template.with_thoughts(_without_nulls(message)) for message in messages]
    # An answer without anything before it has no prompt, hence nothing that serving could repeat.
    given = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i > 0]
    answers = [i for i in given if learnt(messages[i])]
    if not answers:
        ids = template.tokenize(template.render(messages, generation_prompt=False)) if messages else []
        return Encoded(ids, [IGNORE_INDEX] * len(ids))
    turns = [
        template.turn(messages[: i + 1], finished or i != given[-1])
        for i in (answers[-1:] if options.last_turn_only else answers)
    ]
    input_ids = turns[-1][0] + turns[-1][1]
    encoded = Encoded(input_ids, [IGNORE_INDEX] * len(input_ids))
    for prompt, answer in turns:
        end = _common_prefix(input_ids, prompt + answer)
        thoughts = set(_thoughts(template, prompt, answer)) if options.mask_reasoning else set()
        for j in range(len(prompt) + 1, end):
            if j - len(prompt) in thoughts:
                encoded.hidden += 1
            else:
                encoded.labels[j] = input_ids[j]
    return encoded


def encode_text(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str, finished: bool) -> Encoded:
    """Encode text as a completion endpoint serves it: the prompt's ids, the text's ids and, if finished, the end.

    Without a prompt every token from the third on is a target: no position is early enough for the first two.
    """
    lead = _serve_ids(tokenizer, prompt) if prompt else []
    ids = _serve_ids(tokenizer, prompt + text)
    if ids[: len(lead)] != lead:
        # The tokenizer merged across the border, which serving cannot: there the prompt is tokenised alone.
        ids = lead + tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if finished and tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
        ids = [*ids, tokenizer.eos_token_id]
    start = max(2, len(lead) + 1)
    return Encoded(ids, [IGNORE_INDEX] * len(ids[:start]) + ids[start:])


def encode_example(
    tokenizer: PreTrainedTokenizerBase, template: ChatTemplate | None, example: Example, options: EncodingOptions
) -> Encoded:
    """Encode an example of any shape, uncut; `template` is None where the tokenizer has none.

    A `prompt` and `completion` that are texts are a question and its answer where the target has a chat template, for
    that is how it is served, unless the prompt contains special tokens and has thus been rendered already.
    """
    messages = example.messages
    if example.prompt and template is not None and not template.has_special(example.prompt):
        messages = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.text}]
    if not messages and any(options.choice) and example.text:
        raise OddChatError(
            "text that is rendered already has no turns for last_turn_only or mask_reasoning to choose from"
        )
    if not messages:
        return encode_text(tokenizer, example.prompt, example.text, example.finished)
    if template is None:
        raise OddChatError("turns, and the tokenizer has no chat template; set `tokenizer.chat_template`")
    return encode_messages(template.with_tools(example.tools), messages, example.finished, options)


def _serve_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return ids with the special tokens that the tokenizer adds, unless the text has its own at the beginning."""
    bos = tokenizer.bos_token
    own = bool(bos) and text.startswith(str(bos))
    return list(tokenizer(text, add_special_tokens=not own, verbose=False)["input_ids"])


def _without_nulls(message: Message) -> Message:
    """Undo what columnar storage does to messages: every key that any message has, null where this one has none."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _common_prefix(left: list[int], right: list[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def _thoughts(template: ChatTemplate, prompt: list[int], answer: list[int]) -> Iterator[int]:
    """Yield the indices of an answer's tokens that are thoughts or tags; thoughts that were cut reach to the end."""

    def decoded(length: int) -> int:
        return len(template.tokenizer.decode(answer[:length], clean_up_tokenization_spaces=False))

    text = str(template.tokenizer.decode(answer, clean_up_tokenization_spaces=False))
    before = str(template.tokenizer.decode(prompt[-64:], clean_up_tokenization_spaces=False)).rstrip()
    for opening, closing in template.reasoning_tags:
        opened = rf"\A|{re.escape(opening)}" if before.endswith(opening) else re.escape(opening)
        for block in re.finditer(rf"(?:{opened}).*?(?:{re.escape(closing)}|\Z)", text, re.DOTALL):
            # A token is of the block if any of its characters is: it ends behind the start, begins before the end.
            lengths = range(len(answer) + 1)
            first = bisect_right(lengths, block.start(), key=decoded) - 1
            yield from range(first, bisect_left(lengths, block.end(), key=decoded))


def render_mask(tokenizer: PreTrainedTokenizerBase, encoded: Mapping[str, Sequence[int]], colour: bool = False) -> str:
    """Render an encoded chat with its supervised targets between `[[` and `]]`, or in green on a terminal."""
    parts: list[tuple[bool, list[int]]] = []
    run: list[int] = []
    learnt = False
    for token, label in zip(encoded["input_ids"], encoded["labels"], strict=True):
        if run and (label != IGNORE_INDEX) != learnt:
            parts.append((learnt, run))
            run = []
        learnt = label != IGNORE_INDEX
        run.append(token)
    parts.append((learnt, run))
    texts = [(learnt, tokenizer.decode(run, clean_up_tokenization_spaces=False)) for learnt, run in parts]
    before, after = ("\033[1;32m", "\033[0m") if colour else ("[[", "]]")
    return "".join(f"{before}{text}{after}" if learnt else str(text) for learnt, text in texts)
