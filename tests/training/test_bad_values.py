"""Every command with every kind of bad value for every option: one line, exit status 1 or 2, no traceback."""

import argparse
import json
import os
from pathlib import Path

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main, make_parser
from eagle3_hf.commands import values
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import chats


COMMANDS = (
    *("datagen", "show-mask", "features", "bench", "check", "diagnose", "trace", "chat", "inspect", "convert"),
)
NUMBERS = {values.count, values.amount, values.share, values.positive, values.not_negative}
NO_NUMBERS = ["", "x", "nan", "-1", "inf", "1e9999", "0x10", "1,5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, a head, chats and questions, and things of the wrong kind."""
    path = tmp_path_factory.mktemp("things")
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    target = tiny_target(tokenizer)
    target.save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    Eagle3DraftModel.from_target(target, draft_vocab=range(200)).save_pretrained(path / "head")
    (path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats(10)))
    (path / "tasks").mkdir()
    (path / "tasks" / "qa.jsonl").write_text('{"turns": ["What is the sea?"]}\n')
    (path / "binary").write_bytes(bytes(range(256)))
    (path / "empty").write_text("")
    (path / "brace.json").write_text("{")
    (path / "nothing").mkdir()
    broken = path / "broken"
    broken.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (broken / name).write_bytes(b"\xff\xfe{")
    listed = path / "listed"
    listed.mkdir()
    (listed / "config.json").write_text("[1]")
    return path


BAD_PLACES = [
    "missing",
    "a/b/c/missing",
    "binary",
    "empty",
    "brace.json",
    "nothing",
    "broken",
    "listed",
    "\0",
    "x" * 300,
]


def valid(folder: Path, out: Path, command: str) -> list[str]:
    """Words of a call that would do, so that nothing but the bad value is wrong."""
    target, head, data = str(folder / "target"), str(folder / "head"), str(folder / "chats.jsonl")
    return {
        "datagen": [target, str(out / "chats"), "--num-chats", "1", "--max-new-tokens", "4", "--quiet"],
        "show-mask": [target, data],
        "features": [target, data, str(out / "store"), "--quiet"],
        "bench": [
            target,
            head,
            "--prompts",
            str(folder / "tasks"),
            "--max-new-tokens",
            "4",
            "--output",
            str(out / "b"),
        ],
        "check": [target, head, "--prompts", str(folder / "tasks"), "--max-new-tokens", "2"],
        "trace": [target, head, "--max-new-tokens", "2"],
        "diagnose": [target, head, "--data", data, "--rounds", "3", "--no-sweep"],
        "chat": [target, head],
        "inspect": [head, "--target", target],
        "convert": [head, str(out / "head"), "--to", "vllm"],
    }[command]


def actions(command: str) -> list[argparse.Action]:
    (commands,) = [action for action in make_parser()._actions if action.dest == "command"]
    return [action for action in commands.choices[command]._actions if action.dest != "help"]


def with_value(words: list[str], action: argparse.Action, place: int | None, value: str) -> list[str]:
    """The words with one value exchanged: the positional's, or the option's, last so that it wins."""
    if place is not None:
        return [*words[:place], value, *words[place + 1 :]]
    return [*words, f"{action.option_strings[0]}={value}"]


def refused(words: list[str], capsys) -> str:
    """The line that a call ends with; it must be the only one besides argparse's usage."""
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status in (1, 2), (status, words, said)
    assert "Traceback" not in said
    *before, last = said.strip().splitlines()
    assert last.startswith(f"eagle3-hf {words[0]}: "), said
    assert "unexpected" not in last, said
    if status == 2:
        assert before[0].startswith("usage: ")
    return last


def number_options() -> list[tuple[str, str]]:
    found = [(command, action) for command in COMMANDS for action in actions(command)]
    return [(command, action.option_strings[0]) for command, action in found if action.type in NUMBERS]


@pytest.mark.parametrize(("command", "option"), number_options())
def test_no_numbers(command, option, folder, tmp_path, capsys):
    (action,) = [action for action in actions(command) if option in action.option_strings]
    for value in NO_NUMBERS:
        words = with_value(valid(folder, tmp_path, command), action, None, value)
        line = refused([command, *words], capsys)
        assert f"argument {option}: expected " in line
        assert line.endswith(f"got {value!r}")


def test_every_option_that_takes_a_number_is_checked():
    for command in COMMANDS:
        assert not [action.dest for action in actions(command) if action.type in (int, float)]
    assert len(number_options()) >= 20


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_nothing(command, folder, tmp_path, capsys):
    """Empty names are no places; words that are none of the choices, no JSON, no dtype, no device, no tree."""
    checked = 0
    for place, action in enumerate(actions(command)):
        if action.nargs == 0 or action.dest in ("split", "server", "model_name"):
            continue
        positional = (
            None if action.option_strings else len([a for a in actions(command)[:place] if not a.option_strings])
        )
        words = with_value(valid(folder, tmp_path, command), action, positional, "")
        refused([command, *words], capsys)
        checked += 1
    assert checked >= 3


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--dtype", "bf61", "'bf61' is not a dtype: choose from auto, float32, fp32, bfloat16, bf16"),
        ("--device", "auto", "auto is not a device; pass it as --device_map"),
        ("--device", "gpu", "'gpu' is not a device, such as cpu, cuda or cuda:1"),
        ("--device", "cuda:99", "this machine has no cuda:99, but cpu"),
        ("--device", "meta", "this machine has no meta, but cpu"),
        ("--device-map", "{", "{ is not valid JSON"),
        ("--device-map", "everywhere", "'everywhere' is not a device"),
    ],
)
@pytest.mark.parametrize("command", ["datagen", "features", "bench", "diagnose", "train"])
def test_placement(command, option, value, words, folder, tmp_path, capsys):
    """The same words in every command."""
    if command == "train":
        call = ["--target", "t", "--train_data", "d", "--output_dir", str(tmp_path), option, value]
    else:
        call = [*valid(folder, tmp_path, command), option, value]
    assert words in refused([command, *call], capsys)


def positionals(command: str) -> list[tuple[int, str]]:
    found = [action for action in actions(command) if not action.option_strings]
    return [(place, action.dest) for place, action in enumerate(found)]


INPUTS = [(command, place) for command in COMMANDS for place, dest in positionals(command) if dest != "output"]


@pytest.mark.parametrize(("command", "place"), INPUTS)
def test_models_and_data_of_the_wrong_kind(command, place, folder, tmp_path, capsys):
    for name in BAD_PLACES:
        value = name if name in ("\0", "x" * 300) else str(folder / name)
        words = valid(folder, tmp_path, command)
        words[place] = value
        refused([command, *words], capsys)


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("datagen", "--seeds"),
        ("datagen", "--prompts"),
        ("bench", "--prompts"),
        ("check", "--prompts"),
        ("diagnose", "--data"),
        ("inspect", "--target"),
        ("convert", "--target"),
    ],
)
def test_files_of_the_wrong_kind(command, option, folder, tmp_path, capsys):
    for name in BAD_PLACES:
        if (option, name) in (("--seeds", "brace.json"),):  # any line of text may begin a chat
            continue
        value = name if name in ("\0", "x" * 300) else str(folder / name)
        words = valid(folder, tmp_path, command)
        if option == "--prompts":
            words = [word for word in words if word not in ("--num-chats", "1")]
        refused([command, *words, option, value], capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"turns": [5]}', "line 1: expected an object with `turns`"),
        (b'{"turns": 5}', "line 1: expected an object with `turns`"),
        (b'{"turns": []}', "line 1: expected an object with `turns`"),
        (b'{"turns": ["a"]}\n[1]', "line 2: expected an object with `turns`"),
        (b'{"turns": ["a"]}\n{', "line 2: not JSON"),
        (b'{"turns": ["\xff"]}', "line 1"),
    ],
)
def test_questions_of_the_wrong_kind(content, words, folder, tmp_path, capsys, monkeypatch):
    """Said before the target is loaded."""
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    (tmp_path / "qa.jsonl").write_bytes(content)
    line = refused(["bench", *valid(folder, tmp_path, "bench"), "--prompts", str(tmp_path)], capsys)
    assert f"{tmp_path / 'qa.jsonl'}" in line
    assert words in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", "is neither a local folder nor a Hub id"),
        ("binary", "is a file: expected the folder of a model"),
        ("nothing", "has no config.json: it is not the folder of a model"),
        ("broken", "is not valid JSON"),
        ("listed", "is not a config: expected a JSON object, found a list"),
    ],
)
def test_what_is_wrong_with_a_model_is_said_alike(name, words, folder, tmp_path, capsys):
    for command in ("datagen", "show-mask", "features", "bench"):
        line = refused([command, str(folder / name), *valid(folder, tmp_path, command)[1:]], capsys)
        assert str(folder / name) in line
        assert words in line
    train = ["train", "--target", str(folder / name), "--train_data", "d", "--output_dir", str(tmp_path)]
    for call in (train, ["inspect", str(folder / "head"), "--target", str(folder / name)]):
        assert words in refused(call, capsys)


@pytest.mark.parametrize("command", ["datagen", "features", "convert", "train"])
def test_outputs_of_the_wrong_kind(command, folder, tmp_path, capsys, monkeypatch):
    """Before anything is encoded or loaded."""
    for name in ("eagle3_hf.training.data.sources.load_chats", "transformers.AutoTokenizer.from_pretrained"):
        monkeypatch.setattr(name, lambda *args, **kwargs: pytest.fail("the output comes first"))
    (tmp_path / "file").write_text("mine")
    for output in (
        tmp_path / "file" / "below",
        "/proc/none/out",
        *([tmp_path, Path("/dev/null")] if command == "datagen" else []),
    ):
        if command == "train":
            words = ["--target", str(folder / "target"), "--train_data", str(folder / "chats.jsonl"), "--use_cpu"]
            words += ["--output_dir", str(output)]
        else:
            words = valid(folder, tmp_path, command)
            words[len(positionals(command)) - 1] = str(output)
        line = refused([command, *words], capsys)
        assert str(output) in line
    assert (tmp_path / "file").read_text() == "mine"


TRAIN_NUMBERS = [
    "held_out",
    "tau_prompts",
    "draft_vocab_size",
    "max_length",
    "ttt_steps",
    "position_share",
    "learning_rate",
]
TRAIN_NUMBERS += [
    "lora_r",
    "lora_dropout",
    "step_decay",
    "num_train_epochs",
    "per_device_train_batch_size",
    "warmup_steps",
]


@pytest.mark.parametrize("option", TRAIN_NUMBERS)
def test_no_numbers_for_train(option, tmp_path, capsys):
    """On the command line and in a file."""
    words = ["train", "--target", "t", "--train_data", "d", "--output_dir", str(tmp_path)]
    for value in NO_NUMBERS:
        assert f"--{option}" in refused([*words, f"--{option}={value}"], capsys)
    (tmp_path / "c.yaml").write_text(f"target: t\ntrain_data: d\noutput_dir: {tmp_path}\n{option}: -3\n")
    assert refused(["train", str(tmp_path / "c.yaml")], capsys).endswith("got '-3'")


@pytest.mark.parametrize("option", ["accelerator_config", "deepspeed", "fsdp_config"])
def test_configs_of_libraries(option, tmp_path, capsys):
    words = ["train", "--target", "t", "--train_data", "d", "--output_dir", str(tmp_path)]
    for value in ("{", "[1]", str(tmp_path / "none.json"), ""):
        assert f"--{option}" in refused([*words, f"--{option}={value}"], capsys)


@pytest.mark.parametrize("name", ["missing", "binary", "empty", "brace.json", "nothing", "listed/config.json"])
def test_config_files_of_the_wrong_kind(name, folder, tmp_path, capsys):
    assert str(folder / name) in refused(["train", str(folder / name)], capsys)


@pytest.mark.skipif(os.environ.get("HF_HUB_OFFLINE") != "1", reason="the Hub would be asked")
@pytest.mark.parametrize("command", COMMANDS)
def test_hub_ids_that_are_not_here(command, folder, tmp_path, capsys):
    words = valid(folder, tmp_path, command)
    words[0] = "nobody/no-such-model"
    assert "nobody/no-such-model is not a local folder or file" in refused([command, *words], capsys)
