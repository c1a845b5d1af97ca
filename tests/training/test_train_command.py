"""`eagle3-hf features` and `eagle3-hf train`: whole runs of a tiny target, by the commands a user types."""

import errno
import json
import re

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main
from eagle3_hf.commands.train import parse
from eagle3_hf.training.arguments import Eagle3TrainingArguments
from eagle3_hf.training.run import make_head, prompt_of_example
from eagle3_hf.training.targets.stored_features import StoredFeatures
from eagle3_hf.training.trainer import Eagle3Trainer
from support.chats import chat_tokenizer, tiny_target
from support.training_runs import chats


pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and chats as a user has them."""
    path = tmp_path_factory.mktemp("user")
    torch.manual_seed(0)
    tokenizer = chat_tokenizer()
    tiny_target(tokenizer).save_pretrained(path / "target")
    tokenizer.save_pretrained(path / "target")
    (path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats(10)))
    return path


CONFIG = """
held_out: 2
draft_vocab_size: 200
per_device_train_batch_size: 2
max_steps: 6
ttt_steps: 3
learning_rate: 2e-3
logging_steps: 1
save_steps: 2
eval_strategy: steps
eval_steps: 3
tau_prompts: 2
tau_new_tokens: 12
report_to: none
use_cpu: true
disable_tqdm: true
"""


BEST = ["--metric_for_best_model", "eval_tau", "--greater_is_better", "true", "--save_steps", "3"]


def config(folder, path, **values) -> str:
    lines = [f"{name}: {json.dumps(value)}" for name, value in values.items()]
    (path / "config.yaml").write_text("\n".join([f"target: {folder / 'target'}", *lines, CONFIG]))
    return str(path / "config.yaml")


def log(path) -> list[dict]:
    return json.loads((path / "trainer_state.json").read_text())["log_history"]


def test_from_chats_to_a_head_with_its_card(folder, tmp_path):
    """An option beside the file wins; the head that comes out decodes, and its card has what was measured."""
    train = config(folder, tmp_path, train_data=str(folder / "chats.jsonl"), output_dir=str(tmp_path / "out"))
    assert main(["train", train, "--max_steps", "4", "--packing", "--max_length", "160", *BEST]) == 0
    out = tmp_path / "out"
    logged = log(out)
    assert [entry["step"] for entry in logged if "loss" in entry] == [1, 2, 3, 4]
    taus = [entry["eval_tau"] for entry in logged if "eval_tau" in entry]
    assert len(taus) >= 2
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["best_metric"] == max(taus)
    assert all(1 <= tau <= 13 for tau in taus)
    assert {"eval_loss", "eval_accuracy_step_2", "eval_simulated_acceptance_length"} <= set(logged[3])
    card = (out / "README.md").read_text()
    assert "200 of 358 tokens" in card
    assert "% of the training targets" in card
    assert (
        f"| held-out prompts, greedy | {json.loads((out / 'eval_results.json').read_text())['eval_tau']:.2f} |" in card
    )
    head, target = Eagle3DraftModel.from_pretrained(out), AutoModelForCausalLM.from_pretrained(folder / "target")
    ids = torch.tensor([chat_tokenizer()("What is the sea?")["input_ids"]])
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=head, **options), target.generate(ids, **options))


def test_the_same_command_resumes(folder, tmp_path, monkeypatch):
    """Ctrl-C at step 4; the run ends as one that was left alone."""
    weights = []
    for name in ("whole", "parts"):
        train = config(folder, tmp_path, train_data=str(folder / "chats.jsonl"), output_dir=str(tmp_path / name))
        if name == "parts":
            step = Eagle3Trainer.training_step
            calls = []

            def interrupted(self, *args, step=step, calls=calls, **kwargs):
                calls.append(1)
                if len(calls) == 4:
                    raise KeyboardInterrupt
                return step(self, *args, **kwargs)

            monkeypatch.setattr(Eagle3Trainer, "training_step", interrupted)
            assert main(["train", train]) == 130
            monkeypatch.setattr(Eagle3Trainer, "training_step", step)
        assert main(["train", train]) == 0
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert [entry["step"] for entry in log(tmp_path / "parts") if "loss" in entry] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_features_and_training_from_them(folder, tmp_path, capsys, dtype):
    """The size is said first; two parts make one store; training from it equals training online, fp8 about."""
    data, store = str(folder / "chats.jsonl"), str(tmp_path / "store")
    command = ["features", str(folder / "target"), data, store, "--store-dtype", dtype, "--shard-size", "3", "--quiet"]
    assert main([*command, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "10 chats, " in said
    assert f"GB in {dtype}" in said
    assert not (tmp_path / "store").exists()
    assert main([*command, "--part", "1/2"]) == 0
    assert main([*command, "--part", "0/2"]) == 0
    assert len(StoredFeatures(store)) == 10
    losses = []
    for source in (data, store):
        out = tmp_path / f"out{len(losses)}"
        train = config(folder, tmp_path, train_data=source, output_dir=str(out))
        assert main(["train", train, "--max_steps", "2", "--tau_prompts", "0"]) == 0
        losses.append([entry["loss"] for entry in log(out) if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if dtype == "float32" else 5e-3)


def test_adapters_on_a_published_head(folder, tmp_path, capsys):
    """The adapters, and the head with them merged in."""
    data = str(folder / "chats.jsonl")
    train = config(folder, tmp_path, train_data=data, output_dir=str(tmp_path / "head"))
    assert main(["train", train, "--max_steps", "2", "--tau_prompts", "0"]) == 0
    out = capsys.readouterr().out
    assert "target on cpu (" in out
    bench = f"next: eagle3-hf bench {folder / 'target'}"
    assert out.endswith(f"the head is in {tmp_path / 'head'}\n{bench} {tmp_path / 'head'}\n")
    train = config(folder, tmp_path, train_data=data, output_dir=str(tmp_path / "lora"), head=str(tmp_path / "head"))
    assert main(["train", train, "--max_steps", "2", "--lora_r", "4"]) == 0
    out, whole = capsys.readouterr().out, tmp_path / "lora" / "merged"
    assert f"the adapters are in {tmp_path / 'lora'}; the head with merged adapters" in out
    assert out.endswith(f"{bench} {whole}\n")
    assert str(tmp_path) not in (tmp_path / "lora" / "README.md").read_text()
    published = Eagle3DraftModel.from_pretrained(tmp_path / "head")
    merged = Eagle3DraftModel.from_pretrained(tmp_path / "lora" / "merged")
    adapted = PeftModel.from_pretrained(published, tmp_path / "lora").merge_and_unload()
    assert torch.allclose(adapted.fc.weight, merged.fc.weight, atol=1e-6)
    assert not torch.equal(load_file(tmp_path / "head" / "model.safetensors")["fc.weight"], merged.fc.weight)


def test_a_disk_that_fills_at_a_checkpoint(folder, tmp_path, monkeypatch, capsys):
    """One line; with room again the same command goes on from the last whole checkpoint, to the same weights."""
    calls, save = [], torch.save

    def full(*args, **kwargs):
        calls.append(1)
        if len(calls) > 4:  # in the second checkpoint
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    train = config(folder, tmp_path, train_data=str(folder / "chats.jsonl"), output_dir=str(tmp_path / "out"))
    monkeypatch.setattr(torch, "save", full)
    assert main(["train", train, "--tau_prompts", "0"]) == 1
    monkeypatch.undo()
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert re.match("eagle3-hf train: the disk is full: .*No space left on device.*run the same command again", last)
    assert main(["train", train, "--tau_prompts", "0"]) == 0
    assert f"resumes from {tmp_path / 'out' / 'checkpoint-'}" in capsys.readouterr().out


def test_a_head_whose_file_names_other_layers(folder, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    Eagle3DraftModel.from_target(target, draft_vocab=range(200), target_layer_ids=[0, 2]).save_pretrained(tmp_path)
    arguments = ["--target", str(folder / "target"), "--head", str(tmp_path), "--train_data", "x"]
    model, _, _ = parse([*arguments, "--target_layer_ids", "0", "1", "--output_dir", str(tmp_path), "--use_cpu"])
    assert make_head(model, target).config.target_layer_ids == [0, 1]


def test_rows_without_an_answer_are_no_prompts(folder, tmp_path):
    """Rows that are tokens already may have nothing to learn; tau is measured on the others."""
    rows = [{"input_ids": list(range(5, 15)), "labels": [-100] * 5 + list(range(10, 15))} for _ in range(6)]
    rows += [{"input_ids": [5, 6, 7, 8], "labels": [-100] * 4} for _ in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = config(folder, tmp_path, train_data=str(tmp_path / "rows.jsonl"), output_dir=str(tmp_path / "out"))
    assert (
        main(["train", train, "--max_steps", "1", "--held_out", "0", "--tau_prompts", "10", "--eval_strategy", "no"])
        == 0
    )


def test_a_target_with_adapters_teaches(folder, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    adapted = get_peft_model(target, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.5)
    adapted.save_pretrained(tmp_path / "adapter")
    losses = []
    for extra in ([], ["--target_adapter", str(tmp_path / "adapter")]):
        out = tmp_path / f"out{len(losses)}"
        train = config(folder, tmp_path, train_data=str(folder / "chats.jsonl"), output_dir=str(out))
        assert main(["train", train, "--max_steps", "1", "--tau_prompts", "0", *extra]) == 0
        losses.append(log(out)[0]["loss"])
    assert losses[0] != losses[1]


def test_a_dry_run_says_what_would_be_done(folder, tmp_path, capsys):
    train = config(folder, tmp_path, train_data=str(folder / "chats.jsonl"), output_dir=str(tmp_path / "out"))
    assert main(["train", train, "--dry_run"]) == 0
    assert not list((tmp_path / "out").glob("*.safetensors"))
    said = capsys.readouterr().out
    assert "8 sequences, 2 a step on 1 process(es), 6 steps of 3 levels, peak learning rate 0.002" in said
    assert "There are only" not in said
    assert "M trained; 0.00 GB with gradients and AdamW's moments" in said


def test_a_dry_run_warns_of_few_steps_and_shows_the_rate_of_the_width(folder, tmp_path, capsys):
    """With epochs and no rate, as a first run is made; the tiny head is narrower than any that a rate is known of."""
    options = ["--target", str(folder / "target"), "--train_data", str(folder / "chats.jsonl"), "--held_out", "2"]
    options += ["--draft_vocab_size", "200", "--output_dir", str(tmp_path / "out"), "--use_cpu", "--packing"]
    assert main(["train", *options, "--dry_run", "--max_length", "160"]) == 0
    said = capsys.readouterr().out
    assert "3 steps of 7 levels, peak learning rate 0.001" in said
    assert "There are only 3 steps, with 8 sequences of up to 160 tokens with several chats each a step; a" in said
    assert "Lower per_device_train_batch_size or max_length, raise num_train_epochs, or train on more chats." in said


def test_a_run_of_another_head_is_not_gone_on_with(folder, tmp_path, capsys):
    """Other options in the folder of an earlier run: refused by name, the checkpoints stay."""
    out = tmp_path / "out"
    train = config(folder, tmp_path, train_data=str(folder / "chats.jsonl"), output_dir=str(out))
    short = ["--max_steps", "2", "--eval_strategy", "no", "--tau_prompts", "0"]
    assert main(["train", train, *short]) == 0
    assert "resumes from" not in capsys.readouterr().out
    assert main(["train", train, *short, "--draft_vocab_size", "150"]) == 1
    assert f"{out / 'checkpoint-2'} is of a head with draft_vocab_size 200, and this run asks for 150" in (
        capsys.readouterr().err
    )
    assert main(["train", train, *short, "--max_steps", "3"]) == 0
    assert f"resumes from {out / 'checkpoint-2'}; for a new run take another output_dir" in capsys.readouterr().out


# ----- what is refused -----------------------------------------------------------------------------------------------


def test_options_and_files(folder, tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"target": "t", "train_data": "d", "step_weights": [1.0, 0.5]}))
    model, data, args = parse([str(tmp_path / "c.json"), "--ttt_steps", "2", "--output_dir", str(tmp_path)])
    assert (model.target, data.train_data, args.step_weights, args.ttt_steps) == ("t", "d", [1.0, 0.5], 2)
    (tmp_path / "c.yaml").write_text("target: t\ntrain_data: d\nlearning_rate: 1e-3\nbf16: true\nwarm_start: false\n")
    model, _, args = parse([str(tmp_path / "c.yaml"), "--output_dir", str(tmp_path), "--use_cpu"])
    assert (args.learning_rate, args.bf16, model.warm_start) == (1e-3, True, False)
    extra = ["--chat_template_kwargs", '{"enable_thinking": false}', "--head_config", '{"num_hidden_layers": 2}']
    model, _, args = parse(["--target", "t", "--train_data", "d", "--output_dir", str(tmp_path), *extra])
    assert (args.chat_template_kwargs, model.head_config) == ({"enable_thinking": False}, {"num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("lines", "extra", "message"),
    [
        ("learnin_rate: 1", [], "learnin_rate is not an option of eagle3-hf train; did you mean learning_rate?"),
        ("- 1", [], "expected options by name, found a list"),
        (None, [], "there is no such file; options begin with --"),
        ("", ["--head_config", "{bad"], r"head_config is '{bad', not a JSON object such as .* \(Expecting"),
        ("", ["--chat_template_kwargs", "[1]"], r"chat_template_kwargs is \[1\], not a JSON object such as"),
        ("", ["--head_config", '{"fc_bais": true}'], "head_config: fc_bais is not a field of Eagle3DraftConfig"),
        ("", ["--lora_r", "4"], "lora_r trains adapters on an existing head: name that head with head"),
        (
            "",
            ["--head", "x", "--head_config", '{"fc_bias": true}'],
            "head_config describes a new head, but head names an existing one",
        ),
        ("", BEST, "metric_for_best_model is eval_tau, but nothing measures it: set tau_prompts"),
        ("", ["--held_out", "10"], r"held_out is 10, but .* has 10 chats: hold fewer out \(--held_out 1\), or name"),
        ("empty", [], "empty.jsonl: there are no chats in it"),
        ("odd", [], "odd.jsonl: no known shape of training data has the columns frage"),
        ("store", ["--last_turn_only"], "these examples are tokens already: set them where the chats are encoded"),
        ("", ["--loss_type", "kl", "--step_weights", "1"], "step_weights has 1 weights, but there are 7 steps"),
    ],
)
def test_refusals(folder, tmp_path, capsys, lines, extra, message):
    path = tmp_path / "config.yaml"
    if lines == "":
        lines = f"target: {folder / 'target'}\ntrain_data: {folder / 'chats.jsonl'}\noutput_dir: {tmp_path / 'out'}"
    if lines in ("empty", "odd"):
        data = tmp_path / f"{lines}.jsonl"
        data.write_text("" if lines == "empty" else '{"frage": "a"}\n')
        lines = f"target: {folder / 'target'}\ntrain_data: {data}\noutput_dir: {tmp_path / 'out'}"
    if lines == "store":
        assert main(["features", str(folder / "target"), str(folder / "chats.jsonl"), str(tmp_path), "--quiet"]) == 0
        lines = f"target: {folder / 'target'}\ntrain_data: {tmp_path}\nheld_out: 2\noutput_dir: {tmp_path / 'out'}"
    if lines is not None:
        path.write_text(lines + "\n")
    assert main(["train", str(path), *extra]) == 1

    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", ["ttt_steps", "ttt_attention", "step_decay", "position_share"])
def test_arguments_are_named_as_they_were_given(name, tmp_path):
    """Not by the names that the head's forward has for them."""
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Eagle3TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, **{name: "x" if name == "ttt_attention" else -1}
        )


def test_a_target_in_messages_is_never_a_class_of_ours(folder, tmp_path, capsys):
    """Of which only the config was read."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    Eagle3DraftModel.from_target(target, draft_vocab=range(200)).save_pretrained(tmp_path / "head")
    config = json.loads((folder / "target" / "config.json").read_text())
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))
    words = ["convert", str(tmp_path / "head"), str(tmp_path / "out"), "--to", "vllm", "--target"]
    assert main([*words, str(tmp_path / "wide")]) == 1
    said = capsys.readouterr().err
    assert f"but {tmp_path / 'wide'} has hidden_size" in said
    assert "_ConfigOfTarget" not in said


def test_devices_and_dtypes_are_spelt_as_in_the_other_commands(tmp_path):
    words = ["--target", "t", "--train_data", "d", "--output_dir", str(tmp_path)]
    model, _, args = parse([*words, "--device", "cpu", "--dtype", "bf16", "--device-map", "auto"])
    assert (args.use_cpu, model.dtype, model.device_map) == (True, "bfloat16", "auto")
    path = tmp_path / "c.yaml"
    path.write_text("device: cpu\ndtype: fp16\ndevice_map: cpu\n")
    model, _, args = parse([str(path), *words])
    assert (args.use_cpu, model.dtype, model.device_map) == (True, "float16", "cpu")
    assert parse([str(path), *words, "--dtype", "auto"])[0].dtype == "auto"


def test_help_names_the_options_of_all_three(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["train", "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert all(option in said for option in ("--target", "--train_data", "--ttt_steps", "--learning_rate"))
    assert "--fsdp" not in said
    assert "--train-data" not in said
    assert "default: None" not in said
    with pytest.raises(SystemExit) as exit:
        main(["train", "--help_all"])
    assert exit.value.code == 0
    assert "--fsdp_config" in capsys.readouterr().out


def test_a_target_that_is_not_there_is_named_without_a_network(tmp_path, capsys):
    """Transformers leaves the name out then."""
    options = ["--train_data", "chats.jsonl", "--output_dir", str(tmp_path)]
    for words in (["train", "--target", "no-such-target", *options], ["show-mask", "no-such-target", "chats.jsonl"]):
        assert main(words) == 1
        assert "no-such-target is no" in capsys.readouterr().err


def test_logs_come_often_and_evaluations_do_not(tmp_path):
    """A short run shows that it learns; evaluations keep transformers' distance."""
    args = parse(["--target", "t", "--train_data", "d", "--output_dir", str(tmp_path), "--eval_strategy", "steps"])[2]
    assert (args.logging_steps, args.eval_steps) == (10, 500)


@pytest.mark.parametrize("part", ["4/4", "x", "1", "-1/2"])
def test_a_part_that_is_none_is_refused(folder, tmp_path, capsys, part):
    with pytest.raises(SystemExit):
        main(["features", "m", "d", str(tmp_path), f"--part={part}"])
    assert f"{part!r} is not a part such as 0/4, ..., 3/4" in capsys.readouterr().err


def test_the_prompt_of_a_row():
    ids = list(range(10, 22))
    labels = [-100] * 4 + [14, 15] + [-100] * 3 + [19, 20, 21]
    # The answer begins at 18: its first token is the target's own, and not a label.
    assert prompt_of_example({"input_ids": ids, "labels": labels}).tolist() == ids[:8]
    assert prompt_of_example({"input_ids": ids, "labels": [-100] * 6 + ids[6:]}).tolist() == ids[:5]
