"""The draft vocabulary and its two buffers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf.model.vocab import (
    build_draft_vocab,
    coverage,
    ids_from_offsets,
    offsets_and_mask,
    offsets_from_file,
    validate,
)


def test_most_frequent_ids_ascending_ties_by_smaller_id():
    counts = torch.tensor([0, 5, 2, 9, 2, 2, 7])
    assert build_draft_vocab(counts, 4).tolist() == [1, 2, 3, 6]
    assert build_draft_vocab(counts, 5).tolist() == [1, 2, 3, 4, 6]


def test_always_displaces_the_rarest():
    counts = torch.tensor([0, 5, 2, 9, 2, 2, 7])
    assert build_draft_vocab(counts, 4, always=[0, 5, 0]).tolist() == [0, 3, 5, 6]


def test_padding_with_smallest_unused_ids():
    counts = torch.zeros(10, dtype=torch.int64)
    counts[7] = 3
    assert build_draft_vocab(counts, 4, always=[5]).tolist() == [0, 1, 5, 7]
    assert build_draft_vocab(counts, 10).tolist() == list(range(10))


@pytest.mark.parametrize(
    ("counts", "size", "always", "message"),
    [
        (torch.ones(8, dtype=torch.int64), 9, (), r"9.*8 tokens"),
        (torch.ones(8, dtype=torch.int64), 0, (), r"0.*8 tokens"),
        (torch.ones(8, dtype=torch.int64), 2, (1, 2, 3), r"3 ids.*size is 2"),
        (torch.ones(8, dtype=torch.int64), 4, (1, 8), r"always\[1\] = 8.*0\.\.7"),
        (torch.ones(8, dtype=torch.int64), 4, (-1,), r"always\[0\] = -1"),
        (torch.ones(8), 4, (), "integer"),
        (torch.ones(2, 4, dtype=torch.int64), 4, (), r"\(2, 4\)"),
        (torch.tensor([1, -3]), 1, (), r"counts\[1\] = -3"),
    ],
)
def test_refused_counts_and_sizes(counts, size, always, message):
    with pytest.raises(ValueError, match=message):
        build_draft_vocab(counts, size, always)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_map_round_trip(data):
    vocab_size = data.draw(st.integers(2, 60))
    size = data.draw(st.integers(1, vocab_size))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size)))
    always = data.draw(st.sets(st.integers(0, vocab_size - 1), max_size=size))
    ids = build_draft_vocab(counts, size, always)
    assert always <= set(ids.tolist())
    kept = [int(counts[i]) for i in ids.tolist() if i not in always]
    left = [int(counts[i]) for i in range(vocab_size) if i not in set(ids.tolist())]
    assert not kept or not left or min(kept) >= max(left)

    d2t, t2d = offsets_and_mask(ids, vocab_size)
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert torch.equal(ids_from_offsets(d2t), ids)
    assert torch.equal(t2d.nonzero()[:, 0], ids)
    validate(d2t, t2d, vocab_size, size, allow_identity=True)
    validate(d2t, None, vocab_size, size, allow_identity=True)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 2], r"ids\[1\] = 2 follows ids\[0\] = 3"),
        ([2, 2], r"ids\[1\] = 2"),
        ([1, 8], r"ids\[1\] = 8.*0\.\.7"),
        ([-1, 3], r"ids\[0\] = -1"),
    ],
)
def test_offsets_refuse_bad_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        offsets_and_mask(torch.tensor(ids), 8)


def _mask(*ids: int) -> torch.Tensor:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[list(ids)] = True
    return mask


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (torch.tensor([0, 0, 0]), None, r"all zero.*\(3\).*\(8\)"),
        (torch.tensor([1, 0, 2]), None, r"draft ids 0 and 1 both map to target id 1"),
        (torch.tensor([1, 2, 6]), None, r"d2t\[2\] = 6 .*target id 8.*0\.\.7"),
        (torch.tensor([-1, 2, 2]), None, r"d2t\[0\] = -1 .*target id -1"),
        (torch.tensor([1, 1, 1]), _mask(1, 2), "t2d marks 2 tokens, but d2t maps 3"),
        (torch.tensor([1, 1, 1]), _mask(1, 2, 4), "draft id 2 to target id 3"),
        (torch.tensor([1.0, 1.0, 1.0]), None, "int64 offsets, got torch.float32"),
        (torch.tensor([1, 1]), None, r"\(3,\), got \(2,\)"),
        (torch.tensor([1, 1, 1]), _mask(1, 2, 3).long(), "bool mask, got torch.int64"),
        (torch.tensor([1, 1, 1]), _mask(1, 2, 3)[:7], r"\(8,\), got \(7,\)"),
    ],
)
def test_validate_names_the_problem(d2t, t2d, message):
    with pytest.raises(ValueError, match=message):
        validate(d2t, t2d, vocab_size=8, draft_vocab_size=3)


def test_zero_offsets_are_the_identity_of_a_full_vocabulary():
    offsets, members = torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.bool)
    assert validate(offsets, members, 8, 8) is None, "accepted"
    with pytest.raises(ValueError, match="d2t"):
        validate(offsets, members.logical_not(), 8, 8)


def test_zero_offsets_are_the_first_ids_where_the_mask_says_so():
    """What `set_draft_vocab(range(3))` saves; a map that was never filled in marks nothing."""
    d2t = torch.zeros(3, dtype=torch.int64)
    assert offsets_from_file(d2t, torch.arange(5) < 3, 5, 3)[0].tolist() == [0, 0, 0]
    for t2d in (None, torch.zeros(5, dtype=torch.bool), torch.arange(5) > 1):
        with pytest.raises(ValueError, match="d2t is all zero"):
            offsets_from_file(d2t, t2d, 5, 3)


def test_coverage():
    counts = torch.tensor([1, 0, 3, 4])
    assert coverage(counts, torch.tensor([2, 3])) == 7 / 8
    assert coverage(counts, torch.arange(4)) == 1.0
    assert coverage(torch.zeros(4, dtype=torch.int64), torch.tensor([0])) == 1.0


def test_tokenizer_hashes_are_recorded_once_and_checked(caplog):
    from eagle3_hf import Eagle3DraftConfig
    from eagle3_hf.model.vocab import check_tokenizer, record_tokenizer
    from support.chats import chat_tokenizer

    config = Eagle3DraftConfig(vocab_size=300)
    tokenizer = chat_tokenizer()
    check_tokenizer(config, tokenizer)  # nothing recorded, nothing to compare
    record_tokenizer(config, tokenizer)
    recorded = config.target_vocab_hash, config.target_chat_template_hash
    assert all(recorded)
    record_tokenizer(config, tokenizer)
    assert (config.target_vocab_hash, config.target_chat_template_hash) == recorded

    check_tokenizer(config, chat_tokenizer("bos"))
    assert recorded[1] in caplog.text  # another template only warns
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(ValueError, match=recorded[0]):
        check_tokenizer(config, tokenizer)
