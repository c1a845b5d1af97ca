"""One timed call, and the machine around it."""

import time

import pytest
import torch

from eagle3_hf.evaluation.columns import PLAIN, Column
from eagle3_hf.evaluation.differences import text_differences
from eagle3_hf.evaluation.machine import OthersLoad, PeakMemory, describe_machine
from eagle3_hf.evaluation.measure import Answer, left_padded, measure, until_end


GREEDY = {"do_sample": False, "max_new_tokens": 8}
LOOKUP = Column("lookup", call_settings={"prompt_lookup_num_tokens": 4})


def test_tokens_are_counted_up_to_the_end_of_the_text():
    assert until_end([5, 6, 1, 2, 2], [1, 3]) == [5, 6, 1]
    assert until_end([5, 6], [1]) == [5, 6]
    assert until_end([1], [1]) == [1]


def test_padding_is_on_the_left():
    inputs = left_padded([[5, 6, 7], [8]], 2, "cpu")
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [2, 2, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_parts_of_a_call(target, head):
    prompt = [list(range(5, 25))]
    heads = {"head": head}
    plain = measure(target, heads, PLAIN, prompt, 0, **GREEDY)
    assert 0 < plain.prefill_seconds < plain.seconds
    assert (plain.passes, plain.stats) == (None, None)
    looked_up = measure(target, heads, LOOKUP, prompt, 0, **GREEDY)
    assert looked_up.tokens == plain.tokens
    assert 1 <= looked_up.passes <= 7
    drafted = measure(target, heads, Column("head", "head"), prompt, 0, **GREEDY)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.emitted == 7
    assert 0 < drafted.prefill_seconds == drafted.stats.prefill_seconds < drafted.seconds
    assert Answer.from_dict(drafted.as_dict()) == drafted
    assert not target._forward_hooks


def test_passes_after_the_prefill_are_counted(target):
    """A text that repeats itself is guessed from its beginning, but not beyond what passes say."""
    passes = []
    handle = target.register_forward_hook(lambda *_: passes.append(1))
    answer = measure(target, {}, LOOKUP, [[5, 6, 7] * 5], 0, **GREEDY)
    handle.remove()
    assert answer.passes == len(passes) - 1


def test_seeds_decide_what_is_sampled(target):
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": 8}
    one, same, other = (measure(target, {}, PLAIN, [[5, 6, 7]], seed, **sampled).tokens for seed in (1, 1, 2))
    assert one == same != other


def test_memory_of_a_call_is_seen():
    memory = PeakMemory(torch.device("cpu"))
    before = memory.peak()
    if before is None:
        pytest.skip("this system does not tell")
    block = torch.ones(16 << 20)
    del block
    assert PeakMemory(torch.device("cpu")).peak() < memory.peak() + (64 << 20)
    block = torch.ones(16 << 20)
    assert memory.peak() > before + (32 << 20)
    del block


def test_own_work_is_no_load_of_others():
    others = OthersLoad()
    end = time.perf_counter() + 0.2
    while time.perf_counter() < end:
        pass
    load = others.since_last()
    assert load is None or load >= 0
    assert others.since_last() is None, "too short to tell"


def test_load_is_what_all_used_without_ourselves(monkeypatch):
    from eagle3_hf.evaluation import machine

    times = iter([machine._Times(0.0, 100.0, 10.0), machine._Times(2.0, 105.0, 12.0)])
    monkeypatch.setattr(machine.OthersLoad, "_times", lambda self: next(times))
    assert OthersLoad().since_last() == pytest.approx((5.0 - 2.0) / 2.0)


def test_the_machine_is_described(target):
    found = describe_machine(target)
    assert found["device"] == f"cpu ({torch.get_num_threads()} threads), float32"
    assert found["torch"] == torch.__version__
    assert found["eagle3_hf"] == "0.1.0"
    assert found["cores"] >= 1


# ----- differences of texts ------------------------------------------------------------------------------------------


def told(target, prompts):
    inputs = left_padded(prompts, 2, target.device)
    return inputs, target.generate(**inputs, **GREEDY)[:, inputs["input_ids"].shape[1] :].tolist()


def test_differences_are_judged_by_the_scores_of_ordinary_decoding(target, tokenizer):
    inputs, plain = told(target, [[5, 6, 7], [8, 9]])
    scores = target.generate(**inputs, **GREEDY, return_dict_in_generate=True, output_scores=True).scores
    other = [plain[0], [*plain[1][:3], (plain[1][3] + 1) % 300, *plain[1][4:]]]
    answers = {"plain": plain, "same": plain, "other": other, "short": [plain[0][:2], plain[1]]}
    found = text_differences(target, tokenizer, inputs, ["x/a", "x/b"], answers, "plain", **GREEDY)
    assert [(each.column, each.question, each.index, each.kind) for each in found] == [
        ("other", "x/b", 3, "different"),
        ("short", "x/a", 2, "different"),
    ]
    expected = float(scores[3][1][plain[1][3]] - scores[3][1][other[1][3]])
    assert found[0].margin == pytest.approx(expected)
    assert found[0].plain == tokenizer.decode(plain[1][3:])
    assert found[0].before == tokenizer.decode(plain[1][:3])
    assert found[1].margin is None


def test_a_near_tie_is_no_error(target, tokenizer, monkeypatch):
    inputs, plain = told(target, [[5, 6, 7]])
    other = [[*plain[0][:2], plain[0][2] + 1]]
    monkeypatch.setattr("eagle3_hf.evaluation.differences.near_tie_bound", lambda values, dtype: 1e9)
    answers = {"plain": plain, "other": other}
    (found,) = text_differences(target, tokenizer, inputs, ["x/a"], answers, "plain", **GREEDY)
    assert found.kind == "near-tie"


def test_a_text_that_plain_decoding_does_not_repeat_is_not_judged(target, tokenizer):
    inputs, plain = told(target, [[5, 6, 7]])
    unrepeatable = [[plain[0][0] + 1, *plain[0][1:]]]
    other = [[*unrepeatable[0][:4], plain[0][4] + 1, *plain[0][5:]]]
    answers = {"plain": unrepeatable, "other": other}
    (found,) = text_differences(target, tokenizer, inputs, ["x/a"], answers, "plain", **GREEDY)
    assert (found.index, found.kind, found.margin) == (4, "different", None)
    assert "not judged by scores" in str(found)


def test_sampled_texts_are_not_judged(target, tokenizer):
    inputs, plain = told(target, [[5, 6, 7]])
    answers = {"plain": plain, "other": [[*plain[0][:-1], plain[0][-1] + 1]]}
    options = {**GREEDY, "do_sample": True}
    (found,) = text_differences(target, tokenizer, inputs, ["x/a"], answers, "plain", **options)
    assert (found.kind, found.margin) == ("different", None)
