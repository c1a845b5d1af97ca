"""A compiled target beside a draft: its own code in the threads that draft, compiled code everywhere else."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from eagle3_hf.decoding.target.compiled_code import uncompiled
from support.drafts import new_draft, set_tree
from support.families import prompt, tiny


class Backend:
    """A backend of torch.compile that counts how often compiled code runs."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, example_inputs):
        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run

    def runs_in(self, model, *args) -> bool:
        """Whether a call of the model now runs compiled code."""
        before = self.runs
        with torch.no_grad():
            model(*args)
        return self.runs > before


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Linear(nn.Module):
    """Small, so that compiling it takes no time."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.inner(inputs) + 1


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Linear(), Linear()])

    def forward(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


def call_compile(model, backend):
    model.compile(backend=backend)


def forward_of_instance(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)


def forward_of_class(model, backend):
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"forward": torch.compile(kind.forward, backend=backend)})


def part_replaced(model, backend):
    model.parts[0] = torch.compile(model.parts[0], backend=backend)


def part_called(model, backend):
    model.parts[1].compile(backend=backend)


def whole_and_parts(model, backend):
    for part in model.parts:
        part.compile(backend=backend, fullgraph=True)
    model.compile(backend=backend, fullgraph=True)


def below_a_hook_of_accelerate(model, backend):
    model.forward = torch.compile(model.forward, backend=backend)
    add_hook_to_module(model, ModelHook())


WAYS = [
    call_compile,
    forward_of_instance,
    forward_of_class,
    part_replaced,
    part_called,
    whole_and_parts,
    below_a_hook_of_accelerate,
]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def compiled(request):
    """A compiled module, its backend, and an input."""
    model, backend = Twice().eval(), Backend()
    request.param(model, backend)
    return model, backend, torch.ones(1, 4)


def fields(model) -> list[dict]:
    """Everything that stands on the module and its parts, so that nothing may stay behind."""
    names = ("forward", "_old_forward", "_compiled_call_impl")
    return [{name: module.__dict__.get(name) for name in names} for module in model.modules()]


def elsewhere(function, *args):
    """The result of a call in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def test_own_code_inside_and_compiled_again_behind(compiled):
    model, backend, inputs = compiled
    before, right = fields(model), model(inputs)
    assert backend.runs
    with uncompiled(model):
        assert not backend.runs_in(model, inputs)
        assert torch.equal(model(inputs), right)
    assert fields(model) == before
    assert backend.runs_in(model, inputs)


def test_another_thread_runs_the_same_model_compiled_meanwhile(compiled):
    """Also one that compiles it only now."""
    model, backend, inputs = compiled
    with uncompiled(model):
        assert elsewhere(backend.runs_in, model, inputs)
        assert not backend.runs_in(model, inputs)


def test_other_models_stay_compiled(compiled):
    model, _, inputs = compiled
    other, theirs = Twice().eval(), Backend()
    other.compile(backend=theirs)
    with uncompiled(model):
        assert theirs.runs_in(other, inputs)
        assert elsewhere(theirs.runs_in, other, inputs)


def test_nested_blocks_and_exceptions(compiled):
    model, backend, inputs = compiled
    before = fields(model)

    def inner():
        with uncompiled(model):
            raise RuntimeError("in the inner block")

    with uncompiled(model):
        with pytest.raises(RuntimeError, match="in the inner block"):
            inner()
        assert not backend.runs_in(model, inputs), "still in the outer block"
    assert fields(model) == before
    with pytest.raises(RuntimeError, match="in the inner block"):
        inner()
    assert fields(model) == before
    assert backend.runs_in(model, inputs)


@pytest.mark.parametrize("first_out", [0, 1])
def test_blocks_of_two_threads_overlap(compiled, first_out):
    """Whoever leaves first: the other still runs its own code, and in the end all is as before."""
    model, backend, inputs = compiled
    before, both_in, one_out, failures = fields(model), threading.Barrier(2), threading.Event(), []

    def work(number):
        with uncompiled(model):
            both_in.wait(10)
            if number != first_out:
                one_out.wait(10)
            if backend.runs_in(model, inputs):
                failures.append(number)
        if number == first_out:
            if not backend.runs_in(model, inputs):
                failures.append("out, and not compiled")
            one_out.set()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert fields(model) == before
    assert backend.runs_in(model, inputs)


def test_a_model_that_is_compiled_anew_inside_keeps_its_new_code():
    model, old, new = Twice().eval(), Backend(), Backend()
    model.compile(backend=old)
    with uncompiled(model):
        model.compile(backend=new)
        with uncompiled(model):
            assert not new.runs_in(model, torch.ones(1, 4))
    assert new.runs_in(model, torch.ones(1, 4))
    assert not old.runs


def test_what_torch_was_told_not_to_compile_is_no_compiled_code():
    model = Twice().eval()
    model.forward = kept = torch.compiler.disable(model.forward)
    with uncompiled(model):
        assert model.forward is kept


def test_a_function_around_a_compiled_forward_is_refused_by_name():
    """Its own code is in there and cannot be reached."""
    target = tiny("llama", num_hidden_layers=2)
    draft = set_tree(new_draft(target, half=False), "cpu")
    compiled = torch.compile(target.model.forward, backend=Backend())
    target.model.forward = functools.wraps(compiled)(lambda *args, **kwargs: compiled(*args, **kwargs))
    with pytest.raises(ValueError, match=r"compiled forward of a LlamaModel.*wrap it before compiling"):
        target.generate(prompt(6), max_new_tokens=4, assistant_model=draft)


def test_two_threads_draft_on_one_compiled_target():
    target, backend = tiny("llama", num_hidden_layers=2), Backend()
    texts = [target.generate(prompt(6, seed), max_new_tokens=24) for seed in range(2)]
    drafts = [set_tree(new_draft(target, half=False), "cpu").foretell(text[0, 6:]) for text in texts]
    target.compile(backend=backend)
    before = fields(target)

    def work(seed):
        return target.generate(prompt(6, seed), max_new_tokens=24, assistant_model=drafts[seed])

    with ThreadPoolExecutor(2) as pool:
        for found, text in zip(pool.map(work, range(2)), texts, strict=True):
            assert torch.equal(found, text)
    assert not backend.runs
    assert fields(target) == before
    assert backend.runs_in(target, prompt(6))
