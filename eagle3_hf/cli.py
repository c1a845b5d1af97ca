"""The command `eagle3-hf`: one sub-command a job. Each imports what it needs, so that none pays for the others."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

from .commands import bench, convert, datagen, features, inspect, show_mask, train
from .commands.errors import in_words
from .commands.hub import stay_offline_where_unreachable
from .commands.models import check_targets
from .commands.parser import Parser
from .utils.logging import info_shown


_COMMANDS = (datagen, show_mask, features, train, bench, inspect, convert)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit status (0 done, 1 refused with a message, 130 interrupted, 141 unread).

    argparse leaves with 2 where the command line is not understood.
    """
    arguments = _parser().parse_args(argv)
    try:
        check_targets(getattr(arguments, name, None) for name in ("model", "target"))
        stay_offline_where_unreachable(_places(arguments))
        with info_shown():
            status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a pager or `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"interrupted{_how_to_go_on(arguments, sys.argv[1:] if argv is None else argv)}", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.traceback:
            raise
        print(f"eagle3-hf {arguments.command}: {in_words(error, _places(arguments))}", file=sys.stderr)
        return 1


def _how_to_go_on(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    if not arguments.resumes:
        return ""
    return f"; the same command goes on from what was saved:\neagle3-hf {shlex.join(words)}"


def _places(arguments: argparse.Namespace) -> list[str]:
    """What may be a Hub id: models and data."""
    names = ("model", "head", "target", "data", "prompts")
    values = [getattr(arguments, name, None) for name in names]
    return [str(value) for value in values if value and value != "random"]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="eagle3-hf", description="EAGLE-3 speculative decoding inside transformers' own generate().")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised, not its line alone")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
