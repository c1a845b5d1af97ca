"""`eagle3-hf features`: run a target over training data once, and store the features that a head is trained on."""

import argparse
import os
import shutil

from .encoding import add_encoding, encoding_options
from .help import Defaults, say_next
from .placement import add_placement, load_target, load_tokenizer, source_options
from .values import amount, check_output_folder, count, path, place


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "features",
        help="store a target's features of training data",
        description="Run a target over chats and store its features, for `eagle3-hf train --train_data OUT`. The size "
        "is printed first. An interrupted run resumes when it is started again; under `accelerate launch` or torchrun "
        "each process writes its share.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "model", metavar="MODEL", type=place, help="target: a local folder or a Hub id, with its chat template"
    )
    parser.add_argument("data", metavar="DATA", type=place, help="chats: file, folder, or Hub id (name:split[:1000])")
    parser.add_argument("output", metavar="OUT", type=path, help="folder of the store, which is created or continued")
    parser.add_argument("--split", help="split of DATA")
    add_encoding(parser)
    parser.add_argument(
        "--layer_ids", type=amount, nargs="+", help="indices of hidden_states to store (default: those of a new head)"
    )
    parser.add_argument(
        "--store_dtype",
        default="bfloat16",
        choices=["float32", "bfloat16", "float16", "fp8"],
        help="data type of the stored features",
    )
    parser.add_argument("--batch_tokens", type=count, default=8192, help="tokens of a forward pass, with padding")
    parser.add_argument(
        "--shard_size", type=count, default=256, help="chats in a file; an interrupted run loses at most one file"
    )
    parser.add_argument(
        "--part", type=_part, help="I/N: write every N-th file, beginning with file I (default: by RANK)"
    )
    add_placement(parser)
    parser.add_argument(
        "--dry_run", action="store_true", help="print the size without loading weights or storing features"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run, resumes=True)


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 0/4, ..., 3/4")
    return int(index), int(count)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    import torch
    from transformers.utils import logging

    from ..training.data.encoding import prepare_chats
    from ..training.data.sources import load_chats
    from ..training.targets.feature_store import write_features
    from ..utils.devices import place_in_words

    check_output_folder(arguments.output)
    part = arguments.part or (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    chats = load_chats(arguments.data, split=arguments.split)
    examples = prepare_chats(chats, load_tokenizer(arguments), encoding_options(arguments))
    dtype = torch.float8_e4m3fn if arguments.store_dtype == "fp8" else getattr(torch, arguments.store_dtype)
    layer_ids = _layer_ids(arguments)
    if part[0] == 0:
        print(_size(examples, arguments, layer_ids, dtype), flush=True)
    if arguments.dry_run:
        return 0
    logging.disable_progress_bar()
    target = load_target(arguments)
    print(f"{arguments.model} runs on {place_in_words(target)}", flush=True)
    write_features(
        target,
        examples,
        arguments.output,
        layer_ids,
        batch_tokens=arguments.batch_tokens,
        shard_size=arguments.shard_size,
        dtype=dtype,
        part=part,
        progress=not arguments.quiet,
    )
    print(f"part {part[0]} of {part[1]} is in {arguments.output}" if part[1] > 1 else f"stored in {arguments.output}")
    if part[0] == 0:
        say_next("train", "--target", arguments.model, "--train_data", arguments.output, "--output_dir", "HEAD")
    return 0


def _layer_ids(arguments: argparse.Namespace) -> list[int]:
    from transformers import AutoConfig

    from ..model.target_check import default_layer_ids
    from ..model.target_modules import num_blocks

    text = AutoConfig.from_pretrained(arguments.model, **source_options(arguments)).get_text_config()
    return sorted(arguments.layer_ids) if arguments.layer_ids else default_layer_ids(num_blocks(text))


def _size(examples, arguments: argparse.Namespace, layer_ids: list[int], dtype) -> str:
    from transformers import AutoConfig

    from ..training.data.packing import token_lengths
    from ..training.targets.feature_store import projected_bytes

    tokens = sum(token_lengths(examples))
    width = AutoConfig.from_pretrained(arguments.model, **source_options(arguments)).get_text_config().hidden_size
    size = projected_bytes(tokens, width, len(layer_ids), dtype)
    place = next(folder for folder in (arguments.output, *arguments.output.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    return (
        f"{len(examples):,} chats, {tokens:,} tokens: {size / 1e9:.3g} GB in {arguments.store_dtype} "
        f"({size / max(tokens, 1):,.0f} bytes per token); {free / 1e9:.3g} GB are free at {place}"
    )
