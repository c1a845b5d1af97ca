"""A tiny target with a tokenizer, and a head for it."""

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.evaluation.columns import parse_tree
from support.benchmarks import Pretended
from support.chats import chat_tokenizer, tiny_target


@pytest.fixture(scope="session")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture(scope="session")
def target(tokenizer):
    torch.manual_seed(0)
    return tiny_target(tokenizer)


@pytest.fixture
def head(target):
    torch.manual_seed(1)
    draft = Eagle3DraftModel.from_target(target)
    for name, value in parse_tree("4/2/2").items():
        setattr(draft.generation_config, name, value)
    return draft


@pytest.fixture
def pretended(monkeypatch):
    made = Pretended()
    monkeypatch.setattr("eagle3_hf.evaluation.bench.measure", made)
    monkeypatch.setattr("eagle3_hf.evaluation.bench.text_differences", lambda *args, **kwargs: [])
    return made
