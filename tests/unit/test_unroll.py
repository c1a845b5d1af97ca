"""The training-time-test unroll: its memory-saving forms give the losses and gradients of the plain one."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt import fused
from eagle3_hf.ttt.loss import IGNORE_INDEX, Supervision
from eagle3_hf.ttt.settings import TTTSettings
from support.families import prompt, tiny


PLAIN = TTTSettings(num_steps=4, attention="eager", loss_chunk=None)
LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 24}
HEADS = {
    "grouped": {},
    "deep, fed normed": {"num_hidden_layers": 2, "norm_output": True},
    "latent": LATENT,
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 5},
    "latent with a window": {**LATENT, "layer_types": ["sliding_attention"], "sliding_window": 3},
    "query and key norms, normed residual": {"qk_norm": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=4)


def head_for(target, **overrides) -> Eagle3DraftModel:
    torch.manual_seed(3)
    return Eagle3DraftModel.from_target(target, draft_vocab=torch.arange(0, 320, 2), **overrides)


def chat(target, draft, length: int, answer: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Inputs of the draft's training forward for one chat, its answer at these places."""
    ids = prompt(length, seed=length)
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[0, answer[0] + 1 : answer[1] + 1] = ids[0, answer[0] + 1 : answer[1] + 1]
    batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
    return {**batch, **Teacher(target, draft.config.target_layer_ids, draft.draft_vocab_ids())(batch)}


CHATS = [(9, (4, 8)), (14, (2, 13)), (3, (1, 2)), (12, (6, 10)), (2, (0, 0)), (17, (3, 16))]


def chats(target, draft) -> list[dict[str, torch.Tensor]]:
    return [chat(target, draft, *sizes) for sizes in CHATS]


def packed(rows: list[list[dict[str, torch.Tensor]]], width: int) -> dict[str, torch.Tensor]:
    """One row for each list of chats, and padding as a last document of its own."""
    batch: dict[str, list[torch.Tensor]] = {}
    for row in rows:
        positions = [torch.arange(part["input_ids"].shape[1]) for part in row]
        room = width - sum(len(part) for part in positions)
        batch.setdefault("position_ids", []).append(torch.cat([*positions, torch.arange(room)]))
        for name, fill in (("input_ids", 7), ("labels", IGNORE_INDEX), ("attention_mask", 0)):
            joined = torch.cat([part[name][0] for part in row])
            batch.setdefault(name, []).append(nn.functional.pad(joined, (0, room), value=fill))
        joined = torch.cat([part["features"][0] for part in row])
        batch.setdefault("features", []).append(nn.functional.pad(joined, (0, 0, 0, room), value=0.5))
    stacked = {name: torch.stack(parts) for name, parts in batch.items()}
    flat = {name: torch.cat([part[name] for row in rows for part in row]) for name in TEACHER}
    return {**stacked, **flat}


TEACHER = ("teacher_logits", "teacher_in_vocab")


def run(draft, batch, settings: TTTSettings, autocast: bool = False):
    """The output of the training forward, its losses not divided, and the gradient of every parameter."""
    draft.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = draft(**batch, settings=settings, num_items_in_batch=1)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}


def alone(draft, parts, settings: TTTSettings = PLAIN):
    """Sums over chats that run by themselves, in the plain form."""
    losses, hits, gradients = 0, 0, {}
    for part in parts:
        output, grads = run(draft, part, settings)
        losses, hits = losses + output.step_losses, hits + output.step_hits
        gradients = {name: gradients.get(name, 0) + gradient for name, gradient in grads.items()}
    return losses, hits, gradients


def assert_alike(output, gradients, losses, hits, expected, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(output.step_losses, losses, rtol=tolerance, atol=tolerance)
    assert output.step_hits.tolist() == hits.tolist()
    for name, gradient in gradients.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            gradient, expected[name], rtol=tolerance, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("overrides", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("attention", ["fused", "eager"])
def test_packed_rows_are_their_chats_alone(target, overrides, attention):
    """Answers up to a document's last token, chats of two tokens and chats shorter than the unroll included."""
    draft = head_for(target, **overrides)
    parts = chats(target, draft)
    batch = packed([parts[:3], parts[3:]], 33)
    output, gradients = run(draft, batch, replace(PLAIN, attention=attention))
    assert_alike(output, gradients, *alone(draft, parts))


@pytest.mark.parametrize("overrides", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("checkpoint", "chunk"),
    [(False, None), (True, None), (True, 4)],
    ids=["", "checkpointed", "checkpointed, chunked"],
)
def test_fused_and_checkpointed_is_plain(target, overrides, checkpoint, chunk):
    draft = head_for(target, **overrides)
    batch = chat(target, draft, 30, (5, 29))
    settings = TTTSettings(num_steps=4, checkpoint_steps=checkpoint, loss_chunk=chunk)
    output, gradients = run(draft, batch, settings)
    plain, expected = run(draft, batch, PLAIN)
    assert_alike(output, gradients, plain.step_losses, plain.step_hits, expected)


@pytest.mark.parametrize(("attention", "checkpoint"), list(product(["fused", "eager"], [False, True])))
def test_sampled_rows_of_packed_chats(target, attention, checkpoint, monkeypatch):
    """The same rows drawn, in packed rows or not: each document's own rows, weighted as drawn."""
    draft = head_for(target)
    parts = chats(target, draft)
    batch = packed([parts[:3], parts[3:]], 33)
    rows = torch.stack([torch.randperm(33, generator=torch.Generator().manual_seed(s))[:12] for s in (1, 2)])
    monkeypatch.setattr(Supervision, "sample_positions", lambda *args: rows.sort(1).values)
    settings = replace(PLAIN, position_share=12 / 33)
    plain, expected = run(draft, batch, settings)
    everything, _ = run(draft, batch, PLAIN)
    assert plain.step_counts.tolist()[1:] < everything.step_counts.tolist()[1:]
    output, gradients = run(draft, batch, replace(settings, attention=attention, checkpoint_steps=checkpoint))
    assert_alike(output, gradients, plain.step_losses, plain.step_hits, expected)


def test_sampled_rows_of_packed_chats_expect_the_whole_loss(target):
    """Rows whose later tokens lie in the next document are not drawn as if they learnt something."""
    draft = head_for(target)
    parts = chats(target, draft)
    batch = packed([parts[:3], parts[3:]], 33)
    with torch.no_grad():
        exact = draft(**batch, settings=PLAIN).step_losses
        torch.manual_seed(0)
        sampled = replace(TTTSettings(num_steps=4), position_share=0.3)
        draws = torch.stack([draft(**batch, settings=sampled).step_losses for _ in range(150)])
    error = draws[:, 1:].std(0) / len(draws) ** 0.5
    assert ((draws[:, 1:].mean(0) - exact[1:]).abs() < 3.5 * error).all()


def test_checkpoints_keep_the_inputs_of_steps_only(target):
    """Bytes that autograd holds at the end of the forward pass, counted as it saves them."""
    draft = head_for(target)
    batch = chat(target, draft, 60, (5, 59))

    def kept(settings: TTTSettings) -> int:
        held: dict[int, int] = {}

        def pack(tensor):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = draft(**batch, settings=settings)
        assert output.loss.requires_grad
        return sum(held.values()) - sum(p.numel() * p.element_size() for p in draft.parameters())

    settings = TTTSettings(num_steps=7)
    assert kept(replace(settings, checkpoint_steps=True)) < 0.35 * kept(settings)


def test_checkpoints_in_the_first_call_of_a_process(target):
    """The kernels are tried inside the first step, whose own tensors alone must be counted."""
    draft = head_for(target)
    batch = chat(target, draft, 20, (5, 19))
    settings = TTTSettings(num_steps=3, checkpoint_steps=True)
    _, expected = run(draft, batch, settings)
    fused._trial.cache_clear()
    _, gradients = run(draft, batch, settings)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_under_autocast_it_is_close_to_float32(target, checkpoint):
    draft = head_for(target)
    batch = chat(target, draft, 40, (5, 39))
    output, gradients = run(draft, batch, TTTSettings(num_steps=4, checkpoint_steps=checkpoint), autocast=True)
    plain, expected = run(draft, batch, PLAIN)
    torch.testing.assert_close(output.step_losses, plain.step_losses, rtol=1e-2, atol=1e-2)
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() < 0.1 * expected[name].norm(), name


def test_evaluation_keeps_nothing(target):
    draft = head_for(target)
    batch = chat(target, draft, 30, (5, 29))
    with torch.no_grad():
        output = draft(**batch, settings=TTTSettings(num_steps=4, checkpoint_steps=True))
    assert not output.loss.requires_grad
    assert float(output.loss) == pytest.approx(float(run(draft, batch, PLAIN)[0].loss.detach()) / 24, rel=1e-5)
