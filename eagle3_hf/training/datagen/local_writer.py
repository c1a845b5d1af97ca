"""Answers by a target in this process, in batches.

`Conversation` is a chat in the making, whoever writes it; with `openai_client` another program does.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ..data.chat_template import ChatTemplate


@dataclass(frozen=True)
class WritingSettings:
    """How answers are chosen; with the same settings and seed they are the same.

    Args:
        model: name of the target, which is only recorded.
        max_new_tokens: length of the longest answer, in tokens.
        temperature: temperature of the answers that are not greedy; they come from the target's whole distribution.
        greedy_share: share of the chats that are answered greedily, 0 to 1.
        seed: seed of all random choices.
        template_kwargs: extra variables for the chat template (`{"enable_thinking": False}`).
        request_extra: fields for a server's requests beyond those of the standard (`{"top_k": -1}`).

    Raises:
        ValueError: a value is out of range.
    """

    model: str = ""
    max_new_tokens: int = 512
    temperature: float = 1.0
    greedy_share: float = 0.5
    seed: int = 0
    template_kwargs: Mapping[str, Any] | None = None
    request_extra: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        check_randomness(self.temperature, self.greedy_share)


def check_randomness(temperature: float, greedy_share: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0 (greedy answers: greedy_share)")
    if not 0 <= greedy_share <= 1:
        raise ValueError(f"greedy_share is {greedy_share}; it must be between 0 and 1")


@dataclass
class Conversation:
    """A chat whose answers are being written.

    Attributes:
        index: number of the chat among the prompts.
        script: the messages to come; None stands for an answer to be written.
        tools: descriptions of tools for the chat template.
        greedy: whether its answers are the target's most likely tokens.
        messages: the messages that are there so far.
        finished: False once an answer was cut; nothing follows it then.
        problem: why no answer could be obtained, else empty.
    """

    index: int
    script: list[dict[str, Any] | None]
    tools: list[Any] | None = None
    greedy: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = True
    problem: str = ""
    _next: int = 0

    def wants_answer(self) -> bool:
        """Take over messages up to the next answer to be written, and return whether there is one."""
        if not self.finished or self.problem:
            return False
        while self._next < len(self.script):
            message = self.script[self._next]
            self._next += 1
            if message is None:
                return True
            self.messages.append(message)
        return False

    def answer(self, message: dict[str, Any], finished: bool) -> None:
        self.messages.append(message)
        self.finished = finished
        if message.get("tool_calls"):  # what the tool would say is not known
            self._next = len(self.script)

    @property
    def turn(self) -> int:
        """Number of the answer to be written, counted over all messages; it is part of the answer's seed."""
        return len(self.messages)


class GreedySequences(LogitsProcessor):
    """Leaves the marked sequences of a sampled batch only their most likely token, so that a batch holds both kinds.

    Args:
        marked: `(B,)` bool.
    """

    def __init__(self, marked: Tensor) -> None:
        self.marked = marked[:, None]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        best = torch.full_like(scores, -torch.inf).scatter(1, scores.argmax(1, keepdim=True), 0.0)
        return torch.where(self.marked, best, scores)


class TargetWriter:
    """A target with its chat template, which writes answers in batches.

    Args:
        target: a causal language model. The state of the random generators is left alone.
        template: the chat template that serving uses.

    Raises:
        ValueError: neither tokenizer nor target names a token that ends an answer.
    """

    batched = True

    def __init__(self, target: PreTrainedModel, template: ChatTemplate) -> None:
        self.target = target
        self.template = template
        eos = target.generation_config.eos_token_id
        ends = {*(eos if isinstance(eos, list) else [eos]), template.end_of_turn_id()}
        ends.add(template.tokenizer.eos_token_id)
        self.ends = sorted(end for end in ends if end is not None)
        if not self.ends:
            raise ValueError("neither the tokenizer nor the target names a token that ends a turn; set eos_token_id")
        self._room = getattr(target.config.get_text_config(), "max_position_embeddings", None)

    @classmethod
    def of(
        cls, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: WritingSettings
    ) -> "TargetWriter":
        return cls(target, ChatTemplate(tokenizer, settings.template_kwargs))

    def write(
        self, batches: Sequence[Sequence[Conversation]], settings: WritingSettings
    ) -> Iterator[list[Conversation]]:
        """Yield every batch when the last answer of its longest chat is there."""
        training = self.target.training
        self.target.eval()
        try:
            for batch in batches:
                self._write_batch(batch, settings)
                yield list(batch)
        finally:
            self.target.train(training)

    def _write_batch(self, batch: Sequence[Conversation], settings: WritingSettings) -> None:
        turn = 0
        while waiting := [chat for chat in batch if chat.wants_answer()]:
            # By the batch's own random numbers, so that a resumed run needs nothing of the one before.
            draw = random.Random(f"{settings.seed}/{batch[0].index}/{turn}")
            with seeded(self.target.device, draw):
                self._answer(waiting, settings)
            turn += 1

    def _answer(self, chats: list[Conversation], settings: WritingSettings) -> None:
        prompts = [self._prompt(chat) for chat in chats]
        asked = [i for i, prompt in enumerate(prompts) if prompt]
        if not asked:
            return
        answers = self.generate(
            [prompts[i] for i in asked],
            settings.max_new_tokens,
            self.ends,
            settings.temperature,
            greedy=[chats[i].greedy for i in asked],
        )
        for i, ids in zip(asked, answers, strict=True):
            text, finished = self.text(ids)
            chats[i].answer(self.template.message(text), finished)

    def _prompt(self, chat: Conversation) -> list[int]:
        """Return the ids to continue; none, with the reason noted, if template or target reject the chat."""
        try:
            template = self.template.with_tools(chat.tools)
            ids = template.tokenize(template.render(chat.messages, generation_prompt=True))
        except ValueError as error:
            chat.problem = str(error)
            return []
        if self._room is not None and len(ids) >= self._room:
            chat.problem = f"its prompt has {len(ids)} tokens, the target has room for {self._room}"
            return []
        return ids

    def text(self, ids: list[int]) -> tuple[str, bool]:
        """Decode an answer up to its end, and tell whether there is an end."""
        kept = until(ids, self.ends)
        finished = len(kept) < len(ids)
        content = str(self.template.tokenizer.decode(kept, clean_up_tokenization_spaces=False))
        # A cut between the bytes of one character decodes to a replacement mark that the target never wrote.
        return (content if finished else content.rstrip("\ufffd")), finished

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        ends: list[int],
        temperature: float,
        top_p: float = 1.0,
        greedy: Sequence[bool] = (),
    ) -> list[list[int]]:
        """Return the new ids behind each prompt; `greedy` marks the prompts that take the most likely tokens."""
        pad = self.template.tokenizer.pad_token_id
        pad = ends[0] if pad is None else pad
        input_ids, attention_mask = (t.to(self.target.device) for t in _left_pad(prompts, pad))
        # Every setting that would change the target's own distribution is named: its generation_config fills the rest.
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=top_p,
            min_p=0.0,
            typical_p=1.0,
            epsilon_cutoff=0.0,
            eta_cutoff=0.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            eos_token_id=ends,
            pad_token_id=pad,
        )
        processors = [GreedySequences(torch.tensor(greedy, device=input_ids.device))] if any(greedy) else []
        output = self.target.generate(  # type: ignore[operator]  # of GenerationMixin, which causal models add
            input_ids, attention_mask=attention_mask, generation_config=config, logits_processor=processors
        )
        return output[:, input_ids.shape[1] :].tolist()


@contextmanager
def seeded(device: torch.device, draw: random.Random) -> Iterator[None]:
    """Seed torch's random numbers by `draw` for one block, and leave the caller's own alone."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(draw.getrandbits(63))
        yield


def until(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the ids before the first end; all of them where there is none."""
    return ids[: next((i for i, token in enumerate(ids) if token in ends), len(ids))]


def _left_pad(prompts: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Turn prompts into `input_ids (B, T)` and `attention_mask (B, T)`, the last tokens in the last column."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask
