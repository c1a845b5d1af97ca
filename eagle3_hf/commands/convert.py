"""`eagle3-hf convert`: write a head in the layout that a serving engine loads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .help import Defaults
from .settings import add_settings, fields


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a head in the layout that a serving engine loads",
        description="Load a head of any layout and write it for one engine, or in our own layout. What the engine "
        "cannot express is refused by name, before anything is written.",
        formatter_class=Defaults,
    )
    parser.add_argument("head", metavar="HEAD", help="draft head: a local folder or a Hub id")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write to")
    parser.add_argument("--to", required=True, choices=["vllm", "sglang", "speculators", "eagle3-hf"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of OUT (default: as it is)")
    parser.add_argument("--target", help="local folder or Hub id; its weights are read only where OUT needs them")
    parser.add_argument("--verifier", help="name of the target to write for speculators (default: the head's, TARGET)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in OUT")
    add_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from eagle3_hf import Eagle3DraftModel
    from eagle3_hf.export import check_folder, export_head, needs_target_weights, serve_command
    from eagle3_hf.inspection import model_class

    check_folder(arguments.output, arguments.overwrite)  # before anything is loaded
    draft = Eagle3DraftModel.from_pretrained(arguments.head, **fields(arguments.set))
    config: Any = draft.config
    target: Any = AutoConfig.from_pretrained(arguments.target) if arguments.target is not None else None
    if target is not None and needs_target_weights(config, arguments.to, target):
        target = model_class(target).from_pretrained(arguments.target)
    verifier = arguments.verifier or (arguments.target if arguments.to == "speculators" else None)
    folder = export_head(
        draft,
        arguments.output,
        arguments.to,
        target=target,
        dtype=arguments.dtype,
        verifier=verifier,
        overwrite=arguments.overwrite,
    )
    print(f"wrote {', '.join(sorted(file.name for file in folder.iterdir()))} to {folder}")
    if arguments.to != "eagle3-hf":
        name = arguments.target or config.target_name_or_path or "TARGET"
        print(f"serve it with\n\n{serve_command(arguments.to, name, str(folder))}")
    return 0
