"""Small numbers on their way to a device and back."""

import pytest
import torch

from eagle3_hf.decoding import transfers
from eagle3_hf.decoding.coupling import Noise
from eagle3_hf.decoding.draft.host_noise import HostNoise


CPU = torch.device("cpu")


def test_integers():
    for values in ([3, -1, 2**40], [7], [], range(4)):
        moved = transfers.upload(values, CPU)
        assert moved.dtype == torch.int64
        assert moved.tolist() == list(values)


def test_several_kinds_together():
    moved = transfers.upload_parts(CPU, [1, 2, 3], [0.5, float("-inf"), 2.0], b"\1\0\1\1")
    assert [part.dtype for part in moved] == [torch.int64, torch.float32, torch.bool]
    assert [part.tolist() for part in moved] == [[1, 2, 3], [0.5, float("-inf"), 2.0], [True, False, True, True]]
    alone = transfers.upload_parts(CPU, [4])
    assert [part.tolist() for part in alone] == [[4], [], []]


def test_a_copy_is_there_when_it_is_asked_for():
    tensor = torch.randn(2, 3)
    assert torch.equal(transfers.download(tensor)(), tensor)


@pytest.mark.parametrize("waits", [False, True])
def test_noise_on_the_host_is_that_of_the_steps(waits, monkeypatch):
    monkeypatch.setattr(transfers, "makes_host_wait", lambda device: waits)
    torch.manual_seed(0)
    noise = Noise(2, 5, "cpu")
    host = HostNoise(noise)
    for _ in range(3):
        host.begin(4)
        for index, lead, level, token in ((0, 0, 0, 4), (1, 1, 2, 0), (1, 3, 3, 2)):  # one of them beyond what began
            expected = float(noise.peek(lead + level)[index, token])
            assert host.race(index, lead)(level, token) == pytest.approx(expected)
        assert host.race(0, 0)(1, 5) == float("inf"), "a token that the scores do not have"
        assert noise.advance()
