"""Every shape of training data, from every place, becomes the chat that it means; what is none is refused by name."""

import json

import pytest
from datasets import Dataset, DatasetDict

from eagle3_hf.training.data.dropped_chats import OddChatError
from eagle3_hf.training.data.encoding import prepare_dataset, render_mask
from eagle3_hf.training.data.formats import read_example, recognise
from eagle3_hf.training.data.sources import load_chats
from support.chats import chat_tokenizer


QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
CHAT = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]

ROWS = {
    "messages": {"messages": CHAT},
    "null keys": {"messages": [{**turn, "tool_calls": None} for turn in CHAT]},
    "parts": {"messages": [{"role": t["role"], "content": [{"type": "text", "text": t["content"]}]} for t in CHAT]},
    "json": {"messages": json.dumps(CHAT)},
    "sharegpt": {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
    "sharegpt, lost question": {
        "conversations": [
            {"from": "gpt", "value": "Hello"},
            {"from": "human", "value": QUESTION},
            {"from": "gpt", "value": ANSWER},
        ]
    },
    "sharegpt with roles": {"conversations": CHAT},
    "alpaca": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "alpaca without input": {"instruction": QUESTION, "output": ANSWER},
    "completion": {"prompt": QUESTION, "completion": ANSWER},
    "completion of messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
}


@pytest.mark.parametrize("name", ROWS)
def test_one_chat_in_every_shape(name):
    tokenizer = chat_tokenizer()
    expected = prepare_dataset([{"messages": CHAT}], tokenizer, max_length=None)
    assert prepare_dataset([ROWS[name]], tokenizer, max_length=None)[:] == expected[:]


def test_sharegpt_of_many_turns():
    turns = [("system", "Be brief."), ("human", "One?"), ("gpt", "Two."), ("tool", "three"), ("chatgpt", "Four.")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    example = read_example(row)
    assert [turn["role"] for turn in example.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert [turn["content"] for turn in example.messages] == [text for _, text in turns]


def test_alpaca_with_input_and_system():
    row = {"instruction": "Translate.", "input": "Haus", "output": "house", "system": "You translate."}
    assert read_example(row).messages == [
        {"role": "system", "content": "You translate."},
        {"role": "user", "content": "Translate.\n\nHaus"},
        {"role": "assistant", "content": "house"},
    ]


def test_text_is_learnt_from_the_third_token_on():
    tokenizer = chat_tokenizer(None)
    row = prepare_dataset([{"text": "The sea is wide."}], tokenizer, max_length=None)[0]
    ids = tokenizer("The sea is wide.")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert row == {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}
    # A text that brings its own beginning does not get a second one.
    assert prepare_dataset([{"text": "<bos>The sea is wide."}], tokenizer, max_length=None)[0] == row
    # A chat template has no say in it.
    assert prepare_dataset([{"text": "The sea is wide."}], chat_tokenizer(), max_length=None)[0] == row


@pytest.mark.parametrize(("finished", "end"), [(True, "<eos>"), (False, "")])
def test_prompt_and_completion_without_a_template(finished, end):
    tokenizer = chat_tokenizer(None)
    row = {"prompt": "The sea", "completion": " is wide.", "finished": finished}
    encoded = prepare_dataset([row], tokenizer, max_length=None)[0]
    prompt = tokenizer("The sea")["input_ids"]
    whole = prompt + tokenizer(" is wide." + end, add_special_tokens=False)["input_ids"]
    assert encoded["input_ids"] == whole
    assert encoded["labels"] == [-100] * (len(prompt) + 1) + whole[len(prompt) + 1 :]


def test_a_prompt_that_is_rendered_already_is_left_as_it_is():
    tokenizer = chat_tokenizer()
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    row = {"prompt": prompt, "completion": ANSWER + "<|end|>", "finished": False}
    encoded = prepare_dataset([row], tokenizer, max_length=None)[0]
    text = render_mask(tokenizer, encoded)
    assert text == "<bos>" + prompt + "The[[" + ANSWER[3:] + "<|end|>]]"


def test_what_is_no_data_is_refused_by_name():
    with pytest.raises(ValueError, match=r"has the columns frage, answer\. Known: `messages`.*`input_ids` with"):
        recognise(["frage", "answer"])
    with pytest.raises(ValueError, match=r"columns \(none\)"):
        recognise([])
    bad = {
        "is from 'narrator'; known are user, human": {"conversations": [{"from": "narrator"}]},
        "a turn has no role, only content": {"messages": [{"content": "x"}]},
        "part of type 'image'": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        r"content of a turn \(user\) is int": {"messages": [{"role": "user", "content": 3}]},
        "a turn is str \\('Hello'\\), not an object": {"messages": ["Hello", "Good day."]},
        "`messages` is str \\('Hello'\\): Expecting value": {"messages": "Hello"},
        "none of the columns of a chat is filled": {"text": None},
        "`text` is int": {"text": 3},
    }
    for message, row in bad.items():
        with pytest.raises(OddChatError, match=message):
            read_example(row)


def test_a_row_that_cannot_be_read_is_dropped_and_shown(caplog):
    rows = [ROWS["sharegpt"], ROWS["sharegpt"], {"conversations": [{"from": "narrator", "value": "Once."}]}]
    assert len(prepare_dataset(rows, chat_tokenizer(), max_length=None)) == 2
    assert "1 of 3 chats have no token to learn" in caplog.text
    assert "narrator" in caplog.text


@pytest.fixture
def places(tmp_path):
    """The same two chats in every place that data can come from."""
    rows = [{"messages": CHAT, "finished": True}, {"messages": [*CHAT, *CHAT], "finished": False}]
    dataset = Dataset.from_list(rows)
    (tmp_path / "data").mkdir()
    lines = "\n".join(map(json.dumps, rows)) + "\n"
    for name in ("rows.jsonl", "rows", "data/train.jsonl"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": dataset, "test": dataset.select([0])}).save_to_disk(tmp_path / "splits")
    return rows, tmp_path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows", "rows.json", "rows.parquet", "data", "saved", "splits"])
def test_every_place(places, name):
    rows, folder = places
    loaded = load_chats(folder / name)
    assert [read_example(row).messages for row in loaded] == [row["messages"] for row in rows]
    assert loaded["finished"][:] == [True, False]


def test_splits(places):
    _, folder = places
    assert len(load_chats(folder / "splits", split="test")) == 1
    assert len(load_chats(folder / "rows.jsonl", split="train[:1]")) == 1
    assert len(load_chats(folder / "splits", split="train[1:]+test")) == 2
    assert len(load_chats(DatasetDict({"only": Dataset.from_list([ROWS["messages"]])}))) == 1
    two = DatasetDict({name: Dataset.from_list([ROWS["messages"]]) for name in ("a", "b")})
    with pytest.raises(ValueError, match="splits a, b: say which"):
        load_chats(two)
    with pytest.raises(ValueError, match=r"splits a, b and c\[:1\] is none of them"):
        load_chats(two, split="c[:1]")


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("team/chats", ("team/chats", None, None)),
        ("team/chats:train_sft", ("team/chats", None, "train_sft")),
        ("chats:train[:1000]", ("chats", None, "train[:1000]")),
        ("team/chats:main:test[10%:20%]", ("team/chats", "main", "test[10%:20%]")),
    ],
)
def test_names_on_the_hub(source, call, monkeypatch):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return Dataset.from_list([ROWS["messages"]])

    monkeypatch.setattr("eagle3_hf.training.data.sources.load_dataset", load_dataset)
    load_chats(source)
    assert calls == [call]


@pytest.mark.parametrize("source", ["no/such/file", "./chats", "chats.jsonl", "a:b:c:d", "x[3]"])
def test_a_mistyped_file_is_not_looked_for_on_the_hub(source):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_chats(source)


def test_columns_come_from_all_rows():
    rows = [{"messages": CHAT}, {"messages": CHAT, "finished": False}]
    assert load_chats(rows)["finished"][:] == [None, False]


def test_streams_are_refused_with_a_way_out():
    stream = Dataset.from_list([ROWS["messages"]]).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"a streamed dataset has no length.*stream\.take"):
        load_chats(stream)
    assert len(load_chats(Dataset.from_list(list(stream.take(1))))) == 1
