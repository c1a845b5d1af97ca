"""Preparation of what a user passes to `Eagle3Trainer`: datasets are encoded and checked, the vocabulary is set."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.vocab import record_tokenizer
from ...model.warm_start import special_ids
from ...ttt.loss import IGNORE_INDEX
from ..targets.stored_features import StoredFeatures
from .draft_vocab import cached_draft_vocab, report_coverage
from .encoding import prepare_chats, special_token_ids
from .options import EncodingOptions
from .packing import PackedDataset, only_labels
from .sources import load_chats


# What was chosen among the turns of the chats that were encoded here, so that they may be prepared again.
_encoded: WeakKeyDictionary[Any, tuple[bool, bool]] = WeakKeyDictionary()


def settle_tokenizer(draft: Eagle3DraftModel, tokenizer) -> None:
    """Set the special ids of target or tokenizer in both of the draft's configs, and record the tokenizer.

    Trainer then finds nothing to align.
    """
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(draft.config, name)
        value = value if value is not None else getattr(tokenizer, name, None)
        setattr(draft.config, name, value)
        setattr(draft.generation_config, name, value)
    if tokenizer is not None:
        record_tokenizer(draft.config, tokenizer)


def prepare(dataset, draft: Eagle3DraftModel, target: PreTrainedModel, tokenizer, options: EncodingOptions):
    """Encode chats, check examples and stored features, and with `options.packing` pack all of them.

    What it returns may be prepared again, which changes nothing.

    Raises:
        ValueError: there is nothing to learn, columns are missing, or features are of another target or other layers.
    """
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):  # Trainer takes several evaluation sets by name
        return {name: prepare(part, draft, target, tokenizer, options) for name, part in dataset.items()}
    examples = _examples(dataset, draft, target, tokenizer, options)
    if not options.packing or isinstance(examples, PackedDataset) or not hasattr(examples, "__len__"):
        return examples  # a stream is packed by the collator
    assert options.max_length is not None
    return PackedDataset(examples, options.max_length, seed=options.seed)


def _examples(dataset, draft: Eagle3DraftModel, target: PreTrainedModel, tokenizer, options: EncodingOptions):
    if isinstance(dataset, PackedDataset):
        _examples(dataset.dataset, draft, target, tokenizer, options)
        return dataset
    if isinstance(dataset, StoredFeatures):
        dataset.check(target, draft.config.captured_layer_ids)
    else:
        columns = getattr(dataset, "column_names", None) or list(next(iter(dataset), ()))
        if "input_ids" not in columns:
            if tokenizer is None:
                raise ValueError("chats need a tokenizer to become tokens: pass processing_class=tokenizer")
            encoded = prepare_chats(load_chats(dataset), tokenizer, options)
            _encoded[encoded] = options.choice
            return encoded
        if not isinstance(dataset, list) and _encoded.get(dataset) == options.choice:
            return dataset
        if "labels" not in columns:
            raise ValueError("examples with input_ids need labels too: the token where it is to be learnt, else -100")
    if any(options.choice):
        raise ValueError(
            "last_turn_only and mask_reasoning choose among turns of chats, but these examples are tokens already: "
            "set them where the chats are encoded (prepare_dataset, eagle3-hf features)"
        )
    _check_supervised(dataset)
    return dataset


def _check_supervised(dataset) -> None:
    """Check that at least half of the data has something to learn: otherwise the loss would only look good.

    Raises:
        ValueError: more than half of the examples have no token to learn.
    """
    if not hasattr(dataset, "__len__"):
        return  # a stream can be read only once
    labels = (torch.as_tensor(example["labels"]) for example in only_labels(dataset))
    empty = sum(not bool((own[2:] != IGNORE_INDEX).any()) for own in labels)
    if 2 * empty > len(dataset):
        raise ValueError(
            f"{empty} of {len(dataset)} examples have no token to learn (all labels from the third on are "
            f"{IGNORE_INDEX}): prepare the chats with eagle3_hf.prepare_dataset"
        )


def settle_vocabulary(
    draft: Eagle3DraftModel, target: PreTrainedModel, dataset, tokenizer, cache_dir: str | None
) -> float | None:
    """Give a draft without a vocabulary the tokens that the dataset teaches most often; an existing one is kept.

    Returns:
        The share of the supervised tokens that the vocabulary covers; `None` where they cannot be counted.

    Raises:
        ValueError: a vocabulary is to be built, but there is no dataset to count.
    """
    vocab_size = draft.config.vocab_size
    if draft.has_draft_vocab:
        countable = dataset is not None and hasattr(dataset, "__len__") and draft.config.draft_vocab_size < vocab_size
        return report_coverage(dataset, draft.draft_vocab_ids().cpu(), vocab_size) if countable else None
    if dataset is None:
        raise ValueError("the draft vocabulary is not set and there is no train_dataset to build it from")
    always = special_token_ids(tokenizer, target.generation_config) if tokenizer is not None else special_ids(target)
    ids, covered = cached_draft_vocab(
        dataset,
        tokenizer,
        vocab_size=vocab_size,
        size=draft.config.draft_vocab_size,
        always=always,
        cache_dir=cache_dir,
    )
    draft.set_draft_vocab(ids)
    return covered


def pad_token_id(tokenizer, target: PreTrainedModel) -> int:
    """Return an id for padding; any id will do, since padding is to the right of every position that counts."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if pad is not None else getattr(target.generation_config, "pad_token_id", None) or 0
