"""The command line: arguments reach the functions, and a refusal is one line and an exit status."""

import argparse
import errno
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import eagle3_hf
from eagle3_hf.cli import main, make_parser
from eagle3_hf.commands import placement
from eagle3_hf.commands.errors import in_words
from eagle3_hf.commands.hub import stay_offline_where_unreachable
from eagle3_hf.commands.placement import device
from eagle3_hf.training.datagen.errors import ServerError
from eagle3_hf.utils.devices import own_device
from support.chats import chat_tokenizer, tiny_target


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
    assert "blank.txt is empty: write the beginning of a user turn on each line" in capsys.readouterr().err
    assert datagen(model_folder, tmp_path / "none" / "chats.jsonl", "--num-chats", "2") == 1
    assert "does not exist" in capsys.readouterr().err
    assert datagen(model_folder, output, "--num-chats", "2", "--top-p", "0") == 1
    assert "eagle3-hf datagen: top_p is 0.0" in capsys.readouterr().err
    assert not output.exists()


def test_interruption_says_so(model_folder, tmp_path, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3_hf.training.datagen.synthesis.synthesize", interrupt)
    assert datagen(model_folder, tmp_path / "my chats.jsonl", "--num-chats", "2") == 130
    first, command = capsys.readouterr().err.strip().splitlines()[-2:]
    assert first == "interrupted; the same command resumes from what was saved:"
    assert command.startswith(f"eagle3-hf datagen {model_folder} '{tmp_path}/my chats.jsonl' --max-new-tokens 6 ")
    assert command.endswith("--device cpu --num-chats 2")
    monkeypatch.setattr("eagle3_hf.inspection.inspect_head", interrupt)
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


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
    options = ["--greedy-share", "1", "--chat_template_kwargs", '{"mood": 1}']
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
    from support.chat_server import chat_server, reply

    output = tmp_path / "chats.jsonl"
    with chat_server(lambda body: reply(f"{body['model']}, {body['top_k']}.")) as (url, _):
        extra = ["--server", url, "--concurrency", "2", "--request-extra", '{"top_k": -1}']
        assert answer("none", output, prompts, *extra) == 1
        assert "does not serve none, but tiny" in capsys.readouterr().err
        assert answer("none", output, prompts, *extra, "--model-name", "tiny", "--timeout", "9") == 0
    assert [chat["messages"][1]["content"] for chat in lines_of(output)] == ["tiny, -1."] * 3


def test_datagen_options_of_the_other_job(model_folder, prompts, tmp_path, capsys):
    assert answer(model_folder, tmp_path / "a", prompts, "--seeds", "x", "--top-p", "1") == 1
    assert "--seeds, --top_p: no meaning with --prompts" in capsys.readouterr().err
    assert datagen(model_folder, tmp_path / "a", "--num-chats", "2", "--server", "http://x") == 1
    assert "--server: no meaning with --num_chats" in capsys.readouterr().err
    extra = ["--concurrency", "2", "--request-extra", '{"top_k": -1}']
    assert answer(model_folder, tmp_path / "a", prompts, *extra) == 1
    assert "--concurrency, --request_extra: no meaning without --server" in capsys.readouterr().err
    (tmp_path / "about.txt").write_text("\n")
    assert answer(model_folder, tmp_path / "a", prompts, "--about", str(tmp_path / "about.txt")) == 1
    assert "about.txt is empty: write a user turn with {text}" in capsys.readouterr().err
    assert datagen(model_folder, tmp_path / "a") == 1
    assert "pass either --prompts (answer a dataset) or --num_chats" in capsys.readouterr().err


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
    assert f"there is no chat 3: {data} has 3, counted from 0" in capsys.readouterr().err


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
    subprocess.run([*launch, *command], check=True, capture_output=True, cwd=Path(__file__).resolve().parents[2])
    assert answer(model_folder, tmp_path / "one", prompts, "--batch-size", "1") == 0
    assert output.read_bytes() == (tmp_path / "one").read_bytes()
    assert not list(tmp_path.glob("two.part*"))


# ----- errors and suggestions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["bnech", "m", "h"], "did you mean bench?"),
        (["bench", "m", "h", "--dtyp", "bf16", "--questoins", "3"], "did you mean --questions?"),
        (
            ["bench", "m", "h", "--maxnewtokens=3"],
            "unrecognized arguments: --maxnewtokens=3; did you mean --max_new_tokens?",
        ),
        (["convert", "m", "o", "--tu", "vllm"], "required: --to; did you mean --to?"),
        (["train", "--targt", "t", "--train_data", "d"], "required: --target; did you mean --target?"),
        (["train", "--target", "t", "--train_data", "d", "--learnin_rate", "1"], "did you mean --learning_rate?"),
        (["bench", "m", "h", "--zzz"], "unrecognized arguments: --zzz\n"),
    ],
)
def test_misspelt_words_get_a_suggestion(words, hint, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert hint in said
    assert f"eagle3-hf {words[0]}: error" in said or words[0] == "bnech"


def test_options_may_be_spelt_with_underscores_and_dtypes_short(model_folder, tmp_path):
    options = ["--num_chats", "1", "--batch_size=1", "--dtype", "fp32"]
    assert datagen(model_folder, tmp_path / "chats.jsonl", *options) == 0


def test_a_value_is_not_taken_for_an_option(capsys):
    """`r.html` without its first two characters is the name of an option."""
    with pytest.raises(SystemExit):
        main(["bench", "m", "h", "--html", "r.html", "--zzz"])
    assert "unrecognized arguments: --zzz" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a"),
            "the disk is full: .*runs/a.*run the same command",
        ),
        (RuntimeError("PytorchStreamWriter failed writing file data/1: file write failed"), "the disk is full: "),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), "^gguf is not installed .*: pip install gguf$"),
        (
            OSError("We couldn't connect to 'https://x' to load the files.\nCheck."),
            "^no/where is not a local folder or file",
        ),
        (ServerError("http://x/v1 gave no answer: Name or service not known"), "^http://x/v1 gave no answer: Name"),
        (KeyError("rope"), "^unexpected KeyError: rope .eagle3-hf --traceback COMMAND ... shows where.$"),
        (KeyError("a metric is not there"), "^unexpected KeyError: a metric is not there "),
        (AssertionError(), "^unexpected AssertionError: "),
        (ValueError("a\nb\n\nc"), "^a b c$"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_in_words(error, words):
    said = in_words(error, ["no/where"])
    assert re.search(words, said)
    assert "\n" not in said


def test_a_disk_that_fills_behind_another_error():
    """transformers and torch may raise something else while they handle it."""
    error = KeyError("state")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert in_words(error).startswith("the disk is full: ")


def test_a_traceback_is_shown_where_it_is_asked_for(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise KeyError("rope")

    monkeypatch.setattr("eagle3_hf.inspection.inspect_head", fail)
    assert main(["inspect", "x"]) == 1
    assert capsys.readouterr().err.startswith("eagle3-hf inspect: unexpected KeyError: rope (")
    with pytest.raises(KeyError):
        main(["--traceback", "inspect", "x"])


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, capsys):
    """Its client would try every file five times again; a name that is here asks nobody."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    for name in ("HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "")
    start = time.perf_counter()
    assert main(["inspect", "nobody/nothing"]) == 1
    assert time.perf_counter() - start < 15
    first, last = capsys.readouterr().err.strip().splitlines()
    assert first == "http://127.0.0.1:9 cannot be reached: for nobody/nothing only cached files are used"
    assert last.startswith(
        "eagle3-hf inspect: nobody/nothing is not a local folder or file, and the Hub cannot be reached"
    )
    assert constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    stay_offline_where_unreachable([str(Path(__file__))])
    assert not constants.HF_HUB_OFFLINE


# ----- devices and headers -------------------------------------------------------------------------------------------


def test_every_report_names_device_and_dtype(model_folder, prompts, tmp_path, capsys):
    (tmp_path / "chats.jsonl").write_text('{"text": "The sea sings to the ships."}\n')
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "qa.jsonl").write_text('{"turns": ["What is the sea?"]}\n')
    place = ["--device", "cpu", "--dtype", "bf16"]
    calls = [
        ["datagen", model_folder, str(tmp_path / "o"), "--prompts", str(prompts), "--max-new-tokens", "2", "--quiet"],
        ["features", model_folder, str(tmp_path / "chats.jsonl"), str(tmp_path / "store"), "--quiet"],
        [
            "bench",
            model_folder,
            "random",
            "--prompts",
            str(tmp_path / "tasks"),
            "--output",
            str(tmp_path / "answers.jsonl"),
            "--max-new-tokens",
            "2",
            "--tree",
            "2/2/1",
        ],
    ]
    for call in calls:
        assert main([*call, *place]) == 0
        assert f"cpu ({torch.get_num_threads()} threads), bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(("supported", "dtype", "warns"), [(False, "bf16", 1), (True, "bf16", 0), (False, "fp32", 0)])
def test_a_dtype_without_instructions_is_told(model_folder, monkeypatch, caplog, supported, dtype, warns):
    """On such a CPU a target in bfloat16 can be tens of times slower, and nothing else would say why."""
    monkeypatch.setattr("eagle3_hf.utils.devices._computes", lambda _: supported)
    options = argparse.Namespace(model=str(model_folder), device="cpu", device_map=None, dtype=placement.dtype(dtype))
    placement.load_target(options)
    assert caplog.text.count("pass --dtype float32") == warns


def test_the_device_of_a_process(monkeypatch):
    """As a launcher starts it beside others."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert str(own_device()) == "cuda:0"
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(own_device()) == "cuda:1"
    assert [device(text) for text in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    for text in ("cuda:2", "mps"):
        with pytest.raises(
            argparse.ArgumentTypeError, match=f"this machine has no {text}, but cpu, cuda, cuda:0, cuda:1"
        ):
            device(text)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match=r"process 2 \(LOCAL_RANK\), but this machine has only 2 cuda"):
        own_device()


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ([], {"": "cuda:1"}),
        (["--device", "cpu"], None),
        (["--device-map", '{"": "cpu"}'], {"": "cpu"}),
        (["--device-map", "balanced_low_0"], "balanced_low_0"),
    ],
)
def test_every_command_loads_its_target_where_the_options_say(options, place, model_folder, tmp_path, monkeypatch):
    """On a machine that has no accelerator; its targets are asked for, and not loaded."""

    def load(model, **options):
        asked.append((model, options))
        raise RuntimeError("stop here")

    monkeypatch.setattr("eagle3_hf.utils.devices.own_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)
    (tmp_path / "chats.jsonl").write_text('{"text": "The sea sings to the ships."}\n')
    calls = [
        ["datagen", model_folder, str(tmp_path / "o"), "--num-chats", "1"],
        ["features", model_folder, str(tmp_path / "chats.jsonl"), str(tmp_path / "store")],
        ["bench", model_folder, "random", "--round-cost"],
    ]
    for call in calls:
        asked: list[tuple] = []
        assert main([*call, *options, "--dtype", "fp16"]) == 1
        assert asked == [(model_folder, {"dtype": "float16", "device_map": place})]


def test_a_target_is_spread_by_one_process_only(model_folder, prompts, tmp_path, monkeypatch, capsys):
    options = ["--prompts", str(prompts), "--max-new-tokens", "2", "--quiet", "--device-map"]
    assert main(["datagen", model_folder, str(tmp_path / "a"), *options, '{"": "cpu"}']) == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["datagen", model_folder, str(tmp_path / "b"), *options, "auto"]) == 1
    assert (
        "--device_map auto spreads the target over all devices, and each of the 2 processes" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["datagen", model_folder, str(tmp_path / "b"), *options, "auto", "--device", "cpu"])
    assert "argument --device: not allowed with argument --device_map" in capsys.readouterr().err


# ----- what comes next -----------------------------------------------------------------------------------------------


def test_a_finished_command_names_the_next(model_folder, prompts, tmp_path, capsys):
    output = tmp_path / "my chats.jsonl"
    assert answer(model_folder, output, prompts) == 0
    assert capsys.readouterr().out.endswith(f"next: eagle3-hf show-mask {model_folder} '{output}'\n")
    assert main(["show-mask", model_folder, str(output), "--max-length", "90", "--last-turn-only"]) == 0
    train = f"next: eagle3-hf train --target {model_folder} --train_data '{output}' --output_dir HEAD"
    assert capsys.readouterr().out.endswith(f"{train} --max_length 90 --last_turn_only\n")


def test_what_changed_since_an_earlier_run_is_named(model_folder, prompts, tmp_path, capsys):
    assert answer(model_folder, tmp_path / "chats", prompts) == 0
    for options, words in (
        (["--max-new-tokens", "7"], "another max_new_tokens: use the options of that run"),
        (["--temperature", "0.5", "--seed", "3"], "another temperature and another seed: use the options of that run"),
        (["--chat_template_kwargs", '{"a": 1}'], "another template_kwargs: use the options of that run"),
    ):
        assert answer(model_folder, tmp_path / "chats", prompts, *options) == 1
        assert f"answers prompt 0 with {words}" in capsys.readouterr().err


# ----- the examples --------------------------------------------------------------------------------------------------


def test_the_demo_target_asks_for_gguf_before_it_is_downloaded(tmp_path, monkeypatch):
    """A package that is not there is one that Python finds nowhere."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "examples"))
    demo = importlib.import_module("demo_target")
    monkeypatch.setattr(demo, "_download", lambda scratch: pytest.fail("95 MB for nothing"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r'gguf, .* is missing: pip install "eagle3-hf\[demo\]"'):
        demo.demo_target(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


# ----- one form of all options ---------------------------------------------------------------------------------------


def parsers() -> dict:
    (commands,) = [action for action in make_parser()._actions if action.dest == "command"]
    return {name: parser for name, parser in commands.choices.items() if parser.prefix_chars == "-"}


def test_options_have_the_same_form_in_all_commands():
    """Underscores, a file of options, and the same type, choices and default where the name is the same."""
    seen: dict[str, tuple] = {}
    for command, parser in parsers().items():
        assert "--config" in parser._option_string_actions
        assert not [action for action in parser._actions if not action.option_strings], "positions are options too"
        for action in parser._actions:
            (name,) = [name for name in action.option_strings if name.startswith("--")]
            assert "-" not in name[2:], (command, name)
            if name in (
                "--device",
                "--device_map",
                "--dtype",
                "--revision",
                "--trust_remote_code",
                "--seed",
                "--model",
            ):
                kind = type(action), action.type, action.choices, action.default
                assert seen.setdefault(name, kind) == kind, (command, name)
    assert {"--model", "--dtype", "--revision"} <= seen.keys()


@pytest.mark.parametrize("way", ["positions", "options", "mixed", "hyphens", "file", "file and positions", "behind"])
def test_ways_to_give_the_same_options(way, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("num-chats: 2\nbatch_size: 3\nchat_template_kwargs: {mood: 1}\nquiet: true\n")
    if way in ("file", "file and positions"):
        file.write_text(file.read_text() + "target: m\n" + ("output: o.jsonl\n" if way == "file" else ""))
    places = {
        "positions": ["m", "o.jsonl"],
        "options": ["--model", "m", "--output=o.jsonl"],
        "mixed": ["--target", "m", "o.jsonl"],
        "hyphens": ["m", "o.jsonl", "--max-new-tokens", "9"],
        "file": [],
        "file and positions": ["o.jsonl"],
        "behind": ["--quiet", "m", "--temperature", "1", "o.jsonl"],
    }[way]
    options = ["--max_new_tokens", "9", "--config", str(file), "--batch_size", "4"]
    arguments = make_parser().parse_args(["datagen", *places, *options])
    assert (arguments.model, arguments.output) == ("m", Path("o.jsonl"))
    given = arguments.num_chats, arguments.batch_size, arguments.max_new_tokens, arguments.quiet
    assert given == (2, 4, 9, True), "the command line overrides the file"
    assert arguments.chat_template_kwargs == {"mood": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 3", "batchsize is not an option of eagle3-hf datagen; did you mean batch_size?"),
        ("batch_size: none", "argument --batch_size: expected an integer of at least 1, got 'none'"),
        ("batch_size: [1, 2]", "batch_size takes one value, got [1, 2]"),
        ("quiet: 1", "quiet is on or off: expected true or false, got 1"),
        ("- a", "expected options by name, found a list"),
        ("a: [", "is not valid yaml"),
        ("", "is empty"),
    ],
)
def test_files_of_options_that_are_wrong(text, message, tmp_path, capsys):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as stop:
        main(["datagen", "m", "o", "--config", str(file)])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(file) in said


def test_lists_and_choices_in_a_file_of_options(tmp_path, capsys):
    file = tmp_path / "options.json"
    file.write_text('{"head": "h", "temperature": [0, 0.7], "tree": ["15/4/4", "auto"], "max_new_tokens": 8}')
    arguments = make_parser().parse_args(["bench", "m", "--config", str(file)])
    assert (arguments.temperature, arguments.tree, arguments.max_new_tokens) == ([0.0, 0.7], ["15/4/4", "auto"], [8])
    assert arguments.more_heads == ["h"]
    arguments = make_parser().parse_args(["bench", "m", "--tree", "7/2/2", "--config", str(file), "--tree", "9/3/3"])
    assert arguments.tree == ["7/2/2", "9/3/3"], "the command line overrides the file, also where it may be repeated"
    file.write_text('{"to": "vlm"}')
    with pytest.raises(SystemExit):
        main(["convert", "h", "o", "--config", str(file)])
    assert "argument --to: invalid choice: 'vlm'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", "h", "o", "more", "--to", "vllm"])
    assert "unrecognized arguments: more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["convert", "h", "--to", "vllm"])
    assert "the following arguments are required: OUT" in capsys.readouterr().err


def test_a_targets_revision_and_code(model_folder, tmp_path, monkeypatch, capsys):
    """Passed on to whatever is loaded of the target; off where they are not given."""
    asked = []

    def load(model, **options):
        asked.append(options)
        raise RuntimeError("stop here")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", load)
    data = tmp_path / "chats.jsonl"
    data.write_text('{"text": "The sea sings to the ships."}\n')
    for command in (
        ["show-mask", model_folder, str(data)],
        ["features", model_folder, str(data), str(tmp_path / "s")],
    ):
        assert main(command) == 1
        assert main([*command, "--revision", "v2", "--trust-remote-code"]) == 1
    assert asked == [{}, {"revision": "v2", "trust_remote_code": True}] * 2
    if importlib.util.find_spec("bitsandbytes") is None:
        assert main(["datagen", model_folder, str(tmp_path / "o"), "--num_chats", "1", "--load_in_4bit"]) == 1
        monkeypatch.undo()
        assert main(["datagen", model_folder, str(tmp_path / "o"), "--num_chats", "1", "--load_in_4bit"]) == 1
        assert "--load_in_4bit needs bitsandbytes, which is missing" in capsys.readouterr().err


def test_version_and_environment(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"eagle3-hf {eagle3_hf.__version__}\n"
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    assert f"- torch: {torch.__version__}" in said
    assert "- accelerators: " in said
