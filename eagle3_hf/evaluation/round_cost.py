"""Measures what one round of drafting and verification costs, in steps of ordinary decoding."""

import copy
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..decoding.attachments import without_attachment
from ..model.tree_settings import tree_settings


_WARM_UP = 2  # steps or rounds at the beginning of a call that are not counted


class _RoundClock:
    """A streamer that records when each ordinary step, or each round of a draft, ends. It prints nothing."""

    def __init__(self, rounds: bool):
        self._rounds = rounds
        self._tokens = -1  # the prompt is put first
        self._ends: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self._tokens += 1
        if not self._rounds:
            self._ends.append((perf_counter(), self._tokens))

    def end_round(self, accepted: int) -> None:
        self._ends.append((perf_counter(), self._tokens))

    def end(self) -> None:
        pass

    def gaps(self, until: int) -> list[float]:
        """Return the duration of each step or round that began before `until` tokens, after those that warm up."""
        pairs = zip(self._ends, self._ends[1:], strict=False)
        return [after - before for (before, tokens), (after, _) in pairs if tokens <= until][_WARM_UP:]


def round_cost(
    target, draft, trees: Sequence[Mapping[str, Any]], context: int = 128, rounds: int = 50, turns: int = 5
) -> tuple[float, list[float]]:
    """Measure the median time of an ordinary step and of one round of each tree.

    The kinds take turns, so that a drift of the machine's speed affects all of them alike. The head should be one of
    which nothing is accepted (a random one), so that the contexts have equal lengths.

    Args:
        target: The target model.
        draft: The draft head; its generation config stays as it is.
        trees: Sizes as fields of a head's generation config, see `columns.parse_tree`.
        context: Length of the prompt in tokens.
        rounds: Number of rounds to measure of each kind; fewer where drafts are accepted.
        turns: Number of turns in which they are measured.

    Returns:
        Seconds of an ordinary step, and of a round of each tree.

    Raises:
        ValueError: the target verifies no drafts, so that there are no rounds.
    """
    prompt = torch.randint(5, target.config.get_text_config().vocab_size, (1, context), device=target.device)
    common = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "do_sample": False, "eos_token_id": None}
    each = -(-rounds // turns) + _WARM_UP + 1
    gaps: list[list[float]] = [[] for _ in range(1 + len(trees))]
    kept = draft.generation_config
    try:
        for _ in range(turns):
            clock = _RoundClock(rounds=False)
            with without_attachment(target):
                target.generate(**common, streamer=clock, max_new_tokens=each)
            gaps[0] += clock.gaps(each)
            for kind, tree in enumerate(trees, start=1):
                draft.generation_config = copy.deepcopy(kept)
                for name, value in tree.items():
                    setattr(draft.generation_config, name, value)
                # A round emits at most one token more than the tree has levels, and trees are cut near the limit of
                # the length: there is room for the rounds that warm up and a whole one, however much is accepted.
                most = tree_settings(draft, target).depth + 1
                whole = max(each, (_WARM_UP + 2) * most)
                clock = _RoundClock(rounds=True)
                target.generate(**common, streamer=clock, assistant_model=draft, max_new_tokens=whole + most)
                gaps[kind] += clock.gaps(whole)
    finally:
        draft.generation_config = kept
    if not all(gaps):
        raise ValueError(
            f"{type(target).__name__} verifies no drafts and is decoded plainly: there are no rounds to measure"
        )
    plain, *costs = (median(found) for found in gaps)
    return plain, costs
