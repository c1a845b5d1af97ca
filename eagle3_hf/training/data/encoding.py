"""Encoding of training data: chats of any known shape become ids and labels; empty ones are counted and dropped."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ...ttt.loss import IGNORE_INDEX
from ...utils.logging import get_logger
from .chat_template import ChatTemplate
from .collator import Eagle3DataCollator as Eagle3DataCollator
from .dropped_chats import DroppedChats, OddChatError
from .formats import Example, read_example, recognise
from .loss_masks import Encoded, encode_example, render_mask
from .loss_masks import encode_chat as encode_chat
from .options import EncodingOptions
from .sources import Source, load_chats
from .turns import learnt


logger = get_logger(__name__)

# `datasets` caches what it encoded under a hash of the arguments and not of our code: raise this number with every
# change of the ids or labels that a chat becomes.
ENCODING = 2

# Columns of an encoded example that are removed once empty examples are dropped.
_COUNTS = ("length", "targets", "hidden")
_NOTES = ("reason", "problem", *_COUNTS)


@dataclass(frozen=True)
class MaskSummary:
    """Counts of an encoded dataset.

    Attributes:
        chats: number of encoded chats.
        empty: number of chats without a token to learn.
        cut: number of chats longer than `max_length`.
        tokens, targets: number of tokens that are kept, and of those that are learnt.
        longest: number of tokens of the longest chat before it was cut.
        hidden: number of tokens that are not learnt only because of `mask_reasoning`.
    """

    chats: int
    empty: int
    cut: int
    tokens: int
    targets: int
    longest: int
    hidden: int

    @classmethod
    def of(cls, encoded: Dataset, max_length: int | None) -> "MaskSummary":
        """Summarise what `encode_dataset` returned."""
        length, targets, hidden = (
            np.asarray(encoded[name], dtype=np.int64) for name in ("length", "targets", "hidden")
        )
        limit = np.iinfo(np.int64).max if max_length is None else max_length
        return cls(
            chats=len(encoded),
            empty=int((targets == 0).sum()),
            cut=int((length > limit).sum()),
            tokens=int(np.minimum(length, limit).sum()),
            targets=int(targets.sum()),
            longest=int(length.max(initial=0)),
            hidden=int(hidden.sum()),
        )

    @property
    def targets_everywhere(self) -> bool:
        """Whether everything is to be learnt that can be: all but two tokens of every example."""
        return self.targets > 0 and self.targets == self.tokens - 2 * self.chats

    def __str__(self) -> str:
        share = self.targets / max(self.tokens, 1)
        text = (
            f"{self.chats} chats, {self.tokens} tokens, {self.targets} of them ({share:.1%}) to learn; "
            f"the longest chat has {self.longest}; {self.cut} cut, {self.empty} with nothing to learn"
        )
        return f"{text}; {self.hidden} tokens of thoughts masked" if self.hidden else text


def prepare_dataset(
    chats: Source,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    num_proc: int | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    split: str | None = None,
    last_turn_only: bool = False,
    mask_reasoning: bool = False,
    max_empty_share: float = 0.5,
) -> Dataset:
    """Encode training data of any known shape, and drop the chats without a supervised token.

    Args:
        chats: whatever `load_chats` takes. `finished` (default True) tells whether a chat's last answer has an end;
            `tools`, where a chat has them, go to the chat template.
        tokenizer: the target's tokenizer, or a processor that holds it.
        max_length: tokens kept of each chat; None keeps all.
        num_proc: number of processes that encode.
        template_kwargs: extra variables for the chat template (`{"enable_thinking": False}`), as serving passes them.
        split: see `load_chats`.
        last_turn_only: learn from the last answer of each chat only.
        mask_reasoning: do not learn thoughts, nor the tags around them.
        max_empty_share: share of chats without a token to learn above which this is an error.

    Returns:
        A dataset with the columns `input_ids` and `labels`, as `encode_chat` makes them.

    Raises:
        ValueError: the columns are unknown, or too many chats have nothing to learn; one of them is shown with its
            mask.
    """
    options = EncodingOptions(
        max_length=max_length,
        template_kwargs=template_kwargs,
        last_turn_only=last_turn_only,
        mask_reasoning=mask_reasoning,
        num_proc=num_proc,
    )
    return prepare_chats(load_chats(chats, split=split), tokenizer, options, max_empty_share)


def prepare_chats(
    chats: Dataset, tokenizer: PreTrainedTokenizerBase, options: EncodingOptions, max_empty_share: float = 0.5
) -> Dataset:
    """Do what `prepare_dataset` does, for chats that are loaded already and with its options in one object."""
    tokenizer = as_tokenizer(tokenizer)
    encoded = encode_dataset(chats, tokenizer, options)
    summary = MaskSummary.of(encoded, options.max_length)
    logger.info("Training data: %s.", summary)
    if summary.empty:
        _report_empty(dropped_chats(encoded, tokenizer), summary, options.max_length, max_empty_share)
    if summary.cut:
        logger.warning(
            "%d of %d chats are longer than max_length (%s); cut.", summary.cut, summary.chats, options.max_length
        )
    if options.mask_reasoning and not summary.hidden:
        logger.warning("mask_reasoning found no thoughts in %d chats: are they in the data at all?", summary.chats)
    kept = np.flatnonzero(np.asarray(encoded["targets"]))
    examples = encoded if len(kept) == len(encoded) else encoded.select(kept)
    return examples.remove_columns(list(_NOTES))


def encode_dataset(chats: Dataset, tokenizer: PreTrainedTokenizerBase, options: EncodingOptions) -> Dataset:
    """Encode every chat, also those with nothing to learn, to `input_ids`, `labels`, and notes.

    The notes are `reason` (why a chat has nothing to learn, else empty), `problem` (what exactly, where it could not
    be encoded), `length` (tokens before cutting), `targets` and `hidden`. A chat that cannot be encoded becomes an
    empty example; only examples that are tokens already raise. `dropped_chats` counts the reasons.
    """
    tokenizer = as_tokenizer(tokenizer)
    shapes = recognise(chats.column_names)
    if not shapes & {"turns", "questions"} and any(options.choice):
        asked = "last_turn_only" if options.last_turn_only else "mask_reasoning"
        (shape,) = shapes
        raise ValueError(
            f"{asked} needs turns, but these examples are {shape}: pass chats, or mask the labels yourself"
        )
    kwargs: dict[str, Any] = {"options": options.of_a_chat(), "encoding": ENCODING}
    encode: Any = _take_tokens
    if "tokens" not in shapes:
        template = ChatTemplate(tokenizer, options.template_kwargs) if tokenizer.chat_template else None
        _check_template(template, shapes)
        encode = _encode_chat
        kwargs |= {"tokenizer": tokenizer, "template": template}
    encoded = chats.map(
        encode, fn_kwargs=kwargs, remove_columns=chats.column_names, num_proc=options.num_proc, desc="Encoding chats"
    )
    if "tokens" in shapes and MaskSummary.of(encoded, options.max_length).targets_everywhere:
        logger.warning("Every token of every example is to be learnt: do the labels leave out the prompts (-100)?")
    return encoded


def _check_template(template: ChatTemplate | None, shapes: frozenset[str]) -> None:
    if template is None:
        if not shapes & {"text", "completion"}:
            raise ValueError("the tokenizer has no chat template; set `tokenizer.chat_template` to the target's own")
    elif shapes != {"text"} and not template.end_of_turn():
        logger.warning("The chat template writes no end-of-turn token: the head cannot learn where answers end.")


def _encode_chat(
    chat: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate | None,
    options: EncodingOptions,
    encoding: int,
) -> dict[str, Any]:
    try:
        example = read_example(chat)
        encoded = encode_example(tokenizer, template, example, options)
    except (ValueError, RecursionError) as error:
        # One odd chat among many must not end the run; that it was dropped, and why, is reported.
        odd = error if isinstance(error, OddChatError) else OddChatError("it cannot be encoded", str(error))
        return _noted([], [], None, reason=odd.reason, problem=str(odd))
    noted = _noted(encoded.input_ids, encoded.labels, options.max_length, hidden=encoded.hidden)
    return noted if noted["targets"] else {**noted, "reason": _why_empty(example, encoded, options.max_length)}


def _why_empty(example: Example, encoded: Encoded, max_length: int | None) -> str:
    """Say why an encoded example has no token to learn, in words that fit other examples too."""
    answers = [turn for i, turn in enumerate(example.messages) if turn["role"] == "assistant" and i > 0]
    if any(label != IGNORE_INDEX for label in encoded.labels[2:]):
        return f"cut before the first token to learn (max_length {max_length})"
    if not example.messages:
        return "a text too short to learn from" if example.prompt or example.text else "no turns"
    if not answers:
        return "no answer behind a question"
    if not any(map(learnt, answers)):
        return "all its answers have weight 0"
    if encoded.hidden:
        return "nothing but thoughts, which mask_reasoning leaves out"
    if not any(answer["content"] or answer.get("tool_calls") for answer in answers):
        return "empty answers"
    return "answers of one token without an end, or rewritten by the chat template"


def _take_tokens(example: Mapping[str, Any], options: EncodingOptions, encoding: int) -> dict[str, Any]:
    ids, labels = example["input_ids"], example["labels"]
    if ids is None or labels is None:
        raise ValueError(f"an example has no {'input_ids' if ids is None else 'labels'}, but others are tokens")
    if len(ids) != len(labels):
        raise ValueError(f"a chat has {len(ids)} input_ids, but {len(labels)} labels")
    for j, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (IGNORE_INDEX, token):
            raise ValueError(f"labels[{j}] is {label}, but input_ids[{j}] is {token}; labels are not to be shifted")
    noted = _noted(ids, labels, options.max_length)
    return noted if noted["targets"] else {**noted, "reason": "no label but -100 from the third on"}


def _noted(
    ids: list[int], labels: list[int], max_length: int | None, reason: str = "", problem: str = "", hidden: int = 0
) -> dict[str, Any]:
    targets = sum(label != IGNORE_INDEX for label in labels[2:max_length])
    example = {"input_ids": ids[:max_length], "labels": labels[:max_length], "reason": reason, "problem": problem}
    return {**example, "length": len(ids), "targets": targets, "hidden": hidden}


def dropped_chats(encoded: Dataset, tokenizer: PreTrainedTokenizerBase) -> DroppedChats:
    """Count why chats of `encode_dataset` have nothing to learn, with the mask of one chat for each reason."""
    dropped = DroppedChats()
    empty = np.flatnonzero(np.asarray(encoded["targets"]) == 0)
    for number, reason in zip(empty.tolist(), encoded.select(empty)["reason"], strict=True):
        dropped.add(number, reason)
    for reason, (number, _) in dropped.examples.items():
        example = encoded[number]
        shown = example["problem"] or render_mask(tokenizer, example)[-1000:] or "(no tokens)"
        dropped.examples[reason] = (number, shown)
    return dropped


def _report_empty(dropped: DroppedChats, summary: MaskSummary, max_length: int | None, max_empty_share: float) -> None:
    message = f"{summary.empty} of {summary.chats} chats have no token to learn and are dropped:\n{dropped}"
    if summary.empty > max_empty_share * summary.chats:
        raise ValueError(
            f"{message}\nCheck that answers have the role `assistant`, that max_length ({max_length}) reaches beyond "
            "the prompts, and that the chat template is the target's."
        )
    logger.warning("%s", message)


def as_tokenizer(processor: Any) -> PreTrainedTokenizerBase:
    """Return the tokenizer itself; that of a multimodal processor comes with the processor's chat template.

    Raises:
        ValueError: there is none, as in a processor of images or sounds alone.
    """
    if isinstance(processor, PreTrainedTokenizerBase):
        return processor
    tokenizer = getattr(processor, "tokenizer", None)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"{type(processor).__name__} has no tokenizer for text: pass the target's tokenizer")
    template = getattr(processor, "chat_template", None)
    if template and not tokenizer.chat_template:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def count_tokens(dataset: Iterable[Mapping[str, Any]], vocab_size: int) -> Tensor:
    """Count `(V,)` int64 how often each token is a supervised target in a dataset with a `labels` column."""
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
    """Return the ids that a draft vocabulary must contain, ascending: special tokens, ends of turn and of sequence."""
    tokenizer = as_tokenizer(tokenizer)
    ids: set[int | None] = set(tokenizer.all_special_ids)
    if tokenizer.chat_template:
        ids.add(ChatTemplate(tokenizer).end_of_turn_id())
    for eos in (tokenizer.eos_token_id, getattr(generation_config, "eos_token_id", None)):
        ids.update(eos if isinstance(eos, (list, tuple)) else [eos])
    return sorted(int(token) for token in ids if token is not None)
