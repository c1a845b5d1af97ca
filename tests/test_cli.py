"""The command line: arguments reach the functions, and a refusal is one line and an exit status."""

import json

import pytest
import torch

from chats import chat_tokenizer, tiny_target
from eagle3_hf.cli import main


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    tiny_target(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def datagen(model_folder, output, *options):
    lengths = ["--max-new-tokens", "6", "--max-user-tokens", "6", "--quiet", "--device", "cpu"]
    return main(["datagen", model_folder, str(output), *lengths, *options])


def test_datagen_writes_and_continues(model_folder, tmp_path, capsys):
    seeds = tmp_path / "seeds.txt"
    seeds.write_text("Write a poem\n\nWhat is\n", encoding="utf-8")
    output = tmp_path / "chats.jsonl"
    options = ["--seeds", str(seeds), "--batch-size", "2", "--greedy-share", "1", "--dtype", "float32"]
    assert datagen(model_folder, output, "--num-chats", "2", *options) == 0
    first = output.read_text(encoding="utf-8")
    assert datagen(model_folder, output, "--num-chats", "4", *options) == 0
    assert capsys.readouterr().out.count("2 chats written") == 2
    assert output.read_text(encoding="utf-8").startswith(first)
    chats = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(chats) == 4
    assert all(chat["messages"][0]["content"].startswith(("Write a poem", "What is")) for chat in chats)
    assert {chat["decoding"] for chat in chats} == {"greedy"}


def test_datagen_seed(model_folder, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert datagen(model_folder, tmp_path / name, "--num-chats", "2", "--seed", seed) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_refusals_are_one_line(model_folder, tmp_path, capsys):
    output = tmp_path / "chats.jsonl"
    assert datagen(model_folder, output, "--num-chats", "2", "--seeds", str(tmp_path / "none.txt")) == 1
    assert "none.txt" in capsys.readouterr().err
    assert datagen(model_folder, tmp_path / "none" / "chats.jsonl", "--num-chats", "2") == 1
    assert "does not exist" in capsys.readouterr().err
    assert datagen(model_folder, output, "--num-chats", "2", "--top-p", "2") == 1
    assert "eagle3-hf datagen: top_p is 2.0" in capsys.readouterr().err
    assert not output.exists()


def test_interruption_says_so(model_folder, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3_hf.training.synthesis.synthesize", interrupt)
    assert datagen(model_folder, tmp_path / "chats.jsonl", "--num-chats", "2") == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["datagen"], ["datagen", "model", "out"], ["nonsense"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: eagle3-hf" in capsys.readouterr().err
