"""Chats to token ids and the exact set of tokens to learn, for any chat template.

A chat becomes the ids that serving produces: the prompt as the template renders it with `add_generation_prompt`,
followed by the answer and its end-of-turn token.

Templates may rewrite history (drop the thoughts of earlier answers, say). The sequence is always the one that serving
sees at the *last* answer; an earlier answer is supervised as far as the sequence still equals, id for id, what serving
produced at that earlier turn, and not at all where it was rewritten or split into other tokens.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..ttt.loss import IGNORE_INDEX
from .chat_template import ChatTemplate, Message


logger = logging.getLogger(__name__)


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | ChatTemplate,
    messages: Sequence[Message],
    *,
    max_length: int | None,
    finished: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, list[int]]:
    """Token ids of a chat and, of every answer, the tokens to learn.

    For an answer at indices a..b (b = its end-of-turn token) the supervised targets are x_{a+1}..x_b: the first token
    of an answer always comes from the target itself.

    Args:
        tokenizer: with the chat template that serving uses (or a `ChatTemplate`, to prepare it once for many chats).
        messages: `role` and `content` of each turn. What follows the last answer is left out.
        max_length: tokens to keep from the head of the chat; None keeps all.
        finished: False if the last answer was cut: it then has no end-of-turn token.
        template_kwargs: extra variables for the template.

    Returns:
        `input_ids` (T) and `labels` (T): `labels[j] = input_ids[j]` where token j is a supervised target, else -100.

    Raises:
        ValueError: `max_length` below 1, no chat template, or messages that the template refuses.
    """
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1, or None for no limit")
    template = tokenizer if isinstance(tokenizer, ChatTemplate) else ChatTemplate(tokenizer, template_kwargs)
    messages = [_without_nulls(message) for message in messages]
    # An answer without anything before it has no prompt, hence nothing that serving could repeat.
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and i > 0]
    if not answers:
        ids = template.tokenize(template.render(messages, generation_prompt=False)) if messages else []
        return {"input_ids": ids[:max_length], "labels": [IGNORE_INDEX] * len(ids[:max_length])}
    turns = [template.turn(messages[: i + 1], finished or i != answers[-1]) for i in answers]
    input_ids = turns[-1][0] + turns[-1][1]
    labels = [IGNORE_INDEX] * len(input_ids)
    for prompt, answer in turns:
        end = _common_prefix(input_ids, prompt + answer)
        for j in range(len(prompt) + 1, end):
            labels[j] = input_ids[j]
    return {"input_ids": input_ids[:max_length], "labels": labels[:max_length]}


def _without_nulls(message: Message) -> Message:
    """Undo what columnar storage does to messages: every key that any message has, null where this one has none."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _common_prefix(left: list[int], right: list[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))


def render_mask(tokenizer: PreTrainedTokenizerBase, encoded: Mapping[str, Sequence[int]]) -> str:
    """The text of an encoded chat with its supervised targets between `[[` and `]]`."""
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
    return "".join(f"[[{text}]]" if learnt else str(text) for learnt, text in texts)


def count_tokens(dataset: Iterable[Mapping[str, Any]], vocab_size: int) -> Tensor:
    """`(V,)` int64: how often each token is a supervised target in a dataset with a `labels` column."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for labels in _label_batches(dataset):
        targets = labels[labels != IGNORE_INDEX]
        if targets.size and not 0 <= targets.min() <= targets.max() < vocab_size:
            bad = targets[(targets < 0) | (targets >= vocab_size)][0]
            raise ValueError(f"label {bad} is outside the target's vocabulary 0..{vocab_size - 1}; another tokenizer?")
        counts += np.bincount(targets, minlength=vocab_size)
    return torch.from_numpy(counts)


def _label_batches(dataset: Iterable[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    if isinstance(dataset, Dataset):
        for batch in dataset.select_columns("labels").with_format("numpy").iter(batch_size=1000):
            yield np.concatenate([np.asarray(labels, dtype=np.int64) for labels in batch["labels"]])
    else:
        for example in dataset:
            yield np.asarray(example["labels"], dtype=np.int64)


def special_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> list[int]:
    """Ascending ids that a draft vocabulary must contain: special tokens, every end of turn and end of sequence."""
    ids: set[int | None] = set(tokenizer.all_special_ids)
    if tokenizer.chat_template:
        ids.add(ChatTemplate(tokenizer).end_of_turn_id())
    for eos in (tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)):
        ids.update(eos if isinstance(eos, (list, tuple)) else [eos])
    return sorted(int(token) for token in ids if token is not None)


def load_chats(source: str | os.PathLike[str] | Dataset | Sequence[Mapping[str, Any]]) -> Dataset:
    """Chats as a dataset with a `messages` column (or `input_ids` and `labels`, for chats that are tokens already).

    Args:
        source: a JSONL file with one object a line, a list of such objects, or a dataset.

    Raises:
        ValueError: a line that is not JSON, or neither of the two kinds of columns.
    """
    if isinstance(source, (str, os.PathLike)):
        source = _read_json_lines(Path(source))
    chats = source if isinstance(source, Dataset) else Dataset.from_list([dict(chat) for chat in source])
    if len(chats) == 0:
        raise ValueError("there are no chats to train on: the file or dataset is empty")
    if "messages" not in chats.column_names and not _is_tokenized(chats):
        raise ValueError(
            f"chats need a `messages` column (role and content of each turn), or `input_ids` with `labels`; "
            f"found {', '.join(chats.column_names)}"
        )
    return chats


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    chats = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                chats.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); was the file cut off?") from error
    return chats


def _is_tokenized(chats: Dataset) -> bool:
    return {"input_ids", "labels"} <= set(chats.column_names)


def prepare_dataset(
    chats: str | os.PathLike[str] | Dataset | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    num_proc: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> Dataset:
    """Encode chats for training, and drop those without a supervised token.

    Args:
        chats: whatever `load_chats` takes. `finished` (default True) tells whether a chat's last answer has an end.
        tokenizer: the target's.
        max_length: tokens to keep of each chat; None keeps all.
        num_proc: processes to encode with.
        template_kwargs: extra variables for the chat template.

    Returns:
        A dataset with the columns `input_ids` and `labels`, as `encode_chat` makes them.

    Raises:
        ValueError: more than half of the chats have nothing to learn; shows one of them with its mask.
    """
    chats = load_chats(chats)
    kwargs: dict[str, Any] = {"max_length": max_length}
    if _is_tokenized(chats):
        encode: Any = _cut_row
    else:
        encode, kwargs["template"] = _encode_row, ChatTemplate(tokenizer, template_kwargs)
        if not kwargs["template"].end_of_turn():
            logger.warning("The chat template writes no end-of-turn token: the head cannot learn where answers end.")
    encoded = chats.map(
        encode, fn_kwargs=kwargs, remove_columns=chats.column_names, num_proc=num_proc, desc="Encoding chats"
    )
    kept = encoded.filter(_is_supervised, num_proc=num_proc, desc="Dropping chats without targets")
    dropped = len(encoded) - len(kept)
    if dropped:
        _report_dropped(encoded, dropped, tokenizer, max_length)
    return kept.remove_columns("problem")


def _encode_row(row: Mapping[str, Any], template: ChatTemplate, max_length: int | None) -> dict[str, Any]:
    finished = row.get("finished")
    try:
        encoded = encode_chat(template, row["messages"], max_length=max_length, finished=finished is not False)
    except ValueError as error:
        # One odd chat among many must not end the run; that it was dropped, and why, is reported.
        return {"input_ids": [], "labels": [], "problem": str(error)}
    return {**encoded, "problem": ""}


def _cut_row(row: Mapping[str, Any], max_length: int | None) -> dict[str, Any]:
    ids, labels = row["input_ids"], row["labels"]
    if len(ids) != len(labels):
        raise ValueError(f"a chat has {len(ids)} input_ids, but {len(labels)} labels")
    for j, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE_INDEX, token):
            raise ValueError(f"labels[{j}] is {label}, but input_ids[{j}] is {token}; labels are not to be shifted")
    return {"input_ids": ids[:max_length], "labels": labels[:max_length], "problem": ""}


def _is_supervised(row: Mapping[str, Any]) -> bool:
    return any(label != IGNORE_INDEX for label in row["labels"][2:])


def _report_dropped(
    encoded: Dataset, dropped: int, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> None:
    example = next(row for row in encoded if not _is_supervised(row))
    shown = example["problem"] or render_mask(tokenizer, example)[-1000:] or "(no tokens)"
    message = f"{dropped} of {len(encoded)} chats have no token to learn. The first of them: {shown}"
    if 2 * dropped > len(encoded):
        raise ValueError(
            f"{message}\nCheck that answers have the role `assistant`, that max_length ({max_length}) reaches beyond "
            "the prompts, and that the chat template is the target's."
        )
    logger.warning("%s", message)


@dataclass
class Eagle3DataCollator:
    """Right-pad examples to one batch.

    `input_ids`, `attention_mask` and `labels` become `(B, T)`; stored features come along where the examples have
    them: `features (B, T, A * Ht)`, `last_hidden (B, T, Ht)` and `top1 (B, T)` (padded with -1), in their own dtypes.

    Args:
        pad_token_id: fills `input_ids`; never attended to, never a target.
        pad_to_multiple_of: round T up to a multiple of this.
    """

    pad_token_id: int
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise ValueError("pad_token_id is None; pass `tokenizer.pad_token_id`, or the eos id where there is none")

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        lengths = [len(example["input_ids"]) for example in examples]
        multiple = self.pad_to_multiple_of or 1
        width = -(-max(lengths) // multiple) * multiple
        batch = {"attention_mask": _pad([torch.ones(length, dtype=torch.int64) for length in lengths], width, 0)}
        fills = {"input_ids": self.pad_token_id, "labels": IGNORE_INDEX, "features": 0, "last_hidden": 0, "top1": -1}
        for name, fill in fills.items():
            if any(name in example for example in examples) or name == "labels":
                batch[name] = _pad(_column(examples, name, lengths), width, fill)
        batch["labels"][:, :2] = IGNORE_INDEX  # no row is early enough to learn them, and Trainer counts what is left
        return batch


def _column(examples: Sequence[Mapping[str, Any]], name: str, lengths: list[int]) -> list[Tensor]:
    column = []
    for i, (example, length) in enumerate(zip(examples, lengths, strict=True)):
        if name not in example:
            raise ValueError(f"example {i} of the batch has no `{name}`; encode chats with `prepare_dataset`")
        value = example[name]
        value = value if isinstance(value, Tensor) else torch.tensor(value)
        if len(value) != length:
            raise ValueError(f"example {i} has {length} input_ids, but {len(value)} `{name}`")
        column.append(value)
    return column


def _pad(rows: Sequence[Tensor], width: int, fill: int) -> Tensor:
    padded = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), fill)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
