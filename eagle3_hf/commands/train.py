"""`eagle3-hf train`: train a head, from data to a saved head with its card."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .help import OneSpelling


# The many options of TrainingArguments that `--help` shows; `--help_all` shows the rest too.
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
_NO_PREFIX = "\0"  # everything after `train` is for HfArgumentParser, options too


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="train a head, from data to a saved head with its card",
        prefix_chars=_NO_PREFIX,
        add_help=False,
    )
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    model, data, args = parse(arguments.words)
    arguments.model = model.target  # as of the other commands

    from eagle3_hf.training.run import train_head

    trainer = train_head(model, data, args, say=partial(print, flush=True))
    if trainer is not None and not data.dry_run and trainer.is_world_process_zero():
        print(f"the head is in {args.output_dir}")
    return 0


def parse(words: Sequence[str]) -> tuple[Any, Any, Any]:
    """Model, data and training arguments from options, or from a yaml or json file whose values options override."""
    from transformers import HfArgumentParser, TrainingArguments

    from eagle3_hf.training.arguments import DataArguments, Eagle3TrainingArguments, ModelArguments

    kinds: Any = [ModelArguments, DataArguments, Eagle3TrainingArguments]
    parser: Any = HfArgumentParser(
        kinds,
        prog="eagle3-hf train",
        usage="%(prog)s [CONFIG.yaml | CONFIG.json] [OPTIONS]",
        description="Train an EAGLE-3 head. Options are those of TrainingArguments and the ones below; a file gives "
        "them by the same names, and options beside it win. The same command resumes an interrupted run. A switch "
        "that is on is switched off by --no_NAME.",
        formatter_class=OneSpelling,
    )
    options = list(words)
    if "--help_all" in options:
        parser.print_help()
        raise SystemExit(0)
    _shorten_help(parser, TrainingArguments.__dataclass_fields__)
    if options and not options[0].startswith("-"):
        _set_defaults(parser, options.pop(0))
    model, data, args = parser.parse_args_into_dataclasses(options, look_for_args_file=False)
    return model, data, args


def _shorten_help(parser: argparse.ArgumentParser, inherited: Collection[str]) -> None:
    """Hide what few runs need; the options that are ours come first."""
    often = parser.add_argument_group("those of TrainingArguments that are used most (--help_all shows all of them)")
    for action in list(parser._optionals._group_actions):
        negated = action.option_strings[0].startswith("--no_")
        if negated or (action.dest in inherited and action.dest not in _OFTEN):
            action.help = argparse.SUPPRESS
        elif action.dest in inherited:
            parser._optionals._group_actions.remove(action)
            often._group_actions.append(action)


def _set_defaults(parser: argparse.ArgumentParser, path: str) -> None:
    values = _read(Path(path))
    names = {action.dest for action in parser._actions}
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: {name} is no option of eagle3-hf train{hint}")
    for action in parser._actions:  # two for a switch that is on: --x and --no_x
        if action.dest in values:
            action.required = False
            action.default = values[action.dest]  # texts are converted: YAML takes 1e-5 for one


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; options begin with --")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        values = json.loads(text)
    else:
        import yaml

        values = yaml.safe_load(text)
    if not isinstance(values, dict):
        raise ValueError(f"{path}: a {type(values).__name__}, not options by name")
    return values
