"""Exactly the tokens that serving would produce are learnt, with templates in the manner of real ones."""

import logging

import pytest

from eagle3_hf.training.data.chat_template import ChatTemplate
from eagle3_hf.training.data.collator import Eagle3DataCollator
from eagle3_hf.training.data.encoding import (
    MaskSummary,
    encode_dataset,
    prepare_dataset,
    render_mask,
    special_token_ids,
)
from eagle3_hf.training.data.loss_masks import encode_chat
from eagle3_hf.training.data.options import EncodingOptions
from eagle3_hf.training.data.sources import load_chats
from eagle3_hf.ttt.loss import IGNORE_INDEX
from support.real_templates import SPECIALS, TEMPLATES, real_tokenizer


USER, SECOND = {"role": "user", "content": "What is four?"}, {"role": "user", "content": "Sing."}
THOUGHTS = "Let me think about it."
CHAT = [
    USER,
    {"role": "assistant", "content": "A number."},
    SECOND,
    {"role": "assistant", "content": "The sea sings."},
]
# What each family's target writes behind its prompt when it answers with these thoughts and this text.
RAW = {
    "llama3": "{thoughts}{text}<|eot_id|>",
    "qwen3": "<think>\n{thoughts}\n</think>\n\n{text}<|im_end|>",
    "r1": "{thoughts}\n</think>\n\n{text}<|end_of_sentence|>",
    "channels": "<|channel|>analysis<|message|>{thoughts}<|end|>"
    "<|start|>assistant<|channel|>final<|message|>{text}<|return|>",
}
PLAIN = {"channels": "<|channel|>final<|message|>{text}<|return|>", "mistral": " {text}</s>"}


def serve(tokenizer, history, raw, **template_kwargs):
    """The ids of a prompt as a chat API makes them, and those of the raw completion that it got for it."""
    prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False, **template_kwargs)
    return prompt, tokenizer(raw, add_special_tokens=False)["input_ids"]


def learnt(tokenizer, encoded):
    """The texts of the supervised runs."""
    return [part.split("]]")[0] for part in render_mask(tokenizer, encoded).split("[[")[1:]]


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_last_answer_is_what_serving_produced(family):
    tokenizer = real_tokenizer(family)
    raw = PLAIN.get(family, "{text}" + SPECIALS[family][0]).format(text="The sea sings.")
    prompt, answer = serve(tokenizer, CHAT[:3], raw)
    encoded = encode_chat(tokenizer, CHAT, max_length=None)
    assert encoded["input_ids"] == prompt + answer
    assert encoded["labels"][len(prompt) :] == [IGNORE_INDEX, *answer[1:]]
    assert encoded["labels"][-1] == tokenizer.convert_tokens_to_ids(SPECIALS[family][0])
    last = encode_chat(tokenizer, CHAT, max_length=None, last_turn_only=True)
    assert last["input_ids"] == prompt + answer
    assert last["labels"] == [IGNORE_INDEX] * (len(prompt) + 1) + answer[1:]


@pytest.mark.parametrize("family", ["llama3", "qwen3", "chatml", "gemma", "mistral"])
def test_earlier_answers_are_learnt_as_they_were_produced(family):
    """Also under Qwen 3, which shows the last answer with an empty block of thoughts that no model wrote."""
    tokenizer = real_tokenizer(family)
    encoded = encode_chat(tokenizer, CHAT, max_length=None)
    assert len(learnt(tokenizer, encoded)) == 2
    assert learnt(tokenizer, encoded)[0].endswith("number." + SPECIALS[family][0])


def test_a_mode_without_thoughts_is_served_with_its_own_prompt():
    tokenizer = real_tokenizer("qwen3")
    encoded = encode_chat(tokenizer, CHAT, max_length=None, template_kwargs={"enable_thinking": False})
    prompt, answer = serve(tokenizer, CHAT[:3], "The sea sings.<|im_end|>", enable_thinking=False)
    assert encoded["input_ids"] == prompt + answer
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert learnt(tokenizer, encoded)[-1].endswith(" sings.<|im_end|>")
    assert "think" not in learnt(tokenizer, encoded)[-1]


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", ["qwen3", "r1", "channels"])
def test_thoughts_go_where_the_template_puts_them(family, key):
    """Whether they are part of the content, as the target wrote it, or apart, as chat APIs give them."""
    if family == "channels" and key == "content":
        pytest.skip("its content never holds thoughts")
    tokenizer = real_tokenizer(family)
    raw = RAW[family].format(thoughts=THOUGHTS, text="Four.")
    if key == "content":
        answer = {"role": "assistant", "content": raw.replace(SPECIALS[family][0], "")}
    else:
        answer = {"role": "assistant", "content": "Four.", key: THOUGHTS}
    prompt, ids = serve(tokenizer, [USER], raw)
    encoded = encode_chat(tokenizer, [USER, answer], max_length=None)
    assert tokenizer.decode(encoded["input_ids"]) == tokenizer.decode(prompt + ids)
    assert encoded["labels"] == [IGNORE_INDEX] * (len(prompt) + 1) + ids[1:]

    masked = encode_chat(tokenizer, [USER, answer], max_length=None, mask_reasoning=True)
    assert masked["input_ids"] == encoded["input_ids"]
    assert [text.strip() for text in learnt(tokenizer, masked)] == ["Four." + SPECIALS[family][0]]


def test_thoughts_of_a_template_that_knows_none():
    """They are kept, in the tags most models use; and a target that writes tags of its own is masked by those."""
    tokenizer = real_tokenizer("chatml")
    answer = {"role": "assistant", "content": "Four.", "reasoning_content": THOUGHTS}
    encoded = encode_chat(tokenizer, [USER, answer], max_length=None)
    assert "<think>\nLet me think about it.\n</think>\n\nFour." in tokenizer.decode(encoded["input_ids"])
    for opening, closing in (("[THINK]", "[/THINK]"), ("<thought>", "</thought>")):
        answer = {"role": "assistant", "content": f"{opening}{THOUGHTS}{closing}Four."}
        masked = encode_chat(tokenizer, [USER, answer], max_length=None, mask_reasoning=True)
        assert [text.strip() for text in learnt(tokenizer, masked)] in (["Four.<|im_end|>"], ["our.<|im_end|>"])


@pytest.mark.parametrize("family", ["qwen3", "r1"])
def test_thoughts_that_were_cut_are_masked_to_the_end(family):
    tokenizer = real_tokenizer(family)
    answer = {"role": "assistant", "content": "<think>\n" + THOUGHTS}
    encoded = encode_chat(tokenizer, [USER, answer], max_length=None, finished=False)
    assert tokenizer.decode(encoded["input_ids"]).endswith("<think>\n" + THOUGHTS)
    assert tokenizer.decode(encoded["input_ids"]).count("<think>") == 1
    masked = encode_chat(tokenizer, [USER, answer], max_length=None, finished=False, mask_reasoning=True)
    assert set(masked["labels"]) == {IGNORE_INDEX}


def test_masked_thoughts_are_counted(caplog):
    tokenizer = real_tokenizer("qwen3")
    answer = {"role": "assistant", "content": "Four.", "reasoning_content": THOUGHTS}
    chats = load_chats([{"messages": [USER, answer]}, {"messages": CHAT}])
    options = {"max_length": None, "mask_reasoning": True}
    summary = MaskSummary.of(encode_dataset(chats, tokenizer, EncodingOptions(**options)), None)
    raw = tokenizer(RAW["qwen3"].format(thoughts=THOUGHTS, text=""), add_special_tokens=False)["input_ids"]
    assert 0 <= len(raw) - 2 - summary.hidden <= 2  # all but the first token, the end, and the blank line
    assert "tokens of thoughts masked" in str(summary)
    with caplog.at_level(logging.WARNING):
        prepare_dataset([{"messages": CHAT}], tokenizer, **options)
    assert "mask_reasoning found no thoughts in 1 chats" in caplog.text


def test_tags_are_found_by_rendering():
    assert ChatTemplate(real_tokenizer("qwen3")).reasoning == ("reasoning_content", "<think>", "</think>")
    # Newer versions of transformers give the thoughts under every key at once, so any of them may be the one found.
    key, *tags = ChatTemplate(real_tokenizer("channels")).reasoning
    assert key in ("reasoning_content", "thinking")
    assert tags == ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"]
    for family in ("llama3", "r1"):
        assert ChatTemplate(real_tokenizer(family)).reasoning is None


def test_calls_of_tools_are_answers():
    tokenizer = real_tokenizer("llama3")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    other = {"type": "function", "function": {"name": "sing", "arguments": {"song": "sea"}}}
    chats = [
        [USER, {"role": "assistant", "content": "", "tool_calls": [c]}, {"role": "tool", "content": "4"}, CHAT[1]]
        for c in (call, other)
    ]
    # Through columns, where every call has the arguments of all calls, null where it has none.
    rows = prepare_dataset([{"messages": chat} for chat in chats], tokenizer, max_length=None)
    first, last = learnt(tokenizer, rows[0])
    assert first == '"name": "add", "arguments": {"a": 2, "b": 2}}<|eot_id|>'
    assert last.endswith("number.<|eot_id|>")


def test_tools_of_a_row_reach_the_template():
    tokenizer = real_tokenizer("chatml")
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }},{% endfor %}" + TEMPLATES["chatml"]
    rows = [{"messages": CHAT, "tools": [{"name": "add"}]}, {"messages": CHAT, "tools": None}]
    first, second = prepare_dataset(rows, tokenizer, max_length=None)
    assert tokenizer.decode(first["input_ids"]) == "add," + tokenizer.decode(second["input_ids"])
    text = [{"messages": CHAT, "tools": '[{"name": "add"}]'}]
    assert prepare_dataset(text, tokenizer, max_length=None)[0] == first


def test_one_token_answers():
    """With an end there is one token to learn, the end; without one there is nothing, and the chat is dropped."""
    tokenizer = real_tokenizer("llama3")
    chats = [{"messages": [USER, {"role": "assistant", "content": "a"}], "finished": end} for end in (True, False)]
    assert len(tokenizer("a", add_special_tokens=False)["input_ids"]) == 1
    (row,) = prepare_dataset(chats, tokenizer, max_length=None)
    assert learnt(tokenizer, row) == ["<|eot_id|>"]
    batch = Eagle3DataCollator(0)([row])
    assert (batch["labels"] != IGNORE_INDEX).sum() == 1


def test_an_end_of_turn_that_is_the_pad_token_is_learnt():
    """Padding is known by its place, not by its id."""
    tokenizer = real_tokenizer("llama3")
    tokenizer.pad_token = tokenizer.eos_token
    rows = prepare_dataset([{"messages": CHAT}, {"messages": CHAT[:2]}], tokenizer, max_length=None)
    for collator in (
        Eagle3DataCollator(tokenizer.pad_token_id),
        Eagle3DataCollator(tokenizer.pad_token_id, None, 200),
    ):
        batch = collator(list(rows))
        ends = (batch["labels"] == tokenizer.eos_token_id).sum()
        assert ends == 3
        assert (batch["attention_mask"] * batch["input_ids"] == tokenizer.eos_token_id).sum() > 3


def test_cut_rows_are_counted(caplog):
    tokenizer = real_tokenizer("chatml")
    whole = len(encode_chat(tokenizer, CHAT, max_length=None)["input_ids"])
    with caplog.at_level(logging.WARNING):
        rows = prepare_dataset([{"messages": CHAT}, {"messages": CHAT[:2]}], tokenizer, max_length=whole - 1)
    assert "1 of 2 chats are longer than max_length" in caplog.text
    assert len(rows[0]["input_ids"]) == whole - 1


def test_how_many_may_be_empty_is_an_argument():
    tokenizer = real_tokenizer("chatml")
    chats = [{"messages": CHAT}] * 3 + [{"messages": CHAT[:1]}]
    with pytest.raises(ValueError, match="1 of 4 chats have no token to learn"):
        prepare_dataset(chats, tokenizer, max_length=None, max_empty_share=0.2)
    assert len(prepare_dataset(chats, tokenizer, max_length=None, max_empty_share=0.25)) == 3


def test_tokens_of_which_all_are_learnt_are_suspicious(caplog):
    tokenizer = real_tokenizer("chatml")
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 2
    prepare_dataset(rows, tokenizer, max_length=3)
    assert "Every token of every example is to be learnt" in caplog.text
    caplog.clear()
    prepare_dataset([{**rows[0], "labels": [-100, -100, -100, 8]}], tokenizer, max_length=None)
    assert "Every token" not in caplog.text


def test_a_mask_on_a_terminal_is_green():
    tokenizer = real_tokenizer("chatml")
    encoded = encode_chat(tokenizer, CHAT, max_length=None)
    brackets, colour = render_mask(tokenizer, encoded), render_mask(tokenizer, encoded, colour=True)
    assert colour == brackets.replace("[[", "\033[1;32m").replace("]]", "\033[0m")


def test_options_that_need_turns_are_refused_without_any():
    tokenizer = real_tokenizer("chatml")
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}]
    with pytest.raises(ValueError, match="last_turn_only needs turns, but these examples are tokens"):
        prepare_dataset(rows, tokenizer, max_length=None, last_turn_only=True)
    with pytest.raises(ValueError, match="mask_reasoning needs turns, but these examples are text"):
        prepare_dataset([{"text": "The sea."}], tokenizer, max_length=None, mask_reasoning=True)
    rendered = [{"prompt": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n", "completion": "The sea."}]
    assert len(prepare_dataset(rendered, tokenizer, max_length=None)) == 1
    with pytest.raises(ValueError, match="rendered already has no turns"):
        prepare_dataset(rendered, tokenizer, max_length=None, last_turn_only=True)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        prepare_dataset([{"messages": CHAT}], tokenizer, max_length=None)


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("thoughts", [True, False])
def test_what_a_target_wrote_is_learnt_as_it_wrote_it(family, thoughts):
    """From the ids of an answer to a message of a file, and back to the same ids."""
    tokenizer = real_tokenizer(family)
    if thoughts:
        raw = RAW.get(family, " " * (family == "mistral") + "<think>{thoughts}</think>{text}").format(
            thoughts=THOUGHTS, text="Four."
        )
    else:
        raw = PLAIN.get(family, "{text}").format(text="Four.")
    end = SPECIALS[family][0]
    prompt, ids = serve(tokenizer, [USER], raw.removesuffix(end) + end)
    template = ChatTemplate(tokenizer)
    message = template.message(tokenizer.decode(ids[:-1]))
    encoded = encode_chat(template, [USER, message], max_length=None)
    assert tokenizer.decode(encoded["input_ids"]) == tokenizer.decode(prompt + ids)
    assert encoded["labels"][-1] == ids[-1]
    # And the next turn shows the answer without another frame around it.
    text = template.render([USER, message, SECOND], generation_prompt=True)
    assert text.count("final<|message|>") == (family == "channels")
    assert text.count("Four.") == 1


def test_processors():
    """Of a target that also sees, the processor will do; of images alone, it is named."""

    class Processor:
        tokenizer = real_tokenizer("chatml")
        chat_template = tokenizer.chat_template

    expected = prepare_dataset([{"messages": CHAT}], Processor.tokenizer, max_length=None)[:]
    ends = special_token_ids(Processor.tokenizer)
    Processor.tokenizer.chat_template = None
    assert prepare_dataset([{"messages": CHAT}], Processor(), max_length=None)[:] == expected
    assert special_token_ids(Processor()) == ends
    assert Processor.tokenizer.chat_template is None
    with pytest.raises(ValueError, match="object has no tokenizer for text: pass the target's tokenizer"):
        prepare_dataset([{"messages": CHAT}], object(), max_length=None)


@pytest.mark.parametrize(
    "text", ["{block}Four.", "So: {block}Four.", "\u00fcber {block} four {block}five", "no {block"]
)
def test_masked_tokens_are_those_that_touch_a_block(text):
    """Against the slow reference: the place of every token in the text, one by one."""
    tokenizer = real_tokenizer("qwen3")
    block = "<think>\nLet me \u00fcberlegen.\n</think>"
    text = text.replace("{block}", block).replace("{block", block[:20])
    prompt, ids = serve(tokenizer, [USER], text)
    shown = tokenizer.decode(ids)
    thinking = [False] * len(shown)
    start = shown.find("<think>")
    while start >= 0:
        end = shown.find("</think>", start)
        end = len(shown) if end < 0 else end + len("</think>")
        thinking[start:end] = [True] * (end - start)
        start = shown.find("<think>", end)
    ends = [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]
    # The second byte of a letter adds no letter: it belongs to the one before.
    masked = [any(thinking[min(begin, end - 1) : end]) for begin, end in zip([0, *ends], ends, strict=False)]
    encoded = encode_chat(
        tokenizer, [USER, {"role": "assistant", "content": text}], max_length=None, finished=False, mask_reasoning=True
    )
    labels = encoded["labels"][len(prompt) :]
    assert encoded["input_ids"] == prompt + ids
    assert [label == IGNORE_INDEX for label in labels] == [True, *masked[1:]]
    assert True in masked


def test_an_empty_block_that_the_target_wrote_itself_is_kept():
    tokenizer = real_tokenizer("qwen3")
    template = ChatTemplate(tokenizer)
    raw = "<think>\n\n</think>\n\nFour."
    message = template.message(raw)
    assert message == {"role": "assistant", "content": raw}
    prompt, ids = serve(tokenizer, [USER], raw + "<|im_end|>")
    assert encode_chat(template, [USER, message], max_length=None)["input_ids"] == prompt + ids
