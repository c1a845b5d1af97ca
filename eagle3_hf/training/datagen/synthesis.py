"""Chats that a target writes itself: first the user turn, then the answer.

A head learns to predict its target, so the best answers to learn from are the target's own. An instruction-tuned model
also writes user turns, if its prompt is the chat template's text up to the content of a user turn; seed phrases steer
the subject.
"""

import json
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat_template import ChatTemplate
from .local_writer import TargetWriter, check_randomness, seeded, until


# A target that has written no user turn in so many attempts is assumed to write none at all.
MAX_ATTEMPTS = 20


@dataclass
class _Writer:
    """A target with the settings of what it writes."""

    writer: TargetWriter
    seeds: Sequence[str]
    max_new_tokens: int
    max_user_tokens: int
    temperature: float
    top_p: float
    greedy_share: float

    def __post_init__(self) -> None:
        self.template = self.writer.template
        self.user_prefix, self.user_mark = self.template.user_turn()
        self.user_ends = sorted({*self.writer.ends, *self.template.special_ids})

    def batch(self, size: int, draw: random.Random) -> list[dict[str, Any]]:
        """Write `size` chats with the random numbers of `draw` and of torch."""
        users = self._user_turns(size, draw)
        greedy = [draw.random() < self.greedy_share for _ in range(size)]
        chats = [[{"role": "user", "content": user}] for user in users]
        prompts = [self.template.tokenize(self.template.render(chat, generation_prompt=True)) for chat in chats]
        answers = self.writer.generate(prompts, self.max_new_tokens, self.writer.ends, self.temperature, greedy=greedy)
        return [self._record(*parts) for parts in zip(chats, answers, greedy, strict=True)]

    def _record(self, chat: list[dict[str, str]], ids: list[int], greedy: bool) -> dict[str, Any]:
        text, finished = self.writer.text(ids)
        return {
            "messages": [*chat, self.template.message(text)],
            "decoding": "greedy" if greedy else f"temperature_{self.temperature:g}",
            "finished": finished,
        }

    def _user_turns(self, size: int, draw: random.Random) -> list[str]:
        turns = [""] * size
        for _ in range(MAX_ATTEMPTS):
            empty = [i for i, turn in enumerate(turns) if not turn]
            if not empty:
                return turns
            for i, turn in zip(empty, self._attempt_user_turns(len(empty), draw), strict=True):
                turns[i] = turn
        if all(turns):
            return turns
        raise RuntimeError(
            f"the target wrote an empty user turn {MAX_ATTEMPTS} consecutive times after the prompt "
            f"{self.user_prefix[-80:]!r}; pass seed phrases for it to continue"
        )

    def _attempt_user_turns(self, size: int, draw: random.Random) -> list[str]:
        seeds = [draw.choice(self.seeds) if self.seeds else "" for _ in range(size)]
        prompts = [self.template.tokenize(self.user_prefix + seed) for seed in seeds]
        drawn = self.writer.generate(prompts, self.max_user_tokens, self.user_ends, self.temperature, self.top_p)
        return [self._user_text(*parts) for parts in zip(seeds, prompts, drawn, strict=True)]

    def _user_text(self, seed: str, prompt: list[int], ids: list[int]) -> str:
        def decode(ids: list[int]) -> str:
            return str(self.template.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        # The text is decoded with its prompt: some tokenizers drop the space before the first token of a text.
        text = decode(prompt + until(ids, self.user_ends))[len(decode(prompt)) :]
        if self.user_mark:
            text = text.partition(self.user_mark)[0]
        return (seed + text).strip().rstrip("\ufffd")


def synthesize(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    output_path: str | os.PathLike[str],
    num_chats: int,
    *,
    seeds: Sequence[str] = (),
    batch_size: int = 32,
    max_new_tokens: int = 224,
    max_user_tokens: int = 96,
    temperature: float = 1.0,
    top_p: float = 0.95,
    greedy_share: float = 0.5,
    seed: int = 0,
    template_kwargs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> int:
    """Let a target write chats until a JSONL file holds `num_chats` of them.

    Each line is an object: `messages` (user, assistant), `decoding` (how the answer was chosen: `greedy`, or
    `temperature_` with its value), `finished` (False: the answer was cut at `max_new_tokens` and has no end of turn).
    Lines are written batch by batch. An existing file is continued; with the same arguments the result is the file
    that an uninterrupted run would have written.

    Args:
        target: a causal language model. The state of the random generators is left alone.
        tokenizer: the target's tokenizer, with the chat template that serving uses.
        output_path: the JSONL file.
        num_chats: number of lines that the file has at the end, including existing ones.
        seeds: beginnings of user turns, one drawn for each chat; without them the target begins the turn as well.
        batch_size: number of chats that are written at once.
        max_new_tokens: length of the longest answer, in tokens.
        max_user_tokens: length of the longest continuation of a user turn, in tokens.
        temperature: temperature of user turns and of answers that are not greedy.
        top_p: top_p of user turns; answers come from the target's whole distribution.
        greedy_share: share of answers that are decoded greedily, 0 to 1.
        seed: seed of all random choices.
        template_kwargs: extra variables for the chat template (`{"enable_thinking": False}`).
        progress: whether to show a progress bar.

    Returns:
        The number of chats that this call has written.

    Raises:
        ValueError: a setting is out of range, or the tokenizer has no chat template.
        RuntimeError: the target writes only empty user turns.
    """
    _check_settings(num_chats, batch_size, max_new_tokens, max_user_tokens, temperature, top_p, greedy_share)
    starts = [phrase.strip() for phrase in seeds if phrase.strip()]
    target_writer = TargetWriter(target, ChatTemplate(tokenizer, template_kwargs))
    writer = _Writer(target_writer, starts, max_new_tokens, max_user_tokens, temperature, top_p, greedy_share)
    path = Path(output_path)
    done = found = drop_torn_line(path)
    training = target.training
    target.eval()
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file, _bar(num_chats, done, progress) as bar:
            while done < num_chats:
                index, written = divmod(done, batch_size)
                size = min(batch_size, num_chats - index * batch_size)
                # A batch is drawn again as a whole even if some of its lines exist: its chats share random numbers.
                chats = _seeded_batch(writer, size, seed, index)[written:]
                file.write("".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats))
                file.flush()
                done += len(chats)
                bar.update(len(chats))
    finally:
        target.train(training)
    return done - found


def _seeded_batch(writer: _Writer, size: int, seed: int, index: int) -> list[dict[str, Any]]:
    """Write the batch of this index with random numbers of its own, so that a resumed run needs no earlier state."""
    draw = random.Random(f"{seed}/{index}")
    with seeded(writer.writer.target.device, draw):
        return writer.batch(size, draw)


def _check_settings(
    num_chats: int,
    batch_size: int,
    max_new_tokens: int,
    max_user_tokens: int,
    temperature: float,
    top_p: float,
    greedy_share: float,
) -> None:
    lengths = {
        "num_chats": num_chats,
        "batch_size": batch_size,
        "max_new_tokens": max_new_tokens,
        "max_user_tokens": max_user_tokens,
    }
    for name, value in lengths.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    check_randomness(temperature, greedy_share)


def _bar(total: int, done: int, progress: bool) -> tqdm:
    return tqdm(total=total, initial=min(done, total), unit="chat", desc="Writing chats", disable=not progress)


def drop_torn_line(path: Path) -> int:
    """Count the complete lines of a file, and cut off what an interrupted write left behind them."""
    if not path.exists():
        return 0
    lines = length = 0
    with path.open("r+b") as file:
        for line in file:
            if line.endswith(b"\n"):
                lines += 1
                length += len(line)
        file.truncate(length)
    return lines
