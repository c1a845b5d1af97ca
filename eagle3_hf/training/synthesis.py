"""Chats that a target writes itself: first the user turn, then the answer.

A head learns to guess what its target says, so the best answers to learn from are the target's own. An instruction
model has also seen enough user turns to write one when its chat template's text up to the user's content is all it is
given; seed phrases steer the subject.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from eagle3_hf.training.chat_template import ChatTemplate


# A target that writes no user turn in so many attempts will not write one at all.
MAX_ATTEMPTS = 20


class GreedyRows(LogitsProcessor):
    """Leaves the marked rows of a sampled batch only their best token, so that one batch holds both kinds.

    Args:
        rows: `(B,)` bool.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = torch.full_like(scores, -torch.inf).scatter(1, scores.argmax(1, keepdim=True), 0.0)
        return torch.where(self.rows, best, scores)


@dataclass
class _Writer:
    """A target with the settings it writes under."""

    target: PreTrainedModel
    template: ChatTemplate
    seeds: Sequence[str]
    max_new_tokens: int
    max_user_tokens: int
    temperature: float
    top_p: float
    greedy_share: float

    def __post_init__(self) -> None:
        self.user_prefix, self.user_mark = self.template.user_turn()
        eos = self.target.generation_config.eos_token_id
        ends = {*(eos if isinstance(eos, list) else [eos]), self.template.end_of_turn_id()}
        ends.add(self.template.tokenizer.eos_token_id)
        self.answer_ends = sorted(end for end in ends if end is not None)
        self.user_ends = sorted({*self.answer_ends, *self.template.special_ids})
        if not self.user_ends:
            raise ValueError("neither the tokenizer nor the target names a token that ends a turn; set eos_token_id")

    def batch(self, size: int, draw: random.Random) -> list[dict[str, Any]]:
        """`size` chats, by the random numbers of `draw` and of torch."""
        users = self._user_turns(size, draw)
        greedy = [draw.random() < self.greedy_share for _ in range(size)]
        chats = [[{"role": "user", "content": user}] for user in users]
        prompts = [self.template.tokenize(self.template.render(chat, generation_prompt=True)) for chat in chats]
        answers = self._generate(prompts, self.max_new_tokens, self.answer_ends, 1.0, greedy)
        return [self._record(*parts) for parts in zip(chats, answers, greedy, strict=True)]

    def _record(self, chat: list[dict[str, str]], ids: list[int], greedy: bool) -> dict[str, Any]:
        kept = _until(ids, self.answer_ends)
        finished = len(kept) < len(ids)
        content = str(self.template.tokenizer.decode(kept, clean_up_tokenization_spaces=False))
        if not finished:
            # A cut between the bytes of one character decodes to a replacement mark that the target never wrote.
            content = content.rstrip("\ufffd")
        return {
            "messages": [*chat, {"role": "assistant", "content": content}],
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
            f"the target wrote an empty user turn {MAX_ATTEMPTS} times in a row after the prompt "
            f"{self.user_prefix[-80:]!r}; pass seed phrases for it to continue"
        )

    def _attempt_user_turns(self, size: int, draw: random.Random) -> list[str]:
        seeds = [draw.choice(self.seeds) if self.seeds else "" for _ in range(size)]
        prompts = [self.template.tokenize(self.user_prefix + seed) for seed in seeds]
        drawn = self._generate(prompts, self.max_user_tokens, self.user_ends, self.top_p, [False] * size)
        return [self._user_text(*parts) for parts in zip(seeds, prompts, drawn, strict=True)]

    def _user_text(self, seed: str, prompt: list[int], ids: list[int]) -> str:
        def decode(ids: list[int]) -> str:
            return str(self.template.tokenizer.decode(ids, clean_up_tokenization_spaces=False))

        # Decoded behind its prompt: some tokenizers drop the space before the first token of a text.
        text = decode(prompt + _until(ids, self.user_ends))[len(decode(prompt)) :]
        if self.user_mark:
            text = text.partition(self.user_mark)[0]
        return (seed + text).strip().rstrip("\ufffd")

    @torch.no_grad()
    def _generate(
        self, prompts: list[list[int]], max_new_tokens: int, ends: list[int], top_p: float, greedy: list[bool]
    ) -> list[list[int]]:
        pad = self.template.tokenizer.pad_token_id
        pad = ends[0] if pad is None else pad
        input_ids, attention_mask = (t.to(self.target.device) for t in _left_pad(prompts, pad))
        # Every setting that would bend the target's own distribution is named: its generation_config fills the rest.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=self.temperature,
            top_k=0,
            top_p=top_p,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            num_beams=1,
            num_return_sequences=1,
            eos_token_id=ends,
            pad_token_id=pad,
        )
        processors = [GreedyRows(torch.tensor(greedy, device=input_ids.device))] if any(greedy) else []
        output = self.target.generate(
            input_ids, attention_mask=attention_mask, generation_config=config, logits_processor=processors
        )
        return output[:, input_ids.shape[1] :].tolist()


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
    progress: bool = True,
) -> int:
    """Let a target write chats until a JSONL file holds `num_chats` of them.

    One object a line: `messages` (user, assistant), `decoding` (how the answer was chosen: `greedy` or
    `temperature_1`), `finished` (False: the answer was cut at `max_new_tokens` and has no end of turn). Lines are
    written batch by batch; a file that is there already is continued, and with the same arguments the end is the file
    that an uninterrupted run would have written.

    Args:
        target: a causal language model; its own random generator state is left alone.
        tokenizer: its tokenizer, with the chat template that serving uses.
        output_path: the JSONL file.
        num_chats: lines that the file is to have, those already there included.
        seeds: beginnings of user turns, one drawn for each chat; without them the target begins the turn as well.
        batch_size: chats written at once.
        max_new_tokens: longest answer, in tokens.
        max_user_tokens: longest continuation of a user turn, in tokens.
        temperature: of user turns and of answers that are not greedy.
        top_p: of user turns only; answers come from the target's whole distribution.
        greedy_share: share of answers decoded greedily, 0 to 1.
        seed: of all random choices.
        progress: show a progress bar.

    Returns:
        The number of chats written by this call.

    Raises:
        ValueError: a setting out of range, or a tokenizer without a chat template.
        RuntimeError: the target writes only empty user turns.
    """
    _check_settings(num_chats, batch_size, max_new_tokens, max_user_tokens, temperature, top_p, greedy_share)
    starts = [phrase.strip() for phrase in seeds if phrase.strip()]
    template = ChatTemplate(tokenizer)
    writer = _Writer(target, template, starts, max_new_tokens, max_user_tokens, temperature, top_p, greedy_share)
    path = Path(output_path)
    done = found = _drop_torn_line(path)
    training = target.training
    target.eval()
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file, _bar(num_chats, done, progress) as bar:
            while done < num_chats:
                index, written = divmod(done, batch_size)
                size = min(batch_size, num_chats - index * batch_size)
                # A batch is drawn anew as a whole even where some of its lines are there: rows share their randomness.
                chats = _seeded_batch(writer, size, seed, index)[written:]
                file.write("".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats))
                file.flush()
                done += len(chats)
                bar.update(len(chats))
    finally:
        target.train(training)
    return done - found


def _seeded_batch(writer: _Writer, size: int, seed: int, index: int) -> list[dict[str, Any]]:
    """The batch of this index, by its own random numbers, so that a resumed run needs nothing of the one before."""
    draw = random.Random(f"{seed}/{index}")
    device = writer.target.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(draw.getrandbits(63))
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
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy answers: greedy_share)")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1")
    if not 0 <= greedy_share <= 1:
        raise ValueError(f"greedy_share is {greedy_share}; it must be between 0 and 1")


def _bar(total: int, done: int, progress: bool) -> tqdm:
    return tqdm(total=total, initial=min(done, total), unit="chat", desc="Writing chats", disable=not progress)


def _drop_torn_line(path: Path) -> int:
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


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    """The ids before the first end; all of them where there is none."""
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]


def _left_pad(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Prompts to `input_ids (B, T)` and `attention_mask (B, T)`, the last tokens in the last column."""
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
