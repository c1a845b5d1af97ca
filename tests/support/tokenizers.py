"""Tokenizers whose tokens are the tiny targets' ids."""

import string
from itertools import product

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.families import VOCAB_SIZE


def words(prefix: str = "w") -> PreTrainedTokenizerFast:
    """Each id is the prefix and the id's number."""
    vocabulary = {f"{prefix}{token}": token for token in range(VOCAB_SIZE)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=f"{prefix}0")))


def letter_pairs() -> PreTrainedTokenizerFast:
    """Each id is a pair of letters."""
    pairs = ["".join(pair) for pair in product(string.ascii_lowercase, repeat=2)][:VOCAB_SIZE]
    model = models.WordLevel({pair: i for i, pair in enumerate(pairs)}, unk_token=pairs[0])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
