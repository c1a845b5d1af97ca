"""Training-time test: its attention, and the unroll of a real head."""

import pytest
import torch
from torch import nn

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.model.attention import CachedAttention, DraftCache
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt.attention import TTTAttention, ttt_attention
from eagle3_hf.ttt.loss import IGNORE_INDEX, Supervision, supervised_mask
from eagle3_hf.ttt.settings import TTTSettings
from support.families import prompt, tiny


FOUR_STEPS = TTTSettings(num_steps=4)

# ----- attention -----------------------------------------------------------------------------------------------------


def slow_attention(query, keys, values, scaling, rows, window=100, start_of=lambda row: 0):
    """One query at a time: its document's step-0 keys up to its own row, then its own key of every later step."""
    batch, heads, num_rows, _ = query.shape
    group, position = heads // keys[0].shape[1], len(keys) - 1
    output = torch.empty(batch, num_rows, heads, values[0].shape[-1])
    for b in range(batch):
        for h in range(heads):
            for r in range(num_rows):
                row = int(rows.expand(batch, -1)[b, r])
                seen = [
                    (j, keys[0][b, h // group, j], values[0][b, h // group, j]) for j in range(start_of(row), row + 1)
                ]
                later = zip(range(1, len(keys)), keys[1:], values[1:], strict=True)
                seen += [(row + step, k[b, h // group, r], v[b, h // group, r]) for step, k, v in later]
                seen = [(key, value) for at, key, value in seen if at > row + position - window]
                scores = torch.stack([query[b, h, r] @ key * scaling for key, _ in seen])
                output[b, r, h] = scores.softmax(0) @ torch.stack([value for _, value in seen])
    return output


def attention_inputs(
    steps: int, heads: int, kv_heads: int, rows: torch.Tensor, length: int = 7, batch: int = 2, value_width: int = 8
):
    generator = torch.Generator().manual_seed(steps)
    sizes = [length] + [rows.shape[1]] * steps

    def random(heads, length, width=8):
        return torch.randn(batch, heads, length, width, generator=generator).requires_grad_()

    query = random(heads, rows.shape[1])
    return query, [random(kv_heads, size) for size in sizes], [random(kv_heads, size, value_width) for size in sizes]


EVERY_ROW = torch.arange(7)[None]
SOME_ROWS = torch.tensor([[0, 2, 3, 6], [1, 2, 4, 5]])


@pytest.mark.parametrize("rows", [EVERY_ROW, SOME_ROWS], ids=["every row", "some rows"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("window", "value_width"), [(None, 8), (1, 8), (2, 5), (4, 8), (30, 12)])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_attention_equals_the_obvious_loop(steps, heads, kv_heads, rows, window, value_width, packed):
    query, keys, values = attention_inputs(steps, heads, kv_heads, rows, value_width=value_width)
    start_of = (lambda row: 3 if row >= 3 else 0) if packed else (lambda row: 0)  # noqa: E731
    starts = torch.where(rows >= 3, 3, 0) if packed else None
    output = ttt_attention(query, keys, values, 0.3, rows, window, starts)
    expected = slow_attention(query, keys, values, 0.3, rows, window or 100, start_of)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)

    weights = torch.randn_like(expected)
    leaves = [query, *keys, *values]
    gradients = torch.autograd.grad((output * weights).sum(), leaves, materialize_grads=True)
    references = torch.autograd.grad((expected * weights).sum(), leaves, materialize_grads=True)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["fused", "eager"])
def test_attention_keeps_apart_layers_and_remembers_steps(attention):
    rows = EVERY_ROW.expand(2, -1)
    query, keys, values = attention_inputs(2, 4, 2, rows)
    first, second = (type("Layer", (), {"layer_idx": i, "scaling": 0.3, "sliding_window": None})() for i in range(2))
    attend = TTTAttention(rows, attention=attention)
    for step in range(3):
        attend.step = step
        output = attend(first, query, keys[step], values[step])
        other = attend(second, query, -keys[step], values[step])
        expected = ttt_attention(query, keys[: step + 1], values[: step + 1], 0.3, rows)
        torch.testing.assert_close(output, expected)
        negated = ttt_attention(query, [-key for key in keys[: step + 1]], values[: step + 1], 0.3, rows)
        torch.testing.assert_close(other, negated)


# ----- the unroll of a real head -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=4)


@pytest.fixture
def draft(target) -> Eagle3DraftModel:
    return Eagle3DraftModel.from_target(target, draft_vocab=torch.arange(0, 320, 2))


def batch_of(lengths: list[int], width: int, answers: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([nn.functional.pad(prompt(n, seed=n)[0], (0, width - n)) for n in lengths])
    labels = torch.full_like(ids, IGNORE_INDEX)
    for row, spans in enumerate(answers):
        for a, b in spans:
            labels[row, a + 1 : b + 1] = ids[row, a + 1 : b + 1]
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def run(draft, target, batch, settings: TTTSettings = FOUR_STEPS, **kwargs):
    """Output of the training forward and the gradient of every parameter."""
    taught = Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch)
    draft.zero_grad(set_to_none=True)
    output = draft(batch["input_ids"], labels=batch["labels"], settings=settings, **taught, **kwargs)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}


def assert_same_gradients(left: dict, right: dict, tolerance: float = 1e-5) -> None:
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_padding_on_the_right_changes_nothing(draft, target):
    """A padded batch has the losses and gradients of its rows alone, up to the order of additions."""
    lengths, answers = [9, 14, 11], [[(4, 8)], [(2, 5), (8, 13)], [(6, 10)]]
    together, gradients = run(draft, target, batch_of(lengths, 20, answers), num_items_in_batch=1)
    sums, hits, summed = 0, 0, {}
    for length, spans in zip(lengths, answers, strict=True):
        alone, grads = run(draft, target, batch_of([length], length, [spans]), num_items_in_batch=1)
        sums, hits = sums + alone.step_losses, hits + alone.step_hits
        summed = {name: summed.get(name, 0) + grad for name, grad in grads.items()}
    torch.testing.assert_close(together.step_losses, sums, rtol=1e-5, atol=1e-5)
    assert together.step_hits.tolist() == hits.tolist()
    assert_same_gradients(gradients, summed, tolerance=1e-4)


def test_whatever_stands_in_the_padding(draft, target):
    batch = batch_of([9, 14], 16, [[(4, 8)], [(2, 5)]])
    expected, gradients = run(draft, target, batch)
    batch["input_ids"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], 7)
    again, grads = run(draft, target, batch)
    torch.testing.assert_close(again.loss, expected.loss)
    assert_same_gradients(gradients, grads)


def test_nothing_supervised_is_a_loss_of_zero_and_finite_gradients(draft, target):
    output, gradients = run(draft, target, batch_of([9, 12], 12, [[], []]))
    assert output.loss.item() == 0.0
    assert output.step_counts.tolist() == [0] * 4
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients.values())


def test_answers_shorter_than_the_unroll(draft, target):
    """A prompt of one token and an answer of two: only step 0 has a row early enough."""
    output, gradients = run(draft, target, batch_of([3], 3, [[(1, 2)]]))
    assert output.step_counts.tolist() == [1, 0, 0, 0]
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def test_gradient_flows_through_what_is_fed_back(draft, target, monkeypatch):
    """The loss of the last step alone reaches the outputs of all steps before it."""
    batch = batch_of([12], 12, [[(4, 11)]])
    taught = Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch)
    mask = supervised_mask(batch["labels"])
    supervision = Supervision.build(mask, taught["teacher_logits"], taught["teacher_in_vocab"])
    fed: list[torch.Tensor] = []

    def feedback(hidden):
        hidden.retain_grad()
        fed.append(hidden)
        return hidden

    monkeypatch.setattr(draft, "feedback", feedback)
    steps = draft.training_time_test(batch["input_ids"], taught["features"], supervision, TTTSettings(num_steps=3))
    steps[2].loss_sum.backward()
    _, rows, entries = supervision.pairs(torch.arange(12)[None], 2)
    rows = rows[taught["teacher_in_vocab"][entries]]
    assert len(rows) > 2
    for hidden in fed[:2]:
        assert (hidden.grad[0, rows].abs().sum(-1) > 0).all()


def test_a_share_of_the_rows_estimates_the_loss_of_all(draft, target):
    """Answers of unequal lengths, behind prompts of unequal lengths, in rows of unequal lengths."""
    batch = batch_of([32, 20, 9], 32, [[(2, 31)], [(3, 6), (10, 19)], [(4, 8)]])
    exact, _ = run(draft, target, batch)
    with torch.no_grad():
        taught = Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch)
        settings = TTTSettings(num_steps=4, position_share=0.2)
        draws = [draft(batch["input_ids"], labels=batch["labels"], settings=settings, **taught) for _ in range(200)]
    assert torch.equal(draws[0].step_losses[:1], exact.step_losses[:1])  # the first step always runs whole
    assert draws[0].step_counts[1] < exact.step_counts[1]
    losses = torch.stack([draw.step_losses for draw in draws])
    error = losses[:, 1:].std(0) / len(draws) ** 0.5
    assert ((losses[:, 1:].mean(0) - exact.step_losses[1:]).abs() < 3 * error).all()
    assert (error < 0.03 * exact.step_losses[1:]).all()


def test_unroll_equals_drafting_step_by_step(draft, target):
    """Row t of step s is the cached draft that left the text at row t and was fed the text's tokens since."""
    ids, steps = prompt(12, seed=3), 4
    with FeatureReader(target, draft.config.target_layer_ids) as reader, torch.no_grad():
        target(ids)
        features = reader.take()
    embed = draft.borrow().embed
    logits: dict[tuple[int, int], torch.Tensor] = {}
    with torch.no_grad():
        for row in range(12 - steps):
            cache = DraftCache(draft.config.num_hidden_layers)
            hidden = draft.run_layers(
                draft.fuse(features[:, : row + 1]),
                embed(ids[:, 1 : row + 2]),
                torch.arange(row + 1)[None],
                CachedAttention(cache),
            )[:, -1:]
            logits[row, 0] = draft.compute_logits(hidden)[0, 0]
            for step in range(1, steps):
                token = embed(ids[:, row + 1 + step, None])
                position = torch.tensor([[row + step]])
                hidden = draft.run_layers(draft.feedback(hidden), token, position, CachedAttention(cache))
                logits[row, step] = draft.compute_logits(hidden)[0, 0]
    # The unroll hands out losses only; with the drafting's own logits as teachers a loss is a known entropy.
    labels = ids.clone()
    mask = supervised_mask(labels)
    for step in range(steps):
        teacher = torch.zeros(int(mask.sum()), draft.config.draft_vocab_size)
        for row in range(12 - steps):
            if row + step < len(teacher):
                teacher[row + step] = logits[row, step]
        in_vocab = torch.tensor([0 <= u - step < 12 - steps for u in range(len(teacher))])
        supervision = Supervision.build(mask, teacher, in_vocab)
        with torch.no_grad():
            result = draft.training_time_test(ids, features, supervision, TTTSettings(step + 1))[step]
        probabilities = teacher.softmax(-1)[in_vocab]
        entropy = -(probabilities * probabilities.log()).sum()
        assert float(result.loss_sum) == pytest.approx(float(entropy), rel=1e-5)  # cross-entropy = entropy: equal
        assert int(result.hits.sum()) == int(in_vocab.sum())
