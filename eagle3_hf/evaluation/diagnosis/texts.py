"""The texts of a diagnosis: chats whose answers are given, or written by the target."""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...decoding.attachments import without_attachment
from ...training.data.encoding import as_tokenizer, dropped_chats, encode_dataset
from ...training.data.options import EncodingOptions
from ...training.data.sources import load_chats
from ...ttt.loss import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class TrueText:
    """A chat as token ids.

    Attributes:
        task: Name of the task.
        ids: (T,) int64.
        is_answer: (T,) bool, the tokens of answers that a head may draft. The first token of an answer is not among
            them: the prefill gives it.
    """

    task: str
    ids: torch.Tensor
    is_answer: torch.Tensor

    @property
    def roots(self) -> list[int]:
        """The first token of each answer, below which the first round of the answer drafts."""
        marked = self.is_answer.tolist()
        return [at - 1 for at in range(2, len(marked)) if marked[at] and not marked[at - 1]]

    def end(self, root: int) -> int:
        """Return the index of the last token of the answer that begins at `root`."""
        after = self.is_answer[root + 1 :].logical_not().nonzero()
        return root + int(after[0]) if len(after) else len(self.ids) - 1


def load_texts(
    data: Any,
    tokenizer: PreTrainedTokenizerBase,
    options: EncodingOptions,
    split: str | None = None,
    most: int | None = None,
    seed: int = 0,
) -> list[TrueText]:
    """Encode chats as training and serving do.

    Args:
        data: Whatever [`load_chats`] takes, or such sources by the name of their task.
        tokenizer: The target's tokenizer.
        options: How chats are encoded.
        split: Split of the data.
        most: Number of chats of each task, chosen at random; `None` for all.
        seed: Seed of that choice.

    Raises:
        ValueError: no chat has an answer behind a prompt.
    """
    sources = data if _is_by_task(data) else {_name_of(data): data}
    texts = []
    for task, source in sources.items():
        chats = load_chats(source, split=split)
        if most is not None and len(chats) > most:
            chats = chats.select(sorted(random.Random(seed).sample(range(len(chats)), most)))
        encoded = encode_dataset(chats, as_tokenizer(tokenizer), options)
        found = [_text(task, example) for example in encoded if example["targets"]]
        if not found:
            raise ValueError(
                f"{task}: none of {len(chats)} chats has an answer to draft:\n{dropped_chats(encoded, tokenizer)}"
            )
        texts += found
    return texts


def own_answers(text: TrueText, target: Any, max_new_tokens: int) -> TrueText:
    """Return the text with its first answer, and what follows, replaced by the target's greedy answer.

    Answers of one token leave nothing to draft: `is_answer` is then false everywhere.
    """
    prompt = text.ids[: text.roots[0]][None].to(input_device(target))
    with torch.no_grad(), without_attachment(target):
        ids = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )[0].cpu()
    is_answer = torch.zeros(len(ids), dtype=torch.bool)
    is_answer[prompt.shape[1] + 1 :] = True
    return replace(text, ids=ids, is_answer=is_answer)


def _text(task: str, example: Mapping[str, Any]) -> TrueText:
    is_answer = torch.tensor(example["labels"]) != IGNORE_INDEX
    is_answer[:2] = False  # no position is early enough to draft them
    return TrueText(task, torch.tensor(example["input_ids"]), is_answer)


def _is_by_task(data: Any) -> bool:
    """Whether these are sources by task, and not one data set whose splits have names."""
    return isinstance(data, dict) and all(isinstance(task, str) for task in data)


def _name_of(source: Any) -> str:
    return Path(source).name.split(".")[0] if isinstance(source, (str, os.PathLike)) else "chats"


def input_device(target: Any) -> torch.device:
    """Return the device on which a target expects its ids; that of its hooks where weights are offloaded."""
    device = target.get_input_embeddings().weight.device
    return target.device if device.type == "meta" else device


__all__ = ["TrueText", "input_device", "load_texts", "own_answers"]
