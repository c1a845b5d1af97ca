"""Answers by the target: its own, in order, whoever writes them, and the same after any interruption."""

import json
import logging

import pytest
import torch
from datasets import Dataset

from eagle3_hf.training.data.encoding import prepare_dataset
from eagle3_hf.training.datagen.local_writer import TargetWriter, WritingSettings
from eagle3_hf.training.datagen.regeneration import Regeneration, about_texts, script_of
from support.chats import tiny_target


END = 4
SETTINGS = WritingSettings(model="tiny", max_new_tokens=10, greedy_share=0.5)
GREEDY = WritingSettings(model="tiny", max_new_tokens=10, greedy_share=1.0)


def turns(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


PROMPTS = [
    {"messages": turns("What is the capital of France?", "old", "Sing.", "old")},
    {"messages": turns("Write a poem about the sea, please, a long one.")},
    {"messages": turns("One?", "old", "Two?", "old", "Three?")},
    {"messages": [{"role": "system", "content": "Be brief."}, *turns("Hello", "old")]},
    {"messages": turns("The sea is wide, the sea is deep.", "old")},
]


@pytest.fixture(scope="module")
def target(tokenizer):
    torch.manual_seed(0)
    target = tiny_target(tokenizer)

    def favour_end(module, inputs, output):
        output.logits[..., END] += 4.0

    target.register_forward_hook(favour_end)
    return target


@pytest.fixture(scope="module")
def writer(target, tokenizer):
    return TargetWriter.of(target, tokenizer, SETTINGS)


def regenerate(prompts, path, writer, settings=SETTINGS, **options):
    return Regeneration(prompts, path, settings, batch_size=2, **options).run(writer, progress=False)


@pytest.fixture(scope="module")
def uninterrupted(writer, tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "chats.jsonl"
    assert regenerate(PROMPTS, path, writer) == 5
    assert [file.name for file in path.parent.iterdir()] == ["chats.jsonl"]
    return path.read_bytes()


def lines_of(data):
    return [json.loads(line) for line in data.decode().splitlines()]


def test_the_file_holds_the_prompts_with_new_answers(uninterrupted, tokenizer):
    chats = lines_of(uninterrupted)
    assert [chat["index"] for chat in chats] == list(range(5))
    assert {chat["decoding"] for chat in chats} == {"greedy", "temperature_1"}
    for chat, prompt in zip(chats, PROMPTS, strict=True):
        asked = [message for message in prompt["messages"] if message["role"] != "assistant"]
        kept = [message for message in chat["messages"] if message["role"] != "assistant"]
        assert kept == asked[: len(kept)]
        assert len(kept) == len(asked) or not chat["finished"]
        assert chat["messages"][-1]["role"] == "assistant"
        assert "old" not in [message["content"] for message in chat["messages"]]
    assert len(prepare_dataset(chats, tokenizer, max_length=None)) == 5


def answer_alone(target, tokenizer, messages):
    """The slow reference: one chat, by `generate` as everybody calls it."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = target.generate(**prompt, do_sample=False, max_new_tokens=10, eos_token_id=[1, END], pad_token_id=2)
    ids = output[0, prompt["input_ids"].shape[1] :].tolist()
    ended = [i for i, token in enumerate(ids) if token in (1, END)]
    return tokenizer.decode(ids[: ended[0]] if ended else ids).rstrip("\ufffd"), bool(ended)


def test_greedy_answers_are_those_of_generate_on_the_new_history(writer, target, tokenizer, tmp_path):
    regenerate(PROMPTS, tmp_path / "chats.jsonl", writer, GREEDY)
    turns_written = 0
    for chat in lines_of((tmp_path / "chats.jsonl").read_bytes()):
        for i, message in enumerate(chat["messages"]):
            if message["role"] == "assistant":
                content, finished = answer_alone(target, tokenizer, chat["messages"][:i])
                assert message["content"].rstrip("\ufffd") == content
                assert finished == (chat["finished"] or i + 1 < len(chat["messages"]))
                turns_written += 1
    assert turns_written > len(PROMPTS), "no chat had a second answer: the test shows less than it says"


@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.77, 0.999])
def test_resumed_equals_uninterrupted(writer, tmp_path, uninterrupted, share):
    """The parts of a run that was stopped anywhere: between batches, inside a batch, inside a line."""
    path = tmp_path / "chats.jsonl"
    (tmp_path / "chats.jsonl.part-000-of-001").write_bytes(uninterrupted[: int(share * len(uninterrupted))])
    torch.manual_seed(int(100 * share))
    regenerate(PROMPTS, path, writer)
    assert path.read_bytes() == uninterrupted
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]


def test_interrupted_while_writing(writer, target, tmp_path, uninterrupted, monkeypatch):
    path = tmp_path / "chats.jsonl"
    generate, calls = target.generate, []

    def interrupted_generate(*args, **kwargs):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(target, "generate", interrupted_generate)
        with pytest.raises(KeyboardInterrupt):
            regenerate(PROMPTS, path, writer)
    assert not path.exists()
    assert (tmp_path / "chats.jsonl.part-000-of-001").exists()
    regenerate(PROMPTS, path, writer)
    assert path.read_bytes() == uninterrupted


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_several_processes_write_what_one_would(writer, tmp_path, uninterrupted, order):
    path = tmp_path / "chats.jsonl"
    written = [regenerate(PROMPTS, path, writer, part=(i, 3)) for i in order[:2]]
    assert not path.exists()
    written.append(regenerate(PROMPTS, path, writer, part=(order[2], 3)))
    assert sum(written) == 5
    assert path.read_bytes() == uninterrupted
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]


def test_another_number_of_processes_goes_on(writer, tmp_path, uninterrupted):
    path = tmp_path / "chats.jsonl"
    regenerate(PROMPTS, path, writer, part=(1, 2))
    assert regenerate(PROMPTS, path, writer) == 3
    assert path.read_bytes() == uninterrupted


def test_a_complete_file_is_left_alone_and_more_prompts_extend_it(writer, tmp_path, uninterrupted):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(uninterrupted)
    assert regenerate(PROMPTS, path, None) == 0
    assert path.read_bytes() == uninterrupted
    more = [*PROMPTS, {"messages": turns("Good day.")}]
    assert regenerate(more, path, writer) == 1
    assert path.read_bytes().startswith(uninterrupted)
    assert len(lines_of(path.read_bytes())) == 6


def test_files_of_something_else_are_refused(tmp_path, uninterrupted):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(uninterrupted)
    other = [*PROMPTS[:4], {"messages": turns("Another?")}]
    cases = [
        (other, SETTINGS, "answers prompt 4 with another prompt: use the options of that run"),
        (
            PROMPTS,
            WritingSettings(model="other", max_new_tokens=10),
            "answers prompt 0 with another model: use the options of that run",
        ),
        (PROMPTS[:3], SETTINGS, "answers prompt 3, which is not among the prompts"),
    ]
    for prompts, settings, message in cases:
        with pytest.raises(ValueError, match=message):
            Regeneration(prompts, path, settings)
    path.write_text('{"messages": []}\n')
    with pytest.raises(ValueError, match="was not written by this command"):
        Regeneration(PROMPTS, path, SETTINGS)
    path.write_text('{"mess\n')
    with pytest.raises(ValueError, match="line 1: not JSON"):
        Regeneration(PROMPTS, path, SETTINGS)


def test_scripts():
    user, tool, old = ({"role": role, "content": "x"} for role in ("user", "tool", "assistant"))
    system = {"role": "system", "content": "x"}
    call = {**old, "tool_calls": [{"name": "add"}]}
    assert script_of([user, old, user, old]) == [user, None, user, None]
    assert script_of([system, old, user, user, old, old]) == [system, user, user, None]
    assert script_of([user, call, tool, old, user]) == [user, call, tool, None, user, None]
    assert script_of([user, old, system]) == [user, None]
    for nothing in ([], [system], [old], [system, old]):
        with pytest.raises(ValueError, match="no question"):
            script_of(nothing)


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "Sing."}, {"from": "gpt", "value": "old"}]},
        {"instruction": "Sing.", "input": "", "output": "old"},
        {"prompt": "Sing.", "completion": "old"},
        {"prompt": "Sing."},
    ],
)
def test_prompts_in_every_shape(writer, tmp_path, row):
    regenerate([row], tmp_path / "a", writer, GREEDY)
    regenerate([{"messages": turns("Sing.")}], tmp_path / "b", writer, GREEDY)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_rows_without_questions(writer, tmp_path, caplog):
    assert regenerate([*PROMPTS, {"messages": []}], tmp_path / "a", writer) == 5
    assert "1 of 6 examples have nothing to answer" in caplog.text
    with pytest.raises(ValueError, match="1 of 1 examples have nothing to answer"):
        Regeneration([{"messages": []}], tmp_path / "b", SETTINGS)
    with pytest.raises(ValueError, match="examples of text have no questions"):
        Regeneration([{"text": "The sea."}], tmp_path / "b", SETTINGS)
    with pytest.raises(ValueError, match="part is"):
        Regeneration(PROMPTS, tmp_path / "b", SETTINGS, part=(2, 2))
    with pytest.raises(ValueError, match="batch_size is 0"):
        Regeneration(PROMPTS, tmp_path / "b", SETTINGS, batch_size=0)
    for name, value in (("max_new_tokens", 0), ("temperature", 0.0), ("greedy_share", 2)):
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            WritingSettings(**{name: value})


def test_prompts_that_are_too_long_are_left_out_and_counted(writer, tmp_path, caplog):
    long = {"messages": turns("sea " * 600)}
    path = tmp_path / "chats.jsonl"
    with caplog.at_level(logging.WARNING):
        assert regenerate([*PROMPTS, long], path, writer) == 5
    assert "the target has room for 512" in caplog.text
    assert "1 of 6 chats could not be answered" in caplog.text
    assert [chat["index"] for chat in lines_of(path.read_bytes())] == list(range(5))
    again = Regeneration([*PROMPTS, long], path, SETTINGS)
    assert again.pending == 1  # tried again
    assert again.run(writer, progress=False) == 0
    assert [chat["index"] for chat in lines_of(path.read_bytes())] == list(range(5))
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]
    with pytest.raises(RuntimeError, match="none of the first 1 prompts could be answered.*room for 512"):
        regenerate([long], tmp_path / "b", writer)


def test_the_callers_state_is_left_alone(writer, target, tmp_path):
    target.train()
    state = torch.get_rng_state()
    regenerate(PROMPTS[:1], tmp_path / "chats.jsonl", writer)
    assert torch.equal(torch.get_rng_state(), state)
    assert target.training
    target.eval()


def test_texts_to_ask_about():
    chats = Dataset.from_list([{"messages": turns("Write.", f"Text {i}.")} for i in range(3)])
    prompts = about_texts(chats, ["Summarize:\n{text}", "{text}\nAnd:\n{text}\nCompare."])["prompt"][:]
    assert len(prompts) == 3
    expected = [{f"Summarize:\nText {i}.", f"Text {i}.\nAnd:\nText {(i + 1) % 3}.\nCompare."} for i in range(3)]
    assert all(prompt in choices for prompt, choices in zip(prompts, expected, strict=True))
    assert prompts == about_texts(chats, ["Summarize:\n{text}", "{text}\nAnd:\n{text}\nCompare."])["prompt"][:]
    with pytest.raises(ValueError, match=r"'Summarize\.' has no \{text\}"):
        about_texts(chats, ["Summarize."])
    with pytest.raises(ValueError, match="no chat ends with an answer"):
        about_texts(Dataset.from_list([{"prompt": "x"}]), ["{text}"])


def test_texts_of_every_shape_and_of_odd_rows():
    completions = Dataset.from_list([{"prompt": "Write.", "completion": "Text."}])
    assert about_texts(completions, ["{text}!"])["prompt"][:] == ["Text.!"]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    odd = {"role": None, "content": "x"}
    chats = [turns("Write.", "Text."), [{"role": "user", "content": "x"}, call], [odd]]
    rows = Dataset.from_list([{"messages": messages} for messages in chats])
    assert about_texts(rows, ["{text}!"])["prompt"][:] == ["Text.!"]


def test_chats_about_texts(writer, tmp_path, uninterrupted):
    texts = tmp_path / "texts.jsonl"
    texts.write_bytes(uninterrupted)
    regenerate(texts, tmp_path / "about.jsonl", writer, about=["Summarize:\n{text}"])
    asked = [chat["messages"][0]["content"] for chat in lines_of((tmp_path / "about.jsonl").read_bytes())]
    assert asked == ["Summarize:\n" + chat["messages"][-1]["content"] for chat in lines_of(uninterrupted)]


def test_two_processes_that_merge_at_once(writer, tmp_path, uninterrupted, monkeypatch):
    """The slower one has looked at the files already when the faster one renames and removes them."""
    path = tmp_path / "chats.jsonl"
    path.write_bytes(uninterrupted)
    more = [*PROMPTS, {"messages": turns("Good day.")}, {"messages": turns("The sea sings.")}]
    fast, slow = (Regeneration(more, path, SETTINGS, batch_size=1, part=(i, 2)) for i in range(2))
    fast.run(writer, progress=False)
    join = slow._join

    def late_join(files):
        fast.merge()
        assert not list(tmp_path.glob("*.part-*"))
        return join(files)

    monkeypatch.setattr(slow, "_join", late_join)
    slow.run(writer, progress=False)
    assert [chat["index"] for chat in lines_of(path.read_bytes())] == list(range(7))
    assert path.read_bytes().startswith(uninterrupted)
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]


def rows_asked(target, monkeypatch):
    """A list that grows by the rows of every call of `generate`."""
    rows = []
    generate = target.generate
    monkeypatch.setattr(target, "generate", lambda ids, **kwargs: rows.append(len(ids)) or generate(ids, **kwargs))
    return rows


def test_what_is_there_is_not_written_again(writer, target, tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    first = Regeneration(PROMPTS, path, SETTINGS, batch_size=2, part=(1, 3))
    rows = rows_asked(target, monkeypatch)
    first.run(writer, progress=False)
    before = sum(rows)
    regenerate(PROMPTS, path, writer)
    rest = sum(rows) - before
    path.unlink()
    regenerate(PROMPTS, path, writer)
    assert before + rest == sum(rows) - before - rest


def test_batches_are_drawn_apart(writer, tmp_path):
    """Equal prompts in different batches do not get equal answers, nor do the turns of a chat."""
    settings = WritingSettings(model="tiny", max_new_tokens=10, greedy_share=0.0)
    prompts = [{"messages": turns("Sing.", "old", "Sing.")}] * 4
    regenerate(prompts, tmp_path / "a", writer, settings)
    chats = lines_of((tmp_path / "a").read_bytes())
    answers = [chat["messages"][1]["content"] for chat in chats]
    assert answers[:2] != answers[2:]
