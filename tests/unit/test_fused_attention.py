"""Attention of training-time test in linear memory: the eager numbers, whatever the shape, documents and window."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf.ttt import blocks, fused, kernels
from eagle3_hf.ttt.attention import TTTAttention
from eagle3_hf.ttt.blocks import Block, blocks_of, documents_of


def layer(index: int = 0, window: int | None = None, scaling: float = 0.4) -> SimpleNamespace:
    return SimpleNamespace(layer_idx=index, scaling=scaling, sliding_window=window)


def positions_of(lengths: list[list[int]]) -> torch.Tensor:
    """(B, T) of documents of these lengths."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def states_of(shape: dict, rows: int, steps: int, dtype=torch.float32, seed: int = 0) -> list[list[torch.Tensor]]:
    """Query, key and value of every step, as a projection leaves them: views of (B, n, heads, width)."""
    generator = torch.Generator().manual_seed(seed)

    def random(heads: str, count: int, width: str) -> torch.Tensor:
        states = torch.randn(shape["batch"], count, shape[heads], shape[width], generator=generator)
        return states.to(dtype).transpose(1, 2).requires_grad_()

    counts = [shape["length"]] + [rows] * (steps - 1)
    return [[random("heads", n, "key"), random("groups", n, "key"), random("groups", n, "value")] for n in counts]


def unrolled(attention: str, states, position_ids, sampled, window) -> list[torch.Tensor]:
    """The output of every step, and the gradient of every state in a weighted sum of them all."""
    batch, _, length, _ = states[0][0].shape
    attend, outputs = TTTAttention(torch.arange(length).expand(batch, -1), position_ids, attention), []
    for step, state in enumerate(states):
        if step == 1 and sampled is not None:
            attend.sample(sampled)
        attend.step = step
        outputs.append(attend(layer(window=window), *state))
    generator = torch.Generator().manual_seed(9)
    total = sum((output.float() * torch.randn(output.shape, generator=generator)).sum() for output in outputs)
    leaves = [tensor for state in states for tensor in state]
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [*outputs, *gradients]


def assert_alike(states, position_ids=None, sampled=None, window=None, rtol=1e-5, atol=1e-5) -> None:
    mine = unrolled("fused", states, position_ids, sampled, window)
    for number, (a, b) in enumerate(zip(mine, unrolled("eager", states, position_ids, sampled, window), strict=True)):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, n=number: f"tensor {n}: {m}")


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch, request):
    """What is compared is the fused form: here it must never be left for the eager one without a word."""
    if "caught" not in request.fixturenames:
        monkeypatch.setattr("eagle3_hf.ttt.attention.can_fuse", lambda query, value: True)


@st.composite
def cases(draw):
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    groups = draw(st.integers(1, 2))
    shape = {"batch": batch, "length": length, "groups": groups, "heads": groups * draw(st.integers(1, 3))}
    shape |= {"key": draw(st.sampled_from([2, 5, 8])), "value": draw(st.sampled_from([2, 5, 8]))}
    position_ids = None
    if draw(st.booleans()):
        starts = st.lists(st.booleans(), min_size=length, max_size=length)
        cuts = torch.tensor([draw(starts) for _ in range(batch)])
        cuts[:, 0] = True
        place = torch.arange(length).expand(batch, -1)
        position_ids = place - (place * cuts).cummax(1).values
    sampled = None
    if draw(st.booleans()):
        order = torch.rand(batch, length, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
        sampled = order.argsort(1)[:, : draw(st.integers(1, length))].sort(1).values
    window = draw(st.none() | st.integers(1, length + 2))
    return shape, position_ids, sampled, window, draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 128]))


@given(cases())
@settings(max_examples=120)
def test_it_is_the_eager_form_for_everything(case):
    shape, position_ids, sampled, window, steps, block = case
    states = states_of(shape, shape["length"] if sampled is None else sampled.shape[1], steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "QUERIES", block)
        patch.setattr("eagle3_hf.ttt.attention.can_fuse", lambda query, value: True)
        assert_alike(states, position_ids, sampled, window)


SMALL = {"batch": 2, "length": 300, "groups": 2, "heads": 4, "key": 16, "value": 16}
PACKED = positions_of([[300], [7, 1, 150, 142]])
SOME = torch.stack([torch.arange(0, 300, 2), torch.arange(150) + 100])


@pytest.mark.parametrize("position_ids", [None, PACKED], ids=["single", "packed"])
@pytest.mark.parametrize("sampled", [None, SOME], ids=["all rows", "some rows"])
@pytest.mark.parametrize("window", [None, 100], ids=["full", "window"])
def test_it_is_the_eager_form_over_several_blocks(position_ids, sampled, window):
    assert_alike(states_of(SMALL, 300 if sampled is None else 150, 3), position_ids, sampled, window)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampled", [None, SOME], ids=["all rows", "some rows"])
def test_half_precision_is_as_close_to_the_truth_as_the_eager_form(dtype, sampled, monkeypatch):
    monkeypatch.setattr(blocks, "QUERIES", 4)  # a key has a part in the gradients of many blocks
    halves = states_of(SMALL, 300 if sampled is None else 150, 3, dtype)
    exact = [[state.detach().float().requires_grad_() for state in step] for step in halves]
    truth = unrolled("eager", exact, PACKED, sampled, None)
    mine, eager = (unrolled(name, halves, PACKED, sampled, None) for name in ("fused", "eager"))
    for a, b, c in zip(mine, eager, truth, strict=True):
        assert a.dtype == dtype
        assert (a.float() - c).norm() < 1.5 * (b.float() - c).norm() + 1e-6


def test_under_autocast_it_computes_in_the_dtype_of_autocast():
    """Queries come in float32 where a residual is normed, keys of step 0 in bfloat16."""
    states = states_of(SMALL, 300, 2)
    with torch.autocast("cpu", torch.bfloat16):
        output = unrolled("fused", states, None, None, None)
    assert output[1].dtype == torch.bfloat16
    assert output[2].dtype == torch.float32  # a gradient is like its tensor
    for a, b in zip(output, unrolled("eager", states, None, None, None), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.05)


def test_a_step_run_again_gives_the_same(monkeypatch):
    states = states_of(SMALL, 300, 3)
    attend = TTTAttention(torch.arange(300)[None])
    outputs = []
    for step in (0, 1, 2, 1):
        attend.step = step
        outputs.append(attend(layer(), *states[step]))
    assert torch.equal(outputs[1], outputs[3])


def test_layers_do_not_see_each_other():
    first, second = (states_of(SMALL, 300, 2, seed=seed) for seed in (1, 2))
    both, alone = TTTAttention(torch.arange(300)[None]), TTTAttention(torch.arange(300)[None])
    for step in range(2):
        both.step = alone.step = step
        both(layer(0), *first[step])
        assert torch.equal(both(layer(1), *second[step]), alone(layer(0), *second[step]))


# ----- blocks --------------------------------------------------------------------------------------------------------


def seen(found: list[Block], rows: torch.Tensor, length: int, width: int | None) -> torch.Tensor:
    """(B, R, T): how often each pair is in a block and not masked."""
    count = torch.zeros(*rows.shape, length, dtype=torch.int64)
    for block in found:
        part = count[block.batch, block.queries, block.keys]
        mask = block.mask(rows, width, torch.float32)
        visible = torch.ones_like(part) if mask is None else (mask[:, 0] == 0).long().expand_as(part)
        part += visible.tril() if block.causal else visible
    return count


@pytest.mark.parametrize("lengths", [None, [[9, 1, 30], [40], [1, 1, 38]]], ids=["single", "packed"])
@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("width", [None, 1, 5, 39, 40, 100])
def test_blocks_hold_every_visible_pair_once(lengths, share, width, monkeypatch):
    monkeypatch.setattr(blocks, "QUERIES", 4)
    everything = torch.arange(40).expand(3, -1)
    rows = everything if share == 1 else torch.rand(3, 40).argsort(1)[:, :16].sort(1).values
    position_ids = everything if lengths is None else positions_of(lengths)
    documents = None if lengths is None else documents_of(position_ids)
    found = blocks_of(40, documents, None if share == 1 else rows.tolist(), width)
    starts = (everything - position_ids).gather(1, rows)[..., None]
    place, row = torch.arange(40), rows[..., None]
    visible = (place <= row) & (place >= starts) & (place > row - (width or 1000))
    assert torch.equal(seen(found, rows, 40, width), visible.long())


def test_what_has_no_documents_and_no_window_is_one_causal_call():
    assert blocks_of(2048) == [Block(slice(None), slice(0, 2048), slice(0, 2048), causal=True)]


def test_documents_start_at_position_0():
    position_ids = positions_of([[3, 1, 2], [6], [1, 5]])
    assert documents_of(position_ids) == [[(0, 3), (3, 4), (4, 6)], [(0, 6)], [(0, 1), (1, 6)]]


def test_no_mask_is_wider_than_its_block_needs():
    """A document of which every third row runs: masks span the rows of a block, and not the past."""
    rows = torch.arange(0, 3000, 3)
    found = blocks_of(3000, None, [rows.tolist()])
    widest = max(block.keys.stop - block.keys.start for block in found if block.masked)
    assert widest <= 3 * blocks.QUERIES


# ----- where there is no kernel --------------------------------------------------------------------------------------


@pytest.fixture
def caught(caplog):
    fused._trial.cache_clear()
    yield caplog
    fused._trial.cache_clear()


def test_the_cpu_passes_its_trial_without_a_word(caught):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert fused.can_fuse(torch.empty(1, 2, 3, 64, dtype=dtype), torch.empty(1, 2, 3, 48))
    assert not caught.records


def broken(error=None, factor=1.0):
    class Broken(kernels.CpuFlash):
        def forward(self, *args):
            if error is not None:
                raise error
            output, norm, kept = super().forward(*args)
            return output, norm * factor, kept

    return Broken


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (broken(RuntimeError("no kernel image")), "no kernel image"),
        (broken(NotImplementedError("not on this device")), "not on this device"),
        (broken(factor=0.5), "results are"),
    ],
    ids=["fails", "unknown", "wrong"],
)
def test_without_a_right_kernel_it_falls_back_and_says_so_once(kernel, message, caught, monkeypatch):
    monkeypatch.setattr(kernels, "CpuFlash", kernel)
    states = states_of(SMALL, 300, 2)
    outputs = unrolled("fused", states, PACKED, None, None)
    for mine, eager in zip(outputs, unrolled("eager", states, PACKED, None, None), strict=True):
        assert torch.equal(mine, eager)
    (record,) = caught.records
    assert "training attention runs unfused" in record.getMessage()
    assert message in record.getMessage()


def test_devices_without_a_kernel_are_named(caught):
    assert not fused.can_fuse(torch.empty(1, 2, 3, 8, device="meta"), torch.empty(1, 2, 3, 8, device="meta"))
    assert "is known for meta" in caught.records[0].getMessage()


# ----- CUDA's kernels, as far as they can be checked without one -----------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "dtype", "masked"),
    [
        (kernels.CudaFlash, torch.bfloat16, False),
        (kernels.CudaEfficient, torch.float32, False),
        (kernels.CudaEfficient, torch.bfloat16, True),
    ],
)
@pytest.mark.parametrize(("queries", "keys", "widths"), [(40, 40, (20, 12)), (7, 41, (16, 16)), (33, 70, (8, 24))])
def test_calls_of_the_cuda_kernels_are_taken_by_torchs_shape_functions(kernel, dtype, masked, queries, keys, widths):
    """On the meta device: arguments in order, log-sum-exp and gradients of the right shapes."""

    def empty(rows: int, width: int) -> torch.Tensor:
        return torch.empty(1, rows, 4, width, dtype=dtype, device="meta").transpose(1, 2)

    states = empty(queries, widths[0]), empty(keys, widths[0]), empty(keys, widths[1])
    mask = torch.empty(1, 1, queries, keys, dtype=dtype, device="meta") if masked else None
    padded = kernels.Padded(kernel(), multiple=8)
    output, norm, kept = padded.forward(states, 0.3, False, mask)
    assert output.shape == (1, 4, queries, widths[1])
    assert norm.shape == (1, 4, queries)
    gradients = padded.backward(torch.empty_like(output), states, output, norm, 0.3, False, mask, kept)
    assert [gradient.shape for gradient in gradients] == [state.shape for state in states]
