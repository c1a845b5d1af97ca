"""The command line: arguments reach the functions, and a refusal is one line and an exit status."""

import json
import subprocess
import sys
from pathlib import Path

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
    said = capsys.readouterr().out
    assert said.count("2 chats written") == 2
    assert "which holds 4 in all" in said
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
    (tmp_path / "blank.txt").write_text("\n \n")
    assert datagen(model_folder, output, "--num-chats", "2", "--seeds", str(tmp_path / "blank.txt")) == 1
    assert "blank.txt is empty: write a beginning of a user turn on each line" in capsys.readouterr().err
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


@pytest.mark.parametrize("arguments", [[], ["datagen"], ["nonsense"]])
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: eagle3-hf" in capsys.readouterr().err


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "What is the sea?"}\n{"prompt": "Sing."}\n{"prompt": "Hello"}\n', encoding="utf-8")
    return path


def answer(model_folder, output, prompts, *options):
    lengths = ["--max-new-tokens", "6", "--quiet", "--device", "cpu", "--dtype", "float32"]
    return main(["datagen", model_folder, str(output), "--prompts", str(prompts), *lengths, *options])


def test_datagen_answers_prompts(model_folder, prompts, tmp_path, capsys, monkeypatch):
    output = tmp_path / "chats.jsonl"
    options = ["--greedy-share", "1", "--template-kwargs", '{"mood": 1}']
    assert answer(model_folder, output, prompts, *options) == 0
    chats = lines_of(output)
    assert [chat["messages"][0]["content"] for chat in chats] == ["What is the sea?", "Sing.", "Hello"]
    assert all(chat["messages"][1]["role"] == "assistant" for chat in chats)
    # A file that is complete needs no target.
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    assert answer(model_folder, output, prompts, *options) == 0
    out = capsys.readouterr().out
    assert "3 chats written" in out
    assert "0 chats written" in out


def test_datagen_in_several_processes(model_folder, prompts, tmp_path, monkeypatch):
    """As a launcher starts them, each told its rank."""
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert answer(model_folder, tmp_path / "two", prompts, "--batch-size", "1") == 0
    assert datagen(model_folder, tmp_path / "own", "--num-chats", "2") == 1
    monkeypatch.undo()
    assert answer(model_folder, tmp_path / "one", prompts, "--batch-size", "1") == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_datagen_asks_about_what_it_wrote(model_folder, prompts, tmp_path):
    templates = tmp_path / "about.txt"
    templates.write_text("Summarize:\\n{text}\n\n", encoding="utf-8")
    assert answer(model_folder, tmp_path / "texts.jsonl", prompts) == 0
    assert answer(model_folder, tmp_path / "about.jsonl", tmp_path / "texts.jsonl", "--about", str(templates)) == 0
    texts = [chat["messages"][-1]["content"] for chat in lines_of(tmp_path / "texts.jsonl")]
    asked = [chat["messages"][0]["content"] for chat in lines_of(tmp_path / "about.jsonl")]
    assert asked == ["Summarize:\n" + text for text in texts]


def test_datagen_asks_a_server(prompts, tmp_path, capsys):
    from chat_server import chat_server, reply

    output = tmp_path / "chats.jsonl"
    with chat_server(lambda body: reply(f"{body['model']}, {body['top_k']}.")) as (url, _):
        extra = ["--server", url, "--concurrency", "2", "--request-extra", '{"top_k": -1}']
        assert answer("none", output, prompts, *extra) == 1
        assert "does not serve none, but tiny" in capsys.readouterr().err
        assert answer("none", output, prompts, *extra, "--model-name", "tiny", "--timeout", "9") == 0
    assert [chat["messages"][1]["content"] for chat in lines_of(output)] == ["tiny, -1."] * 3


def test_datagen_options_of_the_other_job(model_folder, prompts, tmp_path, capsys):
    assert answer(model_folder, tmp_path / "a", prompts, "--seeds", "x", "--top-p", "1") == 1
    assert "--seeds, --top-p: of no meaning with --prompts" in capsys.readouterr().err
    assert datagen(model_folder, tmp_path / "a", "--num-chats", "2", "--server", "http://x") == 1
    assert "--server: of no meaning with --num-chats" in capsys.readouterr().err
    extra = ["--concurrency", "2", "--request-extra", '{"top_k": -1}']
    assert answer(model_folder, tmp_path / "a", prompts, *extra) == 1
    assert "--concurrency, --request-extra: of no meaning without --server" in capsys.readouterr().err
    (tmp_path / "about.txt").write_text("\n")
    assert answer(model_folder, tmp_path / "a", prompts, "--about", str(tmp_path / "about.txt")) == 1
    assert "about.txt is empty: write a user turn with {text}" in capsys.readouterr().err
    assert datagen(model_folder, tmp_path / "a") == 1
    assert "pass --prompts (answer a dataset) or --num-chats" in capsys.readouterr().err


def test_show_mask(model_folder, tmp_path, capsys):
    chat = [{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "The sea sings."}]
    data = tmp_path / "chats.jsonl"
    rows = [{"messages": chat}, {"messages": chat[:1]}, {"messages": [*chat, *chat]}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["show-mask", model_folder, str(data), "--num-chats", "1"]) == 0
    out = capsys.readouterr().out
    assert "The[[ sea sings.<|end|>]]" in out
    assert out.count("--- chat") == 1
    assert "3 chats, " in out
    assert "the longest chat has" in out
    assert "0 cut, 1 with nothing to learn" in out

    assert main(["show-mask", model_folder, str(data), "--empty", "--split", "train"]) == 0
    assert "--- chat 1: " in capsys.readouterr().out
    assert main(["show-mask", model_folder, str(data), "--first", "2", "--last-turn-only", "--max-length", "400"]) == 0
    assert capsys.readouterr().out.count("[[") == 1
    assert main(["show-mask", model_folder, str(data), "--first", "3"]) == 1
    assert f"there is no chat 3: {data} has 3, the first is 0" in capsys.readouterr().err


def test_show_mask_in_colour(model_folder, tmp_path, capsys, monkeypatch):
    data = tmp_path / "text.jsonl"
    data.write_text('{"text": "The sea sings."}\n', encoding="utf-8")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["show-mask", model_folder, str(data)]) == 0
    assert "\033[1;32m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["show-mask", model_folder, str(data)]) == 0
    assert "\033[" not in capsys.readouterr().out
    assert main(["show-mask", model_folder, str(data), "--mask-reasoning"]) == 1
    assert "mask_reasoning needs turns" in capsys.readouterr().err


@pytest.mark.slow
def test_datagen_under_a_launcher(model_folder, prompts, tmp_path):
    """Two real processes, started as `accelerate launch` starts them; the one that ends last merges."""
    output = tmp_path / "two"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29611"]
    options = ["--max-new-tokens", "6", "--quiet", "--device", "cpu", "--dtype", "float32", "--batch-size", "1"]
    command = ["-m", "eagle3_hf.cli", "datagen", model_folder, str(output), "--prompts", str(prompts), *options]
    subprocess.run([*launch, *command], check=True, capture_output=True, cwd=Path(__file__).resolve().parents[1])
    assert answer(model_folder, tmp_path / "one", prompts, "--batch-size", "1") == 0
    assert output.read_bytes() == (tmp_path / "one").read_bytes()
    assert not list(tmp_path.glob("two.part*"))
