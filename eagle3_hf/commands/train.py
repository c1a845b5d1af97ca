"""`eagle3-hf train`: train a head, from data to a saved head with its card."""

import argparse
import difflib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..utils.devices import own_device
from ..utils.logging import follow_transformers
from .config_file import read_options
from .help import OneSpelling, say_next
from .hub import stay_offline_where_unreachable
from .models import check_targets
from .parser import Parser
from .placement import device, device_map, dtype
from .values import amount, check_output_folder, count, json_or_file, nonempty, not_negative, place, positive, share


# The options of TrainingArguments that `--help` shows; `--help_all` shows all of them.
_OFTEN = [
    "output_dir",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "max_grad_norm",
    "bf16",
    "eval_strategy",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "logging_steps",
    "report_to",
    "push_to_hub",
    "hub_model_id",
    "seed",
    "dataloader_num_workers",
    "use_cpu",
]
# Types of options of transformers' dataclasses whose own types accept values without a meaning.
_TYPES: dict[str, Callable[[str], Any]] = {
    "dtype": dtype,
    "device_map": device_map,
    "revision": nonempty,
    **dict.fromkeys(("accelerator_config", "deepspeed", "fsdp_config"), json_or_file),
    **dict.fromkeys(("target", "head", "target_adapter", "train_data", "eval_data", "output_dir"), place),
    **dict.fromkeys(("held_out", "tau_prompts", "lora_r", "loss_chunk", "seed"), amount),
    **dict.fromkeys(("draft_vocab_size", "max_train_samples", "tau_new_tokens", "lora_alpha"), count),
    **dict.fromkeys(("max_length", "ttt_steps", "dataset_num_proc", "gradient_accumulation_steps"), count),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), count),
    **dict.fromkeys(("position_share", "lora_dropout", "adam_beta1", "adam_beta2"), share),
    **dict.fromkeys(("learning_rate", "num_train_epochs", "step_decay"), positive),
    **dict.fromkeys(("feature_loss_weight", "weight_decay", "max_grad_norm", "warmup_steps"), not_negative),
}
_NO_PREFIX = "\0"  # HfArgumentParser gets everything after `train`, options too


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "train",
        help="train a head, from data to a saved head with its card",
        prefix_chars=_NO_PREFIX,
        add_help=False,
    )
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=run, resumes=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    model, data, args = parse(arguments.words)
    arguments.model, arguments.head, arguments.data = model.target, model.head, data.train_data  # as elsewhere
    given = (model.target, model.head, data.train_data, data.eval_data)
    check_targets([model.target])
    stay_offline_where_unreachable(place for place in given if place)
    if args.log_level != "passive":
        follow_transformers()
    check_output_folder(args.output_dir)

    from ..training.run import train_head

    trainer = train_head(model, data, args, say=partial(print, flush=True))
    if trainer is not None and not data.dry_run and trainer.is_world_process_zero():
        head = _report_head(args.output_dir, adapters=bool(model.lora_r))
        say_next("bench", model.target, head)
    return 0


def _report_head(output_dir: str, adapters: bool) -> Path:
    """Print what a run has saved, and return the folder of its head."""
    from ..training.resume import MERGED

    if not adapters:
        print(f"the head is in {output_dir}")
        return Path(output_dir)
    head = Path(output_dir) / MERGED
    print(f"the adapters are in {output_dir}; the head with merged adapters, for `bench` and `convert`, is in {head}")
    return head


def parse(words: Sequence[str]) -> tuple[Any, Any, Any]:
    """Read model, data and training arguments from options, or from a file whose values options override."""
    from transformers import HfArgumentParser, TrainingArguments

    from ..training.arguments import DataArguments, Eagle3TrainingArguments, ModelArguments

    kinds: Any = [ModelArguments, DataArguments, Eagle3TrainingArguments]

    class TrainParser(Parser, HfArgumentParser):  # defined where transformers is imported
        pass

    parser: Any = TrainParser(
        kinds,
        prog="eagle3-hf train",
        usage="%(prog)s [[--config] CONFIG.yaml | CONFIG.json] [OPTIONS]",
        description="Train an EAGLE-3 head. The options are those of TrainingArguments and the ones below. A file "
        "sets them under the same names, and options of the command line override it. The same command resumes an "
        "interrupted run. --no_NAME switches off what is on by default.",
        formatter_class=OneSpelling,
    )
    parser.add_argument(
        "--device",
        action=_Device,
        dest="use_cpu",
        type=device,
        default=argparse.SUPPRESS,
        help="Device to train on: cpu, or the accelerator of this process (the default if there is one).",
    )
    parser._option_string_actions["--model"] = parser._option_string_actions["--target"]
    _read_as(parser, _TYPES)
    options = list(words)
    if "--help_all" in options:
        parser.print_help()
        raise SystemExit(0)
    _shorten_help(parser, TrainingArguments.__dataclass_fields__)
    if (file := _config_file(options)) is not None:
        options[:0] = _set_defaults(parser, file)
    model, data, args = parser.parse_args_into_dataclasses(options, look_for_args_file=False)
    return model, data, args


def _config_file(options: list[str]) -> str | None:
    """Take the name of a file of options out of the words: the first one without hyphens, or that of `--config`."""
    if options and not options[0].startswith("-"):
        return options.pop(0)
    for index, word in enumerate(options):
        name, equals, value = word.partition("=")
        if name == "--config" and (equals or options[index + 1 :]):
            file = value if equals else options.pop(index + 1)
            del options[index]
            return file
    return None


def _read_as(parser: argparse.ArgumentParser, types: dict[str, Callable[[str], Any]]) -> None:
    """Read options of transformers' dataclasses like those of the other commands."""
    for action in parser._actions:
        if action.dest in types:
            action.type = types[action.dest]


class _Device(argparse.Action):
    """Sets `use_cpu`: Trainer knows no other choice but the accelerator of its process."""

    def __call__(self, parser, namespace, values, option_string=None):
        own = own_device()
        if values not in ("cpu", own.type, str(own)):
            variable = "CUDA_VISIBLE_DEVICES" if own.type == "cuda" else "the visible devices"
            parser.error(f"argument --device: a process trains on its own {own}; to train on {values}, set {variable}")
        namespace.use_cpu = values == "cpu"


def _shorten_help(parser: argparse.ArgumentParser, inherited: Collection[str]) -> None:
    """Hide what few runs need, and put the options of this package first."""
    often = parser.add_argument_group("most used options of TrainingArguments (--help_all shows all of them)")
    for action in list(parser._optionals._group_actions):
        negated = action.option_strings[0].startswith("--no_")
        if negated or (action.dest in inherited and action.dest not in _OFTEN):
            action.help = argparse.SUPPRESS
        elif action.dest in inherited:
            parser._optionals._group_actions.remove(action)
            often._group_actions.append(action)


def _set_defaults(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """Set defaults from a file, and return the words of its `device`, an option that has no field."""
    values = read_options(path)
    if "model" in values:
        values["target"] = values.pop("model")
    words = ["--device", str(values.pop("device"))] if "device" in values else []
    names = {action.dest for action in parser._actions}
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: {name} is not an option of eagle3-hf train{hint}")
    for action in parser._actions:  # an option that is on by default has two: --x and --no_x
        if action.dest in values:
            action.required = False
            value = values[action.dest]
            # Texts and numbers are read like those of a command line; YAML takes 1e-5 for a text.
            action.default = str(value) if type(value) in (int, float) else value
    return words
