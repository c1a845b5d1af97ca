"""`eagle3-hf cost`: what a training step costs, in bytes against its length and in seconds by its parts."""

from __future__ import annotations

import argparse
from typing import Any

from .help import Defaults
from .placement import add_placement, load_target
from .values import amount, count, place


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cost",
        help="measure memory and time of a training step",
        description="Peak memory of a training step against its length, on a small model with a large vocabulary; or, "
        "with MODEL, the time of a step on a packed row. Both beside the eager formulation of the same loss.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", type=place, help="target to time: a local folder or a Hub id"
    )
    parser.add_argument("--steps", type=count, default=7, help="of training-time test")
    parser.add_argument("--draft-vocab-size", type=count, default=8192)
    parser.add_argument("--lengths", type=count, nargs="+", default=[512, 1024, 2048, 4096], help="memory: tokens")
    parser.add_argument(
        "--eager-up-to", type=amount, default=2048, help="memory: longest row for the eager formulation"
    )
    parser.add_argument("--vocab-size", type=count, default=128_256, help="memory: of the small model")
    parser.add_argument("--hidden-size", type=count, default=256, help="memory: of the small model")
    parser.add_argument("--length", type=count, default=2048, help="time: tokens of the packed row")
    parser.add_argument("--document", type=count, default=256, help="time: tokens of each text in it")
    parser.add_argument("--repeats", type=count, default=3, help="time: the median of so many is shown")
    parser.add_argument("--processor-time", action="store_true", help="time: count this process's work, not the clock")
    add_placement(parser, dtype="bfloat16")
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from .. import Eagle3DraftModel
    from ..evaluation.training_cost import Steps, small_target
    from ..ttt.settings import TTTSettings
    from ..utils.devices import own_device, place_in_words

    if arguments.length % arguments.document:
        raise ValueError(f"--length {arguments.length} is no multiple of --document {arguments.document}")
    if arguments.model is None and arguments.device_map is not None:
        raise ValueError("--device-map spreads MODEL, and none is named")
    settings = TTTSettings(num_steps=arguments.steps)
    target: Any
    if arguments.model is None:
        target = small_target(arguments.vocab_size, arguments.hidden_size)
        dtype = torch.bfloat16 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        target = target.to(arguments.device or own_device(), dtype)
    else:
        target = load_target(arguments)
    ids = torch.randperm(target.config.get_text_config().vocab_size)[: arguments.draft_vocab_size].sort().values
    draft = Eagle3DraftModel.from_target(target, draft_vocab=ids).to(target.device)
    steps = Steps(target, draft, settings, autocast=target.dtype != torch.float32)
    print(f"{arguments.model or 'a small target'} on {place_in_words(target)}; head in float32\n")
    if arguments.model is None:
        _print_memory(steps, arguments)
    else:
        _print_time(steps, arguments)
    return 0


def _print_memory(steps, arguments: argparse.Namespace) -> None:
    from ..evaluation.training_cost import memory_table

    print("Peak MiB of a training step (target, teacher, forward, backward) above models and optimizer.\n")
    print("| T | ours | checkpointed | eager | eager / ours |\n|---|---|---|---|---|", flush=True)
    for length, ours, checkpointed, eager in memory_table(steps, arguments.lengths, arguments.eager_up_to):
        cells = f"{length} | {ours / 2**20:,.0f} | {checkpointed / 2**20:,.0f}"
        compared = "- | -" if eager is None else f"{eager / 2**20:,.0f} | {eager / ours:.1f}"
        print(f"| {cells} | {compared} |", flush=True)


def _print_time(steps, arguments: argparse.Namespace) -> None:
    import time

    import torch

    from ..evaluation.training_cost import PARTS, time_table

    now = time.process_time if arguments.processor_time else time.perf_counter
    table = time_table(steps, arguments.length, arguments.document, arguments.repeats, now)
    print(
        f"Seconds of a step, {arguments.length} tokens in texts of {arguments.document}, {arguments.steps} steps, "
        f"{torch.get_num_threads()} threads{', processor time' if arguments.processor_time else ''}.\n"
    )
    print(f"| | {' | '.join(PARTS)} | whole |\n|{'---|' * (len(PARTS) + 2)}")
    for name, parts in table.items():
        whole = sum(seconds for part, seconds in parts.items() if part != "of it target")
        print(f"| {name} | {' | '.join(f'{parts[part]:.2f}' for part in PARTS)} | {whole:.2f} |")
    ours, eager = (
        table[name]["draft forward"] + table[name]["draft backward"] for name in ("online", "eager formulation")
    )
    print(f"\nDraft forward and backward: {ours:.2f} s, eager {eager:.2f} s, {eager / ours:.1f} times as long.")
