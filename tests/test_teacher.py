"""What the head is taught is what the target says: its own distribution over the draft vocabulary, its own choices."""

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from eagle3_hf.features import FeatureReader
from eagle3_hf.training.data import Eagle3DataCollator
from eagle3_hf.training.store import StoredFeatures, write_features
from eagle3_hf.training.teacher import Teacher
from eagle3_hf.ttt.loss import IGNORE_INDEX
from families import COMMON, prompt, tiny


LAYER_IDS = [0, 2, 4]
ANSWERS = [[(4, 8)], [(3, 5), (8, 13)], [(2, 10)]]  # a..b of each row's answers; learnt are a+1..b
LENGTHS = [9, 14, 11]
DRAFT_IDS = torch.arange(1, 320, 3)


def scaled(config_class, **fields):
    """A tiny target that scales its logits."""
    config = config_class(**{**COMMON, "num_hidden_layers": 4, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


TARGETS = {
    "llama": lambda: tiny("llama", num_hidden_layers=4),
    "qwen3": lambda: tiny("qwen3", num_hidden_layers=4),
    "mistral, window": lambda: tiny("mistral_sw", num_hidden_layers=4),
    "gemma3": lambda: tiny("gemma3", num_hidden_layers=4),
    "gpt_oss": lambda: tiny("gpt_oss", num_hidden_layers=4),
    "gemma2, soft-capped": lambda: tiny("gemma2", num_hidden_layers=4, final_logit_softcapping=1.5),
    "cohere, logit_scale": lambda: scaled(CohereConfig, logit_scale=0.3),
    "granite, logits_scaling": lambda: scaled(GraniteConfig, logits_scaling=4.0),
}
STORABLE = ["llama", "qwen3", "mistral, window", "gemma3", "gpt_oss"]


def rows() -> list[dict]:
    made = []
    for length, spans in zip(LENGTHS, ANSWERS, strict=True):
        ids = prompt(length, seed=length)[0].tolist()
        learnt = {j for a, b in spans for j in range(a + 1, b + 1)}
        made.append({"input_ids": ids, "labels": [ids[j] if j in learnt else IGNORE_INDEX for j in range(length)]})
    return made


def own_words(target) -> torch.Tensor:
    """Of every learnt token, row by row: the logits (n, V) that predict it, from the target run on each row alone."""
    logits = []
    for row, spans in zip(rows(), ANSWERS, strict=True):
        with torch.no_grad():
            full = target(torch.tensor([row["input_ids"]])).logits[0]
        logits += [full[j - 1] for a, b in spans for j in range(a + 1, b + 1)]
    return torch.stack(logits)


def check(taught: dict, logits: torch.Tensor, tolerance: float = 1e-5) -> None:
    expected = logits[:, DRAFT_IDS].softmax(-1)
    torch.testing.assert_close(taught["teacher_logits"].softmax(-1), expected, rtol=0, atol=tolerance)
    choices = logits.argmax(-1).tolist()
    assert taught["teacher_in_vocab"].tolist() == [choice in set(DRAFT_IDS.tolist()) for choice in choices]
    assert 0 < int(taught["teacher_in_vocab"].sum()) < len(choices)  # the test can fail both ways


@pytest.mark.parametrize("name", TARGETS)
def test_online_teacher_is_the_targets_own_distribution(name):
    target = TARGETS[name]()
    batch = Eagle3DataCollator(pad_token_id=0)(rows())
    taught = Teacher(target, LAYER_IDS, DRAFT_IDS)(batch)
    check(taught, own_words(target))
    for i, row in enumerate(rows()):
        ids = torch.tensor([row["input_ids"]])
        with FeatureReader(target, LAYER_IDS) as reader, torch.no_grad():
            target(ids)
            torch.testing.assert_close(taught["features"][i, : LENGTHS[i]], reader.take()[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STORABLE)
def test_stored_teacher_is_the_targets_own_distribution(name, tmp_path):
    target = TARGETS[name]()
    write_features(
        target, Dataset.from_list(rows()), tmp_path, LAYER_IDS, dtype=torch.float32, batch_tokens=20, progress=False
    )
    batch = Eagle3DataCollator(pad_token_id=0)(list(StoredFeatures(tmp_path)))
    check(Teacher(target, LAYER_IDS, DRAFT_IDS)(batch), own_words(target))


def test_output_layers_of_every_kind_give_the_same(tmp_path):
    """Rows of a plain weight are gathered once; anything else (quantised, adapted, with a bias) is called."""

    class Called(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, hidden):
            return self.linear(hidden)

    target = tiny("llama", num_hidden_layers=4)
    plain = target.lm_head
    target.lm_head = nn.Linear(64, 320, bias=True)
    target.lm_head.weight = plain.weight
    nn.init.normal_(target.lm_head.bias)
    write_features(target, Dataset.from_list(rows()), tmp_path, LAYER_IDS, dtype=torch.float32, progress=False)
    batch = Eagle3DataCollator(pad_token_id=0)(list(StoredFeatures(tmp_path)))
    check(Teacher(target, LAYER_IDS, DRAFT_IDS)(batch), own_words(target))
    target.lm_head = Called(target.lm_head)
    check(Teacher(target, LAYER_IDS, DRAFT_IDS)(batch), own_words(target))


def test_autocast_leaves_the_target_alone():
    """Training in mixed precision must not change what the target says or the features that the head will meet."""
    target = tiny("llama", num_hidden_layers=4)
    batch = Eagle3DataCollator(pad_token_id=0)(rows())
    teacher = Teacher(target, LAYER_IDS, DRAFT_IDS)
    expected = teacher(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        taught = teacher(batch)
    assert all(torch.equal(taught[name], expected[name]) for name in expected)


def test_nothing_supervised_gives_no_teacher_rows():
    target = tiny("llama", num_hidden_layers=4)
    batch = Eagle3DataCollator(pad_token_id=0)(rows())
    batch["labels"].fill_(IGNORE_INDEX)
    taught = Teacher(target, LAYER_IDS, DRAFT_IDS)(batch)
    assert taught["teacher_logits"].shape == (0, len(DRAFT_IDS))
    assert taught["teacher_in_vocab"].shape == (0,)


def test_no_gradient_reaches_the_target():
    target = tiny("llama", num_hidden_layers=4)
    taught = Teacher(target, LAYER_IDS, DRAFT_IDS)(Eagle3DataCollator(pad_token_id=0)(rows()))
    assert not any(value.requires_grad for value in taught.values())
