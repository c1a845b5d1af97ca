"""Counts of ops and transfers: exact, by phase, and without a trace in what is counted."""

import re
import threading
from collections import Counter

import pytest
import torch

from eagle3_hf.decoding.loop import SpeculativeDecoding
from eagle3_hf.evaluation.op_counts import (
    OTHER,
    OUTSIDE,
    PHASES,
    ROUND_PHASES,
    count_generate,
    counting,
    counts_table,
    plain_step,
)
from support.drafts import FAVOURITE, new_draft, set_tree, target_of
from support.families import VOCAB_SIZE, prompt


CPU = torch.device("cpu")
METHODS = {name: getattr(SpeculativeDecoding, name) for name in (*PHASES, "_round")}
MODES = pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"]
)


def inputs() -> dict[str, torch.Tensor]:
    ids = prompt(9)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def models(shift: int = 0):
    """A target and a head that guesses the target's tokens, or others that differ from them by `shift`."""
    target = target_of("llama")
    draft = set_tree(new_draft(target, half=False), (11, 3, 4))
    text = (target.generate(**inputs(), max_new_tokens=16)[0, 9:] + shift) % VOCAB_SIZE
    return target, draft.foretell(text, favourite=1.0 if shift else FAVOURITE)


def counted(block, device=CPU):
    with counting(device) as counts:
        block()
    return counts.phase(OUTSIDE)


@pytest.mark.parametrize(
    ("block", "ops", "reads", "writes"),
    [
        (lambda x: (x + 1).sum().item(), {"aten::add": 1, "aten::sum": 1, "aten::_local_scalar_dense": 1}, 1, 0),
        (lambda x: x.view(6)[1:].t().expand(2, 5).unsqueeze(0).detach(), {}, 0, 0),
        (lambda x: x.transpose(0, 1).reshape(6), {"aten::clone": 1}, 0, 0),
        (lambda x: torch.empty(3), {}, 0, 0),
        (lambda x: x.tolist(), {}, 1, 0),
        (lambda x: bool(x[0, 0] > 1), {"aten::gt": 1, "aten::_local_scalar_dense": 1}, 1, 0),
        (lambda x: torch.tensor([1, 2]), {}, 0, 1),
        (lambda x: x[:, [0, 1]], {"aten::index": 1}, 0, 1),
        (lambda x: x[x > 1], {"aten::gt": 1, "aten::index": 1}, 1, 0),
        (lambda x: x.masked_fill(x > 1, 0.0), {"aten::gt": 1, "aten::masked_fill": 1}, 0, 0),
        (lambda x: x.nonzero(), {"aten::nonzero": 1}, 1, 0),
        (lambda x: torch.equal(x, x), {"aten::equal": 1}, 1, 0),
        (lambda x: torch.equal(x.byte(), x.byte()), {"aten::_to_copy": 2, "aten::equal": 1}, 0, 0),
        (lambda x: x.to(torch.float64), {"aten::_to_copy": 1}, 0, 0),
    ],
)
def test_what_is_counted_on_a_cpu(block, ops, reads, writes):
    x = torch.arange(6.0).view(2, 3)
    found = counted(lambda: block(x))
    assert found.ops == Counter(ops)
    assert (found.reads.total(), found.writes.total()) == (reads, writes)
    assert not found.uploads


def test_on_an_accelerator_only_its_own_tensors_count():
    """The meta device stands for one: what is on the host already is not moved."""

    def block():
        on_host = torch.tensor([1, 2])
        on_host.tolist()
        bool(on_host[0] > 0)
        on_host.to("meta")
        torch.zeros(2, device="meta").copy_(on_host)

    found = counted(block, torch.device("meta"))
    assert found.reads == {}
    assert found.writes == {"aten::_to_copy": 1, "aten::copy_": 1}


@MODES
def test_counting_changes_no_ids_and_two_calls_count_the_same(options):
    target, draft = models()
    torch.manual_seed(3)
    expected = target.generate(**inputs(), **options, max_new_tokens=16, assistant_model=draft)
    seen = []
    for _ in range(2):
        draft = models()[1]
        torch.manual_seed(3)
        with counting(CPU) as counts:
            ids = target.generate(**inputs(), **options, max_new_tokens=16, assistant_model=draft)
        assert torch.equal(ids, expected)
        assert counts.rounds == draft.stats.rounds > 0
        seen.append(counts)
    assert seen[0] == seen[1]
    assert {name: getattr(SpeculativeDecoding, name) for name in METHODS} == METHODS


def test_phases_add_up_to_the_call():
    target, draft = models()
    counts = count_generate(target, inputs(), 0, draft, max_new_tokens=16)
    assert set(counts.phases) - {OTHER} == {*PHASES.values(), OUTSIDE}
    draft, given = models()[1], inputs()
    torch.manual_seed(0)
    with counting(CPU) as whole:
        for name, method in METHODS.items():  # so that there are no phases
            setattr(SpeculativeDecoding, name, method)
        target.generate(**given, max_new_tokens=16, assistant_model=draft)
    assert set(whole.phases) == {OUTSIDE}
    for kind in ("ops", "reads", "writes"):
        total = sum((getattr(phase, kind) for phase in counts.phases.values()), Counter())
        assert getattr(whole.phase(OUTSIDE), kind) == total


def test_a_round_has_the_forwards_of_its_levels():
    """A chain of 3 runs the draft three times (for the new positions and two levels), and the target once."""
    target, draft = models(shift=1)
    set_tree(draft, (3, 3, 1))
    counts = count_generate(target, inputs(), 0, draft, max_new_tokens=9)
    assert counts.rounds == 8
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    # Feeding the new positions gives the first level. Near the end there is less to draft, at last nothing.
    assert counts.phase("draft").ops[attention] == sum(min(3, left) for left in range(8))
    assert counts.phase("verify").ops[attention] == 8 * target.config.num_hidden_layers
    assert counts.phase("prefill").ops[attention] == target.config.num_hidden_layers


def test_a_plain_step_is_the_difference_of_two_calls():
    target = target_of("llama")
    step = plain_step(target, inputs(), max_new_tokens=12, do_sample=False)
    short, long = (count_generate(target, inputs(), max_new_tokens=n, do_sample=False) for n in (7, 8))
    expected = tuple(b - a for a, b in zip(short.phase(OUTSIDE).totals(), long.phase(OUTSIDE).totals(), strict=True))
    assert step == expected
    assert step[0] > 100
    with pytest.raises(ValueError, match="the text ends after 1 token"):
        plain_step(target, inputs(), max_new_tokens=1)


def test_other_threads_are_not_counted():
    target, draft = models()
    with counting(CPU) as counts:
        thread = threading.Thread(target=lambda: target.generate(**inputs(), max_new_tokens=8, assistant_model=draft))
        thread.start()
        thread.join()
    assert draft.stats.rounds > 0
    assert counts.rounds == 0
    assert counts.phases == {}


def test_methods_are_restored_after_an_error():
    with pytest.raises(RuntimeError, match="stop"), counting(CPU):
        raise RuntimeError("stop")
    assert {name: getattr(SpeculativeDecoding, name) for name in METHODS} == METHODS


def test_table():
    target, draft = models(shift=1)
    lines = counts_table(target, draft, inputs(), max_new_tokens=8, do_sample=False).splitlines()
    rounds, per_round = (float(word) for word in re.findall(r"[\d.]+", lines[0]))
    assert rounds * per_round == pytest.approx(7, abs=0.05)
    rows = {line.split(" | ")[0].strip("| "): line for line in lines[3:]}
    assert list(rows) == [*ROUND_PHASES, "whole round", "plain step", "prefill (once)"]
    ops = {name: float(line.split(" | ")[1]) for name, line in rows.items()}
    assert ops["whole round"] == pytest.approx(sum(ops[name] for name in ROUND_PHASES), abs=0.3)
