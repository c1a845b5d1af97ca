"""Mean acceptance length (tau), measured by decoding: the losses of an evaluation can only simulate it."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from ...acceptance import SpeculationStats
from ...model.tree_settings import measured_alone
from ...utils.logging import get_logger
from ..data.formats import read_example


logger = get_logger(__name__)


class MeasureTau(TrainerCallback):
    """Decodes held-out prompts with the head at every evaluation of an [`Eagle3Trainer`] and logs `eval_tau`.

    The mean acceptance length (tau) is the number of tokens that one forward pass of the target yields; ordinary
    decoding has 1. It is taken over all prompts, decoded greedily by the head alone, without lookup, with the tree
    that is set on it, or else with 11/3/4 (nodes/levels/children) on a CPU and 59/8/10 elsewhere. It is among the
    metrics of the evaluation, so that `metric_for_best_model="eval_tau"` (with `greater_is_better=True`) keeps the
    checkpoint that decodes best. With several processes each decodes its share of the prompts.

    Args:
        prompts: Chats (a list of turns, or an example in any shape that `load_chats` reads; what follows the last user
            turn is left out), texts, or ids `(T,)`.
        tokenizer: The target's tokenizer; not needed for ids.
        max_new_tokens: Number of tokens that are decoded for each prompt.
        generate_kwargs: Other arguments for `generate`, such as `num_assistant_tokens=15`.

    Raises:
        ValueError: there are no prompts, or one of them cannot become ids.
    """

    def __init__(self, prompts: Sequence[Any], tokenizer=None, max_new_tokens: int = 128, **generate_kwargs: Any):
        if not len(prompts):
            raise ValueError("there are no prompts to measure tau with")
        self.prompts = [prompt_ids(prompt, tokenizer) for prompt in prompts]
        self.options = {"max_new_tokens": max_new_tokens, "do_sample": False, **generate_kwargs}

    @torch.no_grad()
    def measure(self, draft, target, process_index: int = 0, num_processes: int = 1) -> tuple[int, int]:
        """Decode this process's share of the prompts, and count the emitted tokens and the rounds."""
        emitted = rounds = 0
        with measured_alone(draft, target):
            for ids in self.prompts[process_index::num_processes]:
                stats = _decode(draft, target, ids, self.options)
                emitted, rounds = emitted + stats.emitted, rounds + stats.rounds
        return emitted, rounds


def _decode(draft, target, ids: torch.Tensor, options: dict[str, Any]) -> SpeculationStats:
    device = target.get_input_embeddings().weight.device
    inputs = ids[None].to(draft.device if device.type == "meta" else device)  # meta: the weights are offloaded
    output = target.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        assistant_model=draft,
        return_dict_in_generate=True,
        **options,
    )
    return output.speculation


def prompt_ids(prompt: Any, tokenizer=None) -> torch.Tensor:
    """Return the ids (T,) int64 of a chat up to its last user turn, of a text, or of ids.

    Raises:
        ValueError: a text comes without a tokenizer, or a chat has no user turn.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = prompt["input_ids"]
    if isinstance(prompt, torch.Tensor) or (isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], int)):
        return torch.as_tensor(prompt, dtype=torch.int64).flatten()
    if tokenizer is None:
        raise ValueError("prompts that are texts or chats need a tokenizer: pass tokenizer=, or pass ids")
    if isinstance(prompt, Mapping):
        example = read_example(prompt)
        prompt = example.messages or example.prompt or example.text
    if isinstance(prompt, str):
        return tokenizer(prompt, return_tensors="pt")["input_ids"][0]
    messages = list(prompt)
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"a chat without a user turn gives no prompt: {str(messages)[:200]}")
    text = tokenizer.apply_chat_template(messages[: last + 1], add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]


def sample_prompts(chats: Sequence[Any], count: int, seed: int = 0) -> list[Any]:
    """Draw `count` of the chats, the same ones for the same seed."""
    chosen = random.Random(seed).sample(range(len(chats)), min(count, len(chats)))
    return [chats[i] for i in sorted(chosen)]
