"""Code of others in a target's forward: what is tried, what is known to be harmless, and that the text is plain's."""

import functools
import logging
import threading
import types

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.decoding.target import capability_probe
from eagle3_hf.decoding.target.capability import VerifyMode, known_capability
from eagle3_hf.decoding.target.capability_probe import capability_of
from eagle3_hf.decoding.target.custom_code import custom_code
from eagle3_hf.decoding.target.hook_memory import Memory
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.model.target_modules import decoder_blocks
from support.drafts import MODES, assert_same_as_plain, new_draft, padded, set_tree
from support.families import prompt, tiny
from support.families.others import tiny_or_skip


logger = logging.getLogger(__name__)

PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def trials(monkeypatch):
    """The trials made from now on: one entry each, the names of the custom code."""
    made: list[list[str]] = []

    def count(target, device, rows=1, known=None, custom=()):
        made.append([piece.name for piece in custom])
        return original(target, device, rows, known, custom)

    original = capability_probe.try_out
    monkeypatch.setattr(capability_probe, "_found", type(capability_probe._found)())
    monkeypatch.setattr(capability_probe, "try_out", count)
    return made


@pytest.fixture
def target():
    return tiny("llama", num_hidden_layers=4)


def steering_vector(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(3)) * 0.5


# Steering as people write it; each adds the vector to the output of a block.


def at_all_tokens(v):
    return lambda module, args, out: out + v[:, None]


def at_the_newest(v):
    def steer(module, args, out):
        out = out.clone()
        out[:, -1] += v
        return out

    return steer


def in_place_at_the_newest(v):
    def steer(module, args, out):
        out[:, -1] += v

    return steer


def at_single_tokens(v):
    return lambda module, args, out: out + v[:, None] if out.shape[1] == 1 else out


def at_the_first_of_each_forward(v):
    def steer(module, args, out):
        return torch.cat([out[:, :1] + v[:, None], out[:, 1:]], dim=1)

    return steer


def normalised_over_tokens(v):
    return lambda module, args, out: out - 0.1 * out.mean(1, keepdim=True)


def on_the_first_ten_calls(v):
    left = 10

    def steer(module, args, out):
        nonlocal left
        left -= 1
        return out + v[:, None] if left >= 0 else out

    return steer


class EveryThirdCall:
    def __init__(self, v):
        self.v, self.calls = v, 0

    def __call__(self, module, args, out):
        self.calls += 1
        return out + self.v[:, None] if self.calls % 3 == 0 else out


class Listed:
    def __init__(self, v):
        self.v, self.state = v, [0]

    def hook(self, module, args, out):
        self.state[0] += 1
        return out + self.v[:, None] if self.state[0] > 4 else out


HARMLESS = [at_all_tokens]
HARMFUL = [
    at_the_newest,
    in_place_at_the_newest,
    at_single_tokens,
    at_the_first_of_each_forward,
    normalised_over_tokens,
    on_the_first_ten_calls,
    EveryThirdCall,
    lambda v: Listed(v).hook,
]


def assert_same_steered(target, make, lengths, mode, way):
    """With new hooks for each of the two calls, since some remember their calls; their order among the hooks that
    capture hidden states changes with that, so that these are not compared."""
    draft = set_tree(new_draft(target, half=False), (12, 4, 3))
    handles: list = []

    def hooks() -> dict:
        for handle in handles:
            handle.remove()
        handles[:] = [
            decoder_blocks(target)[layer].register_forward_hook(make(steering_vector(len(lengths))))
            for layer in (1, 3)
        ]
        return {}

    for seed in range(2):
        kwargs = {"accepts": way is not VerifyMode.PLAIN, "output_hidden_states": False, **mode}
        ours, _ = assert_same_as_plain(target, draft, padded(lengths), hooks, seed, **kwargs)
        assert (ours.out.speculation.rounds == 0) == (way is VerifyMode.PLAIN)


@MODES
@pytest.mark.parametrize("make", HARMFUL)
def test_hooks_that_know_places_or_calls(target, trials, make, mode):
    assert_same_steered(target, make, [14], mode, VerifyMode.PLAIN)


@MODES
@pytest.mark.parametrize("lengths", [[14], [5, 14, 9]], ids=str)
def test_hooks_that_do_not(target, trials, lengths, mode):
    assert_same_steered(target, at_all_tokens, lengths, mode, VerifyMode.TREE)
    assert len(trials) == 1, "one trial for hooks of the same code and settings, not for each call"


def test_hooks_on_a_target_of_chains(trials):
    assert_same_steered(tiny_or_skip("bloom"), at_all_tokens_of_a_tuple, [14], {}, VerifyMode.CHAIN)
    assert len(trials) == 1


def at_all_tokens_of_a_tuple(v):
    return lambda module, args, out: out + v[:, None] if isinstance(out, torch.Tensor) else (out[0] + v[:, None],)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hooks_in_half_precision(target, trials, dtype):
    for make, way in [
        (at_all_tokens, VerifyMode.TREE),
        (at_the_newest, VerifyMode.PLAIN),
        (at_single_tokens, VerifyMode.PLAIN),
    ]:
        other = tiny("llama", num_hidden_layers=4).to(dtype)
        vector = steering_vector().to(dtype)
        other.model.layers[1].register_forward_hook(make(vector))
        assert capability_of(other).mode is way


def test_the_hooks_and_their_settings_are_the_key(target, trials):
    vector, settings = steering_vector(), {"places": "all"}

    def steer(module, args, out):
        out = out.clone()
        out[:, slice(None) if settings["places"] == "all" else -1] += vector
        return out

    handle = target.model.layers[1].register_forward_hook(steer)
    assert [capability_of(target).mode, capability_of(target).mode] == [VerifyMode.TREE] * 2
    settings["places"] = "newest"
    assert [capability_of(target).mode, capability_of(target).mode] == [VerifyMode.PLAIN] * 2
    settings["places"] = "all"
    assert capability_of(target).mode is VerifyMode.TREE
    handle.remove()
    assert capability_of(target).mode is VerifyMode.TREE
    assert len(trials) == 2
    assert trials[0] == [trials[0][0]]
    assert "steer on model.layers.1" in trials[0][0]


def test_a_vector_that_was_zero_is_another_setting(target, trials):
    vector = torch.zeros(1, 64)
    target.model.layers[1].register_forward_hook(at_the_newest(vector))
    assert capability_of(target).mode is VerifyMode.TREE
    vector += steering_vector()
    assert capability_of(target).mode is VerifyMode.PLAIN


def test_records_are_no_reason_for_a_trial_a_call(target, trials):
    """Hooks that only look, as analysis code has them; and nothing of a trial is left in the records."""
    sizes, activations, newest = [], {}, types.SimpleNamespace(output=None)

    def record(module, args, out):
        sizes.append(out.shape[1])
        activations.setdefault("block", []).append(out.detach())
        newest.output = out

    target.model.layers[1].register_forward_hook(record)
    draft = set_tree(new_draft(target, half=False), "cpu")
    for _ in range(3):
        sizes.clear()
        activations.clear()
        target.generate(prompt(9), max_new_tokens=12, assistant_model=draft.foretell([]))
        assert sizes[0] == 9, "the first forward recorded is the prompt's"
        assert len(activations["block"]) == len(sizes)
    assert len(trials) == 1
    assert draft.stats.rounds


def test_other_ways_to_change_a_forward(target, trials):
    """Exchanged forwards, exchanged modules, exchanged methods, hooks for all modules."""

    def newest(module, hidden, *args, **kwargs):
        out = type(module).forward(module, hidden, *args, **kwargs)
        return torch.cat([out[:, :-1], out[:, -1:] + steering_vector()[:, None]], dim=1)

    class Block(type(target.model.layers[1])):
        def forward(self, *args, **kwargs):
            return at_the_newest(steering_vector())(self, args, super().forward(*args, **kwargs))

    def by_forward(model):
        model.model.layers[1].forward = types.MethodType(newest, model.model.layers[1])

    def by_wrapped_forward(model):
        block = model.model.layers[1]
        block.forward = functools.wraps(block.forward)(functools.partial(newest, block))

    def by_class(model):
        model.model.layers[1].__class__ = Block

    def by_module(model):
        class Newest(nn.Module):
            def forward(self, x):
                return at_the_newest(steering_vector())(self, (x,), x)

        mlp = model.model.layers[1].mlp
        mlp.down_proj = nn.Sequential(mlp.down_proj, Newest())

    def by_accelerate(model):
        class Newest(ModelHook):
            def post_forward(self, module, output):
                return at_the_newest(steering_vector())(module, (), output)

        add_hook_to_module(model.model.layers[1], Newest())

    for change in (by_forward, by_wrapped_forward, by_class, by_module, by_accelerate):
        other = tiny("llama", num_hidden_layers=4)
        change(other)
        assert capability_of(other).mode is VerifyMode.PLAIN, change.__name__
        draft = set_tree(new_draft(other, half=False), "cpu")
        assert_same_as_plain(other, draft, prompt(9), accepts=False)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: (
            at_the_newest(steering_vector())(module, args, out)
            if type(module).__name__ == "LlamaDecoderLayer"
            else None
        )
    )
    try:
        assert capability_of(target).mode is VerifyMode.PLAIN
    finally:
        handle.remove()
    assert capability_of(target).mode is VerifyMode.TREE


class Stepper(LlamaForCausalLM):
    """Counts its steps in the model kwargs, as audio models do."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)
        return {**model_kwargs, "step": model_kwargs.get("step", 0) + 1}

    def forward(self, *args, step=0, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 3 * self.size * torch.sin(torch.arange(out.logits.shape[-1]) * (1.0 + step))
        return out


@MODES
@pytest.mark.parametrize("size", [0, 1])
def test_state_of_a_step(target, trials, mode, size):
    """Carried along for nothing it does no harm; where it counts, decoding is plain."""
    target.__class__, target.size = Stepper, size
    target.__class__ = type("Stepper", (Stepper,), {"__module__": __name__})  # a class of its own for each case
    draft = set_tree(new_draft(target, half=False), (12, 4, 3))
    ours, _ = assert_same_as_plain(target, draft, prompt(9), accepts=not size, **mode)
    assert (ours.out.speculation.rounds == 0) == bool(size)


def test_a_method_exchanged_on_the_target_is_tried(target, trials):
    plain = target._update_model_kwargs_for_generation

    def step(outputs, model_kwargs, **kwargs):
        return plain(outputs, model_kwargs, **kwargs)

    target._update_model_kwargs_for_generation = step
    assert capability_of(target).mode is VerifyMode.TREE
    assert len(trials) == 1


@PEFT
def test_hooks_of_frameworks_are_not_tried(target, trials):
    target(prompt(5), output_hidden_states=True)  # leaves transformers' capturing hooks
    assert any(module._forward_hooks for module in target.modules())
    offloaded = cpu_offload(tiny("llama", num_hidden_layers=4), execution_device="cpu")
    adapted = get_peft_model(tiny("llama", num_hidden_layers=4), LoraConfig(task_type="CAUSAL_LM")).get_base_model()
    compiled = tiny("llama", num_hidden_layers=4)
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    for model in (target, offloaded, adapted, compiled):
        assert custom_code(model) == []
        assert capability_of(model).mode is VerifyMode.TREE
    assert not trials


def test_our_own_hooks_in_another_thread_are_not_tried(target, trials):
    ready, done = threading.Event(), threading.Event()

    def read():
        with FeatureReader(target, [1, 2], embeds=True):
            ready.set()
            done.wait(30)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert ready.wait(30)
        assert any(module._forward_hooks for module in target.modules())
        assert custom_code(target) == []
    finally:
        done.set()
        thread.join()


def test_fsdp_is_not_tried(tmp_path, trials):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model, mesh = tiny("llama", num_hidden_layers=4), init_device_mesh("cpu", (1,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert any(module._forward_pre_hooks for module in model.modules())
        assert custom_code(model) == []
        assert known_capability(model).mode is VerifyMode.TREE
    finally:
        torch.distributed.destroy_process_group()


@PEFT
@MODES
@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
        PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=5, encoder_hidden_size=32),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_virtual_tokens(target, config, mode, caplog):
    draft = set_tree(Eagle3DraftModel.from_target(target), "cpu")
    adapted = get_peft_model(target, config).eval()
    for lengths in ([9], [4, 9]):
        results = []
        for assistant in (None, draft):
            torch.manual_seed(0)
            results.append(adapted.generate(**ids_of(lengths), max_new_tokens=8, assistant_model=assistant, **mode))
        assert torch.equal(*results)
        assert draft.stats.rounds == 0


def ids_of(lengths):
    inputs = padded(lengths)
    return {"input_ids": inputs["inputs"], "attention_mask": inputs["attention_mask"]}


@PEFT
def test_activated_adapters_count_from_the_end_of_each_forward(target):
    """aLoRA gives its layers an offset from the end, which a tree's forward would shift."""
    base = target
    text = prompt(9)
    config = LoraConfig(
        task_type="CAUSAL_LM", alora_invocation_tokens=text[0, 3:5].tolist(), init_lora_weights=False, r=8
    )
    draft = set_tree(new_draft(base, half=False), (12, 4, 3))
    adapted = get_peft_model(base, config).eval()
    plain = adapted.generate(input_ids=text, max_new_tokens=20)
    draft.foretell(plain[:, 9:])
    assert torch.equal(adapted.generate(input_ids=text, max_new_tokens=20, assistant_model=draft), plain)


@PEFT
def test_an_adapter_for_each_row_is_no_reason_for_a_trial(target, trials):
    text = padded([9, 4])
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    draft = set_tree(new_draft(target, half=False), (12, 4, 3))
    adapted = get_peft_model(target, config).eval()
    inputs = {**ids_of([9, 4]), "max_new_tokens": 20, "adapter_names": ["default", "__base__"]}
    plain = adapted.generate(**inputs)
    draft.foretell(plain[:, text["inputs"].shape[1] :])
    assert torch.equal(adapted.generate(**inputs, assistant_model=draft), plain)
    assert draft.stats.mean_accepted > 0.3
    assert not trials


def test_what_a_hook_remembers_can_be_put_back():
    numbers, count = [1, 2], 0
    record: dict = {"inner": [5]}

    def hook():
        nonlocal count
        count += 1
        numbers.append(3)
        record["inner"].append(6)
        record["new"] = torch.ones(2)

    memory = Memory(hook)
    settings = memory.settings()
    assert not memory.changed()
    hook()
    assert memory.changed() == {"count", "numbers", "record"}
    assert memory.has_counted()
    memory.restore()
    assert (count, numbers, record) == (0, [1, 2], {"inner": [5]})
    assert Memory(hook).settings() == settings
    assert not memory.has_counted()


def test_what_a_hook_names_but_does_not_own_stays():
    """A trial may be the first to import something, whose logger must not be taken away again."""

    def hook():
        return logger.getChild("made by a hook")

    memory = Memory(hook)
    child = hook()
    memory.restore()
    assert not memory.has_counted()
    assert logging.getLogger(child.name) is child
    assert child.name in logging.Logger.manager.loggerDict


# ----- devices without float64 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen3_next"])
def test_a_trial_needs_no_float64(family, monkeypatch):
    """Apple's devices have none: whatever asks for it there raises."""
    model = tiny_or_skip(family)

    def refuse(*args, **kwargs):
        raise TypeError("the device has no float64")

    monkeypatch.setattr(torch.Tensor, "double", refuse)
    expected = VerifyMode.TREE if family == "qwen3" else VerifyMode.CHAIN
    assert capability_probe.try_out(model, model.device).mode is expected


# ----- targets with cross-attention layers ---------------------------------------------------------------------------


def tiny_cross_attention(kind: str):
    """Text models with layers that attend to an image, and are skipped without one."""
    text = {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "mllama":
        vision = {
            "hidden_size": 32, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
            "intermediate_size": 32, "vision_output_dim": 64, "image_size": 16, "patch_size": 4, "max_num_tiles": 4,
            "intermediate_layers_indices": [0],
        }  # fmt: skip
        text = {**text, "cross_attention_layers": [1]}
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, image_token_index=319)
    else:
        vision = {"embed_dim": 32, "image_size": 16, "patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = AutoConfig.for_model(
            kind, **text, vision_config=vision, cross_layer_interval=2, use_resampler=False, additional_vocab_size=0,
            qk_layer_norms=False,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@MODES
@pytest.mark.parametrize("image", [False, True])
def test_cross_attention_to_an_image(image, mode):
    target = tiny_cross_attention("mllama")
    draft = Eagle3DraftModel.from_target(target, draft_vocab=list(range(100)))
    inputs = {"input_ids": prompt(9, vocab_size=319)}
    if image:
        inputs |= {
            "pixel_values": torch.randn(1, 1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0)),
            "aspect_ratio_ids": torch.tensor([[1]]), "aspect_ratio_mask": torch.tensor([[[1, 0, 0, 0]]]),
            "cross_attention_mask": torch.ones(1, 9, 1, 4, dtype=torch.int64),
        }  # fmt: skip
    results = []
    for assistant in (None, draft):
        torch.manual_seed(0)
        results.append(target.generate(**inputs, max_new_tokens=8, assistant_model=assistant, **mode))
    assert torch.equal(*results)
    assert draft.stats.rounds == 0
    assert "cross-attention layers" in capability_of(target).reason


def test_the_older_kind_of_cross_attention_is_known_too():
    assert "cross-attention layers" in known_capability(tiny_cross_attention("idefics")).reason
