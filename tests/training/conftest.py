"""Fixtures of several tests of training."""

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from eagle3_hf.training.data.encoding import prepare_dataset
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import chats


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `target`, with a template for chats."""
    return chat_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer) -> LlamaForCausalLM:
    """A tiny target, the same weights in every module."""
    torch.manual_seed(0)
    return tiny_target(tokenizer)


@pytest.fixture(scope="module")
def rows(tokenizer) -> Dataset:
    """Eight chats, encoded."""
    return prepare_dataset(chats(), tokenizer, max_length=None)
