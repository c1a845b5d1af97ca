"""What the head is taught is what the target says: its own distribution over the draft vocabulary, its own choices."""

import threading

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import CausalLMOutput

from eagle3_hf.model.features import FeatureReader
from eagle3_hf.training.data.encoding import Eagle3DataCollator
from eagle3_hf.training.targets import output_layer
from eagle3_hf.training.targets.output_layer import OutputLayer
from eagle3_hf.training.targets.teacher import Teacher, document_batches
from eagle3_hf.ttt.loss import IGNORE_INDEX
from support.families import FAMILIES as WELL_TESTED
from support.families import prompt, tiny
from support.families.others import IS_OLD, OTHERS, tiny_or_skip, tiny_other


PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own call
LAYER_IDS = [0, 2, 4]
ANSWERS = [[(4, 8)], [(3, 5), (8, 13)], [(2, 10)]]  # a..b of each row's answers; learnt are a+1..b
LENGTHS = [9, 14, 11]
DRAFT_IDS = torch.arange(1, 320, 3)
FAMILIES = {  # by what a target does behind its output layer, and by what it could see across documents
    "llama": {},
    "qwen3": {},
    "mistral_sw": {},
    "gemma3": {},
    "gpt_oss": {},
    "gemma2": {"final_logit_softcapping": 1.5},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "gpt2": {},
    "opt": {},
    "phi": {},  # with a bias
    "bloom": {},
    "mamba2": {},
    "qwen3_next": {},
    "falcon_h1": {"lm_head_multiplier": 0.5},
    "recurrent_gemma": {"logits_soft_cap": 3.0},
}
PROCESSED = ("gemma2", "cohere", "granite", "falcon_h1", "recurrent_gemma")


def family(name: str):
    overrides = FAMILIES[name]
    try:
        return tiny_other(name, num_hidden_layers=4, **overrides)
    except Exception as error:
        if IS_OLD:
            pytest.skip(f"{name}: {error}")
        raise


def rows() -> list[dict]:
    made = []
    for length, spans in zip(LENGTHS, ANSWERS, strict=True):
        ids = prompt(length, seed=length)[0].tolist()
        learnt = {j for a, b in spans for j in range(a + 1, b + 1)}
        made.append({"input_ids": ids, "labels": [ids[j] if j in learnt else IGNORE_INDEX for j in range(length)]})
    return made


def padded() -> dict[str, torch.Tensor]:
    return Eagle3DataCollator(pad_token_id=0)(rows())


def packed() -> dict[str, torch.Tensor]:
    """The rows in two packed rows of 25 tokens; the first ends in padding, the second in a text without labels."""
    texts = rows()
    ids = [texts[0]["input_ids"] + texts[1]["input_ids"] + [0, 0], texts[2]["input_ids"] + [5] * 14]
    labels = [
        texts[0]["labels"] + texts[1]["labels"] + [IGNORE_INDEX] * 2,
        texts[2]["labels"] + [IGNORE_INDEX] * 14,
    ]
    positions = [[*range(9), *range(14), 0, 1], [*range(11), *range(14)]]
    mask = torch.ones(2, 25, dtype=torch.int64)
    mask[0, 23:] = 0
    return {
        "input_ids": torch.tensor(ids),
        "labels": torch.tensor(labels),
        "attention_mask": mask,
        "position_ids": torch.tensor(positions),
    }


PLACES = [(0, 0), (0, 9), (1, 0)]  # where the packed rows have each document


@torch.no_grad()
def own_words(target) -> torch.Tensor:
    """Of every learnt token, row by row: the logits (n, V) that predict it, from the target run on each row alone."""
    logits = []
    for row, spans in zip(rows(), ANSWERS, strict=True):
        full = target(torch.tensor([row["input_ids"]])).logits[0]
        logits += [full[j - 1] for a, b in spans for j in range(a + 1, b + 1)]
    return torch.stack(logits)


@torch.no_grad()
def own_features(target, layer_ids: list[int]) -> list[torch.Tensor]:
    """Each row's features (T, A * Ht), from the target run on it alone."""
    found = []
    for row in rows():
        with FeatureReader(target, layer_ids) as reader:
            target(torch.tensor([row["input_ids"]]))
            found.append(reader.take()[0])
    return found


def assert_taught(taught: dict, logits: torch.Tensor, tolerance: float = 1e-5, varied: bool = True) -> None:
    expected = logits[:, DRAFT_IDS].softmax(-1)
    torch.testing.assert_close(taught["teacher_logits"].softmax(-1), expected, rtol=0, atol=tolerance)
    choices = logits.argmax(-1).tolist()
    assert taught["teacher_in_vocab"].tolist() == [choice in set(DRAFT_IDS.tolist()) for choice in choices]
    assert not varied or 0 < int(taught["teacher_in_vocab"].sum()) < len(choices)  # the test can fail both ways


def teacher_of(target, **kwargs) -> Teacher:
    return Teacher(target, LAYER_IDS, DRAFT_IDS, **kwargs)


@torch.no_grad()
def stored(target) -> dict[str, torch.Tensor]:
    """A batch as stored features give it: what the target was asked, and what its output layer was given."""
    batch = padded()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    with FeatureReader(target, LAYER_IDS) as reader:
        hidden = OutputLayer(target, DRAFT_IDS).hidden(**inputs)
        features = reader.take()
    full = target(**inputs).logits
    return {**batch, "features": features, "last_hidden": hidden, "top1": full.argmax(-1)}


# ----- on every kind of target ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_online_teacher_is_the_targets_own_distribution(name, caplog):
    target = family(name)
    taught = teacher_of(target)(padded())
    assert_taught(taught, own_words(target))
    for i, features in enumerate(own_features(target, LAYER_IDS)):
        bound = 1e-5 * max(1.0, float(features.abs().max()))
        torch.testing.assert_close(taught["features"][i, : LENGTHS[i]], features, rtol=1e-4, atol=bound)
    assert "cannot be run on the supervised tokens alone" not in caplog.text


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_are_read_alone(name):
    target = family(name)
    taught = teacher_of(target)(packed())
    assert_taught(taught, own_words(target))
    for (row, start), length, features in zip(PLACES, LENGTHS, own_features(target, LAYER_IDS), strict=True):
        there = taught["features"][row, start : start + length]
        torch.testing.assert_close(there, features, rtol=1e-4, atol=1e-5 * float(features.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
def test_stored_teacher_is_the_targets_own_distribution(name):
    target = family(name)
    raw = target.get_output_embeddings()(stored(target)["last_hidden"])
    own = target(padded()["input_ids"], attention_mask=padded()["attention_mask"]).logits
    assert (name in PROCESSED) == (float((raw - own).detach().abs().max()) > 0.1)  # the test knows which are hard
    assert_taught(teacher_of(target)(stored(target)), own_words(target))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*WELL_TESTED, *OTHERS])
def test_every_family_in_every_way(name, caplog):
    """Online, packed and stored, on every family of docs/families.md; none of them has to run whole."""
    target = tiny_or_skip(name)
    expected, teacher = own_words(target), teacher_of(target)
    for batch in (padded(), packed(), stored(target)):
        assert_taught(teacher(batch), expected, varied=False)
    assert "cannot be run on the supervised tokens alone" not in caplog.text


# ----- output layers that are not a plain weight ---------------------------------------------------------------------


class Packed(nn.Module):
    """Stands for a quantised layer: eight-bit weights that nobody outside may look at."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.register_buffer("packed", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, inputs):
        return inputs @ (self.packed.to(inputs.dtype) * self.scale).T


def quantised():
    target = tiny("gemma2", num_hidden_layers=4, final_logit_softcapping=1.5)
    target.lm_head = Packed(target.lm_head)
    return target


def with_bias():
    target = tiny("llama", num_hidden_layers=4)
    weight, target.lm_head = target.lm_head.weight, nn.Linear(64, 320, bias=True)
    target.lm_head.weight = weight
    nn.init.normal_(target.lm_head.bias)
    return target


def offloaded():
    """Parameters on the meta device, brought in for each call."""
    return cpu_offload(tiny("gemma2", num_hidden_layers=4, final_logit_softcapping=1.5), torch.device("cpu"))


def adapted():
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(tiny("gemma2", num_hidden_layers=4, final_logit_softcapping=1.5), config).eval()


class Padded(nn.Linear):
    """Rows behind the vocabulary, of an output layer padded to a round size, that would win every argmax."""

    def forward(self, hidden):
        return nn.functional.pad(super().forward(hidden), (0, 8), value=1e4)


def cropped():
    target = tiny("llama", num_hidden_layers=4)
    target.lm_head.__class__ = Padded
    original = target.forward

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits[..., :320]
        return output

    target.forward = forward
    return target


KINDS = {
    "quantised": quantised,
    "bias": with_bias,
    "offloaded": offloaded,
    "LoRA": adapted,
    "padded vocabulary": cropped,
}


@PEFT
@pytest.mark.parametrize("kind", KINDS)
def test_output_layers_of_every_kind_give_the_targets_words(kind, caplog):
    target = KINDS[kind]()
    expected = own_words(target)
    for batch in (padded(), packed()):
        assert_taught(teacher_of(target)(batch), expected)
    if kind != "padded vocabulary":  # its raw layer cannot be read off by itself
        assert_taught(teacher_of(target)(stored(target)), expected)
    assert "cannot be run on the supervised tokens alone" not in caplog.text


def headstrong():
    """A target that does not call its output layer as a module, and does something to the logits."""
    target = tiny("llama", num_hidden_layers=4)

    def forward(input_ids, attention_mask=None, use_cache=None):
        hidden = target.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)[0]
        return CausalLMOutput(logits=3 * torch.tanh(nn.functional.linear(hidden, target.lm_head.weight) / 2))

    target.forward = forward
    return target


def test_a_target_that_does_not_fit_runs_whole_and_says_so(caplog):
    target = headstrong()
    with caplog.at_level("WARNING", logger="transformers"):
        teacher = teacher_of(target)
        assert_taught(teacher(padded()), own_words(target))
        assert_taught(teacher(packed()), own_words(target))
    said = [record for record in caplog.records if "cannot be run on the supervised tokens alone" in record.message]
    assert len(said) == 1
    assert "LlamaForCausalLM" in said[0].message


def test_a_target_that_says_nan_is_not_taken_for_one_that_does_not_fit():
    target = tiny("llama", num_hidden_layers=4)
    target.model.embed_tokens.weight.data[padded()["input_ids"][0, 3]] = float("nan")
    taught = teacher_of(target)(stored(target))
    assert taught["teacher_logits"].isnan().any()


def test_stored_features_of_a_target_that_does_not_fit_are_refused():
    target = headstrong()
    batch = {**padded(), "features": torch.randn(3, 14, 192), "last_hidden": torch.randn(3, 14, 64)}
    with pytest.raises(ValueError, match="logits of LlamaForCausalLM cannot be computed from its last hidden state"):
        teacher_of(target)({**batch, "top1": torch.zeros(3, 14, dtype=torch.int64)})


# ----- memory, threads, precision ------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation gave; views of the target's weights are none."""

    def __init__(self, target):
        super().__init__()
        self.largest, self.known = 0, {parameter.untyped_storage().data_ptr() for parameter in target.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, value.numel())
        return output


@pytest.mark.parametrize("make", [padded, packed, None], ids=["padded", "packed", "stored"])
def test_logits_over_the_whole_vocabulary_exist_for_a_few_rows_only(make, monkeypatch):
    target = tiny("llama", num_hidden_layers=4, vocab_size=9000)
    monkeypatch.setattr(output_layer, "_LOGITS", 4 * 9000)
    batch = make() if make else stored(target)
    teacher = teacher_of(target)
    teacher(batch)  # the comparison with the target's own logits, once
    with LargestTensor(target) as mode:
        taught = teacher(batch)
    tokens = 2 * 25 if make is packed else 3 * 14
    assert mode.largest <= max(4 * 9000, tokens * 3 * 64, 19 * len(DRAFT_IDS)) < len(taught["teacher_logits"]) * 9000


def test_another_thread_may_use_the_target_meanwhile():
    target, results = tiny("llama", num_hidden_layers=4), []
    text = prompt(6)
    with torch.no_grad():
        expected = target(text).logits
    layer = OutputLayer(target, DRAFT_IDS)

    def elsewhere(hidden):
        thread = threading.Thread(target=lambda: results.append(target(text).logits.detach()))
        thread.start()
        thread.join()
        return hidden[:, :1, :1]

    with layer._replaced(elsewhere), torch.no_grad():
        target(text)
    assert torch.equal(results[0], expected)
    assert torch.equal(target(text).logits.detach(), expected)  # and nothing is left behind


def test_autocast_leaves_the_target_alone():
    """Training in mixed precision must not change what the target says or the features that the head will meet."""
    teacher, batch = teacher_of(tiny("llama", num_hidden_layers=4)), padded()
    expected = teacher(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        taught = teacher(batch)
    assert all(torch.equal(taught[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_keep_the_targets_dtype(dtype):
    target = tiny("gemma2", num_hidden_layers=4, final_logit_softcapping=1.5).to(dtype)
    taught, logits = teacher_of(target)(padded()), own_words(target)
    assert taught["teacher_logits"].dtype == taught["features"].dtype == dtype
    expected = logits[:, DRAFT_IDS].float().softmax(-1)
    torch.testing.assert_close(taught["teacher_logits"].float().softmax(-1), expected, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("make", [padded, packed])
def test_nothing_supervised_gives_no_teacher_rows(make):
    batch = make()
    batch["labels"].fill_(IGNORE_INDEX)
    taught = teacher_of(tiny("llama", num_hidden_layers=4))(batch)
    assert taught["teacher_logits"].shape == (0, len(DRAFT_IDS))
    assert taught["teacher_in_vocab"].shape == (0,)


def test_no_gradient_reaches_the_target():
    taught = teacher_of(tiny("llama", num_hidden_layers=4))(padded())
    assert not any(value.requires_grad for value in taught.values())


# ----- the last feature, for the feature regression ------------------------------------------------------------------


@pytest.mark.parametrize("make", [padded, packed])
@pytest.mark.parametrize("layer_ids", [[1, 2], [2, 4], [4]])
def test_last_features_are_the_targets_one_ahead(make, layer_ids):
    target = tiny("llama", num_hidden_layers=4)
    taught = Teacher(target, layer_ids, DRAFT_IDS, last_features=True)(make())
    expected = [
        features[j - 1]  # at the token whose next one is learnt: a pair reads the feature before it
        for features, spans in zip(own_features(target, [4]), ANSWERS, strict=True)
        for a, b in spans
        for j in range(a + 1, b + 1)
    ]
    torch.testing.assert_close(taught["teacher_features"], torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert taught["features"].shape[-1] == 64 * len(layer_ids)
    without = Teacher(target, layer_ids, DRAFT_IDS)(make())
    assert "teacher_features" not in without
    torch.testing.assert_close(taught["features"], without["features"])


def test_last_features_from_a_store():
    target = tiny("llama", num_hidden_layers=4)
    batch = stored(target)
    online = teacher_of(target, last_features=True)(padded())["teacher_features"]
    torch.testing.assert_close(teacher_of(target, last_features=True)(batch)["teacher_features"], online)
    with pytest.raises(
        ValueError, match=r"needs the target's last feature, hidden_states index 4, but indices \[0, 2\]"
    ):
        Teacher(target, [0, 2], DRAFT_IDS, last_features=True)(batch)


# ----- documents of packed rows --------------------------------------------------------------------------------------


def test_every_token_of_every_document_is_in_one_batch_once():
    lengths = [[3, 1, 40, 700, 2], [333, 5, 400, 8], [746]]
    positions = torch.cat([torch.cat([torch.arange(n) for n in row])[None] for row in lengths])
    batches = document_batches(positions)
    rows_seen = [row[row >= 0].tolist() for batch in batches for row in batch]
    starts = (positions == 0).flatten().nonzero()[:, 0].tolist()
    expected = [list(range(a, b)) for a, b in zip(starts, [*starts[1:], positions.numel()], strict=True)]
    assert sorted(rows_seen) == expected
    for batch in batches:
        assert batch.numel() <= max(positions.numel(), batch.shape[1])
        real = int((batch >= 0).sum())
        assert batch.numel() <= max(512, 1.25 * real)  # little padding
        assert ((batch >= 0).long().diff(dim=1) <= 0).all()  # padded on the right


def test_padding_is_no_document():
    batch = packed()
    batches = document_batches(batch["position_ids"], batch["attention_mask"])
    assert sorted(len(row[row >= 0]) for places in batches for row in places) == [9, 11, 14, 14]
    alone = document_batches(torch.arange(4)[None], torch.zeros(1, 4))
    assert [places.tolist() for places in alone] == [[[0, 1, 2, 3]]]
