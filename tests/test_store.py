"""Features on disk: the same as those seen online, written whole or not at all, and never mixed with others'."""

import json
import pickle
from collections import namedtuple

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from eagle3_hf.features import FeatureReader
from eagle3_hf.training import store
from eagle3_hf.training.store import StoredFeatures, projected_bytes, write_features
from eagle3_hf.ttt.loss import IGNORE_INDEX
from families import prompt, tiny


LAYER_IDS = [1, 2, 3]
LENGTHS = [9, 5, 14, 6, 11, 7, 8]


@pytest.fixture(scope="module")
def target():
    return tiny("llama", num_hidden_layers=4)


def rows_of(lengths: list[int], seed: int = 0) -> Dataset:
    ids = [prompt(length, seed=seed + i)[0].tolist() for i, length in enumerate(lengths)]
    return Dataset.from_list([{"input_ids": row, "labels": [IGNORE_INDEX] * 3 + row[3:]} for row in ids])


def write(target, directory, rows=None, **kwargs):
    options = {"shard_rows": 3, "batch_tokens": 24, "progress": False, "dtype": torch.float32, **kwargs}
    layer_ids = options.pop("layer_ids", LAYER_IDS)
    write_features(target, rows or rows_of(LENGTHS), directory, layer_ids, **options)


def shards(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}


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
    assert [row["labels"].tolist() for row in stored.label_rows()] == rows["labels"][:]
    assert all(set(row) == {"labels"} for row in stored.label_rows())


@pytest.mark.parametrize("rows", [range(2), range(2, 7), range(0, 7, 3), range(6, -1, -1), range(4, 4)], ids=str)
def test_some_rows_of_a_store(written, rows):
    whole, some = StoredFeatures(written), StoredFeatures(written, rows=rows)
    assert len(some) == len(rows)
    assert some.lengths == [LENGTHS[i] for i in rows]
    labels = [row["labels"].tolist() for row in whole.label_rows()]
    assert [row["labels"].tolist() for row in some.label_rows()] == [labels[i] for i in rows]
    for item, i in zip(some, rows, strict=True):
        for name, value in whole[i].items():
            assert torch.equal(item[name], value)
    with pytest.raises(IndexError):
        some[len(rows)]


@pytest.mark.parametrize("rows", [range(8), range(-1, 3)], ids=str)
def test_rows_beyond_the_store_are_refused(written, rows):
    with pytest.raises(ValueError, match=r"has the rows 0 to 6"):
        StoredFeatures(written, rows=rows)


def test_a_store_travels_to_worker_processes(written):
    stored = StoredFeatures(written)
    before = stored[4]
    again = pickle.loads(pickle.dumps(stored))[4]
    assert all(torch.equal(before[name], again[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_projected_size_is_the_real_one(target, tmp_path, dtype):
    rows = rows_of([40] * 12)
    write(target, tmp_path, rows, dtype=dtype, shard_rows=12)
    projected = projected_bytes(40 * 12, 64, len(LAYER_IDS), dtype.itemsize)
    real = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert projected <= real <= projected + 12 * 4 + 1000  # and a length of each row, and the file's header


def test_the_size_is_shown_before_anything_is_written(target, tmp_path, capsys):
    write(target, tmp_path, progress=True)
    size = projected_bytes(sum(LENGTHS), 64, len(LAYER_IDS), 4)
    assert f"({size / 1e9:.3g} GB)" in capsys.readouterr().err


def test_a_full_disk_is_noticed_before_the_target_runs(target, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage(free=10_000))
    with pytest.raises(OSError, match=r"60 tokens take 6.22e-05 GB, of which .* has 1e-05 GB free: store fewer"):
        write(target, tmp_path)
    assert not shards(tmp_path)


def test_only_what_is_still_to_be_written_needs_room(target, written, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage(free=10))
    write(target, written)  # everything is there already


# ----- going on ------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on_where_it_stopped(target, tmp_path, written, monkeypatch):
    class Interrupted(Exception):
        pass

    def failing(tensors, path):
        if "00001" in str(path):
            path.write_bytes(b"half a shard")
            raise Interrupted
        save(tensors, path)

    save = store.save_file
    monkeypatch.setattr(store, "save_file", failing)
    with pytest.raises(Interrupted):
        write(target, tmp_path)
    assert list(shards(tmp_path)) == ["shard-00000.safetensors"]
    with pytest.raises(ValueError, match="lacks 2 of 3 shards: run the same"):
        StoredFeatures(tmp_path)

    first = (tmp_path / "shard-00000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(store, "save_file", save)
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


# ----- never mixed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_ids": [0, 2, 4]}, r"layer_ids \[1, 2, 3\] \(now \[0, 2, 4\]\)"),
        ({"rows": rows_of(LENGTHS[:-1])}, r"rows 7 \(now 6\), tokens 60 \(now 52\)"),
        ({"rows": rows_of(LENGTHS, seed=100)}, r"something else: data \w{16} \(now \w{16}\)\. Store into another"),
        ({"shard_rows": 4}, r"shard_rows 3 \(now 4\)"),
        ({"dtype": torch.bfloat16}, r"dtype float32 \(now bfloat16\)"),
    ],
    ids=["layers", "fewer rows", "other rows", "shards", "dtype"],
)
def test_a_store_of_something_else_is_refused(target, written, options, message):
    before = shards(written)
    with pytest.raises(ValueError, match=message):
        write(target, written, **options)
    assert shards(written) == before


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


@pytest.mark.parametrize("cap", [30.0, 5.0])
def test_soft_capped_logits_cannot_be_stored(tmp_path, cap):
    gemma = tiny("gemma2", num_hidden_layers=2, final_logit_softcapping=cap)
    with pytest.raises(ValueError, match=r"Gemma2ForCausalLM post-processes its logits .* Train it online"):
        write(gemma, tmp_path / "store", layer_ids=[0, 1, 2])
    assert not (tmp_path / "store").exists()


def test_the_same_family_without_soft_capping_is_fine(tmp_path):
    gemma = tiny("gemma2", num_hidden_layers=2, final_logit_softcapping=None)
    write(gemma, tmp_path, rows_of([6, 5]), layer_ids=[0, 1, 2])
    assert set(load_file(tmp_path / "shard-00000.safetensors")) == {
        "input_ids", "labels", "top1", "features", "last_hidden", "lengths",
    }  # fmt: skip
