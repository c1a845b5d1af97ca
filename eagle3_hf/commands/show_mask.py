"""`eagle3-hf show-mask`: show which tokens of a dataset a head would learn, before anything is trained."""

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from .encoding import add_encoding, encoding_options
from .help import Defaults, say_next
from .placement import add_source, load_tokenizer
from .values import amount, count, place


if TYPE_CHECKING:
    from datasets import Dataset


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "show-mask",
        help="show which tokens of a dataset are learnt",
        description="Encode a dataset as the trainer would, and show some of its chats: tokens to learn are green on "
        "a terminal, otherwise between [[ and ]]. Counts of the whole dataset follow.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "model", metavar="MODEL", type=place, help="target (its tokenizer is enough): a local folder or a Hub id"
    )
    parser.add_argument("data", metavar="DATASET", type=place, help="file, folder, or Hub id (name:split[:1000])")
    parser.add_argument("--split", help="split of DATASET")
    parser.add_argument("--num_chats", type=count, default=2, help="number of chats to show")
    parser.add_argument("--first", type=amount, default=0, help="index of the first chat to show")
    parser.add_argument("--empty", action="store_true", help="show only chats with nothing to learn")
    add_encoding(parser)
    add_source(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from ..training.data.encoding import MaskSummary, dropped_chats, encode_dataset
    from ..training.data.sources import load_chats

    tokenizer = load_tokenizer(arguments)
    chats = load_chats(arguments.data, split=arguments.split)
    encoded = encode_dataset(chats, tokenizer, encoding_options(arguments))
    numbers = _numbers(encoded, arguments)
    if not numbers and not arguments.empty:
        raise ValueError(f"there is no chat {arguments.first}: {arguments.data} has {len(encoded)}, counted from 0")
    for number in numbers:
        _show(number, encoded[number], tokenizer)
    print(MaskSummary.of(encoded, arguments.max_length))
    if dropped := dropped_chats(encoded, tokenizer):
        print(dropped)
    say_next(
        "train", "--target", arguments.model, "--train_data", arguments.data, "--output_dir", "HEAD", *_same(arguments)
    )
    return 0


def _same(arguments: argparse.Namespace) -> list[str]:
    """Return the options for masks as options of `eagle3-hf train`."""
    given = {
        "train_split": arguments.split,
        "max_length": None if arguments.max_length == 2048 else arguments.max_length,
        "chat_template_kwargs": arguments.chat_template_kwargs and json.dumps(arguments.chat_template_kwargs),
    }
    words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
    return words + [f"--{name}" for name in ("last_turn_only", "mask_reasoning") if getattr(arguments, name)]


def _numbers(encoded: "Dataset", arguments: argparse.Namespace) -> list[int]:
    """Return the indices of the chats to show."""
    targets = encoded["targets"]
    wanted = (i for i in range(arguments.first, len(encoded)) if not arguments.empty or targets[i] == 0)
    return [number for number, _ in zip(wanted, range(arguments.num_chats), strict=False)]


def _show(number: int, example: dict[str, Any], tokenizer: Any) -> None:
    from ..training.data.loss_masks import render_mask

    print(f"--- chat {number}: {example['length']} tokens, {example['targets']} to learn")
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(example["problem"] or render_mask(tokenizer, example, colour))
