"""Where things live and in what they compute: dtypes, offloading, quantised targets, adapters, wrapped heads."""

import itertools

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eagle3_hf.model.borrowed import call_on_module_device, compute_dtype
from support.drafts import assert_same, new_draft, observe, padded, set_tree, target_of
from support.families import prompt, tiny
from support.losslessness import Comparison


# peft itself reads a name that transformers has renamed.
PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_same_text(target, draft, inputs=None, **kwargs) -> None:
    """Everything that a caller can see is as without the head, which is right most of the time."""
    inputs = padded([9, 5]) if inputs is None else inputs
    kwargs = {"max_new_tokens": 16, **kwargs}
    vanilla = observe(target, inputs, **kwargs)
    head = draft.module if isinstance(draft, DistributedDataParallel) else draft
    set_tree(head, "cpu").foretell(vanilla.told)
    assert_same(observe(target, inputs, assistant_model=draft, **kwargs), vanilla)
    assert head.stats.mean_accepted > 0.5


# ----- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target_dtype", "draft_dtype"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_every_pair_of_dtypes(target_dtype, draft_dtype):
    target = tiny("llama", num_hidden_layers=4).to(target_dtype)
    draft, comparison = new_draft(target, half=False, dtype=draft_dtype), Comparison()
    for seed, (setting, tree) in enumerate([("greedy", "cpu"), ("T=1", "cpu")]):
        comparison.assert_same_ids(target, draft, prompt(9, seed), seed, setting, tree)
    comparison.assert_few_near_ties(target_dtype)
    assert (target.dtype, draft.dtype) == (target_dtype, draft_dtype)
    # Borrowing is where the two meet: a head without an output layer of its own.
    lean = new_draft(target, half=False, dtype=draft_dtype, own_lm_head=False).foretell([])
    assert target.generate(prompt(9), max_new_tokens=9, assistant_model=lean).shape == (1, 18)


# ----- offloaded targets ---------------------------------------------------------------------------------------------


@pytest.mark.each_choice
@pytest.mark.parametrize("offload", ["cpu", "disk"])
@pytest.mark.parametrize("own_lm_head", [True, False])
def test_an_offloaded_target(offload, own_lm_head, tmp_path):
    """Its weights are on the meta device between forwards; features, embedding and output layer come by calling."""
    target = tiny("llama", num_hidden_layers=4)
    plain = target.generate(prompt(9), max_new_tokens=16)
    draft = new_draft(target, half=False, own_lm_head=own_lm_head)
    if offload == "cpu":
        cpu_offload(target, execution_device=torch.device("cpu"))
    else:
        disk_offload(target, tmp_path, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in target.parameters()} == {"meta"}
    assert_same_text(target, draft)
    draft.foretell(plain[0, 9:])
    assert torch.equal(target.generate(prompt(9), max_new_tokens=16, assistant_model=draft), plain)


def test_an_offloaded_output_layer_of_another_dtype():
    target = tiny("llama", num_hidden_layers=4).to(torch.bfloat16)
    draft = new_draft(target, half=False, own_lm_head=False).foretell([])
    cpu_offload(target, execution_device=torch.device("cpu"))
    assert target.generate(prompt(9), max_new_tokens=9, assistant_model=draft).shape == (1, 18)
    assert draft.dtype == torch.float32


# ----- quantised targets ---------------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """Eight-bit weights, one scale a row, as quantisers store them; it computes in one dtype and takes no other."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale.detach())
        self.dtype = dtype

    def forward(self, inputs):
        assert inputs.dtype == self.dtype, f"a kernel for {self.dtype} was given {inputs.dtype}"
        return nn.functional.linear(inputs, self.weight.to(self.dtype) * self.scale.to(self.dtype))


def quantised(dtype: torch.dtype = torch.float32, skip: tuple[str, ...] = ()):
    target = tiny("llama", num_hidden_layers=4).to(dtype)
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith(skip or "-"):
            target.set_submodule(name, PackedLinear(module, dtype))
    return target


@pytest.mark.parametrize("own_lm_head", [True, False])
def test_a_quantised_target(own_lm_head):
    target = quantised()
    assert target.lm_head.weight.dtype == torch.int8
    assert_same_text(target, new_draft(target, half=False, own_lm_head=own_lm_head))


def test_a_quantised_output_layer_is_given_what_the_target_computes_in():
    target = quantised(torch.bfloat16)
    assert compute_dtype(target) == torch.bfloat16
    draft = new_draft(target, half=False, own_lm_head=False).foretell([])
    assert target.generate(prompt(9), max_new_tokens=9, assistant_model=draft).shape == (1, 18)
    assert draft.dtype == torch.float32


def test_eight_bit_floats_are_storage_too():
    class Float8(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4).to(torch.float8_e4m3fn), requires_grad=False)

        def forward(self, inputs):
            return inputs @ self.weight.to(inputs.dtype)

    found = call_on_module_device(Float8(), torch.bfloat16)(torch.randn(2, 4))
    assert found.dtype == torch.bfloat16
    assert compute_dtype(nn.Sequential(Float8(), nn.LayerNorm(4))) == torch.float32


@pytest.mark.parametrize("scheme", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_target_quantised_by_torchao(scheme):
    torchao = pytest.importorskip("torchao.quantization")
    target = tiny("llama", num_hidden_layers=4)
    torchao.quantize_(target, getattr(torchao, scheme)())
    for own_lm_head in (True, False):
        assert_same_text(target, new_draft(target, half=False, own_lm_head=own_lm_head))


def test_a_target_quantised_by_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    target = tiny("llama", num_hidden_layers=4)
    for name, module in list(target.named_modules()):
        if isinstance(module, nn.Linear):
            packed = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32
            )
            packed.load_state_dict(module.state_dict())
            target.set_submodule(name, packed.to("cpu"))
    target(prompt(3))
    assert target.lm_head.weight.dtype == torch.uint8
    for own_lm_head in (True, False):
        assert_same_text(target, new_draft(target, half=False, own_lm_head=own_lm_head))


# ----- adapters and wrappers -----------------------------------------------------------------------------------------


@PEFT
def test_adapters_switched_between_calls():
    target = get_peft_model(tiny("llama", num_hidden_layers=4), LoraConfig(target_modules=["q_proj", "down_proj"]))
    target.add_adapter("other", LoraConfig(target_modules=["v_proj"]))
    for name, parameter in target.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    draft, texts = new_draft(target_of("llama"), half=False), set()
    for adapter in ("default", "other", "default"):
        target.set_adapter(adapter)
        assert_same_text(target, draft)
        texts.add(tuple(target.generate(prompt(9), max_new_tokens=16)[0].tolist()))
        with target.disable_adapter():
            assert_same_text(target, draft)
            texts.add(tuple(target.generate(prompt(9), max_new_tokens=16)[0].tolist()))
    assert len(texts) == 3, "two adapters and none"


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_head_inside_ddp_and_synchronised_gpus_of_one_process():
    assert_same_text(target_of("llama"), DistributedDataParallel(new_draft(target_of("llama"), half=False)))
    assert_same_text(target_of("llama"), new_draft(target_of("llama"), half=False), synced_gpus=True)


# ----- long texts ----------------------------------------------------------------------------------------------------


def test_a_head_beyond_its_trained_length_warns_once(caplog, monkeypatch):
    target = tiny("llama", num_hidden_layers=4)
    draft = new_draft(target, half=False, max_position_embeddings=32)
    for length in (20, 40, 50):
        assert_same_text(target, draft, prompt(length), max_new_tokens=20)
    lines = [record.getMessage() for record in caplog.records if "32 positions" in record.getMessage()]
    assert len(lines) == 1


@pytest.mark.slow
def test_a_head_far_beyond_its_trained_length():
    target = tiny("llama", num_hidden_layers=4, max_position_embeddings=4096)
    draft = new_draft(target, half=False, max_position_embeddings=256)
    assert_same_text(target, draft, prompt(2048), max_new_tokens=32)


@pytest.mark.slow
def test_memory_is_flat_over_many_calls():
    import resource

    target, draft = target_of("llama"), set_tree(new_draft(target_of("llama"), half=False), "cpu").foretell([])
    kept = []
    for call in range(500):
        target.generate(prompt(9, call), max_new_tokens=8, assistant_model=draft)
        if call in (99, 499):
            kept.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, _tensors()))
    assert kept[1][0] - kept[0][0] < 20_000, "kilobytes"
    assert kept[1][1] <= kept[0][1]


def _tensors() -> int:
    import gc

    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
