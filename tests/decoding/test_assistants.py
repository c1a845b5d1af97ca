"""What is no model as `assistant_model` is refused with the line to write, in `generate` and in pipelines."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, pipeline

import eagle3_hf
from eagle3_hf import Eagle3DraftModel
from support.drafts import draft_of, new_draft, target_of
from support.families import prompt, tiny
from support.tokenizers import words


LINE = r"assistant_model=Eagle3DraftModel\.from_pretrained\("


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("head")
    new_draft(target_of("llama")).save_pretrained(path)
    return str(path)


STRANGERS = {
    "path": (lambda folder: folder, "the string '{folder}'"),
    "Path": (lambda folder: Path(folder), "Path '{folder}'"),
    "Hub id": (lambda folder: "somebody/a-head", "the string 'somebody/a-head'"),
    "config": (lambda folder: Eagle3DraftModel.from_pretrained(folder).config, "a Eagle3DraftConfig, which has no"),
    "state dict": (lambda folder: draft_of("llama").state_dict(), "a OrderedDict"),
    "class": (lambda folder: Eagle3DraftModel, "the class Eagle3DraftModel"),
    "tokenizer": (lambda folder: words("w"), "the tokenizer"),
    "generation config": (lambda folder: GenerationConfig(), "a GenerationConfig"),
    "bool": (lambda folder: False, "a bool"),
    "list": (lambda folder: [draft_of("llama")], "a list"),
}


@pytest.mark.parametrize("kind", [kind for kind in STRANGERS if kind not in ("path", "Path", "Hub id")])
@pytest.mark.parametrize("kwargs", [{}, {"do_sample": True}], ids=str)
def test_generate_refuses_what_is_no_model(kind, kwargs, folder):
    make, given = STRANGERS[kind]
    target, calls = target_of("llama"), []
    handle = target.register_forward_pre_hook(lambda *args: calls.append(args))
    given = re.escape(given.format(folder=folder))
    with pytest.raises(TypeError, match=f"must be a loaded model, got .*{given}.*{LINE}") as caught:
        target.generate(prompt(5), max_new_tokens=4, assistant_model=make(folder), **kwargs)
    handle.remove()
    assert not calls
    if kind == "config":
        assert f"from_pretrained('{folder}')" in str(caught.value), "a line to copy"


@pytest.mark.parametrize("kind", STRANGERS)
def test_pipelines_refuse_what_is_no_model(kind, folder):
    make, given = STRANGERS[kind]
    if kind == "Hub id":
        pytest.skip("transformers looks it up, and says what it found")
    target, tokenizer = target_of("llama"), words("w")
    error = ValueError if kind == "path" else TypeError
    with pytest.raises(error, match=re.escape(folder) if kind == "path" else given.format(folder=folder)) as caught:
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=make(folder))
    assert re.search(LINE, str(caught.value))


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": 32000},
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "eagle_config": {}},
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"},
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
    ],
    ids=["SafeAILab", "SpecForge", "speculators", "no key but the class"],
)
def test_pipelines_know_published_heads_by_their_config(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"holds an EAGLE-3 draft head.*{LINE}"):
        pipeline("text-generation", model=target_of("llama"), tokenizer=words("w"), assistant_model=str(tmp_path))


def test_pipelines_still_load_ordinary_assistants_by_path(tmp_path, no_deprecated_calls):
    tiny("llama", seed=2, num_hidden_layers=1).save_pretrained(tmp_path)
    words("w").save_pretrained(tmp_path)
    pipe = pipeline("text-generation", model=target_of("llama"), tokenizer=words("w"), assistant_model=str(tmp_path))
    assert type(pipe.assistant_model).__name__ == "LlamaForCausalLM"


def test_a_disabled_seam_leaves_them_to_transformers(folder):
    with eagle3_hf.enabled(False):
        with pytest.raises(AttributeError):
            target_of("llama").generate(prompt(5), max_new_tokens=4, assistant_model=folder)
        with pytest.raises(ValueError, match="cannot infer"):
            pipeline("text-generation", model=target_of("llama"), tokenizer=words("w"), assistant_model=folder)


def test_somebody_elses_assistant_that_is_no_module_is_left_alone():
    """Whatever can generate may be an assistant, for transformers to judge."""

    class Stub:
        generate = torch.nn.Identity()

    with pytest.raises(AttributeError, match="config"):
        target_of("llama").generate(prompt(5), max_new_tokens=4, assistant_model=Stub())
