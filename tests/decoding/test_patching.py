"""The seam: on and off, on top of others and below them, and nothing changes for anybody who passes no draft."""

import functools
import inspect
import logging
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface

import eagle3_hf
from eagle3_hf.decoding import patching, validation
from eagle3_hf.decoding.target import tree_attention
from support.drafts import draft_of, new_draft, pair, set_tree, target_of
from support.families import prompt, tiny


# peft itself reads a name that transformers has renamed.
PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
# With the seam gone only the draft itself can refuse.
REFUSAL = r"draft head cannot generate alone|eagle3_hf\.enable\(\)"
METHODS = ("_assisted_decoding", "_validate_generation_mode", "_extract_generation_mode_kwargs")
METHODS += ("_prepare_generation_config", "load_assistant_model", "_sample", "init_continuous_batching")


def current() -> dict:
    """What stands where we put something."""
    found = {name: inspect.getattr_static(patching._owner(name), name) for name in METHODS}
    return found | {name: AttentionMaskInterface._global_mapping[name] for name in tree_attention.INTERFACES}


@pytest.fixture(autouse=True)
def seam_as_it_was():
    before = current()
    yield
    assert current() == before, "the test left the seam changed"


@pytest.fixture
def call():
    """`call()` generates with a draft and checks the text."""
    target, draft = target_of("llama"), set_tree(draft_of("llama", half=False), "cpu")
    vanilla = target.generate(prompt(7), max_new_tokens=12)

    def with_draft(assistant=None, **kwargs):
        draft.foretell(vanilla[0, 7:])
        out = target.generate(
            prompt(7), max_new_tokens=12, assistant_model=draft if assistant is None else assistant, **kwargs
        )
        assert torch.equal(out, vanilla)
        assert draft.stats.mean_accepted > 0.5

    return with_draft


# ----- on and off ----------------------------------------------------------------------------------------------------


NEWER = [("5.4.0", False), ("5.24.3", False), ("5.25.0.dev0", True), ("6.0.0", True)]


@pytest.mark.parametrize(("installed", "warns"), NEWER)
def test_a_transformers_newer_than_the_tests_is_said_once(monkeypatch, caplog, installed, warns):
    logging.Logger.warning_once.cache_clear()
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(validation.transformers, "__version__", installed)
    target, draft = pair("llama")
    for _ in range(2):
        target.generate(prompt(4), assistant_model=draft.foretell([]), max_new_tokens=2)
    assert caplog.text.count(f"transformers {installed} is newer") == warns


def test_enabled_by_import_and_twice_is_once(call):
    on = current()
    eagle3_hf.enable()
    assert current() == on
    call()


def test_disable_restores_transformers_own_functions():
    on = current()
    with eagle3_hf.enabled(False):
        off = current()
        for name in METHODS:
            assert on[name].__wrapped__ is off[name], name
            assert off[name].__module__.startswith(("transformers.generation.", "transformers.pipelines.base"))
        for name in tree_attention.INTERFACES:
            assert off[name].__module__ == "transformers.masking_utils"
        eagle3_hf.disable()
        assert current() == off
    assert set(current()) == set(on)
    eagle3_hf.disable()
    assert current() == off
    eagle3_hf.enable()
    assert_same_wrappers_again(on)


def assert_same_wrappers_again(on: dict) -> None:
    """Enabling anew makes new wrappers around the same functions; put the old ones back for the other tests."""
    now = current()
    for name in METHODS:
        assert now[name].__wrapped__ is on[name].__wrapped__
        setattr(patching._owner(name), name, on[name])
        patching._wrapped[name] = (on[name].__wrapped__, on[name])
    for name in tree_attention.INTERFACES:
        assert now[name].__wrapped__ is on[name].__wrapped__
        AttentionMaskInterface._global_mapping[name] = on[name]
        tree_attention._installed[name] = (on[name].__wrapped__, on[name])


@pytest.fixture
def switching():
    """For tests that switch the seam off and on: afterwards the wrappers are the ones from before."""
    on = current()
    yield
    eagle3_hf.enable()
    assert_same_wrappers_again(on)


@pytest.mark.usefixtures("switching")
def test_enabled_nests_and_survives_exceptions(call):
    def nested():
        with eagle3_hf.enabled(False):
            with eagle3_hf.enabled():
                call()
                with eagle3_hf.enabled(False), pytest.raises((ValueError, TypeError), match=REFUSAL):
                    call()
                call()
            with pytest.raises((ValueError, TypeError), match=REFUSAL):
                call()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        nested()
    call()


@pytest.mark.usefixtures("switching")
def test_a_draft_while_disabled_is_one_clear_error_before_any_forward():
    target, draft = target_of("llama"), draft_of("llama")
    calls = []
    handle = target.register_forward_pre_hook(lambda *args: calls.append(1))
    with eagle3_hf.enabled(False), pytest.raises((ValueError, TypeError), match=REFUSAL):
        target.generate(prompt(7), max_new_tokens=4, assistant_model=draft)
    handle.remove()
    assert not calls


# ----- others who wrap the same methods ------------------------------------------------------------------------------


def wrap_on_top(monkeypatch, log: list, keeps_trace: bool = True):
    """Somebody's wrapper around the decoding method, as an observability library would put it."""
    below = GenerationMixin._assisted_decoding

    def logged(self, *args, **kwargs):
        log.append(type(self).__name__)
        return below(self, *args, **kwargs)

    monkeypatch.setattr(
        GenerationMixin, "_assisted_decoding", functools.wraps(below)(logged) if keeps_trace else logged
    )


def test_somebody_wraps_on_top(call, monkeypatch):
    log: list[str] = []
    with monkeypatch.context() as patch:
        wrap_on_top(patch, log)
        call()
        eagle3_hf.enable()  # again, by another import: theirs must stay on top
        call()
    assert log == ["LlamaForCausalLM"] * 2
    call()


@pytest.fixture
def stock_assistants(no_deprecated_calls):
    """For calls with transformers' own assistants, inside which transformers makes a call that it has deprecated."""
    yield
    kept = [line for line in no_deprecated_calls.lines if "Passing `generation_config` together" not in line]
    no_deprecated_calls.lines[:] = kept


@pytest.mark.usefixtures("switching", "stock_assistants")
def test_disable_below_somebody_elses_wrapper_is_a_pass_through(call, monkeypatch):
    log: list[str] = []
    ours = GenerationMixin._assisted_decoding
    with monkeypatch.context() as patch:
        wrap_on_top(patch, log)
        theirs = GenerationMixin._assisted_decoding
        with eagle3_hf.enabled(False):
            assert GenerationMixin._assisted_decoding is theirs
            with pytest.raises((ValueError, TypeError), match=REFUSAL):
                call()
            target = target_of("llama")
            stock = target.generate(prompt(7), max_new_tokens=6, assistant_model=target_of("llama"))
            assert torch.equal(stock, target.generate(prompt(7), max_new_tokens=6))
        call()
    assert log[-1] == "LlamaForCausalLM"
    assert GenerationMixin._assisted_decoding is ours
    call()


@pytest.mark.usefixtures("switching", "stock_assistants")
def test_disabled_below_somebody_elses_wrapper_rejects_nothing(monkeypatch):
    """A published head under the wrong class is an error of ours, not of transformers."""
    below = GenerationMixin._validate_generation_mode
    assistant = tiny("llama")
    assistant.config.draft_vocab_size = 100
    target = target_of("llama")
    kwargs = {"max_new_tokens": 4, "assistant_model": assistant}
    with monkeypatch.context() as patch:
        theirs = functools.wraps(below)(lambda self, *args: below(self, *args))
        patch.setattr(GenerationMixin, "_validate_generation_mode", theirs)
        with pytest.raises(ValueError, match="opened under the wrong class"):
            target.generate(prompt(7), **kwargs)
        with eagle3_hf.enabled(False):
            assert target.generate(prompt(7), **kwargs).shape == (1, 11)


@pytest.mark.usefixtures("stock_assistants")
def test_a_wrapper_that_hides_what_is_below(call, monkeypatch):
    """Without `__wrapped__` we cannot see that we are still there; a second wrapper of ours must do no harm."""
    log: list[str] = []
    below = dict(patching._wrapped)
    with monkeypatch.context() as patch:
        wrap_on_top(patch, log, keeps_trace=False)
        eagle3_hf.enable()
        call()
        target = target_of("llama")
        assert target.generate(prompt(3), max_new_tokens=3, assistant_model=target).shape == (1, 6)
        assert log
    patching._wrapped.update(below)
    call()


# ----- everybody else ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("switching", "stock_assistants")
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"do_sample": True},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"assistant_model": "itself"},
        {"assistant_model": "itself", "do_sample": True},
        {"assistant_model": "another"},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 2},
    ],
    ids=str,
)
def test_calls_without_a_draft_are_untouched(kwargs):
    target = target_of("llama")
    others = {"itself": target, "another": tiny("llama", seed=1, num_hidden_layers=2)}
    if "assistant_model" in kwargs:
        kwargs = {**kwargs, "assistant_model": others[kwargs["assistant_model"]]}
    results = []
    for on in (False, True):
        with eagle3_hf.enabled(on):
            torch.manual_seed(0)
            out = target.generate(
                prompt(9), max_new_tokens=10, return_dict_in_generate=True, output_scores=True, **kwargs
            )
            results.append((out, torch.get_rng_state()))
    (off, state_off), (on, state_on) = results
    assert torch.equal(on.sequences, off.sequences)
    assert torch.equal(state_on, state_off)
    assert all(torch.equal(one, other) for one, other in zip(on.scores, off.scores, strict=True))
    assert not hasattr(on, "speculation")


def test_a_batch_without_a_draft_is_untouched():
    target = target_of("gemma3")
    assert target.generate(prompt(5, rows=3), max_new_tokens=4).shape == (3, 9)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_models_compile_to_one_graph_after_import(family):
    target = tiny(family, num_hidden_layers=3)  # with windows and without
    compiled = torch.compile(target, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(prompt(20)).logits, target(prompt(20)).logits)


@pytest.mark.parametrize("way", ["model.compile", "forward", "module", "layers"])
def test_a_compiled_target_runs_its_own_code_beside_a_draft(way, caplog, monkeypatch):
    """Compiled code asks neither hooks nor masks: it must be left aside, aloud, and be there again afterwards."""
    target, compilations = tiny("llama", num_hidden_layers=1), []

    def backend(graph, example_inputs):
        compilations.append(graph)
        return graph.forward

    draft = set_tree(new_draft(target, half=False), "cpu")
    vanilla = target.generate(prompt(6), max_new_tokens=6)
    if way == "model.compile":
        target.compile(backend=backend)
    elif way == "forward":
        target.forward = torch.compile(target.forward, backend=backend)
    elif way == "module":
        target.model = torch.compile(target.model, backend=backend)
    else:
        for layer in target.model.layers:
            layer.compile(backend=backend)
    draft.foretell(vanilla[0, 6:])
    assert torch.equal(target.generate(prompt(6), max_new_tokens=6, assistant_model=draft), vanilla)
    assert draft.stats.mean_accepted > 0.5
    assert not compilations
    assert any("runs uncompiled" in record.getMessage() for record in caplog.records) or way != "model.compile"
    with torch.no_grad():
        target(prompt(6))
    assert compilations, "without a draft it is compiled as before"


# ----- a draft inside something else ---------------------------------------------------------------------------------


class Holder(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


@PEFT
def test_as_draft_looks_through_wrappers():
    draft = new_draft(target_of("llama"))
    adapted = get_peft_model(new_draft(target_of("llama")), LoraConfig(target_modules=["q_proj"]))
    assert patching.as_draft(draft) is draft
    assert patching.as_draft(torch.compile(draft)) is draft
    assert patching.as_draft(Holder(draft)) is draft
    assert patching.as_draft(Holder(torch.compile(draft))) is draft
    assert patching.as_draft(torch.compile(Holder(draft))) is draft
    assert isinstance(patching.as_draft(adapted), eagle3_hf.Eagle3DraftModel)
    for other in (None, target_of("llama"), torch.compile(target_of("llama")), Holder(target_of("llama")), "a path"):
        assert patching.as_draft(other) is None


def test_generate_takes_wrapped_drafts(call):
    draft = draft_of("llama", half=False)
    call(torch.compile(draft, backend="eager"))
    call(Holder(draft))


@PEFT
def test_a_draft_with_an_adapter():
    target = target_of("llama")
    draft = set_tree(new_draft(target), "cpu")
    adapted = get_peft_model(draft, LoraConfig(target_modules=["q_proj", "down_proj"]))
    vanilla = target.generate(prompt(7), max_new_tokens=12)
    assert torch.equal(target.generate(prompt(7), max_new_tokens=12, assistant_model=adapted), vanilla)


@PEFT
def test_a_target_with_an_adapter():
    target = get_peft_model(tiny("llama", num_hidden_layers=4), LoraConfig(target_modules=["q_proj", "down_proj"]))
    for name, parameter in target.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    draft = set_tree(new_draft(target_of("llama"), half=False), "cpu")
    texts = []
    for ids in (prompt(7), prompt(7, 1)):
        adapted = target.generate(ids, max_new_tokens=16)
        assert torch.equal(
            target.generate(ids, max_new_tokens=16, assistant_model=draft.foretell(adapted[0, 7:])), adapted
        )
        with target.disable_adapter():
            plain = target.generate(ids, max_new_tokens=16)
            ours = target.generate(ids, max_new_tokens=16, assistant_model=draft.foretell(plain[0, 7:]))
        assert torch.equal(ours, plain)
        assert draft.stats.mean_accepted > 0.5
        texts.append((adapted, plain))
    assert any(not torch.equal(adapted, plain) for adapted, plain in texts)


def test_one_draft_serves_several_targets_in_turn():
    draft = set_tree(new_draft(target_of("llama"), half=False), "cpu")
    for seed in (0, 1, 0):
        target = tiny("llama", seed=seed, num_hidden_layers=4)
        vanilla = target.generate(prompt(7), max_new_tokens=12)
        out = target.generate(prompt(7), max_new_tokens=12, assistant_model=draft.foretell(vanilla[0, 7:]))
        assert torch.equal(out, vanilla)


def test_threads_do_not_see_each_others_trees():
    """Trees are per thread; targets, drafts and prompts all differ, and all run at once."""
    jobs, failures = [], []
    for seed, family in enumerate(["llama", "gemma3", "mistral_sw"]):
        target = target_of(family)
        vanilla = target.generate(prompt(9, seed), max_new_tokens=32)
        draft = set_tree(new_draft(target, half=False), "cpu").foretell(vanilla[0, 9:])
        jobs.append((target, prompt(9, seed), draft, vanilla))

    def work(target, ids, draft, vanilla):
        out = target.generate(ids, max_new_tokens=32, assistant_model=draft)
        if not torch.equal(out, vanilla):
            failures.append(type(target).__name__)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
