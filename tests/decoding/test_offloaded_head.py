"""Heads whose weights accelerate keeps on a disk or in another memory: they draft, and say what they cannot do."""

import copy
import logging

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from peft import LoraConfig, get_peft_model
from torch import nn

from eagle3_hf import Eagle3DraftModel, Eagle3Trainer, Eagle3TrainingArguments
from eagle3_hf.export import export_head
from eagle3_hf.model.offload import device_of_head, is_offloaded
from support.drafts import assert_same, new_draft, observe, padded, set_tree, target_of
from support.families import prompt


PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
CPU = torch.device("cpu")
PARTS = ("fc", "layers", "norm", "lm_head", "rotary_emb", "embed_tokens", "fc_norm")
# Buffers are no modules.
pytestmark = pytest.mark.filterwarnings("ignore:The following device_map keys do not match")


def parts_on_disk(*names: str) -> dict[str, str]:
    return {part: "disk" if part in names else "cpu" for part in (*PARTS, "d2t", "t2d")}


EVERYWHERE = parts_on_disk(*PARTS)


@pytest.fixture(scope="module")
def target():
    return target_of("llama")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("head")
    new_draft(target, half=False).save_pretrained(path)
    return path


@pytest.fixture
def load(folder, tmp_path):
    def with_map(device_map, source=folder, **kwargs) -> Eagle3DraftModel:
        kwargs = {"offload_folder": tmp_path / "offloaded", **kwargs}
        return set_tree(Eagle3DraftModel.from_pretrained(source, device_map=device_map, **kwargs), "cpu")

    return with_map


def assert_drafts_like(offloaded, resident, target, inputs=None, **kwargs) -> None:
    """The same text as without it, and the same guesses as of the same head in memory."""
    inputs = padded([9, 5]) if inputs is None else inputs
    kwargs = {"max_new_tokens": 12, **kwargs}
    plain = observe(target, inputs, **kwargs)
    assert_same(observe(target, inputs, assistant_model=resident, **kwargs), plain)
    assert_same(observe(target, inputs, assistant_model=offloaded, **kwargs), plain)
    head = offloaded.get_base_model() if hasattr(offloaded, "get_base_model") else offloaded
    assert head.stats.accepted == resident.stats.accepted
    assert is_offloaded(head)


# ----- drafting ------------------------------------------------------------------------------------------------------

MAPS = {
    "auto": ("auto", {"max_memory": {"cpu": "60KB"}}),
    "everything": ({"": "disk"}, {}),
    "all parts": (EVERYWHERE, {}),
    "offload_state_dict": (EVERYWHERE, {"offload_state_dict": True}),
    **{part: (parts_on_disk(part), {}) for part in PARTS[:4]},
    "the vocabulary too": (parts_on_disk("layers", "d2t", "t2d"), {}),
}


@pytest.mark.parametrize("name", MAPS)
def test_every_device_map(name, load, folder, target):
    device_map, kwargs = MAPS[name]
    offloaded = load(device_map, **kwargs)
    resident = set_tree(Eagle3DraftModel.from_pretrained(folder), "cpu")
    if not hasattr(offloaded, "hf_device_map"):
        # Earlier versions of transformers leave any model on the meta device if one device is named for all of it.
        with pytest.raises(ValueError, match=r"has no weights: fc\.weight is on the meta device"):
            target.generate(prompt(5), max_new_tokens=4, assistant_model=offloaded)
        return
    assert device_of_head(offloaded) == CPU
    assert_drafts_like(offloaded, resident, target)


@pytest.mark.parametrize(
    "kwargs", [{"do_sample": True, "temperature": 0.7}, {"num_assistant_tokens": "auto"}], ids=str
)
def test_sampling_and_trees_by_cost(kwargs, load, folder, target):
    assert_drafts_like(load(EVERYWHERE), set_tree(Eagle3DraftModel.from_pretrained(folder), "cpu"), target, **kwargs)


@pytest.mark.parametrize(
    "fields",
    [
        {"own_embeddings": True},
        {"own_lm_head": False},
        {"own_embeddings": True, "own_lm_head": False, "dtype": torch.bfloat16},
        {"num_hidden_layers": 2, "fc_norm": True},
    ],
    ids=str,
)
def test_every_kind_of_head(fields, load, target, tmp_path):
    draft = new_draft(target, half=False, **fields)
    draft.save_pretrained(tmp_path)
    assert_drafts_like(load(EVERYWHERE, tmp_path), set_tree(draft, "cpu"), target)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offloaded_after_loading(way, target, tmp_path):
    draft = set_tree(new_draft(target, half=False), "cpu")
    resident = copy.deepcopy(draft)
    if way == "cpu_offload":
        cpu_offload(draft, execution_device=CPU)
    elif way == "disk_offload":
        disk_offload(draft, tmp_path, execution_device=CPU)
    else:
        dispatch_model(draft, parts_on_disk("layers", "fc"), main_device="cpu", offload_dir=tmp_path)
    assert_drafts_like(draft, resident, target)


@PEFT
def test_with_adapters(load, target, tmp_path):
    """Adapters that are put on before; put on behind, they have no numbers."""
    lora = LoraConfig(target_modules=["o_proj", "up_proj"], init_lora_weights=False)
    adapted = get_peft_model(new_draft(target, half=False), lora)
    set_tree(adapted.get_base_model(), "cpu")
    observe(target, padded([9, 5]), max_new_tokens=12, assistant_model=adapted)
    right = adapted.get_base_model().stats.accepted
    disk_offload(adapted, tmp_path, execution_device=CPU)
    plain = observe(target, padded([9, 5]), max_new_tokens=12)
    assert_same(observe(target, padded([9, 5]), max_new_tokens=12, assistant_model=adapted), plain)
    assert adapted.get_base_model().stats.accepted == right
    behind = get_peft_model(load(EVERYWHERE), lora)
    with pytest.raises(ValueError, match=r"has no weights: .*lora_A.*put adapters on a head before it is offloaded"):
        target.generate(prompt(5), max_new_tokens=4, assistant_model=behind)


def test_compiled_around_it(load, folder, target):
    resident = set_tree(Eagle3DraftModel.from_pretrained(folder), "cpu")
    offloaded = load(EVERYWHERE)
    plain = target.generate(prompt(9), max_new_tokens=12)
    compiled = torch.compile(offloaded, backend="eager")
    assert torch.equal(target.generate(prompt(9), max_new_tokens=12, assistant_model=compiled), plain)
    assert torch.equal(target.generate(prompt(9), max_new_tokens=12, assistant_model=resident), plain)
    assert offloaded.stats.accepted == resident.stats.accepted


def test_that_it_is_slow_is_said(load, target, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logging.Logger.warning_once.cache_clear()
    target.generate(prompt(5), max_new_tokens=4, assistant_model=load(EVERYWHERE))
    assert "weights are offloaded and fetched again" in caplog.text


def test_one_pass_by_hand(load, folder, target):
    """Without labels, `forward` is that of the head in memory."""
    resident, offloaded = Eagle3DraftModel.from_pretrained(folder).bind(target), load(EVERYWHERE).bind(target)
    features = torch.randn(1, 7, 3 * target.config.hidden_size)
    with torch.no_grad():
        found, right = (draft(prompt(7), features).logits for draft in (offloaded, resident))
    assert torch.equal(found, right)


# ----- what it cannot do ---------------------------------------------------------------------------------------------


def test_training_is_refused_by_name(load, target, tmp_path):
    offloaded = load(parts_on_disk("layers")).bind(target)
    words = r"training needs the weights of the draft head in memory, but 10 of its tensors are offloaded \(layers\.0"
    with pytest.raises(ValueError, match=words):
        Eagle3Trainer(offloaded, target, Eagle3TrainingArguments(output_dir=tmp_path))
    features = torch.randn(1, 7, 3 * target.config.hidden_size)
    with pytest.raises(ValueError, match=words):
        offloaded(prompt(7), features, labels=prompt(7), teacher_logits=torch.randn(5, 160))


def test_saving_writes_the_weights(load, folder, target, tmp_path):
    load(EVERYWHERE).save_pretrained(tmp_path / "saved")
    found, right = (Eagle3DraftModel.from_pretrained(path).state_dict() for path in (tmp_path / "saved", folder))
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_export_is_refused_by_name(to, load, target, tmp_path):
    with pytest.raises(ValueError, match="export needs the weights of the draft head in memory"):
        export_head(load(EVERYWHERE).bind(target), tmp_path / "exported", to)


BROKEN = {
    "meta": ("meta", {}),
    "all meta": ({"": "meta"}, {}),
    "buffers on disk": ({"": "disk"}, {"offload_buffers": True}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_vocabulary_without_numbers_is_refused_at_load(name, load):
    device_map, kwargs = BROKEN[name]
    with pytest.raises(ValueError, match=r"vocabulary map \(d2t, t2d\) is on the meta device.*onto one device"):
        load(device_map, **kwargs)


def test_weights_that_nothing_fetches_are_refused_before_a_forward(target, tmp_path):
    draft, calls = new_draft(target), []
    draft.fc.to("meta")
    handle = target.register_forward_pre_hook(lambda *args: calls.append(args))
    with pytest.raises(ValueError, match=r"has no weights: fc\.weight is on the meta device"):
        target.generate(prompt(5), max_new_tokens=4, assistant_model=draft)
    handle.remove()
    assert not calls
    with pytest.raises(ValueError, match=r"has no weights: fc\.weight"):
        draft.save_pretrained(tmp_path)


def test_parts_on_several_devices_are_named():
    """There is one device here; what accelerate would fetch to another one is where the part computes."""

    class Hook:
        offload, execution_device = True, "cuda:0"

    parts = nn.ModuleDict({"fc": nn.Linear(2, 2), "lm_head": nn.Linear(2, 2, device="meta")})
    parts["lm_head"]._hf_hook = Hook()
    with pytest.raises(ValueError, match=r"several devices \(fc\.weight on cpu, lm_head\.weight on cuda:0\)"):
        device_of_head(parts)
