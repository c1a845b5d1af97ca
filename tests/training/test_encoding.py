"""Chats to ids and targets: every template gives what serving would, and nothing else is supervised."""

import json
import logging

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig

from eagle3_hf.training.data.encoding import (
    Eagle3DataCollator,
    count_tokens,
    encode_chat,
    load_chats,
    prepare_dataset,
    render_mask,
    special_token_ids,
)
from eagle3_hf.training.data.options import EncodingOptions
from eagle3_hf.ttt.loss import IGNORE_INDEX, supervised_mask
from support.chats import TEMPLATES, chat_tokenizer


END = "<|end|>"
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "Write a poem."},
    {"role": "assistant", "content": "The sea is wide.\n\nIt sings."},
]
THOUGHTFUL = [
    CHAT[0],
    {"role": "assistant", "content": "<think>\nLet me think.\n</think>\n\nParis."},
    CHAT[2],
    {"role": "assistant", "content": "<think>\nA poem.\n</think>\n\nIt sings."},
]


def served(tokenizer, messages, answer, end=END):
    """What serving produces at one turn: the prompt's ids as a chat API makes them, and those with the answer."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return prompt, prompt + tokenizer(answer + end, add_special_tokens=False)["input_ids"]


def expected(tokenizer, messages, turns, end=END):
    """Ids of the chat, and its labels when the answers at these indices are supervised."""
    _, ids = served(tokenizer, messages[:-1], messages[-1]["content"], end)
    labels = [IGNORE_INDEX] * len(ids)
    for i in turns:
        prompt, whole = served(tokenizer, messages[:i], messages[i]["content"], end)
        assert ids[: len(whole)] == whole
        labels[len(prompt) + 1 : len(whole)] = whole[len(prompt) + 1 :]
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("template", ["chatml", "bos", "markers", "no system", "trailing eos", "strips thoughts"])
def test_every_answer_of_a_chat_is_supervised(template):
    tokenizer = chat_tokenizer(template)
    encoded = encode_chat(tokenizer, CHAT, max_length=None)
    assert encoded == expected(tokenizer, CHAT, turns=[1, 3])
    assert encoded["input_ids"].count(tokenizer.bos_token_id) == (template == "bos")
    assert encoded["labels"][-1] == tokenizer.convert_tokens_to_ids(END)
    assert sum(label == encoded["labels"][-1] for label in encoded["labels"]) == 2


def test_mask_as_text():
    tokenizer = chat_tokenizer("no system")
    assert render_mask(tokenizer, encode_chat(tokenizer, CHAT[:2], max_length=None)) == (
        "<|start|>user\nWhat is the capital of France?<|end|>\n<|start|>assistant\n"
        "The[[ capital of France is Paris.<|end|>]]"
    )


def test_what_follows_the_last_answer_is_left_out():
    tokenizer = chat_tokenizer()
    longer = [*CHAT, {"role": "user", "content": "Thank you."}]
    assert encode_chat(tokenizer, longer, max_length=None) == encode_chat(tokenizer, CHAT, max_length=None)


def test_rewritten_history_supervises_the_last_answer_with_its_thoughts():
    tokenizer = chat_tokenizer("strips thoughts")
    encoded = encode_chat(tokenizer, THOUGHTFUL, max_length=None)
    assert encoded == expected(tokenizer, THOUGHTFUL, turns=[3])
    # Alone, the first answer is the last one, and is learnt.
    assert encode_chat(tokenizer, THOUGHTFUL[:2], max_length=None) == expected(tokenizer, THOUGHTFUL[:2], turns=[1])


def test_an_answer_is_supervised_as_far_as_history_keeps_it():
    """A template that closes earlier answers with another token: all but that token is learnt."""
    tokenizer = chat_tokenizer("markers")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}"
        "{{ '<eos>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
    )
    text = render_mask(tokenizer, encode_chat(tokenizer, CHAT, max_length=None))
    assert "The[[ capital of France is Paris.]]<|end|>" in text
    assert text.endswith("The[[ sea is wide.\n\nIt sings.<eos>]]")


@pytest.mark.parametrize("tag", ["", "<think>\n"])
def test_thoughts_opened_by_the_prompt(tag):
    """Serving appends the raw answer to a prompt that ends with the tag, whatever the rendered history shows."""
    tokenizer = chat_tokenizer("opens thoughts")
    raw = "Let me think.\n</think>\n\nParis."
    encoded = encode_chat(tokenizer, [CHAT[0], {"role": "assistant", "content": tag + raw}], max_length=None)
    assert encoded == expected(tokenizer, [CHAT[0], {"role": "assistant", "content": raw}], turns=[1])


def test_tokens_do_not_merge_across_the_end_of_the_prompt():
    """Serving tokenises a prompt alone, where it ends with a space; in the text, the next word owns the space."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    prompt, whole = served(tokenizer, CHAT[:1], CHAT[1]["content"])
    joined = tokenizer.apply_chat_template(CHAT[:2], return_dict=False)
    assert joined[: len(prompt)] != prompt
    assert encode_chat(tokenizer, CHAT[:2], max_length=None)["input_ids"] == whole
    # At the second answer the first one is text of the prompt, in other tokens than it was produced in.
    assert encode_chat(tokenizer, CHAT, max_length=None) == expected(tokenizer, CHAT, turns=[3])


@pytest.mark.parametrize("template", ["chatml", "bos", "trailing eos"])
def test_an_unfinished_answer_has_no_end(template):
    tokenizer = chat_tokenizer(template)
    cut = [CHAT[0], {"role": "assistant", "content": "The capital of"}]
    encoded = encode_chat(tokenizer, cut, max_length=None, finished=False)
    assert encoded == expected(tokenizer, cut, turns=[1], end="")


def test_only_the_last_answer_can_be_unfinished():
    tokenizer = chat_tokenizer()
    text = render_mask(tokenizer, encode_chat(tokenizer, CHAT, max_length=None, finished=False))
    assert text.count("<|end|>]]") == 1
    assert text.endswith("It sings.]]")


def test_a_template_without_end_of_turn(caplog):
    tokenizer = chat_tokenizer("no end of turn")
    assert encode_chat(tokenizer, CHAT, max_length=None) == expected(tokenizer, CHAT, turns=[1, 3], end="")
    with caplog.at_level(logging.WARNING):
        prepare_dataset([{"messages": CHAT}], tokenizer, max_length=None)
    assert "no end-of-turn token" in caplog.text


def test_template_arguments_reach_the_template():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        TEMPLATES["chatml"]
        .replace("You are helpful.", "{{ tone }}")
        .replace("'<|start|>system\n{{ tone }}<|end|>\n'", "'<|start|>system\n' + tone + '<|end|>\n'")
    )
    encoded = encode_chat(tokenizer, CHAT, max_length=None, template_kwargs={"tone": "Sing."})
    assert tokenizer.decode(encoded["input_ids"]).startswith("<|start|>system\nSing.<|end|>")


def test_keys_that_are_null_are_absent():
    """A columnar data set gives every message the keys of all."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.tool_calls is defined %}TOOL{% endif %}{% endfor %}" + TEMPLATES["chatml"]
    )
    chat = [{**message, "tool_calls": None} for message in CHAT]
    assert encode_chat(tokenizer, chat, max_length=None) == encode_chat(tokenizer, CHAT, max_length=None)


def test_nothing_to_learn():
    tokenizer = chat_tokenizer()
    for chat in ([], CHAT[:1], CHAT[1:2], [CHAT[0], {"role": "assistant", "content": ""}]):
        assert set(encode_chat(tokenizer, chat, max_length=None)["labels"]) <= {IGNORE_INDEX}
    # An answer of one token: the token is the target's own, its end is learnt.
    encoded = encode_chat(tokenizer, [CHAT[0], {"role": "assistant", "content": "The"}], max_length=None)
    assert [label for label in encoded["labels"] if label != IGNORE_INDEX] == [tokenizer.convert_tokens_to_ids(END)]


def test_max_length_keeps_the_head():
    tokenizer = chat_tokenizer()
    whole = encode_chat(tokenizer, CHAT, max_length=None)
    for length in (1, 20, len(whole["labels"]) - 1, 1000):
        cut = encode_chat(tokenizer, CHAT, max_length=length)
        assert cut == {key: value[:length] for key, value in whole.items()}
    with pytest.raises(ValueError, match="max_length is 0"):
        encode_chat(tokenizer, CHAT, max_length=0)


def test_refusals_name_the_reason():
    with pytest.raises(ValueError, match="no chat template"):
        encode_chat(chat_tokenizer(None), CHAT, max_length=None)
    with pytest.raises(ValueError, match=r"system, user.*System role not supported"):
        encode_chat(chat_tokenizer("no system"), [{"role": "system", "content": "x"}, *CHAT], max_length=None)


def test_supervised_mask_table():
    """Prompt at 0-3, answer at 4-6: step 0 rows {3, 4}, step 1 rows {2, 3}, step 2 rows {1, 2}."""
    labels = torch.tensor([[IGNORE_INDEX] * 5 + [55, 66]])
    mask = supervised_mask(labels)
    assert mask.dtype == torch.bool
    pairs = {step: [t for t in range(7 - step) if mask[0, t + step]] for step in range(4)}
    assert pairs == {0: [3, 4], 1: [2, 3], 2: [1, 2], 3: [0, 1]}


def test_supervised_mask_of_an_encoded_chat():
    """The targets that rows and steps reach are x_{a+1}..x_b of every turn, each at step 0 once."""
    tokenizer = chat_tokenizer()
    encoded = encode_chat(tokenizer, CHAT, max_length=None)
    mask = supervised_mask(torch.tensor([encoded["labels"]]))[0]
    reached = [t + 2 for t in range(len(mask)) if mask[t]]
    assert reached == [j for j, label in enumerate(encoded["labels"]) if label != IGNORE_INDEX]
    assert not mask[-2:].any()


def test_counts_are_of_supervised_targets_only():
    tokenizer = chat_tokenizer()
    dataset = prepare_dataset([{"messages": CHAT}, {"messages": CHAT[:2]}], tokenizer, max_length=None)
    counts = count_tokens(dataset, len(tokenizer))
    labels = [label for row in dataset for label in row["labels"] if label != IGNORE_INDEX]
    assert counts.dtype == torch.int64
    assert counts.sum() == len(labels)
    assert counts[tokenizer.convert_tokens_to_ids(END)] == 3
    assert torch.equal(counts, count_tokens(list(dataset), len(tokenizer)))
    with pytest.raises(ValueError, match=r"outside the target's vocabulary 0\.\.3"):
        count_tokens(dataset, 4)


def test_special_tokens():
    tokenizer = chat_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    assert special_token_ids(tokenizer) == [0, 1, 2, end]
    assert special_token_ids(tokenizer, GenerationConfig(eos_token_id=[1, 9])) == [0, 1, 2, end, 9]
    assert special_token_ids(tokenizer, GenerationConfig(eos_token_id=9)) == [0, 1, 2, end, 9]
    assert special_token_ids(chat_tokenizer("no end of turn")) == [0, 1, 2]
    assert special_token_ids(chat_tokenizer(None)) == [0, 1, 2]


def test_chats_from_a_file(tmp_path):
    path = tmp_path / "chats.jsonl"
    lines = [{"messages": CHAT, "finished": True}, {"messages": CHAT[:2], "finished": False}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    tokenizer = chat_tokenizer()
    dataset = prepare_dataset(path, tokenizer, max_length=None)
    assert dataset.column_names == ["input_ids", "labels"]
    assert dataset[0] == encode_chat(tokenizer, CHAT, max_length=None)
    assert dataset[1] == encode_chat(tokenizer, CHAT[:2], max_length=None, finished=False)
    assert load_chats(Dataset.from_list(lines)).num_rows == 2


def test_bad_files(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": []}\n{"mess', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        load_chats(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="empty"):
        load_chats(path)
    path.write_text('{"talk": []}\n', encoding="utf-8")
    with pytest.raises(ValueError, match="columns talk. Known: `messages`"):
        load_chats(path)


def test_chats_without_targets_are_dropped_and_counted(caplog):
    tokenizer = chat_tokenizer("no system")
    refused = [{"role": "system", "content": "x"}, *CHAT]
    chats = [{"messages": chat} for chat in (CHAT, CHAT[:1], CHAT[:2], refused, CHAT)]
    with caplog.at_level(logging.WARNING):
        dataset = prepare_dataset(chats, tokenizer, max_length=None)
    assert len(dataset) == 3
    assert "2 of 5 chats have no token to learn" in caplog.text
    with pytest.raises(ValueError, match="(?s)2 of 3 chats .*System role not supported"):
        prepare_dataset([chats[3], chats[3], chats[0]], tokenizer, max_length=None)


def test_mostly_empty_data_stops_before_training_and_shows_why():
    tokenizer = chat_tokenizer()
    with pytest.raises(ValueError, match=r"(?s)2 of 2 chats.*You are helpful.*max_length \(12\)"):
        prepare_dataset([{"messages": CHAT}] * 2, tokenizer, max_length=12)


def test_chats_that_are_tokens_already():
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [IGNORE_INDEX, IGNORE_INDEX, 7, 8]}]
    tokenizer = chat_tokenizer(None)
    assert prepare_dataset(rows, tokenizer, max_length=3)[0] == {
        "input_ids": [5, 6, 7],
        "labels": [IGNORE_INDEX, IGNORE_INDEX, 7],
    }
    with pytest.raises(ValueError, match=r"labels\[2\] is 8, but input_ids\[2\] is 7"):
        prepare_dataset(
            [{**rows[0], "labels": [IGNORE_INDEX, IGNORE_INDEX, 8, IGNORE_INDEX]}], tokenizer, max_length=None
        )
    with pytest.raises(ValueError, match="4 input_ids, but 2 labels"):
        prepare_dataset([{**rows[0], "labels": [IGNORE_INDEX, 6]}], tokenizer, max_length=None)


def test_several_processes_encode_alike():
    tokenizer = chat_tokenizer()
    chats = [{"messages": CHAT[:2]}, {"messages": CHAT}, {"messages": CHAT}]
    one = prepare_dataset(chats, tokenizer, max_length=40)
    assert prepare_dataset(chats, tokenizer, max_length=40, num_proc=2)[:] == one[:]


def test_cached_chats_depend_only_on_what_decides_their_tokens():
    """Neither the number of processes nor packing makes `datasets` encode them again."""
    deciding = {"max_length": 40, "last_turn_only": True, "mask_reasoning": True, "template_kwargs": {"a": 1}}
    options = EncodingOptions(**deciding, num_proc=2, packing=True, seed=3)
    assert options.of_a_chat() == EncodingOptions(**deciding)
    assert options != options.of_a_chat()
    with pytest.raises(ValueError, match="max_length is 0; it must be at least 1"):
        EncodingOptions(max_length=0)


def test_collator_pads_on_the_right():
    rows = [{"input_ids": [5, 6, 7], "labels": [IGNORE_INDEX, 6, 7]}, {"input_ids": [8], "labels": [IGNORE_INDEX]}]
    batch = Eagle3DataCollator(pad_token_id=2)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7], [8, 2, 2]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[IGNORE_INDEX, IGNORE_INDEX, 7], [IGNORE_INDEX] * 3],  # no row could learn the second token
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert Eagle3DataCollator(2, pad_to_multiple_of=8)(rows)["input_ids"].shape == (2, 8)


def test_collator_takes_stored_features_along():
    rows = [
        {
            "input_ids": torch.arange(length),
            "labels": torch.arange(length),
            "features": torch.ones(length, 6, dtype=torch.bfloat16),
            "last_hidden": torch.ones(length, 2).numpy(),
            "top1": list(range(length)),
        }
        for length in (2, 4)
    ]
    batch = Eagle3DataCollator(pad_token_id=0)(rows)
    assert batch["features"].shape == (2, 4, 6)
    assert batch["features"].dtype == torch.bfloat16
    assert batch["features"].sum() == 6 * 6
    assert batch["last_hidden"].shape == (2, 4, 2)
    assert batch["last_hidden"].dtype == torch.float32
    assert batch["top1"].tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]


def test_collator_refuses_what_does_not_fit():
    row = {"input_ids": [5, 6], "labels": [IGNORE_INDEX, 6]}
    collator = Eagle3DataCollator(pad_token_id=0)
    with pytest.raises(ValueError, match="2 input_ids, but 3 `features`"):
        collator([{**row, "features": torch.ones(3, 4)}])
    with pytest.raises(ValueError, match="example 1 .* no `features`"):
        collator([{**row, "features": torch.ones(2, 4)}, row])
    with pytest.raises(ValueError, match="no `labels`"):
        collator([{"input_ids": [5]}])
    with pytest.raises(ValueError, match="pad_token_id is None"):
        Eagle3DataCollator(pad_token_id=None)


def test_the_shared_chats_encode_as_served(shared):
    """Against the real files: only counts that hold for any tokenizer of ours."""
    chats = load_chats(shared / "data" / "smollm2_self_written.jsonl").select(range(50))
    dataset = prepare_dataset(chats, chat_tokenizer(), max_length=None)
    assert len(dataset) == 50
    ends = sum(row["labels"][-1] == 4 for row in dataset)
    assert ends == sum(chats["finished"])
