"""Chats files of many odd shapes: each is read as what it means, or counted by reason, or rejected with the reason."""

import bz2
import contextlib
import gzip
import json
import lzma

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf.cli import main
from eagle3_hf.training.data import records, sources
from eagle3_hf.training.data.dropped_chats import OddChatError
from eagle3_hf.training.data.encoding import dropped_chats, encode_chat, encode_dataset, prepare_dataset
from eagle3_hf.training.data.formats import read_example
from eagle3_hf.training.data.options import EncodingOptions
from eagle3_hf.training.data.sources import load_chats
from eagle3_hf.training.datagen.local_writer import WritingSettings
from eagle3_hf.training.datagen.regeneration import Regeneration
from support.chats import TEMPLATES, chat_tokenizer


QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
Q, A = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
CHAT = [Q, A]
ROW = {"messages": CHAT}
SHAREGPT = {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}
DEEP = json.loads("[" * 500 + "]" * 500)


def call(arguments):
    """A chat with a call of a tool; its text beside the call is null, as APIs have it."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": 7, "type": "function", "function": function}]
    return [
        Q,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "4", "tool_call_id": 7},
        A,
    ]


def with_answer(**keys):
    return {"messages": [Q, {**A, **keys}]}


def lines(*rows, end="\n"):
    return "".join(json.dumps(row) + end for row in rows).encode()


def table(*rows, separator=","):
    return "\r\n".join(separator.join(row) for row in rows).encode()


def quoted(text):
    return '"' + text.replace('"', '""') + '"'


# ----- files that are read: name, bytes, the chats in them, and how many others were dropped for which reason --------

READ = {
    "a byte-order mark": ("a.jsonl", b"\xef\xbb\xbf" + lines(ROW, ROW), [CHAT] * 2, {}),
    "two files put together, each with its mark": ("a.jsonl", 2 * (b"\xef\xbb\xbf" + lines(ROW)), [CHAT] * 2, {}),
    "UTF-16 with a mark": ("a.jsonl", lines(ROW, ROW).decode().encode("utf-16"), [CHAT] * 2, {}),
    "UTF-16 without": ("a.jsonl", lines(ROW, ROW).decode().encode("utf-16-be"), [CHAT] * 2, {}),
    "UTF-16 with a mark, an indented array": (
        "a.json",
        json.dumps([ROW] * 2, indent=2).encode("utf-16"),
        [CHAT] * 2,
        {},
    ),
    "an array called .jsonl": ("a.jsonl", json.dumps([ROW, ROW]).encode(), [CHAT] * 2, {}),
    "an indented array": ("a.jsonl", json.dumps([ROW, ROW], indent=4).encode(), [CHAT] * 2, {}),
    "an array with a row in every line": (
        "a.json",
        b"[\n" + lines(ROW, end=",\n") + lines(ROW) + b"]",
        [CHAT] * 2,
        {},
    ),
    "lines called .json": ("a.json", lines(ROW, ROW), [CHAT] * 2, {}),
    "one indented object": ("a.json", json.dumps(ROW, indent=2).encode(), [CHAT], {}),
    "indented objects one behind the other": (
        "a.jsonl",
        2 * (json.dumps(ROW, indent=2) + "\n").encode(),
        [CHAT] * 2,
        {},
    ),
    "a chat in every line, no name": ("a.jsonl", lines(CHAT, CHAT), [CHAT] * 2, {}),
    "one chat, no name": ("a.json", json.dumps(CHAT, indent=1).encode(), [CHAT], {}),
    "gzip": ("a.jsonl.gz", gzip.compress(lines(ROW, ROW)), [CHAT] * 2, {}),
    "gzip that does not say so": ("a.jsonl", gzip.compress(lines(ROW)), [CHAT], {}),
    "bzip2 of an array": ("a.json.bz2", bz2.compress(json.dumps([ROW]).encode()), [CHAT], {}),
    "xz": ("a.jsonl.xz", lzma.compress(lines(ROW)), [CHAT], {}),
    "CRLF and blank lines": ("a.jsonl", b"\r\n \r\n" + lines(ROW, ROW, end="\r\n\r\n"), [CHAT] * 2, {}),
    "CR alone": ("a.jsonl", lines(ROW, ROW, end="\r"), [CHAT] * 2, {}),
    "no newline in the end": ("a.jsonl", lines(ROW, ROW).rstrip(), [CHAT] * 2, {}),
    "a line separator in a text": (
        "a.jsonl",
        json.dumps(with_answer(content="It\u2028sings."), ensure_ascii=False).encode(),
        [[Q, {"role": "assistant", "content": "It\u2028sings."}]],
        {},
    ),
    "half of a character in one chat": (
        "a.jsonl",
        lines(ROW, with_answer(content="cut \ud83d"), ROW),
        [CHAT] * 2,
        {"half of a character (a lone surrogate)": 1},
    ),
    "a character in two halves": (
        "a.jsonl",
        lines(with_answer(content="It \U0001f600 sings.")),
        [[Q, {"role": "assistant", "content": "It \U0001f600 sings."}]],
        {},
    ),
    "messages and conversations": ("a.jsonl", lines(ROW, SHAREGPT, ROW, SHAREGPT), [CHAT] * 4, {}),
    "all columns in every row, the others null": (
        "a.jsonl",
        lines({**ROW, "conversations": None}, {"messages": [], **SHAREGPT}),
        [CHAT] * 2,
        {},
    ),
    "every shape in one file": (
        "a.jsonl",
        lines(ROW, SHAREGPT, {"instruction": QUESTION, "output": ANSWER}, {"prompt": QUESTION, "completion": ANSWER}),
        [CHAT] * 4,
        {},
    ),
    "prompt, response": ("a.jsonl", lines({"prompt": QUESTION, "response": ANSWER}), [CHAT], {}),
    "question, answer": ("a.jsonl", lines({"question": QUESTION, "answer": ANSWER}), [CHAT], {}),
    "query, output": ("a.jsonl", lines({"query": QUESTION, "output": ANSWER}), [CHAT], {}),
    "input, output": ("a.jsonl", lines({"input": QUESTION, "output": ANSWER}), [CHAT], {}),
    "problem, solution": ("a.jsonl", lines({"problem": QUESTION, "solution": ANSWER}), [CHAT], {}),
    "system_prompt, question, response": (
        "a.jsonl",
        lines({"system_prompt": SYSTEM["content"], "question": QUESTION, "response": ANSWER}),
        [[SYSTEM, *CHAT]],
        {},
    ),
    "conversations with a system prompt beside them": (
        "a.jsonl",
        lines({"system": SYSTEM["content"], **SHAREGPT}, {"system": "", **ROW}),
        [[SYSTEM, *CHAT], CHAT],
        {},
    ),
    "instruction, context, response": (
        "a.jsonl",
        lines({"instruction": "Answer.", "context": QUESTION, "response": ANSWER}),
        [[{"role": "user", "content": "Answer.\n\n" + QUESTION}, A]],
        {},
    ),
    "instruction with a history": (
        "a.jsonl",
        lines({"instruction": QUESTION, "output": ANSWER, "history": [["One?", "Two."]]}),
        [[{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two."}, *CHAT]],
        {},
    ),
    "preferences, in text and in turns": (
        "a.jsonl",
        lines(
            {"prompt": QUESTION, "chosen": ANSWER, "rejected": "No."},
            {"prompt": QUESTION, "chosen": CHAT, "rejected": CHAT},
            {"prompt": [Q], "chosen": [A], "rejected": [A]},
            {"chosen": CHAT, "rejected": CHAT},
            {"chosen": ANSWER, "rejected": "No."},
            {"prompt": "Another?", "chosen": CHAT},
        ),
        [CHAT] * 4,
        {"`chosen` without a question": 1, "the turns of `chosen` begin with another question": 1},
    ),
    "columns of which several could be meant": (
        "a.jsonl",
        lines(
            ROW,
            {"prompt": "x", "question": QUESTION, "answer": ANSWER},
            {"question": QUESTION, "answer": ANSWER, "solution": "4"},
            {"question": QUESTION, "text": ANSWER},
        ),
        [CHAT],
        {
            "`prompt` and `question` could each be the question": 1,
            "`answer` and `solution` could each be the answer": 1,
            "`question` beside `text`": 1,
        },
    ),
    "weights": (
        "a.jsonl",
        lines(*[with_answer(weight=weight) for weight in (1, None, 1.0, True, 0, 0.0, False, 0.5, 2, "0")]),
        [CHAT] * 4,
        {"all its answers have weight 0": 3, "a weight other than 0 and 1": 3},
    ),
    "roles of other names": (
        "a.jsonl",
        lines(
            {"messages": [{"role": "Human", "content": QUESTION}, {"role": "model", "parts": [{"text": ANSWER}]}]},
            {"messages": [{"role": "USER", "text": QUESTION}, {"role": "ASSISTANT ", "value": ANSWER}]},
            {"conversation": [{"from": "prompter", "content": QUESTION}, {"from": "Bot", "text": ANSWER}]},
            {"dialog": [{"input": QUESTION, "output": ANSWER}]},
            {"messages": [Q, {"role": "narrator", "content": ANSWER}]},
            {"conversations": [{"from": "narrator", "value": ANSWER}]},
            {"messages": [Q, {"role": 3, "content": ANSWER}]},
        ),
        [CHAT] * 4,
        {"no answer behind a question": 1, "a turn is from 'narrator'": 1, "a role that is no text": 1},
    ),
    "turns in odd orders": (
        "a.jsonl",
        lines(
            {"messages": [*CHAT, SYSTEM, *CHAT]},
            {"messages": [A, *CHAT]},
            {"messages": [Q, *CHAT]},
            {"messages": [A]},
            {"messages": []},
            {"messages": [SYSTEM, Q]},
        ),
        [[*CHAT, SYSTEM, *CHAT], [A, *CHAT], [Q, *CHAT]],
        {"no answer behind a question": 2, "no turns": 1},
    ),
    "turns that are none": (
        "a.jsonl",
        lines(
            ROW,
            {"dialog": ["Hi", "Hello"]},
            {"messages": 3},
            {"messages": "Hi"},
            {"messages": [{"content": "x"}]},
            {"messages": {"a": 1}},
        ),
        [CHAT],
        {"a turn without a role": 3, "`messages` is no list of turns": 1, "`messages` is a text, but not JSON": 1},
    ),
    "empty contents": (
        "a.jsonl",
        lines(
            {"messages": [{**Q, "content": ""}, A]}, {"messages": [{**Q, "content": None}, A]}, with_answer(content="")
        ),
        [[{**Q, "content": ""}, A]] * 2,
        {"empty answers": 1},
    ),
    "content in texts and in parts": (
        "a.jsonl",
        lines(
            ROW,
            {"messages": [{**Q, "content": [{"type": "text", "text": QUESTION}]}, A]},
            with_answer(content=["The capital of France", {"type": "output_text", "text": " is Paris."}]),
            with_answer(content={"type": "text", "text": ANSWER}),
            with_answer(content=[{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": ANSWER}]),
            {"messages": [{**Q, "content": [{"type": "image_url", "image_url": "x"}]}, A]},
            with_answer(content=3),
            with_answer(content=[3]),
        ),
        [*[CHAT] * 4, [Q, {**A, "reasoning_content": "Hm."}]],
        {"a part of type 'image_url'": 1, "the content of a turn is no text": 2},
    ),
    "calls of tools, arguments of every type": (
        "a.jsonl",
        lines(
            *[{"messages": call(x)} for x in ({"x": 1}, {"x": "one"}, {"x": 1.5}, '{"x": 1}', "", None, [1], "word")],
            {"messages": [Q, {**A, "tool_calls": "f"}]},
            {"messages": [Q, {**A, "tool_calls": [3]}]},
        ),
        [call(x) for x in ({"x": 1}, {"x": "one"}, {"x": 1.5}, {"x": 1}, {}, {}, [1], "word")],
        {"`tool_calls` is a text, but not JSON": 1, "`tool_calls` is no list of calls": 1},
    ),
    "rows that are broken twice": (
        "a.jsonl",
        lines(
            ROW,
            {"conversations": [{"from": "\ud83d", "value": "x"}]},
            {"messages": "\ud83d"},
            {"prompt": [], "chosen": CHAT},
            {"question": QUESTION, "answer": ANSWER, "history": 3.5},
            {"question": QUESTION, "answer": {"x": "\ud83d"}},
        ),
        [CHAT] * 2,
        {
            "a turn is from '\\ud83d'": 1,
            "`messages` is a text, but not JSON": 1,
            "`history` is no list of pairs of a question and its answer": 1,
            "a turn without a role": 1,
        },
    ),
    "columns that nobody reads, of many types": (
        "a.jsonl",
        lines(
            {**ROW, "id": 1, "image": "a.png", "meta": {"a": 1}},
            {**ROW, "id": "b", "image": ["a.png"], "meta": [DEEP, {"a": {}}]},
            {**ROW, "id": None, "image": 2.5, "meta": "\ud83d"},
        ),
        [CHAT] * 3,
        {},
    ),
    "keys of turns that nobody reads": (
        "a.jsonl",
        lines(
            with_answer(id=1, meta={}),
            with_answer(id="b", meta=[1, {"a": None}]),
            with_answer(id=None, meta=DEEP[0][:0]),
        ),
        [CHAT] * 3,
        {},
    ),
    "brackets in brackets": (
        "a.jsonl",
        lines(ROW) + b'{"messages": ' + b"[" * 20000 + b"]" * 20000 + b"}\n" + lines(ROW),
        [CHAT] * 2,
        {"a record that cannot be read": 1},
    ),
    "lines that are no objects": (
        "a.jsonl",
        lines(ROW, [1], "Hello", None, 3, ROW),
        [CHAT] * 2,
        {"no object with named columns": 4},
    ),
    "a huge line": ("a.jsonl", lines({**ROW, "blob": "x" * 5_000_000}, ROW), [CHAT] * 2, {}),
    "unfinished, in words": (
        "a.csv",
        table(["prompt", "completion", "finished"], [QUESTION, ANSWER, "True"]),
        [CHAT],
        {},
    ),
    "a table with capitals and a mark": (
        "a.csv",
        b"\xef\xbb\xbf" + table(["Id", "Question ", "ANSWER"], ["1", QUESTION, "NA"], ["b", QUESTION, "4"]),
        [[Q, {"role": "assistant", "content": "NA"}], [Q, {"role": "assistant", "content": "4"}]],
        {},
    ),
    "a table of tabs with an empty cell": (
        "a.tsv",
        table(["question", "answer"], [QUESTION, ANSWER], [QUESTION, ""], separator="\t"),
        [CHAT],
        {"no answer behind a question": 1},
    ),
    "a table in UTF-16": (
        "a.csv",
        table(["question", "answer"], [QUESTION, ANSWER]).decode().encode("utf-16"),
        [CHAT],
        {},
    ),
    "a table with chats as JSON": (
        "a.csv",
        table(["prompt", "chosen"], [quoted(json.dumps([Q])), quoted(json.dumps(CHAT))]),
        [CHAT],
        {},
    ),
    "a table with commas in a text, and no quotes": (
        "a.csv",
        table(
            ["prompt", "answer"],
            [QUESTION, ANSWER],
            ["Well?", "Yes, I can"],
            [QUESTION, quoted("Yes, I\ncan")],
            ["Hm"],
        ),
        [CHAT, [Q, {"role": "assistant", "content": "Yes, I\ncan"}]],
        {"a record that cannot be read": 2},
    ),
    "a table with a huge cell": (
        "a.csv",
        table(["prompt", "answer", "blob"], [QUESTION, ANSWER, "x" * 500_000]),
        [CHAT],
        {},
    ),
}

# ----- files that are rejected: name, bytes, what is said ------------------------------------------------------------

REJECTED = {
    "a truncated last line": ("a.jsonl", lines(ROW, ROW)[:-20], r"a\.jsonl, line 2: not JSON .*cut off"),
    "a truncated array": ("a.json", json.dumps([ROW] * 2, indent=1).encode()[:-30], r"a\.json, line \d+: not JSON"),
    "a broken first line": ("a.jsonl", lines(ROW)[5:] + lines(ROW, ROW), r"a\.jsonl, line 1: not JSON"),
    "truncated gzip": ("a.jsonl.gz", gzip.compress(lines(*[ROW] * 9))[:-30], r"compressed file is broken or was cut"),
    "Latin-1": (
        "a.jsonl",
        lines(ROW) + b"\n" + '{"prompt": "Caf\xe9?", "completion": "x"}'.encode("latin-1"),
        r"a\.jsonl, line 3: not UTF-8 .*byte 0xe9\. In Latin-1 the place reads .*Caf\xe9.*iconv",
    ),
    "Latin-1 in a table": (
        "a.csv",
        table(["question", "answer"], [QUESTION, ANSWER]) + "\r\nCaf\xe9,x".encode("latin-1"),
        r"a\.csv, line 3: not UTF-8 .*Caf\xe9",
    ),
    "Latin-1 in a text": ("a.txt", "Caf\xe9".encode("latin-1"), r"a\.txt, line 1: not UTF-8"),
    "half of a UTF-16 file": ("a.jsonl", lines(ROW).decode().encode("utf-16")[:-3], r"line 1: not (JSON|UTF-16)"),
    "zeros in the end": ("a.jsonl", lines(ROW) + bytes(4096), r"a\.jsonl, line 2: NUL bytes"),
    "nothing but zeros": ("a.jsonl", bytes(4096), r"a\.jsonl, line 1: NUL bytes"),
    "parquet by another name": ("a.jsonl", b"PAR1" + bytes(8), r"a\.jsonl is a parquet file by its content"),
    "nothing": ("a.jsonl", b"", "there are no chats in it"),
    "blank lines alone": ("a.jsonl", b"\n\r\n \n", "there are no chats in it"),
    "an empty table": ("a.csv", b"", "there are no chats in it"),
    "a table of other columns": ("a.csv", b"a,b\n1,2\n", r"a\.csv: no known shape .* the columns a, b"),
    "a table whose quotes have no end": ("a.csv", b'prompt,answer\nx,"y\n', r"a\.csv, line 2: no row of a table"),
    "a table of rows that do not fit": ("a.csv", b"prompt,answer\n1,2,3\n", "line 2: 3 cells under a heading of 2"),
    "other columns": (
        "a.jsonl",
        lines({"frage": 1, "antwort": 2}),
        r"a\.jsonl: no known shape .* columns (frage|antwort)",
    ),
    "rows under a name": ("a.json", json.dumps({"version": 1, "data": [ROW]}).encode(), "columns (version|data)"),
    "no objects at all": ("a.jsonl", lines(1, 2), "line 2: a int, not an object"),
    "Python's own words": ("a.jsonl", str(ROW).encode(), r"line 1: not JSON \(Expecting property name"),
}


@pytest.fixture(scope="module")
def tokenizer():
    """Its template shows calls of tools, and what the target would be told of their arguments."""
    tokenizer = chat_tokenizer()
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
    tokenizer.chat_template = TEMPLATES["chatml"].replace(
        "+ '<|end|>\n' }}{% endfor %}", "}}" + calls + "{{ '<|end|>\n' }}{% endfor %}"
    )
    assert tokenizer.chat_template != TEMPLATES["chatml"]
    return tokenizer


def encoded_alone(tokenizer, chat):
    """The ids of a chat that never was in a file."""
    chat = [{**turn, "content": turn["content"] or ""} for turn in chat]
    return encode_chat(tokenizer, chat, max_length=None)


def assert_reads(path, tokenizer, chats, dropped):
    encoded = encode_dataset(load_chats(path), tokenizer, EncodingOptions())
    assert dropped_chats(encoded, tokenizer).counts == dropped
    assert len(encoded) == len(chats) + sum(dropped.values())
    kept = [{name: row[name] for name in ("input_ids", "labels")} for row in encoded if row["targets"]]
    assert kept == [encoded_alone(tokenizer, chat) for chat in chats]


def test_there_are_many():
    assert len(READ) + len(REJECTED) >= 40


@pytest.mark.parametrize("name", READ)
def test_an_odd_file_is_read(name, tokenizer, tmp_path):
    file, content, chats, dropped = READ[name]
    (tmp_path / file).write_bytes(content)
    assert_reads(tmp_path / file, tokenizer, chats, dropped)


@pytest.mark.parametrize("name", REJECTED)
def test_a_broken_file_is_rejected_with_the_reason(name, tmp_path):
    file, content, message = REJECTED[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_chats(tmp_path / file)


def test_a_large_file_goes_through_the_disk(tokenizer, tmp_path, monkeypatch):
    """Read as one in memory is, batch by batch, and again when it has changed."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sources, "_IN_MEMORY", 0)
    monkeypatch.setattr(records, "_BATCH", 2)
    path = tmp_path / "a.jsonl"
    rows = [ROW] * 2 + [SHAREGPT, {"messages": call({"x": "one"})}, with_answer(content="\ud83d"), [1]]
    path.write_bytes(lines(*rows))
    chats = load_chats(path)
    assert chats.cache_files
    assert set(chats.column_names) == {"messages.json", "conversations.json", "eagle3_unreadable"}
    assert_reads(
        path,
        tokenizer,
        [CHAT] * 3 + [call({"x": "one"})],
        {"half of a character (a lone surrogate)": 1, "no object with named columns": 1},
    )
    path.write_bytes(lines(with_answer(content="Rome.")))
    assert_reads(path, tokenizer, [[Q, {"role": "assistant", "content": "Rome."}]], {})
    path.write_bytes(lines({"frage": 1}))
    with pytest.raises(ValueError, match=r"a\.jsonl: no known shape .* columns frage"):
        load_chats(path)
    path.write_bytes(lines(ROW)[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: not JSON"):
        load_chats(path)


def test_a_folder_of_odd_files(tokenizer, tmp_path):
    for name, content in {
        "train-0.jsonl": lines({**ROW, "id": 1}, [1]),
        "train-1.jsonl": b"\xef\xbb\xbf" + lines({**SHAREGPT, "id": "b"}),
        "test.jsonl": lines(ROW, ROW, ROW),
    }.items():
        (tmp_path / name).write_bytes(content)
    assert_reads(tmp_path, tokenizer, [CHAT] * 2, {"no object with named columns": 1})
    assert len(load_chats(tmp_path, split="test[1:]")) == 2


@pytest.mark.parametrize(
    "rows",
    [
        lambda: [{**ROW, "id": 1}, {**ROW, "id": "b"}, {**ROW, "image": ["a"]}],
        lambda: [ROW, SHAREGPT, {"Prompt": QUESTION, "response": ANSWER}],
        lambda: Dataset.from_list([{"Question": QUESTION, "answer": ANSWER, "id": i} for i in range(3)]),
        lambda: Dataset.from_list([{**ROW, "conversations": None}, {"messages": None, **SHAREGPT}] + [ROW]),
        lambda: Dataset.from_list([{"id": 1, **ROW}] * 3).with_format("numpy"),
        lambda: load_chats([ROW, SHAREGPT, ROW]),
    ],
)
def test_rows_that_are_in_memory(rows, tokenizer):
    assert_reads(rows(), tokenizer, [CHAT] * 3, {})


def test_tokens_beside_chats(tokenizer, tmp_path):
    tokens = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}
    assert_reads([ROW, tokens], tokenizer, [CHAT], {"none of the columns of a chat is filled": 1})
    with pytest.raises(ValueError, match="an example has no input_ids, but others are tokens"):
        prepare_dataset([tokens, ROW], tokenizer, max_length=None)


def test_an_answer_of_weight_0_is_context(tokenizer):
    """Its tokens are there, and the other answers learn behind it; what follows the last one that is learnt is not."""
    first, second, third = ({"role": "assistant", "content": text} for text in ("One.", "Two.", "Three."))
    chat = [Q, first, Q, {**second, "weight": 0}, Q, third]
    weighed = encode_chat(tokenizer, chat, max_length=None)
    plain = encode_chat(tokenizer, [Q, first, Q, second, Q, third], max_length=None)
    assert weighed["input_ids"] == plain["input_ids"]
    told = [text for text in ("One", "Two", "Three") if text_is_learnt(tokenizer, weighed, text)]
    assert told == ["One", "Three"]
    assert encode_chat(tokenizer, chat[:4], max_length=None) == encode_chat(tokenizer, chat[:2], max_length=None)
    # Only the last answer of the chat can have been cut, learnt or not.
    cut = encode_chat(tokenizer, chat[:4], max_length=None, finished=False)
    assert cut == encode_chat(tokenizer, chat[:2], max_length=None)


def text_is_learnt(tokenizer, encoded, text):
    """Whether the end of the answer that begins with this text is a target."""
    ids, labels = encoded["input_ids"], encoded["labels"]
    start = tokenizer.decode(ids).index(text + ".")
    ends = [j for j, token in enumerate(ids) if token == 4 and len(tokenizer.decode(ids[:j])) > start]
    return labels[ends[0]] != -100


ODD = [ROW, {"prompt": "x", "question": QUESTION}, [1], {"messages": [SYSTEM]}, ROW, [2]]


def test_dropped_chats_are_counted_in_the_log_and_in_the_error(tokenizer, caplog):
    assert len(prepare_dataset(ODD, tokenizer, max_length=None, max_empty_share=0.7)) == 2
    for line in (
        "4 of 6 chats have no token to learn and are dropped",
        "2 x no object with named columns; the first is chat 2: item 2 of the list: a list, not an object",
        "1 x `prompt` and `question` could each be the question; the first is chat 1: ",
        "1 x no answer behind a question; the first is chat 3: <|start|>system",
    ):
        assert line in caplog.text
    with pytest.raises(ValueError, match=r"(?s)4 of 6 chats .*2 x no object with named columns; the first is chat 2"):
        prepare_dataset(ODD, tokenizer, max_length=None)


ANYTHING = st.recursive(
    st.sampled_from([None, True, 0, 2.5, float("nan"), 10**30, "", "Hi", "\ud83d", "[{", "{}", '[{"role": "user"}]']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "from", "content", "type", "text", "weight", "tool_calls"]), inner)
        | st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "gpt"]), "content": inner}), max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(sources._CHAT_COLUMNS)), ANYTHING, max_size=3))
def test_no_row_raises_anything_else(row):
    with contextlib.suppress(OddChatError):
        for message in read_example(row).messages:
            assert isinstance(message["role"], str)
            message["content"].encode()


def test_show_mask_counts_dropped_chats(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "a.jsonl").write_bytes(lines(*ODD))
    assert main(["show-mask", str(tmp_path / "target"), str(tmp_path / "a.jsonl"), "--num-chats", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 chats, " in out
    assert "2 x no object with named columns; the first is chat 2: line 3: a list, not an object" in out
    assert "1 x no answer behind a question; the first is chat 3" in out


def test_datagen_counts_dropped_prompts(tmp_path, caplog):
    """Prompts keep their numbers, whatever is dropped before them."""
    (tmp_path / "a.jsonl").write_bytes(lines(*ODD, {"query": QUESTION}))
    regeneration = Regeneration(tmp_path / "a.jsonl", tmp_path / "out.jsonl", WritingSettings())
    assert [chat.index for chat in regeneration.conversations] == [0, 4, 6]
    assert [chat.script[0] for chat in regeneration.conversations] == [Q] * 3
    assert "4 of 7 examples have nothing to answer and are dropped" in caplog.text
    assert "2 x no object with named columns; the first is chat 2: line 3: a list, not an object" in caplog.text
    assert "1 x no question to answer; the first is chat 3: no question among the roles (system)" in caplog.text


def test_a_server_is_sent_arguments_as_json():
    from eagle3_hf.training.datagen.openai_client import ServerWriter
    from support.chat_server import chat_server, reply

    asked = []
    with chat_server(lambda body: (asked.append(body), reply("Four."))[1]) as (url, _):
        plain = WritingSettings()
        (chat,) = Regeneration([{"messages": call({"x": 1})}], "out.jsonl", plain).conversations
        list(ServerWriter(url, "tiny").write([[chat]], plain))
    assert asked[0]["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
