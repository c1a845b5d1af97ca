"""Whole chats in shared rows: nothing lost, nothing mixed, the same at every run, and everything else still works."""

import logging
import random

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from eagle3_hf.training.data.collator import Eagle3DataCollator
from eagle3_hf.training.data.encoding import count_tokens
from eagle3_hf.training.data.packing import (
    PackedDataset,
    join_chats,
    only_labels,
    pack_examples,
    plan_packing,
    token_lengths,
)
from eagle3_hf.ttt.loss import IGNORE_INDEX, supervised_mask


def chat(length, start=0, prompt=2):
    ids = list(range(start, start + length))
    return {"input_ids": ids, "labels": [IGNORE_INDEX] * min(prompt, length) + ids[prompt:]}


def chats(lengths):
    return [chat(length, 100 * i) for i, length in enumerate(lengths)]


@given(st.lists(st.integers(1, 70), max_size=60), st.integers(3, 50), st.integers(0, 3))
def test_every_chat_is_in_one_row_and_no_row_overflows(lengths, packing_length, seed):
    rows = plan_packing(lengths, packing_length, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    filled = sorted(sum(min(lengths[i], packing_length) for i in row) for row in rows)
    assert all(0 < tokens <= packing_length for tokens in filled)
    # Best fit opens a row only where no other has room: the two emptiest could not have shared one.
    assert len(filled) < 2 or filled[0] + filled[1] > packing_length
    assert rows == plan_packing(lengths, packing_length, seed)


def test_rows_are_full_and_drawn_by_the_seed():
    draw = random.Random(0)
    lengths = [draw.randint(20, 400) for _ in range(2000)]
    rows = plan_packing(lengths, 1024, seed=0)
    assert sum(lengths) / (1024 * len(rows)) > 0.99
    assert rows != plan_packing(lengths, 1024, seed=1)
    # The order does not follow the lengths: any stretch of rows holds chats of all of them.
    first = [len(row) for row in rows[:20]]
    assert len(set(first)) > 1


def test_a_row_of_chats():
    row = join_chats(chats([3, 2, 4]))
    assert row["input_ids"].tolist() == [0, 1, 2, 100, 101, 200, 201, 202, 203]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert row["labels"].tolist() == [-100, -100, 2, -100, -100, -100, -100, 202, 203]
    assert join_chats(chats([5]), packing_length=3)["input_ids"].tolist() == [0, 1, 2]


def test_packed_batch_is_the_agreed_one():
    batch = Eagle3DataCollator(pad_token_id=7, packing_length=8)(chats([3, 4, 5]))
    rows = {tuple(row) for row in batch["input_ids"].tolist()}
    assert rows == {(200, 201, 202, 203, 204, 0, 1, 2), (100, 101, 102, 103, 7, 7, 7, 7)}
    full = batch["input_ids"][:, 0] == 200
    assert batch["position_ids"][full].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch["position_ids"][~full].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]  # padding: a document of its own
    assert batch["attention_mask"][~full].tolist() == [[1, 1, 1, 1, 0, 0, 0, 0]]
    assert batch["labels"][full].tolist() == [[-100, -100, 202, 203, 204, -100, -100, 2]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_the_first_two_tokens_of_every_document_are_no_targets():
    """Whatever the data says: the pairs that would teach them lie in the document before."""
    examples = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3
    for batch in (Eagle3DataCollator(0, packing_length=9)(examples), Eagle3DataCollator(0)(examples)):
        assert (batch["labels"] != IGNORE_INDEX).sum() == 3
        assert set(batch["labels"][batch["labels"] != IGNORE_INDEX].tolist()) == {3}
    mask = supervised_mask(Eagle3DataCollator(0, packing_length=9)(examples)["labels"])
    assert mask.nonzero()[:, 1].tolist() == [0, 3, 6]


def test_stored_features_pack_along_the_tokens():
    def with_features(example):
        ids = torch.tensor(example["input_ids"])
        wide = ids[:, None].float().expand(-1, 6)
        return {**example, "features": wide.bfloat16(), "last_hidden": wide[:, :2], "top1": ids}

    examples = [with_features(example) for example in chats([3, 2, 3])]
    batch = Eagle3DataCollator(pad_token_id=0, pad_to_multiple_of=4, packing_length=8)(examples)
    attended = batch["attention_mask"] == 1
    ids = batch["input_ids"][attended]
    assert batch["features"].shape == (1, 8, 6)
    assert batch["features"].dtype == torch.bfloat16
    assert torch.equal(batch["features"][attended][:, 0], ids.bfloat16())
    assert torch.equal(batch["last_hidden"][attended][:, 1], ids.float())
    assert torch.equal(batch["top1"][attended], ids)
    with pytest.raises(ValueError, match="example 1 .* no `features`"):
        pack_examples([examples[0], chat(2)], 8)


@pytest.mark.parametrize("kind", ["list", "arrow"])
def test_packed_dataset(kind):
    examples = chats([5, 3, 4, 6, 2, 4])
    dataset = Dataset.from_list(examples) if kind == "arrow" else examples
    packed = PackedDataset(dataset, 8)
    assert len(packed) == 3
    assert packed.lengths == [8, 8, 8]
    assert sorted(i for group in packed.groups for i in group) == list(range(6))
    for i, group in enumerate(packed.groups):
        assert packed[i]["input_ids"].tolist() == [token for j in group for token in examples[j]["input_ids"]]
    batch = Eagle3DataCollator(0)([packed[0], packed[1]])
    assert batch["position_ids"].shape == (2, 8)
    assert torch.equal(count_tokens(packed.iter_labels(), 600), count_tokens(dataset, 600))


def test_lengths_of_a_selection_of_an_arrow_table():
    dataset = Dataset.from_list(chats([5, 3, 4])).select([2, 0])
    assert token_lengths(dataset) == [4, 5]
    assert token_lengths(list(dataset)) == [4, 5]


def test_chats_longer_than_a_row_are_cut_and_counted_once(caplog):
    examples = [chat(12), chat(4, 100), chat(12, 200, prompt=9)]
    with caplog.at_level(logging.WARNING):
        packed = PackedDataset(examples, 8)
        rows = [packed[i] for i in range(len(packed))]
    assert len(caplog.records) == 1
    assert "2 of 3 chats are longer than packing_length (8)" in caplog.text
    assert "1 of them have no token to learn" in caplog.text
    assert (packed.num_cut, packed.num_dropped) == (2, 1)
    assert sorted(row["input_ids"].tolist() for row in rows) == [[0, 1, 2, 3, 4, 5, 6, 7], [100, 101, 102, 103]]
    assert len(list(packed.iter_labels())) == 2
    with pytest.raises(ValueError, match="no chat of 1 has a token to learn among its first 8 tokens"):
        PackedDataset(examples[2:], 8)
    with pytest.raises(ValueError, match="packing_length is 2"):
        PackedDataset(examples, 2)


def test_the_collator_says_once_that_chats_are_cut(caplog):
    collator = Eagle3DataCollator(0, packing_length=8)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            batch = collator([chat(12), chat(4)])
    assert batch["input_ids"].shape == (2, 8)
    assert len(caplog.records) == 1
    assert "1 of 2 chats of a batch are longer than packing_length (8)" in caplog.text


def test_only_labels_are_read():
    dataset = Dataset.from_list(chats([3, 4]))
    assert [set(row) for row in only_labels(dataset)] == [{"labels"}] * 2
    packed = PackedDataset(dataset, 8)
    assert [row["labels"].tolist() for row in only_labels(packed)] == dataset["labels"][:]


def test_rows_reach_every_process_once():
    """What `accelerate` does with a sampler: each process its share, a row never twice."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, RandomSampler

    packed = PackedDataset(chats([5, 3, 4, 6, 2, 4] * 4), 8)
    seen = []
    for process in range(2):
        sampler = RandomSampler(packed, generator=torch.Generator().manual_seed(3))
        seen += [i for batch in BatchSamplerShard(BatchSampler(sampler, 2, False), 2, process) for i in batch]
    assert sorted(seen) == list(range(len(packed)))


def test_stored_features_pack(tmp_path):
    """From the disk: each chat's own features, and its labels without reading them."""
    from eagle3_hf.training.targets.feature_store import write_features
    from eagle3_hf.training.targets.stored_features import StoredFeatures
    from support.chats import chat_tokenizer, tiny_target

    rows = [chat(length, 5) for length in (6, 4, 5, 3)]
    write_features(tiny_target(chat_tokenizer()), rows, tmp_path, [1, 2], progress=False)
    stored = StoredFeatures(tmp_path)
    packed = PackedDataset(stored, 10)
    assert sorted(packed.lengths) == [8, 10]
    for i, group in enumerate(packed.groups):
        start = 0
        for j in group:
            for name in ("input_ids", "features", "last_hidden", "top1"):
                part = packed[i][name][start : start + len(rows[j]["input_ids"])]
                assert torch.equal(part, stored[j][name])
            start += len(rows[j]["input_ids"])
    assert torch.equal(count_tokens(packed.iter_labels(), 400), count_tokens(rows, 400))
    batch = Eagle3DataCollator(0)([packed[0], packed[1]])
    assert batch["features"].shape[:2] == batch["position_ids"].shape == (2, 10)
