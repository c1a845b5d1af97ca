"""Memory and time of a training step are measured right, and the memory is what it is meant to be."""

import runpy
import sys
from dataclasses import replace

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.ttt.settings import TTTSettings
from support.examples import EXAMPLES, load_example


cost = load_example("benchmarks/training_cost")
CPU = torch.device("cpu")


def steps_for(vocab_size: int, draft_vocab_size: int, hidden_size: int = 64, settings=TTTSettings()) -> cost.Steps:  # noqa: B008
    target = cost.small_target(vocab_size, hidden_size)
    torch.manual_seed(1)
    ids = torch.randperm(vocab_size)[:draft_vocab_size]
    return cost.Steps(target, Eagle3DraftModel.from_target(target, draft_vocab=ids), settings, autocast=False)


# ----- the eager formulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", [12, 36])
def test_the_eager_formulation_is_the_same_loss(document):
    """Otherwise their costs could not be compared."""
    steps = steps_for(500, 480, settings=TTTSettings(num_steps=5))
    batch = steps.batch(36, document)
    results = []
    for loss in (
        cost.our_loss(steps.draft, batch, steps.teacher(batch), steps.settings),
        cost.eager_loss(
            steps.draft, batch, cost.eager_teacher(steps.target, steps.teacher.layer_ids, batch), steps.settings
        ),
    ):
        steps.draft.zero_grad()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in steps.draft.parameters())])
    for mine, eager in zip(*results, strict=True):
        torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-6)


def test_made_up_rows_are_packed():
    batch = cost.made_up_batch(20, 10, 50)
    assert batch["position_ids"][0].tolist() == [*range(10)] * 2
    assert (batch["labels"] != -100)[0].tolist() == [*[False] * 3, *[True] * 7] * 2


# ----- memory --------------------------------------------------------------------------------------------------------


def test_peak_bytes_are_those_held_at_once():
    def run():
        first = torch.empty(1000, dtype=torch.float32)
        del first
        second, third = torch.empty(3000, dtype=torch.float32), torch.empty(500, dtype=torch.float32)
        return second, third

    assert 14_000 <= cost.peak_bytes(run, CPU) <= 14_000 + 256


def test_peak_bytes_see_what_a_kernel_holds_inside():
    """A log-sum-exp makes a copy of its input that no Python hook sees."""
    scores = torch.randn(50, 2000)
    assert cost.peak_bytes(lambda: scores.logsumexp(-1), CPU) >= scores.numel() * 4


@pytest.fixture(scope="module")
def peaks() -> dict[int, list[int]]:
    """T -> bytes of ours, of ours with checkpoints, of the eager formulation: a vocabulary large beside the width."""
    steps = steps_for(16_000, 1000, settings=TTTSettings(loss_chunk=64))
    return {length: rest for length, *rest in cost.memory_table(steps, [128, 256, 512], eager_up_to=256)}


def test_memory_grows_with_the_length_and_not_its_square(peaks):
    for kind in (0, 1):
        first, second, third = (peaks[length][kind] for length in (128, 256, 512))
        assert third - second < 2.2 * (second - first) + 100_000


def test_memory_is_at_most_half_of_the_eager_formulations(peaks):
    ours, checkpointed, eager = peaks[256]
    assert ours <= eager / 2
    assert checkpointed <= ours


def test_lengths_beyond_the_limit_are_not_run_eagerly(peaks):
    assert peaks[512][2] is None


def test_no_tensor_has_the_size_of_rows_by_rows():
    """Whatever the documents and rows: the largest allocation grows with the length alone."""
    steps = steps_for(300, 64, settings=TTTSettings(num_steps=3, position_share=0.5, loss_chunk=64))
    sizes = []
    for length in (512, 1024):
        batch = steps.batch(length)
        taught = steps.teacher(batch)
        largest = 0

        def note(tensor):
            nonlocal largest
            largest = max(largest, tensor.untyped_storage().nbytes())
            return tensor

        for settings in (steps.settings, replace(steps.settings, position_share=1.0)):
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                cost.our_loss(steps.draft, batch, taught, settings).backward()
        sizes.append(largest)
    assert sizes[1] < 2.2 * sizes[0]


# ----- time ----------------------------------------------------------------------------------------------------------


def test_a_clock_sums_its_parts():
    ticks = iter(range(100))
    clock = cost.Clock(CPU, lambda: float(next(ticks)))
    for _ in range(2):
        with clock.part("a"), clock.part("b"):
            pass
    assert clock.seconds == {"a": 6.0, "b": 2.0}


def test_every_form_is_timed_in_all_its_parts():
    steps = steps_for(300, 64, settings=TTTSettings(num_steps=2))
    table = cost.time_table(steps, 24, 12, repeats=1)
    assert set(next(iter(table.values()))) == set(cost.PARTS)
    for name, parts in table.items():
        for part, seconds in parts.items():
            assert (seconds > 0) == (part != "of it target" or name != "from stored features")


def test_stored_features_replace_the_targets_run():
    steps = steps_for(300, 64)
    batch = steps.batch(12)
    assert cost.stored(steps.target, steps.teacher, batch)["features"].shape == (1, 12, 3 * 64)


# ----- the script ----------------------------------------------------------------------------------------------------


def test_the_script_runs_on_its_own(monkeypatch, capsys):
    """As the documentation calls it, from the root of the repository."""
    script = EXAMPLES / "benchmarks" / "training_cost.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path[1:]])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert "--eager_up_to" in capsys.readouterr().out


@pytest.mark.parametrize("place", [[], ["--device", "cpu", "--dtype", "bf16"]])
def test_the_script_prints_memory(capsys, place):
    sizes = ["--vocab-size", "900", "--draft-vocab-size", "100", "--hidden-size", "64"]
    assert cost.main([*sizes, "--lengths", "16", "32", "--eager-up-to", "16", "--steps", "2", *place]) == 0
    out = capsys.readouterr().out
    *_, first, second = out.strip().splitlines()
    assert [cell.strip() for cell in first.split("|")][1] == "16"
    assert second.count("-") == 2
    assert f"cpu ({torch.get_num_threads()} threads), bfloat16" in out


def test_the_script_prints_time(capsys, tmp_path):
    cost.small_target(400, 64).save_pretrained(tmp_path)
    arguments = ["--length", "24", "--document", "12", "--repeats", "1", "--steps", "2"]
    assert cost.main([str(tmp_path), *arguments, "--processor-time", "--draft-vocab-size", "50"]) == 0
    out = capsys.readouterr().out
    assert "24 tokens in documents of 12, 2 steps" in out
    assert "| from stored features |" in out
    assert "times as long" in out
    assert cost.main([str(tmp_path), *arguments]) == 0  # a draft vocabulary as large as the target's


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--length", "100", "--document", "30"], "--length 100 is no multiple of --document 30"),
        (["--document", "5"], "--length 2048 is no multiple of --document 5"),
        (["--device-map", "auto"], "--device_map spreads MODEL, and none is named"),
        (["--steps", "0"], "argument --steps"),
    ],
)
def test_options_that_mean_nothing(words, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cost.main(words)
    assert message in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded(tmp_path, capsys):
    assert cost.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("training_cost: ")
    assert str(tmp_path) in said
