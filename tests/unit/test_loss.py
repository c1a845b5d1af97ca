"""The loss of training-time test on plain tensors: which pairs of row and step it counts, and what each costs."""

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3_hf.ttt.loss import (
    IGNORE_INDEX,
    Supervision,
    acceptance_loss,
    soft_cross_entropy,
    step_loss,
    supervised_mask,
    weighted_loss,
)
from eagle3_hf.ttt.settings import LOSS_TYPES, TTTSettings


def supervision_by(teacher_logits: torch.Tensor, in_vocab: list[bool] | None = None, **kwargs) -> Supervision:
    """One row of text in which every position is taught by these logits."""
    count = len(teacher_logits)
    known = torch.ones(count, dtype=torch.bool) if in_vocab is None else torch.tensor(in_vocab)
    return Supervision.build(torch.ones(1, count, dtype=torch.bool), teacher_logits, known, **kwargs)


def loss_of_logits(logits: torch.Tensor, supervision: Supervision, entries=None, **settings):
    """The loss of a step whose head gives these logits."""
    entries = torch.arange(len(logits)) if entries is None else entries
    return step_loss(logits, nn.Identity(), entries, supervision, TTTSettings(**settings))


# ----- what the teacher says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_teacher_probabilities_are_the_softmax_of_its_logits(dtype, monkeypatch):
    """The rows stay as they were given, and lose nothing."""
    monkeypatch.setattr("eagle3_hf.ttt.loss._NUMBERS", 300 * 40)
    logits = (8 * torch.randn(1100, 40) + 30).to(dtype)
    logits[0, 3:] = float("-inf")
    logits[1] = 0.0
    supervision = supervision_by(logits)
    assert supervision.teacher.dtype == dtype
    entries = torch.tensor([0, 1, 2, 600, 1099, 600])
    probabilities = logits.float().softmax(-1)
    torch.testing.assert_close(supervision.probabilities(entries), probabilities[entries], rtol=1e-6, atol=1e-7)
    expected = logits.double().log_softmax(-1)[entries].float()
    torch.testing.assert_close(supervision.log_probabilities(entries), expected, rtol=1e-6, atol=4e-6)
    assert supervision.choice.tolist() == logits.max(-1).indices.tolist()
    entropy = torch.special.entr(logits.double().softmax(-1)).sum(-1).float()
    torch.testing.assert_close(supervision.entropy, entropy, rtol=1e-5, atol=1e-5)


def test_no_teacher_row_at_all():
    supervision = Supervision.build(torch.zeros(2, 5).bool(), torch.empty(0, 7), torch.empty(0).bool())
    assert supervision.peak.shape == supervision.entropy.shape == (0,)
    weight = torch.randn(7, 3, requires_grad=True)
    hidden = torch.randn(0, 3, requires_grad=True)
    loss = step_loss(hidden, lambda rows: rows @ weight.T, torch.empty(0).long(), supervision, TTTSettings())
    loss.loss_sum.backward()
    assert float(loss.loss_sum.detach()) == 0
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # it took part: nothing for DDP to miss


# ----- loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cross_entropy_equals_autograd(dtype):
    logits = (3 * torch.randn(6, 50)).to(dtype)
    teacher = (2 * torch.randn(6, 50)).softmax(-1)
    weights = torch.randn(6)

    mine = logits.clone().requires_grad_()
    loss = soft_cross_entropy(mine, teacher)
    (loss * weights).sum().backward()

    reference = logits.float().requires_grad_()
    expected = nn.functional.cross_entropy(reference, teacher, reduction="none")
    (expected * weights).sum().backward()

    assert loss.dtype == torch.float32
    assert mine.grad.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    # The loss is computed in float32 either way; only the gradient is rounded to the logits' dtype on its way out.
    torch.testing.assert_close(
        mine.grad, reference.grad.to(dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


def test_soft_cross_entropy_bears_logits_that_overflow_exp():
    logits = torch.tensor([[300.0, -300.0, 0.0]], requires_grad=True)
    loss = soft_cross_entropy(logits, torch.tensor([[0.5, 0.25, 0.25]]))
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.25 * 600 + 0.25 * 300)
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.25, -0.25]]))


def test_pairs_outside_the_vocabulary_carry_no_loss_but_are_counted():
    teacher_logits, logits = torch.randn(3, 5), torch.randn(3, 5)
    logits[1] = teacher_logits[1] = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0])
    result = loss_of_logits(logits, supervision_by(teacher_logits, [True, False, True]))
    expected = nn.functional.cross_entropy(logits, teacher_logits.softmax(-1), reduction="none")
    torch.testing.assert_close(result.loss_sum, expected[0] + expected[2])
    assert not result.hits[1]  # the draft's first choice is the best draft token, but not what the target says
    assert len(result.entries) == 3


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        (TTTSettings(3, step_decay=0.5), (1.0, 0.5, 0.25)),
        (TTTSettings(3, step_weights=[1, 0, 2]), (1.0, 0.0, 2.0)),
        (TTTSettings(1), (1.0,)),
        (TTTSettings(), tuple(0.8**s for s in range(7))),
    ],
)
def test_weights_of_the_steps(settings, weights):
    supervision = supervision_by(torch.randn(9, 5))
    steps = [loss_of_logits(torch.randn(9 - s, 5), supervision, torch.arange(s, 9)) for s in range(settings.num_steps)]
    assert settings.weights == pytest.approx(weights)
    expected = sum(weight * step.loss_sum for weight, step in zip(weights, steps, strict=True)) / 8
    torch.testing.assert_close(weighted_loss(steps, 8, settings), expected)
    assert float(weighted_loss(steps, 0, settings)) == pytest.approx(float(expected) * 8, rel=1e-5)  # never by zero


def test_too_few_teacher_rows_are_refused():
    with pytest.raises(ValueError, match="expected teacher logits for 2 supervised pairs, got 3"):
        Supervision.build(torch.tensor([[True, False, True]]), torch.randn(3, 4), torch.ones(3, dtype=torch.bool))


# ----- the other losses ----------------------------------------------------------------------------------------------


def test_kl_is_the_cross_entropy_less_the_teachers_entropy():
    teacher, logits = 2 * torch.randn(6, 30), torch.randn(6, 30, requires_grad=True)
    supervision = supervision_by(teacher)
    loss = loss_of_logits(logits, supervision, loss_type="kl").loss_sum
    expected = nn.functional.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    (paper,) = torch.autograd.grad(loss_of_logits(logits, supervision).loss_sum, logits)
    assert torch.equal(gradient, paper)
    assert float(loss_of_logits(teacher + 3, supervision, loss_type="kl").loss_sum) == pytest.approx(0, abs=1e-5)


def test_acceptance_loss_is_minus_the_log_of_the_chance_of_being_accepted():
    """Float64 and the definition on one side; also the rejection sampler itself, drawn many times."""
    teacher, logits = 2 * torch.randn(6, 30), (2 * torch.randn(6, 30)).requires_grad_()
    p, q = teacher.double().softmax(-1), logits.double().softmax(-1)
    expected = -torch.minimum(p, q).sum(-1).log()
    torch.testing.assert_close(expected, -(1 - (p - q).abs().sum(-1) / 2).log())  # the total variation
    loss = acceptance_loss(logits, teacher.log_softmax(-1))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    (reference,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-6)
    drafted = q[0].detach().multinomial(200_000, replacement=True)
    accepted = torch.rand(len(drafted)) < (p[0] / q[0].detach())[drafted]
    assert float(accepted.float().mean()) == pytest.approx(float((-loss[0]).exp().detach()), abs=0.006)


def test_acceptance_loss_is_zero_where_the_draft_is_right_and_nowhere_else():
    teacher = 3 * torch.randn(4, 20)
    exact = acceptance_loss(teacher + 1, teacher.log_softmax(-1))
    assert exact.tolist() == pytest.approx([0.0] * 4, abs=1e-5)
    for scale in (1e-3, 0.1, 3.0):
        assert (acceptance_loss(teacher + scale * torch.randn(4, 20), teacher.log_softmax(-1)) > 1e-5).all()


def test_acceptance_loss_has_a_gradient_where_the_draft_is_confidently_wrong():
    """The chance itself is 1e-30 there, and so is its gradient."""
    logits = torch.tensor([[70.0, 0.0, 0.0]], requires_grad=True)
    loss = acceptance_loss(logits, torch.tensor([[-200.0, 0.0, -200.0]]).log_softmax(-1))
    loss.sum().backward()
    assert loss.item() == pytest.approx(70.0)
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


def test_descending_the_acceptance_loss_raises_acceptance():
    """A draft that can express only some distributions: the loss finds a better one than the cross-entropy does."""
    teacher = torch.tensor([[3.0, 2.9, -4.0, -4.0, 2.0, 1.0]])
    mix = torch.randn(2, 6)  # the draft has two numbers for six tokens
    accepted = {}
    for loss_type in ("soft_cross_entropy", "acceptance"):
        parameters = torch.zeros(1, 2, requires_grad=True)
        optimizer = torch.optim.Adam([parameters], 0.05)
        for _ in range(300):
            optimizer.zero_grad()
            loss_of_logits(parameters @ mix, supervision_by(teacher), loss_type=loss_type).loss_sum.backward()
            optimizer.step()
        accepted[loss_type] = float(torch.minimum((parameters.detach() @ mix).softmax(-1), teacher.softmax(-1)).sum())
    assert accepted["acceptance"] > accepted["soft_cross_entropy"] + 0.001


def test_feature_regression_is_added_for_every_pair():
    logits, teacher, features = torch.randn(4, 6), torch.randn(4, 6), 3 * torch.randn(4, 6)
    plain = loss_of_logits(logits, supervision_by(teacher, [True, True, False, True]))
    supervision = supervision_by(teacher, [True, True, False, True], features=features.bfloat16())
    entries = torch.tensor([2, 0, 3])
    loss = loss_of_logits(logits[:3], supervision, entries, feature_loss_weight=0.5, loss_chunk=2)
    without = loss_of_logits(logits[:3], supervision, entries)
    regression = []
    for i, entry in enumerate(entries.tolist()):
        wanted = features.bfloat16().float()[entry]
        size = wanted.norm() / 6**0.5
        regression.append(nn.functional.smooth_l1_loss(logits[i] / size, wanted / size))
    torch.testing.assert_close(loss.loss_sum - without.loss_sum, 0.5 * sum(regression))
    assert float(plain.loss_sum) > 0
    with pytest.raises(ValueError, match="needs the target's features one position ahead: pass teacher_features"):
        loss_of_logits(logits, supervision_by(teacher), feature_loss_weight=0.5)


# ----- in chunks -----------------------------------------------------------------------------------------------------


def adapted(dropout: float = 0.0) -> nn.Module:
    """Norm and output layer with a LoRA adapter that is not at its zero start."""
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 50, bias=False))
    config = LoraConfig(r=2, target_modules=["1"], lora_dropout=dropout, init_lora_weights=False)
    return inject_adapter_in_model(config, module)


HEADS = {
    "linear": lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 50)),
    "half precision": lambda: nn.Linear(8, 50).to(torch.bfloat16),
    "LoRA": adapted,
}


def gradients(head: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 3, **settings):
    """Loss, hits, and the gradients of a step's input and of everything in the head that learns."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(11, 8, generator=generator).to(dtype).requires_grad_()
    teacher = 2 * torch.randn(13, 50, generator=generator)
    entries = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 10, 11, 12])
    supervision = supervision_by(teacher, [i % 5 != 2 for i in range(13)])
    weights = torch.rand(11, generator=generator)
    torch.manual_seed(0)
    loss = step_loss(hidden, head, entries, supervision, TTTSettings(**settings), weights)
    leaves = [hidden, *(parameter for parameter in head.parameters() if parameter.requires_grad)]
    return loss.loss_sum.detach(), loss.hits, torch.autograd.grad(loss.loss_sum, leaves)


@pytest.mark.parametrize("chunk", [1, 4, 11, 500])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("kind", HEADS)
def test_chunks_of_any_size_give_the_loss_and_gradients_of_all_rows_at_once(kind, loss_type, chunk):
    head = HEADS[kind]()
    dtype = torch.bfloat16 if kind == "half precision" else torch.float32
    expected, hits, references = gradients(head, dtype, loss_type=loss_type, loss_chunk=None)
    loss, hit, grads = gradients(head, dtype, loss_type=loss_type, loss_chunk=chunk)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(hit, hits)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5  # sums of chunks are rounded to the parameter's dtype
    for gradient, reference in zip(grads, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=tolerance, atol=tolerance)


def test_dropout_in_the_head_falls_alike_in_both_computations():
    head = adapted(dropout=0.5).train()
    expected, _, references = gradients(head, loss_chunk=None)
    loss, _, grads = gradients(head, loss_chunk=11)
    assert float(loss) == pytest.approx(float(expected))
    for gradient, reference in zip(grads, references, strict=True):
        torch.testing.assert_close(gradient, reference)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gave."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.numel())
        return output


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_no_more_than_a_chunk_of_logits_exists_and_none_is_kept(loss_type):
    rows, size, chunk = 600, 1000, 50
    head = nn.Linear(4, size, bias=False)
    supervision = supervision_by(torch.randn(rows, size).bfloat16())
    hidden, saved = torch.randn(rows, 4, requires_grad=True), []

    def keep(tensor):
        saved.append(tensor)
        return tensor

    with LargestTensor() as mode:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            settings = TTTSettings(loss_type=loss_type, loss_chunk=chunk)
            loss = step_loss(hidden, head, torch.arange(rows), supervision, settings).loss_sum
        loss.backward()
    assert mode.largest == chunk * size
    assert sum(tensor.numel() for tensor in saved) < rows * 30  # a few numbers a row


def test_evaluation_runs_in_chunks_too():
    head, supervision = nn.Linear(4, 1000), supervision_by(torch.randn(60, 1000))
    with torch.no_grad(), LargestTensor() as mode:
        step_loss(torch.randn(60, 4), head, torch.arange(60), supervision, TTTSettings(loss_chunk=10))
    assert mode.largest == 10 * 1000


# ----- which pairs ---------------------------------------------------------------------------------------------------


def labels_of(length: int, answers: list[tuple[int, int]]) -> torch.Tensor:
    """(1, T): an answer at a..b has the learnt tokens a+1..b."""
    labels = torch.full((1, length), IGNORE_INDEX)
    for a, b in answers:
        labels[0, a + 1 : b + 1] = torch.arange(a + 1, b + 1)
    return labels


def supervision_of(labels: torch.Tensor) -> Supervision:
    mask = supervised_mask(labels)
    count = int(mask.sum())
    return Supervision.build(mask, torch.randn(count, 5), torch.ones(count, dtype=torch.bool))


def pairs_of(supervision: Supervision, rows: torch.Tensor, step: int) -> list[tuple[int, int]]:
    """(batch row, row t) of every pair of a step."""
    batch, place, _ = supervision.pairs(rows, step)
    return [(int(b), int(rows[b, p])) for b, p in zip(batch, place, strict=True)]


def test_pairs_of_the_worked_example():
    """A prompt at 0-3 and its answer at 4-6."""
    supervision = supervision_of(labels_of(7, [(4, 6)]))
    rows = torch.arange(7)[None]
    assert pairs_of(supervision, rows, 0) == [(0, 3), (0, 4)]
    assert pairs_of(supervision, rows, 1) == [(0, 2), (0, 3)]
    assert pairs_of(supervision, rows, 4) == [(0, 0)]
    assert pairs_of(supervision, rows, 5) == []


@pytest.mark.parametrize(
    "answers",
    [[(4, 6)], [(3, 3)], [(2, 9)], [(3, 5), (9, 13)], [(1, 2), (4, 4), (6, 13)]],
    ids=lambda answers: " ".join(f"{a}-{b}" for a, b in answers),
)
def test_every_steps_pairs_are_those_of_the_rule(answers):
    """All (t, s) with a-1 <= t+s <= b-2, whose targets are x[a+1]..x[b], for every answer."""
    labels = labels_of(14, answers)
    supervision = supervision_of(labels)
    rows = torch.arange(14)[None]
    taught = supervised_mask(labels)[0].nonzero()[:, 0]
    for step in range(7):
        expected = [t for t in range(14) if any(a - 1 <= t + step <= b - 2 for a, b in answers)]
        batch, place, entries = supervision.pairs(rows, step)
        assert place.tolist() == expected
        assert batch.tolist() == [0] * len(expected)
        assert taught[entries].tolist() == [t + step for t in expected]  # the entry is the one of u = t + s


def test_entries_of_a_batch_are_numbered_row_by_row():
    labels = torch.cat([labels_of(8, [(2, 4)]), labels_of(8, []), labels_of(8, [(1, 2), (4, 7)])])
    supervision = supervision_of(labels)
    rows = torch.arange(8).expand(3, -1)
    assert pairs_of(supervision, rows, 0) == [(0, 1), (0, 2), (2, 0), (2, 3), (2, 4), (2, 5)]
    assert supervision.pairs(rows, 0)[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert pairs_of(supervision, rows, 2) == [(0, 0), (2, 1), (2, 2), (2, 3)]
    assert supervision.pairs(rows, 2)[2].tolist() == [1, 3, 4, 5]


def test_pairs_of_some_rows_only():
    supervision = supervision_of(labels_of(14, [(3, 5), (9, 13)]))
    rows = torch.tensor([[1, 3, 8, 10, 13]])
    everything = torch.arange(14)[None]
    for step in range(5):
        kept = [pair for pair in pairs_of(supervision, everything, step) if pair[1] in rows[0].tolist()]
        assert pairs_of(supervision, rows, step) == kept


@pytest.mark.parametrize(("share", "count"), [(0.05, 1), (0.3, 4), (0.5, 7), (1.0, 14)])
@pytest.mark.parametrize("num_steps", [2, 4])
def test_sampled_rows(share, count, num_steps):
    answers = [[(3, 5), (9, 13)], [(5, 6)]]
    supervision = supervision_of(torch.cat([labels_of(14, spans) for spans in answers]))
    rows = supervision.sample_positions(share, num_steps)
    assert rows.shape == (2, count)
    assert (rows[:, 1:] > rows[:, :-1]).all()  # ascending and distinct
    assert (rows >= 0).all()
    assert (rows < 14).all()
    weights = supervision.sample_weights(count, num_steps)
    for b, spans in enumerate(answers):
        useful = {
            u - step for a, end in spans for u in range(a - 1, end - 1) for step in range(1, num_steps) if u >= step
        }
        assert len(set(rows[b].tolist()) & useful) == min(count, len(useful))  # rows that learn something come first
        assert float(weights[b]) == pytest.approx(max(1.0, len(useful) / count))


def test_sampled_rows_differ_from_draw_to_draw():
    supervision = supervision_of(labels_of(64, [(3, 63)]))
    draws = {tuple(supervision.sample_positions(0.3)[0].tolist()) for _ in range(5)}
    assert len(draws) == 5


# ----- packed rows ---------------------------------------------------------------------------------------------------


def packed(*documents: tuple[int, list[tuple[int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and positions (1, T) of documents given by their length and answers, one behind the other."""
    labels = torch.cat([labels_of(length, answers) for length, answers in documents], dim=1)
    return labels, torch.cat([torch.arange(length) for length, _ in documents])[None]


DOCUMENTS = [(7, [(2, 6)]), (5, [(1, 4)]), (1, []), (9, [(3, 4), (6, 8)]), (3, [])]


@pytest.mark.parametrize("step", range(7))
def test_pairs_of_packed_documents_are_those_of_each(step):
    labels, positions = packed(*DOCUMENTS)
    mask = supervised_mask(labels)
    count = int(mask.sum())
    known = torch.ones(count, dtype=torch.bool)
    supervision = Supervision.build(mask, torch.randn(count, 5), known, positions)
    every = torch.arange(labels.shape[1])[None]
    _, rows, entries = supervision.pairs(every, step)
    expected_rows, expected_entries, start, taught = [], [], 0, 0
    for length, answers in DOCUMENTS:
        alone = supervision_of(labels_of(length, answers))
        _, own_rows, own_entries = alone.pairs(torch.arange(length)[None], step)
        expected_rows += (start + own_rows).tolist()
        expected_entries += (taught + own_entries).tolist()
        start, taught = start + length, taught + len(alone.teacher)
    assert rows.tolist() == expected_rows
    assert entries.tolist() == expected_entries
    unpacked = Supervision.build(mask, torch.randn(count, 5), known)
    assert all(
        map(torch.equal, supervision.pairs_of_steps(every, range(step, 9))[step], supervision.pairs(every, step))
    )
    crossing = len(unpacked.pairs(every, step)[1]) - len(rows)
    assert crossing > 0 or step < 2  # without the positions, rows would reach into the next document


def test_no_document_is_taught_the_start_of_the_next():
    """Labels of packed rows that somebody else made may be set at a document's first two tokens."""
    labels, positions = packed(*DOCUMENTS)
    careless = torch.arange(labels.shape[1])[None]
    taught = supervised_mask(careless, positions)
    allowed = [u for u in range(labels.shape[1] - 2) if positions[0, u + 2] >= 2]
    assert taught[0].nonzero()[:, 0].tolist() == allowed
    assert torch.equal(supervised_mask(labels, positions), supervised_mask(labels))


def test_sampled_rows_of_packed_documents_are_those_that_learn_something():
    labels, positions = packed(*DOCUMENTS)
    mask = supervised_mask(labels)
    count = int(mask.sum())
    supervision = Supervision.build(mask, torch.randn(count, 5), torch.ones(count, dtype=torch.bool), positions)
    every = torch.arange(labels.shape[1])[None]
    useful = {row for step in range(1, 4) for row in supervision.pairs(every, step)[1].tolist()}
    assert supervision.taught_later(4)[0].nonzero()[:, 0].tolist() == sorted(useful)
    rows = supervision.sample_positions(len(useful) / labels.shape[1], 4)
    assert set(rows[0].tolist()) == useful


# ----- settings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_steps", 0, "num_steps must be at least 1, got 0"),
        ("step_decay", 0.0, "step_decay must be above 0, got 0.0"),
        ("step_decay", float("nan"), "step_decay must be above 0, got nan"),
        ("step_weights", (1.0, 0.5), "step_weights has 2 weights, but there are 7 steps"),
        ("step_weights", (1.0, 0.5, 0, 0, 0, 0, -1.0), "0 or more, and not all 0"),
        ("step_weights", (0.0,) * 7, "0 or more, and not all 0"),
        ("position_share", 0.0, "above 0 and at most 1, got 0.0"),
        ("position_share", 1.5, "above 0 and at most 1, got 1.5"),
        ("loss_type", "mse", "loss_type must be one of soft_cross_entropy, kl, acceptance, got 'mse'"),
        ("attention", "flash", "attention must be one of fused, eager, got 'flash'"),
        ("feature_loss_weight", -1.0, "feature_loss_weight must be 0 or more, got -1.0"),
        ("loss_chunk", 0, "loss_chunk must be at least 1, or None for all positions at once, got 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(field, value, message):
    with pytest.raises(ValueError, match=message):
        TTTSettings(**{field: value})
