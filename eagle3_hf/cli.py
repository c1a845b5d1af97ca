"""The command `eagle3-hf`. Each sub-command imports only what it needs, so that none is slowed down by the others."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from .commands import (
    bench,
    chat,
    check,
    convert,
    datagen,
    diagnose,
    env,
    features,
    inspect,
    serve,
    show_mask,
    trace,
    train,
)
from .commands.errors import in_words
from .commands.hub import stay_offline_where_unreachable
from .commands.models import check_targets
from .commands.parser import Parser
from .utils.logging import info_shown


_COMMANDS = (
    datagen,
    show_mask,
    features,
    train,
    bench,
    check,
    diagnose,
    trace,
    chat,
    inspect,
    convert,
    serve,
    env,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command.

    Returns:
        The exit status: 0 for success, 1 for an error, whose message was printed, 130 for an interrupt, and 141 if the
        reader of the output is gone. argparse exits with 2 if the command line is invalid.
    """
    arguments = make_parser().parse_args(argv)
    try:
        check_targets(getattr(arguments, name, None) for name in ("model", "target"))
        stay_offline_where_unreachable(_places(arguments))
        with info_shown():
            status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a pager or `head` was closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"interrupted{_how_to_resume(arguments, sys.argv[1:] if argv is None else argv)}", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.traceback:
            raise
        print(f"eagle3-hf {arguments.command}: {in_words(error, _places(arguments))}", file=sys.stderr)
        return 1


def _how_to_resume(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    if not arguments.resumes:
        return ""
    return f"; the same command resumes from what was saved:\neagle3-hf {shlex.join(words)}"


def _places(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that may be Hub ids: models and data."""
    names = ("model", "head", "target", "data", "prompts")
    values = [getattr(arguments, name, None) for name in names]
    values = [each for value in values for each in (value if isinstance(value, list) else [value])]
    values += [text.rpartition("=")[2] for text in getattr(arguments, "more_heads", ())]
    return [str(value) for value in values if value and value not in ("random", "lookup")]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with all sub-commands."""
    parser = Parser(
        prog="eagle3-hf", description="EAGLE-3 speculative decoding inside the generate() of transformers."
    )
    parser.add_argument(
        "--traceback", action="store_true", help="show the traceback of an error, not only its message"
    )
    parser.add_argument("--version", action="version", version=f"eagle3-hf {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    for command_parser in commands.choices.values():
        if command_parser.prefix_chars == "-":  # the others hand their words to another parser
            command_parser.make_uniform()
    return parser


def _version() -> str:
    from . import __version__

    return __version__


if __name__ == "__main__":
    sys.exit(main())
