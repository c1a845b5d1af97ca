"""What needs a tokenizer beside a head, with one made here: pipelines, streamed text, healed prompts."""

import asyncio
from threading import Thread

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModel,
    PreTrainedTokenizerFast,
    SynthIDTextWatermarkingConfig,
    pipeline,
)

from eagle3_hf import Eagle3DraftModel
from support.drafts import assert_same_as_plain, new_draft, padded, set_tree
from support.families import VOCAB_SIZE, prompt, tiny


END, BEGIN, PAD = 319, 318, 0
TEXTS = ["w5 w9 w200 w31", "w7", "w250 w3 w3 w91 w17 w64 w2"]


@pytest.fixture(autouse=True)
def pipelines_own_deprecations(no_deprecated_calls):
    """Older pipelines make a call of `generate` that transformers has deprecated itself."""
    yield
    kept = [line for line in no_deprecated_calls.lines if "Passing `generation_config` together" not in line]
    no_deprecated_calls.lines[:] = kept


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0` to `w319`, split at spaces; the last one ends a text."""
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token=f"w{PAD}"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=f"w{PAD}", eos_token=f"w{END}", bos_token=f"w{BEGIN}", padding_side="left"
    )


@pytest.fixture(scope="module")
def target():
    """What many published targets are: the config names one end of text, the generation config several."""
    target = tiny("llama", num_hidden_layers=4, eos_token_id=END)
    target.generation_config.eos_token_id = [END, END - 1]
    return target


@pytest.fixture(scope="module")
def draft(target) -> Eagle3DraftModel:
    return set_tree(new_draft(target, half=False), "cpu")


def test_a_pipeline_writes_what_it_writes_without_a_head(target, draft, tokenizer):
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft)
    assert drafted.assistant_model is draft
    for kwargs in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        for text in TEXTS:
            torch.manual_seed(0)
            ids = plain(text, max_new_tokens=20, return_tensors=True, **kwargs)[0]["generated_token_ids"]
            draft.foretell(ids[len(text.split()) :])
            torch.manual_seed(0)
            expected = plain(text, max_new_tokens=20, **kwargs)
            torch.manual_seed(0)
            assert drafted(text, max_new_tokens=20, **kwargs) == expected
            assert draft.stats.rounds, "the head was used"
            assert draft.stats.mean_accepted > 0.5


def test_a_pipeline_of_several_texts(target, draft, tokenizer):
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=draft.foretell([]))
    kwargs = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    expected = plain(TEXTS, **kwargs)
    assert drafted(TEXTS, **kwargs) == expected, "one by one"
    assert drafted(TEXTS, batch_size=3, **kwargs) == plain(TEXTS, batch_size=3, **kwargs)
    kwargs |= {"do_sample": True, "num_return_sequences": 2}
    results = []
    for pipe in (plain, drafted):
        torch.manual_seed(0)
        results.append(pipe(TEXTS[0], **kwargs))
    assert results[1] == results[0]


def test_a_saved_head_knows_the_ids_that_a_pipeline_compares(target, draft, tokenizer, tmp_path):
    draft.save_pretrained(tmp_path)
    for loaded in (Eagle3DraftModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        drafted = pipeline(
            "text-generation", model=target, tokenizer=tokenizer, assistant_model=set_tree(loaded, "cpu")
        )
        plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
        assert drafted(TEXTS[0], max_new_tokens=8, do_sample=False) == plain(
            TEXTS[0], max_new_tokens=8, do_sample=False
        )


def test_a_head_that_does_not_know_them_is_bound_first(target, tokenizer):
    stranger = set_tree(new_draft(target, half=False), "cpu")
    stranger.config.eos_token_id = 2
    with pytest.raises(ValueError, match="different tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=stranger)
    # Giving the tokenizer that transformers asks for then ends in our refusal, which names the way out.
    asked = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, assistant_model=stranger, assistant_tokenizer=tokenizer
    )
    with pytest.raises(ValueError, match=r"assistant_tokenizer has no meaning.*draft\.bind\(model\)"):
        asked(TEXTS[0], max_new_tokens=4)
    drafted = pipeline(
        "text-generation", model=target, tokenizer=tokenizer, assistant_model=stranger.bind(target).foretell([])
    )
    assert drafted(TEXTS[0], max_new_tokens=4)


# ----- other arguments that take a tokenizer -------------------------------------------------------------------------


def test_an_asynchronous_streamer(target, draft, tokenizer):
    ids = target.generate(prompt(7), max_new_tokens=16)
    draft.foretell(ids[0, 7:])

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True)
        kwargs = {"inputs": prompt(7), "max_new_tokens": 16, "assistant_model": draft, "streamer": streamer}
        thread = Thread(target=target.generate, kwargs=kwargs)
        thread.start()
        text = "".join([part async for part in streamer])
        thread.join()
        return text

    assert asyncio.run(read()).split() == tokenizer.decode(ids[0, 7:]).split()


def test_healed_prompts(target, draft, tokenizer):
    """The prompt's last token may be replaced before anything is generated; then both go on from the new one."""
    assert_same_as_plain(target, draft, prompt(9), token_healing=True, tokenizer=tokenizer)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_watermark_with_a_state(target, draft, rows, do_sample):
    config = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123], context_history_size=16)
    assert_same_as_plain(target, draft, padded([9, 6][:rows]), watermarking_config=config, do_sample=do_sample)
