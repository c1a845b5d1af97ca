"""`eagle3-hf convert`: writes a head in the format that a serving engine loads."""

import argparse
from pathlib import Path
from typing import Any

from .help import Defaults
from .placement import add_dtype
from .settings import add_settings, fields
from .values import check_output_folder, path, place


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "convert",
        help="write a head in the format that a serving engine loads",
        description="Load a head of any published format and write it for one engine, or in this package's format. A "
        "head that the engine cannot run is rejected, with every reason, before anything is written.",
        formatter_class=Defaults,
    )
    parser.add_argument("head", metavar="HEAD", type=place, help="draft head: a local folder or a Hub id")
    parser.add_argument("output", metavar="OUT", type=path, help="folder to write to")
    parser.add_argument(
        "--to", required=True, choices=["vllm", "sglang", "speculators", "eagle3-hf"], help="format to write"
    )
    add_dtype(parser, default="auto", help="data type in which OUT is written; auto keeps the head's")
    parser.add_argument(
        "--target", type=place, help="target: a local folder or a Hub id; its weights are read only if OUT needs them"
    )
    parser.add_argument(
        "--verifier",
        type=place,
        help="name of the target to record for speculators (default: TARGET, or the name that the head records)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in OUT")
    add_settings(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from transformers import AutoConfig

    from .. import Eagle3DraftModel
    from ..export import check_folder, export_head, needs_target_weights, serve_command
    from ..inspection import model_class

    check_output_folder(arguments.output)
    check_folder(arguments.output, arguments.overwrite)  # before anything is loaded
    draft = Eagle3DraftModel.from_pretrained(arguments.head, **fields(arguments.set))
    config: Any = draft.config
    target: Any = AutoConfig.from_pretrained(arguments.target) if arguments.target is not None else None
    if target is not None and needs_target_weights(config, arguments.to, target):
        target = model_class(target).from_pretrained(arguments.target)
    verifier = arguments.verifier or (arguments.target if arguments.to == "speculators" else None)
    before = _files(arguments.output)
    folder = export_head(
        draft,
        arguments.output,
        arguments.to,
        target=target,
        dtype=None if arguments.dtype == "auto" else arguments.dtype,
        verifier=verifier,
        overwrite=arguments.overwrite,
    )
    written = sorted(name for name, about in _files(folder).items() if before.get(name) != about)
    print(f"wrote {', '.join(written)} to {folder}")
    if arguments.to != "eagle3-hf":
        name = arguments.target or config.target_name_or_path or "TARGET"
        print(f"serve it with\n\n{serve_command(arguments.to, name, str(folder))}")
    return 0


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the files of a folder with what changes when one is written again."""
    if not folder.is_dir():
        return {}
    stats = {file.name: file.stat() for file in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_mtime_ns) for name, stat in stats.items()}
