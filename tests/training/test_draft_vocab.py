"""A draft vocabulary is counted once for a dataset, tokenizer and sizes, and never taken from a wrong file."""

import logging
import re

import pytest
import torch
from datasets import Dataset

from eagle3_hf.model.vocab import resolve
from eagle3_hf.training.data import draft_vocab
from eagle3_hf.training.data.draft_vocab import cached_draft_vocab, dataset_fingerprint, report_coverage
from eagle3_hf.training.data.packing import PackedDataset
from eagle3_hf.training.targets.stored_features import StoredFeatures
from support.chats import chat_tokenizer
from support.fresh_interpreter import fingerprint


ROWS = [{"input_ids": [1, 2, 7, 7, 9], "labels": [-100, -100, 7, 7, 9]}, {"input_ids": [3] * 4, "labels": [-100] * 4}]
SIZES = {"vocab_size": 12, "size": 4}


@pytest.fixture
def data():
    return Dataset.from_list(ROWS)


@pytest.fixture
def counted(monkeypatch):
    """How often a dataset was read."""
    calls = []
    count = draft_vocab.count_tokens
    monkeypatch.setattr(draft_vocab, "count_tokens", lambda *args: calls.append(1) or count(*args))
    return calls


def test_the_second_time_nothing_is_counted(data, counted, tmp_path, caplog):
    tokenizer = chat_tokenizer()
    with caplog.at_level(logging.INFO, logger="eagle3_hf"):
        first, covered = cached_draft_vocab(data, tokenizer, **SIZES, always=[5], cache_dir=tmp_path)
        again, _ = cached_draft_vocab(data, tokenizer, **SIZES, always=[5, 5], cache_dir=tmp_path)
    assert first.tolist() == again.tolist() == [0, 5, 7, 9]
    assert again.dtype == torch.int64
    assert covered == 1.0
    assert len(counted) == 1
    assert caplog.text.count("vocabulary of 4 tokens covers 100.00% of the supervised tokens") == 2


def test_every_part_of_the_key_counts(data, counted, tmp_path):
    other = chat_tokenizer("bos")
    calls = [
        {},
        {"size": 3},
        {"vocab_size": 13},
        {"always": [6]},
        {"tokenizer": other},
        {"dataset": Dataset.from_list(ROWS[:1])},
        {"dataset": data.select([0])},
        {"dataset": PackedDataset(data, 4)},
        {"dataset": PackedDataset(data, 8)},
    ]
    for changed in calls:
        arguments = {"dataset": data, "tokenizer": chat_tokenizer(), **SIZES, "cache_dir": tmp_path, **changed}
        cached_draft_vocab(**arguments)
    assert len(counted) == len(calls)
    assert len(list(tmp_path.iterdir())) == len(calls)


def test_rows_without_a_fingerprint_are_counted_every_time(counted, tmp_path):
    for _ in range(2):
        cached_draft_vocab(ROWS, None, **SIZES, cache_dir=tmp_path)
    assert len(counted) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[: len(text) // 2], "Unterminated|Expecting|delimiter"),
        (lambda text: text.replace("[0, 1, 7, 9]", "[0, 2, 7, 9]"), "its ids were changed"),
        (lambda text: text.replace('"vocab_size": 12', '"vocab_size": 13'), "another dataset, tokenizer or size"),
        (lambda text: "{}", "'key'"),
        (lambda text: "[]", "indices"),
    ],
)
def test_a_damaged_or_stale_file_is_noticed(data, counted, tmp_path, caplog, damage, reason):
    expected, _ = cached_draft_vocab(data, None, **SIZES, cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_text()
    path.write_text(damage(whole))
    assert path.read_text() != whole
    assert cached_draft_vocab(data, None, **SIZES, cache_dir=tmp_path)[0].tolist() == expected.tolist()
    assert len(counted) == 2
    assert "is not used (" in caplog.text
    assert re.search(reason, caplog.text)
    assert path.read_text() == whole


def test_a_folder_that_cannot_be_written_costs_only_the_cache(data, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert len(cached_draft_vocab(data, None, **SIZES, cache_dir=tmp_path / "file")[0]) == 4
    assert "could not be cached" in caplog.text


def test_the_default_place_is_the_cache_of_datasets(data, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    cached_draft_vocab(data, None, **SIZES)
    assert len(list((tmp_path / "eagle3_draft_vocab").glob("*.json"))) == 1


def test_stored_features_have_the_fingerprint_of_their_data():
    class Stored(StoredFeatures):
        def __init__(self, indices):
            self.index, self.indices = {"data": "abc"}, indices

    assert dataset_fingerprint(Stored(range(3))) == "abc/range(0, 3)"
    assert dataset_fingerprint(Stored([2, 0])) is None


def test_a_kept_vocabulary_is_measured_on_the_new_data(data, caplog):
    with caplog.at_level(logging.INFO, logger="eagle3_hf"):
        assert report_coverage(data, torch.tensor([7, 9]), 12) == 1.0
        assert "A new head" not in caplog.text
        assert report_coverage(data, torch.tensor([7]), 12) == pytest.approx(2 / 3)
    assert "keeps its draft vocabulary of 1 tokens, which covers 66.67%" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING


def test_the_same_chats_have_the_same_key_in_another_process(fresh, monkeypatch):
    key = fresh.found["fingerprint"]
    assert fingerprint() == key
    # Once more with libraries that were used before, and never with another way of encoding.
    assert fingerprint() == key
    monkeypatch.setattr("eagle3_hf.training.data.encoding.ENCODING", 0)
    assert fingerprint() != key


def test_both_names_of_an_id_given_twice():
    with pytest.raises(ValueError, match=r"draft_vocab\[1\] and draft_vocab\[3\] are both 5 \(1 of 4 ids"):
        resolve([2, 5, 7, 5], None, 12)
    assert resolve([7, 2, 5], 3, 12).tolist() == [2, 5, 7]
    assert resolve(torch.tensor([7, 2]), None, 12).tolist() == [2, 7]
