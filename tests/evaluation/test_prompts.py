"""Questions from every source, and which of them are asked."""

import json

import pytest

from eagle3_hf.evaluation.prompts import BUILT_IN, Question, fingerprint, load_questions


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_the_built_in_set_has_every_kind():
    questions = load_questions()
    kinds = [question.task for question in questions]
    assert len(set(kinds)) == 9
    assert {kinds.count(kind) for kind in kinds} == {4}
    assert all(len(question.turns) > 1 for question in questions if question.task == "multi-turn")
    assert len({question.turns for question in questions}) == 36


def test_a_wheel_has_the_built_in_set():
    from pathlib import Path

    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"evaluation/{BUILT_IN.name}"' in pyproject


def test_a_folder_of_tasks(tmp_path):
    write(tmp_path / "qa.jsonl", [{"question_id": 7, "category": "x", "turns": ["a", "b"]}, {"turns": ["c"]}])
    write(tmp_path / "code.jsonl", [{"turns": ["d"]}])
    write(tmp_path / "other.jsonl", [{"something": 1}])
    found = {question.task: question for question in load_questions(tmp_path, per_task=9) if question.id != "2"}
    assert found == {"code": Question("1", "code", ("d",)), "qa": Question("7", "qa", ("a", "b"))}


def test_one_file_of_several_categories(tmp_path):
    path = write(tmp_path / "spec.jsonl", [{"category": "math", "turns": ["a"]}, {"turns": ["b"]}])
    assert [(each.task, each.turns) for each in load_questions(path)] == [("math", ("a",)), ("spec", ("b",))]


def test_chats_are_asked_by_the_turns_of_their_user(tmp_path):
    chat = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "told"},
        {"role": "user", "content": "b"},
    ]
    path = write(
        tmp_path / "chats.jsonl", [{"messages": chat}, {"prompt": "c"}, {"prompt": "d", "completion": "told"}]
    )
    found = sorted(load_questions(path), key=lambda question: question.id)
    assert found == [
        Question("0", "chats", ("a", "b"), "Be short."),
        Question("1", "chats", ("c",)),
        Question("2", "chats", ("d",)),
    ]


def test_lists(tmp_path):
    asked = [Question("x", "mine", ("a",)), "b"]
    assert {each.turns for each in load_questions(asked)} == {("a",), ("b",)}
    assert load_questions([{"messages": [{"role": "user", "content": "c"}]}])[0].turns == ("c",)


def test_fewer_questions_are_a_part_of_more(tmp_path):
    path = write(tmp_path / "qa.jsonl", [{"turns": [f"question {number}"]} for number in range(30)])
    few, many = load_questions(path, 5), load_questions(path, 20)
    assert few == many[:5]
    assert few != load_questions(path, 5, seed=1)
    assert few == load_questions(path, 5)
    assert fingerprint(few) != fingerprint(many)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"turns": ["a"]}, {"turns": "b"}], "line 2: expected an object with `turns`"),
        (
            [{"question_id": 1, "turns": ["a"]}, {"question_id": 1, "turns": ["b"]}],
            "two questions of qa have the id 1",
        ),
        ([{"text": "no question"}], "none of its chats has a turn of a user|holds no questions"),
    ],
)
def test_sources_that_cannot_be_asked(records, words, tmp_path):
    path = write(tmp_path / "qa.jsonl", records)
    with pytest.raises(ValueError, match=words) as caught:
        load_questions(path)
    assert "qa.jsonl" in str(caught.value)
