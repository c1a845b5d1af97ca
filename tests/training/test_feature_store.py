"""Features on disk: the same as those seen online, written whole or not at all, and never mixed with others'."""

import json
import os
import pickle
import signal
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eagle3_hf.model.features import FeatureReader
from eagle3_hf.training.targets import feature_store, output_layer, stored_features
from eagle3_hf.training.targets.feature_store import StoredFeatures, projected_bytes, write_features
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt.loss import IGNORE_INDEX
from support.families import tiny
from support.feature_stores import LAYER_IDS, LENGTHS, rows_of, shards, write
from support.processes import run_forked


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def written(target, tmp_path_factory):
    directory = tmp_path_factory.mktemp("store")
    write(target, directory)
    return directory


# ----- what is stored ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_values_are_those_seen_online(target, tmp_path, dtype):
    """Whatever was run beside a row: the order, the batch and the padding leave no trace."""
    rows = rows_of(LENGTHS)
    write(target, tmp_path, rows, dtype=dtype)
    stored = StoredFeatures(tmp_path)
    assert len(stored) == len(LENGTHS)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-3}
    for item, row in zip(stored, rows, strict=True):
        ids = torch.tensor([row["input_ids"]])
        with FeatureReader(target, LAYER_IDS) as reader, torch.no_grad():
            logits = target(ids).logits[0]
            features = reader.take()[0]
        assert item["features"].dtype == item["last_hidden"].dtype == dtype
        torch.testing.assert_close(item["features"].float(), features, **tolerance)
        again = target.lm_head(item["last_hidden"].float())
        torch.testing.assert_close(again, logits, rtol=1e-2, atol=1e-4 if dtype == torch.float32 else 0.05)
        assert item["input_ids"].tolist() == row["input_ids"]
        assert item["labels"].tolist() == row["labels"]
        assert item["input_ids"].dtype == item["labels"].dtype == item["top1"].dtype == torch.int64
        # The target's choice at j teaches token j + 1.
        taught = [j for j in range(len(row["labels"]) - 1) if row["labels"][j + 1] != IGNORE_INDEX]
        expected = torch.full((len(row["labels"]),), -1)
        expected[taught] = logits.argmax(-1)[taught]
        assert item["top1"].tolist() == expected.tolist()


def test_lengths_and_labels_are_read_without_the_features(target, written):
    stored, rows = StoredFeatures(written), rows_of(LENGTHS)
    assert stored.lengths == LENGTHS
    assert [row["labels"].tolist() for row in stored.iter_labels()] == rows["labels"][:]
    assert all(set(row) == {"labels"} for row in stored.iter_labels())


@pytest.mark.parametrize("rows", [range(2), range(2, 7), range(0, 7, 3), range(6, -1, -1), range(4, 4)], ids=str)
def test_some_rows_of_a_store(written, rows):
    whole, some = StoredFeatures(written), StoredFeatures(written, indices=rows)
    assert len(some) == len(rows)
    assert some.lengths == [LENGTHS[i] for i in rows]
    labels = [row["labels"].tolist() for row in whole.iter_labels()]
    assert [row["labels"].tolist() for row in some.iter_labels()] == [labels[i] for i in rows]
    for item, i in zip(some, rows, strict=True):
        for name, value in whole[i].items():
            assert torch.equal(item[name], value)
    with pytest.raises(IndexError):
        some[len(rows)]


@pytest.mark.parametrize("rows", [range(8), range(-1, 3)], ids=str)
def test_rows_beyond_the_store_are_refused(written, rows):
    with pytest.raises(ValueError, match=r"has the examples 0 to 6"):
        StoredFeatures(written, indices=rows)


def test_a_store_travels_to_worker_processes(written):
    stored = StoredFeatures(written)
    before = stored[4]
    again = pickle.loads(pickle.dumps(stored))[4]
    assert all(torch.equal(before[name], again[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_projected_size_is_the_real_one(target, tmp_path, dtype):
    rows = rows_of([40] * 12)
    write(target, tmp_path, rows, dtype=dtype, shard_size=12)
    projected = projected_bytes(40 * 12, 64, len(LAYER_IDS), dtype)
    real = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert projected <= real <= projected + 12 * 4 + 1000  # and a length of each row, and the file's header


def test_the_size_is_shown_before_anything_is_written(target, tmp_path, capsys):
    write(target, tmp_path, progress=True)
    size = projected_bytes(sum(LENGTHS), 64, len(LAYER_IDS), torch.float32)
    assert f"({size / 1e9:.3g} GB)" in capsys.readouterr().err


def test_a_full_disk_is_noticed_before_the_target_runs(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: usage(free=10_000))
    with pytest.raises(OSError, match=r"60 tokens take 6.22e-05 GB, of which .* has 1e-05 GB free: store fewer"):
        write(target, tmp_path)
    assert not shards(tmp_path)


def test_only_what_is_still_to_be_written_needs_room(target, written, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(feature_store.shutil, "disk_usage", lambda _: usage(free=10))
    before = shards(written)
    write(target, written)  # everything is there already
    assert shards(written) == before


# ----- going on ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_stopped(target, tmp_path, written, monkeypatch):
    class Interrupted(Exception):
        pass

    def failing(tensors, path):
        if "00001" in str(path):
            path.write_bytes(b"half a shard")
            raise Interrupted
        save(tensors, path)

    save = feature_store.save_file
    monkeypatch.setattr(feature_store, "save_file", failing)
    with pytest.raises(Interrupted):
        write(target, tmp_path)
    assert list(shards(tmp_path)) == ["shard-00000.safetensors"]
    with pytest.raises(ValueError, match="lacks 2 of 3 shards: run the same"):
        StoredFeatures(tmp_path)

    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(feature_store, "save_file", save)
    write(target, tmp_path)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns == first  # kept, not written again
    assert shards(tmp_path) == shards(written)
    assert not list(tmp_path.glob("*.partial"))


def test_a_missing_shard_is_written_again(target, tmp_path, written):
    write(target, tmp_path)
    (tmp_path / "shard-00001.safetensors").unlink()
    write(target, tmp_path)
    assert shards(tmp_path) == shards(written)


def test_parts_written_side_by_side_equal_one(target, tmp_path, written):
    write(target, tmp_path, part=(1, 2))
    assert list(shards(tmp_path)) == ["shard-00001.safetensors"]
    write(target, tmp_path, part=(0, 2))
    assert shards(tmp_path) == shards(written)
    assert json.loads((tmp_path / "index.json").read_text()) == json.loads((written / "index.json").read_text())


def write_to_a_full_disk(target, directory, size: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size,) * 2)  # a write beyond it fails, as on a full disk
    write(target, directory)


def write_until_killed(target, directory) -> None:
    save = feature_store.save_file

    def torn(tensors, path):
        save(tensors, path)
        if "00001" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    feature_store.save_file = torn
    write(target, directory)


def test_a_disk_that_fills_up_in_the_middle_of_a_shard(target, tmp_path, written):
    """A real write that fails half-way: nothing torn stays, the message says what to do, and doing so works."""
    size = (written / "shard-00001.safetensors").stat().st_size - 100
    code, raised = run_forked(write_to_a_full_disk, target, tmp_path, size)
    assert code == 1
    assert "shard-00000.safetensors could not be written" in raised or "shard-00001" in raised
    assert "make room and run the same call again, it goes on from there" in raised
    assert not list(tmp_path.glob("*.partial"))
    whole = shards(written)
    assert all(content == whole[name] for name, content in shards(tmp_path).items())
    write(target, tmp_path)
    assert shards(tmp_path) == whole


def test_killed_in_the_middle_of_a_shard(target, tmp_path, written):
    code, raised = run_forked(write_until_killed, target, tmp_path)
    assert code == -9, raised
    assert list(shards(tmp_path)) == ["shard-00000.safetensors"]
    write(target, tmp_path)
    assert shards(tmp_path) == shards(written)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("left", [0, 4, 100, 3000])
def test_a_shard_that_was_cut_off_is_not_taken_for_whole(target, tmp_path, written, left):
    """Copied by something that stopped, say."""
    write(target, tmp_path)
    path = tmp_path / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match="lacks 1 of 3 shards: run the same"):
        StoredFeatures(tmp_path)
    write(target, tmp_path)
    assert shards(tmp_path) == shards(written)


# ----- eight-bit floats ----------------------------------------------------------------------------------------------


def test_eight_bit_floats_keep_their_bound():
    """1/16 of itself for every value down to 1/28,000 of its vector's largest, next to huge channels too."""
    torch.manual_seed(0)
    features = torch.randn(50, 3 * 64) * torch.logspace(-2, 2, 50)[:, None]
    features[:, 5] *= 500.0  # a massive activation
    features[3] = 0.0
    values, scales = stored_features.to_fp8(features, 3)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (50, 3)
    again = stored_features.from_fp8(values, scales).float()
    error = (again - features).abs()
    floor = features.unflatten(-1, (3, 64)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(1) / 28_000
    assert (error <= features.abs().clamp(min=floor) * (1 / 16 + 1 / 256)).all()  # and one rounding to bfloat16
    assert (again[3] == 0).all()


def test_a_store_of_eight_bit_floats(target, tmp_path):
    rows = rows_of(LENGTHS)
    write(target, tmp_path / "fp8", rows, dtype=torch.float8_e4m3fn)
    write(target, tmp_path / "bf16", rows, dtype=torch.bfloat16)
    eight, half = StoredFeatures(tmp_path / "fp8"), StoredFeatures(tmp_path / "bf16")
    for small, large in zip(eight, half, strict=True):
        assert small["features"].dtype == torch.bfloat16
        difference = (small["features"].float() - large["features"].float()).norm(dim=-1)
        assert (difference <= 0.035 * large["features"].float().norm(dim=-1)).all()
        for name in ("last_hidden", "top1", "labels", "input_ids"):  # what is learnt is not rounded further
            assert torch.equal(small[name], large[name])


# ----- the manners of `datasets` -------------------------------------------------------------------------------------


def test_a_store_has_the_manners_of_a_dataset(written, monkeypatch):
    whole = StoredFeatures(written)
    assert set(whole.column_names) == set(whole[0])
    monkeypatch.setattr(StoredFeatures, "__getitem__", lambda *_: pytest.fail("a row was read"))
    assert whole.select([4, 1]).lengths == [LENGTHS[4], LENGTHS[1]]
    assert whole.select([4, 1, 6]).select([2, 0]).indices == [6, 4]
    assert sorted(whole.shuffle(seed=3).indices) == list(range(7))
    assert whole.shuffle(seed=3).indices == whole.shuffle(seed=3).indices != whole.shuffle(seed=4).indices
    for size in (2, 0.3):
        parts = whole.train_test_split(test_size=size, seed=0)
        assert sorted(parts["train"].indices + parts["test"].indices) == list(range(7))
        same = rows_of(LENGTHS).add_column("at", list(range(7))).train_test_split(test_size=size, seed=0)
        assert {name: part.indices for name, part in parts.items()} == {
            name: part["at"][:] for name, part in same.items()
        }
    with pytest.raises(ValueError, match="test_size is 7, which leaves one part of 7 examples empty"):
        whole.train_test_split(test_size=7)


# ----- never mixed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_ids": [0, 2, 4]}, r"layer_ids \[1, 2, 3\] \(now \[0, 2, 4\]\)"),
        ({"rows": rows_of(LENGTHS[:-1])}, r"num_examples 7 \(now 6\), tokens 60 \(now 52\)"),
        (
            {"rows": rows_of(LENGTHS, seed=100)},
            "something else: other chats, or the same chats encoded otherwise. Store into another",
        ),
        ({"shard_size": 4}, r"shard_size 3 \(now 4\)"),
        ({"dtype": torch.bfloat16}, r"dtype float32 \(now bfloat16\)"),
    ],
    ids=["layers", "fewer rows", "other rows", "shards", "dtype"],
)
def test_a_store_of_something_else_is_refused(target, written, options, message):
    before = shards(written)
    with pytest.raises(ValueError, match=message):
        write(target, written, **options)
    assert shards(written) == before


def test_a_refused_call_does_not_bind_the_folder(target, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="hidden_states index 40, but LlamaForCausalLM has 4 layers"):
        write(target, tmp_path, layer_ids=[1, 2, 40])
    with monkeypatch.context() as patch:
        patch.setattr(feature_store.shutil, "disk_usage", lambda _: namedtuple("usage", "free")(free=10_000))
        with pytest.raises(OSError, match="store fewer chats"):
            write(target, tmp_path)
    write(target, tmp_path, rows_of(LENGTHS[:2]))
    assert len(StoredFeatures(tmp_path)) == 2


@pytest.mark.parametrize(
    ("options", "message"), [({"shard_size": 0}, "shard_size is 0"), ({"part": (3, 2)}, r"part is \(3, 2\)")]
)
def test_settings_out_of_range(target, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        write(target, tmp_path, **options)


def test_first_choices_are_found_some_rows_at_a_time(target, tmp_path, written, monkeypatch):
    monkeypatch.setattr(output_layer, "_LOGITS", 2 * 320)
    seen, plain = [], nn.Linear.forward

    def forward(layer, hidden):
        seen.append(len(hidden) if layer is target.lm_head and hidden.dim() == 2 else 0)
        return plain(layer, hidden)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    write(target, tmp_path)
    assert max(seen) == 2
    assert shards(tmp_path) == shards(written)


def test_a_store_of_another_target_is_refused(written):
    other = tiny("llama", seed=1, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"features of another target: the output layer .* agrees with \d+% of"):
        write(other, written)
    with pytest.raises(ValueError, match="features of another target"):
        StoredFeatures(written).check(other, LAYER_IDS)
    wide = tiny("llama", num_hidden_layers=4, hidden_size=32)
    with pytest.raises(ValueError, match="features of width 64, but LlamaForCausalLM has hidden_size 32"):
        StoredFeatures(written).check(wide, LAYER_IDS)


def test_the_right_target_is_accepted_also_at_another_path(target, written):
    StoredFeatures(written).check(target, LAYER_IDS)
    name = target.config._name_or_path
    target.config._name_or_path = "somewhere/else"
    try:
        write(target, written)
    finally:
        target.config._name_or_path = name


def test_an_empty_dataset_is_refused(target, tmp_path):
    with pytest.raises(ValueError, match="the dataset is empty"):
        write_features(target, [], tmp_path, LAYER_IDS)


@pytest.mark.parametrize("cap", [30.0, 5.0, None])
def test_targets_that_soft_cap_their_logits_can_be_stored(tmp_path, cap):
    """What is stored is the input of the output layer; the teacher puts the target's own capping on top."""
    gemma = tiny("gemma2", num_hidden_layers=2, final_logit_softcapping=cap)
    rows = rows_of([9, 6])
    write(gemma, tmp_path, rows, layer_ids=[0, 1, 2])
    ids = torch.arange(0, 150, 3)
    teacher = Teacher(gemma, [0, 1, 2], ids)
    for row, online in zip(StoredFeatures(tmp_path), rows, strict=True):
        batch = {name: value[None] for name, value in row.items()}
        tokens = torch.tensor([online["input_ids"]])
        with torch.no_grad():
            logits = gemma(tokens).logits[0]
        taught = [j for j in range(2, len(online["labels"])) if online["labels"][j] != IGNORE_INDEX]
        expected = logits[[j - 1 for j in taught]][:, ids].softmax(-1)
        torch.testing.assert_close(teacher(batch)["teacher_logits"].softmax(-1), expected, atol=1e-5, rtol=1e-5)


def test_a_target_whose_logits_are_made_of_more_is_refused(target, tmp_path, monkeypatch):
    monkeypatch.setattr(feature_store.OutputLayer, "fits", lambda *_: False)
    with pytest.raises(ValueError, match="logits of LlamaForCausalLM cannot be computed .* train it online"):
        write(target, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_what_a_shard_holds(written):
    assert set(load_file(written / "shard-00000.safetensors")) == {
        "input_ids", "labels", "top1", "features", "last_hidden", "lengths",
    }  # fmt: skip
