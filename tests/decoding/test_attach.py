"""A draft that is attached to a target: used by every call that it can serve, and nothing is left after `detach`."""

import copy
import gc
import io
import logging
import pickle
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline

import eagle3_hf
from eagle3_hf import LookupDraft, attach, detach
from eagle3_hf.decoding.attachments import attachment_of
from support.drafts import (
    MODES,
    Recorder,
    assert_same,
    draft_of,
    new_draft,
    observe,
    padded,
    pair,
    set_tree,
    target_of,
)
from support.families import prompt, tiny
from support.tokenizers import words


PEFT = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
IDS = prompt(7)


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert attachment_of(target_of("llama")) is None, "the test left a draft attached"


@pytest.fixture
def attached():
    """A target and the draft that is attached to it, told the text of `IDS`."""
    target, draft = pair("llama")
    draft.stats = None
    draft.foretell(target.generate(IDS, max_new_tokens=12)[0, 7:])
    with attach(target, draft) as attachment:
        yield target, draft, attachment


def is_drafted(target, draft, ids=IDS, **kwargs) -> bool:
    """Whether a call used the draft."""
    draft.stats = None
    target.generate(ids, max_new_tokens=12, **kwargs)
    return draft.stats is not None and draft.stats.rounds > 0


# ----- calls that are drafted ----------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_calls_without_an_assistant_use_the_draft_and_look_the_same(family, mode):
    target, draft = pair(family)
    for inputs in (IDS, padded([9, 4, 6])):
        vanilla = observe(target, inputs, max_new_tokens=18, **mode)
        with attach(target, draft.foretell(vanilla.told)):
            ours = observe(target, inputs, max_new_tokens=18, make=lambda: {"trust_remote_code": object()}, **mode)
        assert_same(ours, vanilla)
        assert ours.out.speculation.accepted, "made, not remembered, since its arguments are no plain values"


def test_calls_with_an_assistant_of_their_own_use_that_one(attached):
    target, draft, _ = attached
    other = set_tree(draft_of("llama"), "cpu").foretell([])
    other.stats = None
    assert not is_drafted(target, draft, assistant_model=other)
    assert other.stats.rounds > 0
    # Without an end of text, prompt lookup of earlier versions of transformers raises an error.
    assert not is_drafted(target, draft, prompt_lookup_num_tokens=3, eos_token_id=1)
    assert is_drafted(target, draft)


def test_a_draft_of_the_call_that_decodes_plainly_does_not_reach_the_attached_one():
    target = tiny("llama", num_hidden_layers=2)
    target._supports_default_dynamic_cache = lambda: False  # verifies nothing
    attachments, own = LookupDraft(), LookupDraft()
    plain = target.generate(IDS, max_new_tokens=6)
    with attach(target, attachments):
        assert torch.equal(target.generate(IDS, max_new_tokens=6, assistant_model=own), plain)
        assert own.stats.rounds == 0
        assert attachments.stats is None
        assert torch.equal(target.generate(IDS, max_new_tokens=6), plain)
        assert attachments.stats.rounds == 0


def test_lookup_alone_and_a_new_attachment_in_place_of_another(attached):
    target, draft, _ = attached
    lookup = LookupDraft()
    with attach(target, lookup):
        assert is_drafted(target, lookup)
        assert not is_drafted(target, draft), "replaced"
    assert is_drafted(target, draft), "there again after the block"
    attach(target, lookup)
    detach(target)
    assert not is_drafted(target, draft)
    assert not is_drafted(target, lookup)
    detach(target)  # changes nothing


def test_statistics_of_each_call(attached):
    target, draft, _ = attached
    seen = []
    with attach(target, draft, on_call=seen.append):
        target.generate(IDS, max_new_tokens=12)
        target.generate(IDS, max_new_tokens=12, num_beams=2)
        with pytest.raises(ValueError, match="raised by the streamer"):
            target.generate(IDS, max_new_tokens=12, streamer=Recorder(raise_at=4))
    assert len(seen) == 2
    assert seen[0].mean_accepted > 0.5
    assert seen[1].emitted == 2, "what there was before the exception"


def test_while_disabled_it_is_not_used(attached):
    target, draft, _ = attached
    with eagle3_hf.enabled(False):
        assert not is_drafted(target, draft)
    assert is_drafted(target, draft)


# ----- calls that are not --------------------------------------------------------------------------------------------


LEFT_OUT = {
    "num_beams": [{"num_beams": 2}, {"num_beams": 3, "do_sample": True}],
    "use_cache": [{"use_cache": False}] * 2,
    "assistant_confidence_threshold": [{"assistant_confidence_threshold": 0.2}] * 2,
    "custom_generate": [{"custom_generate": lambda model, input_ids, **kwargs: input_ids}] * 2,
}


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_it_cannot_serve_runs_plainly_and_says_so_once(kind, attached, caplog):
    target, draft, attachment = attached
    for kwargs in LEFT_OUT[kind]:
        with caplog.at_level(logging.WARNING):
            torch.manual_seed(0)
            out = target.generate(IDS, max_new_tokens=12, **kwargs)
        attachment.detach()
        torch.manual_seed(0)
        assert torch.equal(out, target.generate(IDS, max_new_tokens=12, **kwargs))
        eagle3_hf.decoding.attachments._attachments[target] = attachment
    assert draft.stats is None
    lines = [
        record.getMessage() for record in caplog.records if "runs without the attached draft" in record.getMessage()
    ]
    assert len(lines) == 1
    assert f"({kind})" in lines[0]
    assert is_drafted(target, draft)


def test_contrastive_search_and_continuous_batching_say_so(caplog):
    target = tiny("llama", num_hidden_layers=2)
    with attach(target, LookupDraft()), caplog.at_level(logging.WARNING):
        with pytest.raises(OSError, match="contrastive-search"):  # its code is on the Hub
            target.generate(IDS, penalty_alpha=0.6, top_k=4, trust_remote_code=True)
        assert caplog.text.count("without the attached draft") == caplog.text.count("(generation mode") == 1
        target.init_continuous_batching()  # which `generate(cache_implementation="paged")` and `generate_batch` call
        assert "(continuous batching)" in caplog.text


def test_a_target_that_draws_random_numbers_in_training_mode(caplog):
    target = tiny("llama", num_hidden_layers=2, attention_dropout=0.5).train()
    lookup = LookupDraft()
    with attach(target, lookup), caplog.at_level(logging.WARNING):
        target.generate(IDS, max_new_tokens=4)
        assert "(training mode)" in caplog.text
        assert lookup.stats is None
        assert is_drafted(target.eval(), lookup)


# ----- settings of one call ------------------------------------------------------------------------------------------


SETTINGS = {"assistant_tree_depth": 2, "assistant_tree_top_k": 1, "assistant_window": 3, "assistant_lookup": False}


@pytest.mark.parametrize("way", ["attached", "assistant_model"])
def test_a_call_may_set_what_the_draft_sets(way, monkeypatch):
    target, draft = pair("llama")
    vanilla, seen = target.generate(IDS, max_new_tokens=12), []
    original = eagle3_hf.Eagle3Candidate.__init__

    def spy(self, target, draft, settings, **kwargs):
        original(self, target, draft, settings, **kwargs)
        seen.append((settings.num_nodes, settings.depth, settings.top_k, settings.lookup_levels, self._cache.window))

    monkeypatch.setattr(eagle3_hf.Eagle3Candidate, "__init__", spy)
    with attach(target, draft.foretell(vanilla[0, 7:])):
        own = {} if way == "attached" else {"assistant_model": draft}
        config = GenerationConfig(max_new_tokens=12)
        config.assistant_tree_depth = 1
        outs = [
            target.generate(IDS, max_new_tokens=12, **own, **SETTINGS),
            target.generate(IDS, generation_config=config, **own),
            target.generate(IDS, max_new_tokens=12, **own),
        ]
    assert all(torch.equal(out, vanilla) for out in outs)
    assert seen == [(15, 2, 1, None, 3), (15, 1, 4, 16, None), (15, 4, 4, 16, None)]
    assert not set(SETTINGS) & set(vars(target.generation_config)), "a call leaves the target as it was"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"assistant_tree_depth": 0}, "assistant_tree_depth must be an int of at least 1, got 0"),
        ({"assistant_tree_top_k": "many"}, "assistant_tree_top_k must be an int of at least 1, got 'many'"),
        ({"assistant_window": 0}, "assistant_window must be None or an int of at least 1, got 0"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens must be 'auto' or an int of at least 1, got 0"),
    ],
)
def test_invalid_settings_are_errors_before_anything_runs(attached, kwargs, message):
    target, _, _ = attached
    streamer = Recorder()
    with pytest.raises(ValueError, match=message):
        target.generate(IDS, max_new_tokens=4, streamer=streamer, **kwargs)
    assert not streamer.calls


def test_settings_without_a_draft_or_without_a_meaning_are_errors():
    target = target_of("llama")
    with pytest.raises(ValueError, match="assistant_tree_depth=2 needs a draft as assistant_model"):
        target.generate(IDS, max_new_tokens=4, assistant_tree_depth=2)
    with pytest.raises(ValueError, match="assistant_window=2 has no meaning with a LookupDraft"):
        target.generate(IDS, max_new_tokens=4, assistant_model=LookupDraft(), assistant_window=2)


# ----- copies, wrappers, threads -------------------------------------------------------------------------------------


def test_copies_are_plain_and_nothing_is_stored_on_the_target(tmp_path):
    target, draft = tiny("llama", num_hidden_layers=4), set_tree(draft_of("llama", half=False), "cpu").foretell([])
    with attach(target, draft):
        copies = [copy.deepcopy(target), pickle.loads(pickle.dumps(target))]
        buffer = io.BytesIO()
        torch.save(target, buffer)
        buffer.seek(0)
        copies.append(torch.load(buffer, weights_only=False))
        target.save_pretrained(tmp_path)
        copies.append(AutoModelForCausalLM.from_pretrained(tmp_path))
        assert is_drafted(target, draft)
        for other in copies:
            assert not is_drafted(other, draft)


def test_neither_keeps_the_other_alive():
    target = tiny("llama", num_hidden_layers=4)
    draft = set_tree(new_draft(target, half=False), "cpu").foretell([])
    attachment = attach(target, draft)
    assert is_drafted(target, draft)
    dead = weakref.ref(target)
    del target
    gc.collect()
    assert dead() is None
    attachment.detach()
    with attachment:
        pass


def test_another_dtype_meanwhile():
    target = tiny("llama", num_hidden_layers=4)
    draft = set_tree(new_draft(target, half=False), "cpu").foretell([])
    with attach(target, draft):
        target.to(torch.float64)
        assert is_drafted(target, draft)


@PEFT
def test_adapters_before_and_after():
    target = tiny("llama", num_hidden_layers=4)
    draft = set_tree(new_draft(target, half=False), "cpu").foretell([])
    with attach(target, draft):
        adapted = get_peft_model(target, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        assert is_drafted(adapted, draft)
    assert not is_drafted(adapted, draft)
    plain = adapted.generate(IDS, max_new_tokens=12)
    with attach(adapted, draft):
        assert torch.equal(adapted.generate(IDS, max_new_tokens=12), plain)
        assert is_drafted(adapted, draft)
        assert attachment_of(adapted.merge_and_unload()).draft is draft
    assert attachment_of(target) is None


class Holder(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_wrapped_targets_and_drafts():
    target, draft = pair("llama")
    for wrapped in (torch.compile(target), Holder(target), Holder(torch.compile(target))):
        with attach(wrapped, Holder(draft)):
            assert attachment_of(target).draft is draft
        attach(wrapped, draft)
        detach(wrapped)
        assert attachment_of(target) is None


def test_threads():
    jobs, wrong = [], []
    for seed in range(3):
        target = tiny("llama", seed, num_hidden_layers=4)
        vanilla = target.generate(prompt(9, seed), max_new_tokens=24)
        draft = set_tree(new_draft(target, half=False), "cpu").foretell(vanilla[0, 9:])
        jobs.append((target, draft, prompt(9, seed), vanilla))

    def work(target, draft, ids, vanilla):
        with attach(target, draft):
            out = target.generate(ids, max_new_tokens=24)
        if not torch.equal(out, vanilla) or draft.stats.mean_accepted < 0.5 or attachment_of(target) is not None:
            wrong.append(draft)

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_pipeline(attached, no_deprecated_calls):
    target, draft, _ = attached
    draft.foretell([])
    pipe = pipeline("text-generation", model=target, tokenizer=words("w"))
    pipe(["w5 w9", "w7 w3"], max_new_tokens=6, do_sample=False)
    assert draft.stats.rounds > 0
    # Older pipelines make a call of `generate` that transformers has deprecated itself.
    no_deprecated_calls.lines[:] = [line for line in no_deprecated_calls.lines if "together" not in line]


# ----- what may be attached, and by which name -----------------------------------------------------------------------


def test_what_cannot_be_attached():
    target, draft = pair("llama")
    for other in (target_of("llama"), None, 3, eagle3_hf.Eagle3DraftModel):
        with pytest.raises(TypeError, match="attach takes a draft head, a LookupDraft, or the path"):
            attach(target, other)
    for other in (draft, target.model, None, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="a model of transformers with generate"):
            attach(other, draft)
    with pytest.raises(ValueError, match="width|hidden_size"):
        attach(tiny("llama", hidden_size=32, num_hidden_layers=4), draft)
    unset = eagle3_hf.Eagle3DraftModel.from_target(target, draft_vocab_size=100)
    with pytest.raises(ValueError, match="only its size"):
        attach(target, unset)


def test_a_class_with_a_loop_of_its_own():
    target = tiny("llama", num_hidden_layers=2)

    class Own(type(target)):
        def _sample(self, input_ids, **kwargs):
            return input_ids

    target.__class__ = Own
    with pytest.raises(ValueError, match="Own has a decoding loop of its own"):
        attach(target, LookupDraft())


def test_heads_by_name(tmp_path):
    target = tiny("llama", num_hidden_layers=4)
    head = set_tree(new_draft(target, half=False), "cpu")
    head.save_pretrained(tmp_path)
    plain = target.generate(IDS, max_new_tokens=12)
    for name in (str(tmp_path), tmp_path):
        assert torch.equal(target.generate(IDS, max_new_tokens=12, assistant_model=name), plain)
        with attach(target, name) as attachment:
            loaded = attachment.draft
            assert is_drafted(target, loaded)
            assert attach(target, str(tmp_path)).draft is loaded, "kept"
            assert is_drafted(target, loaded, assistant_model=name)
        detach(target)
    with pytest.raises(ValueError, match="num_beams=2 with a draft head"):
        target.generate(IDS, assistant_model=str(tmp_path), num_beams=2)


def test_names_of_what_is_no_head(tmp_path):
    target = target_of("llama")
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    way_out = r"assistant_model=AutoModelForCausalLM\.from_pretrained\("
    for name in (str(tmp_path), str(tmp_path / "nothing"), "somebody/a-head"):
        for call in (lambda name: target.generate(IDS, assistant_model=name), lambda name: attach(target, name)):
            with pytest.raises(ValueError, match=f"is not a draft head that can be loaded: .*{way_out}"):
                call(name)


def test_measurements_compare_with_a_target_without_a_draft(attached):
    target, draft, _ = attached
    draft.stats = None
    result = eagle3_hf.compare(target, LookupDraft(), {"input_ids": IDS}, max_new_tokens=6)
    assert draft.stats is None
    assert result.plain.tokens == result.assisted.tokens
