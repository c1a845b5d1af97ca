"""Fixtures of several tests of decoding."""

import pytest
from transformers import PreTrainedTokenizerFast

from support.tokenizers import letter_pairs


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Each id is a pair of letters."""
    return letter_pairs()
