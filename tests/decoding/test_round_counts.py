"""How much a round launches, and how often the host waits for the device: counted, and kept from growing.

The counts are those of a CPU that decodes as an accelerator does, for all nodes at once. A call with one more token
has one more round, if nothing is accepted, so that the difference of two calls is a whole round.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.decoding import transfers
from eagle3_hf.evaluation.op_counts import ROUND_PHASES, PhaseCounts, counting
from support.drafts import set_tree, target_of
from support.families import VOCAB_SIZE, prompt


PAPER, SMALL = (59, 8, 10), (15, 4, 4)
LONG = 14  # tokens; the round before the last has room for all levels
SAMPLED = {"do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 0.9}


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(transfers, "makes_host_wait", lambda device: True)


def inputs(batch: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.cat([prompt(9, seed) for seed in range(batch)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@cache
def wrong_head(tree: tuple[int, int, int], lookup: bool) -> Eagle3DraftModel:
    """A head whose vocabulary lacks all tokens of the text, so that no draft is accepted."""
    target, texts = target_of("llama"), []
    for batch, options in itertools.product((1, 4), ({"do_sample": False}, SAMPLED)):
        torch.manual_seed(0)
        texts.append(target.generate(**inputs(batch), max_new_tokens=LONG, **options).flatten())
    absent = sorted(set(range(VOCAB_SIZE)) - set(torch.cat(texts).tolist()))[:100]
    torch.manual_seed(2)
    draft = set_tree(Eagle3DraftModel.from_target(target, draft_vocab=absent).eval(), tree)
    draft.generation_config.assistant_lookup = lookup
    return draft


@dataclass
class Round:
    """The counts of one round by phase, and of its ops those inside the target's layers."""

    phases: dict[str, PhaseCounts]
    in_layers: int

    def __sub__(self, other: "Round") -> "Round":
        phases = {}
        for name, counts in self.phases.items():
            parts = zip(_parts(counts), _parts(other.phases[name]), strict=True)
            phases[name] = PhaseCounts(*(Counter(more) - Counter(less) for more, less in parts))
        return Round(phases, self.in_layers - other.in_layers)

    def total(self) -> PhaseCounts:
        columns = zip(*map(_parts, self.phases.values()), strict=True)
        return PhaseCounts(*(sum(column, Counter()) for column in columns))


def _parts(counts: PhaseCounts) -> tuple[Counter, ...]:
    return counts.ops, counts.reads, counts.writes, counts.uploads


def count(tree, lookup: bool, batch: int, options: dict[str, Any]) -> Round:
    target, draft = target_of("llama"), wrong_head(tree, lookup)
    in_layers, handles = 0, []
    torch.manual_seed(0)
    with counting(torch.device("cpu")) as counts:

        def enter(module, args):
            nonlocal in_layers
            in_layers -= counts.phase("verify").ops.total()

        def leave(module, args, output):
            nonlocal in_layers
            in_layers += counts.phase("verify").ops.total()

        for layer in target.get_decoder().layers:
            handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
        try:
            target.generate(**inputs(batch), **options, assistant_model=draft)
        finally:
            for handle in handles:
                handle.remove()
    assert draft.stats.mean_accepted == 0
    return Round({name: counts.phase(name) for name in ROUND_PHASES}, in_layers)


def a_round(tree, lookup: bool = False, batch: int = 1, **options: Any) -> Round:
    """The counts of the first round: two calls differ by it."""
    target = target_of("llama")
    options = {"do_sample": False, **options}
    target.generate(**inputs(batch), assistant_model=wrong_head(tree, lookup), max_new_tokens=2)  # what is done once
    long, short = (count(tree, lookup, batch, {**options, "max_new_tokens": LONG - less}) for less in (0, 1))
    return long - short


def test_greedy_decoding_waits_once_in_a_round():
    found = a_round(PAPER)
    whole = found.total()
    assert whole.reads == found.phases["walk"].reads == {"tolist": 1}
    assert whole.writes == {}
    assert whole.uploads.total() <= 2


def test_beside_lookup_it_waits_for_the_pool_and_for_the_choices():
    """The nodes are chosen on the host, where the continuations are found, and go to the device together."""
    found = a_round(PAPER, lookup=True)
    assert found.phases["draft"].reads == found.phases["walk"].reads == {"tolist": 1}
    whole = found.total()
    assert whole.reads.total() == 2
    assert whole.writes == {}
    assert whole.uploads.total() <= 3


def test_launches_of_a_round():
    found, one_level_less = a_round(PAPER), a_round((59, 7, 10))
    assert (found - one_level_less).phases["draft"].ops.total() <= 55
    assert found.total().ops.total() - found.in_layers <= 450
    small = a_round(SMALL)
    assert small.total().ops.total() - small.in_layers <= 270


def test_sampling_waits_once_in_a_round():
    whole = a_round(PAPER, **SAMPLED).total()
    assert whole.reads == {"tolist": 1}
    assert whole.writes == {}


def test_sampling_beside_lookup_waits_twice():
    """The noise of the coming steps is copied in the background, before the pool is read."""
    whole = a_round(SMALL, lookup=True, **SAMPLED).total()
    assert whole.reads.total() == 2
    assert whole.writes == {}


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_waits_as_often_as_a_single_sequence(options):
    whole = a_round(SMALL, batch=4, **options).total()
    assert whole.reads == {"tolist": 1}
    assert whole.writes == {}
