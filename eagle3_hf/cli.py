"""The command `eagle3-hf`: one sub-command a job. Each imports what it needs, so that none pays for the others."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import bench, convert, cost, datagen, features, inspect, show_mask, train


_COMMANDS = (datagen, show_mask, features, train, cost, bench, inspect, convert)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit status (0 done, 1 refused with a message, 130 interrupted, 141 unread)."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a pager or `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"eagle3-hf {arguments.command}: {_named(error, arguments)}", file=sys.stderr)
        return 1


def _named(error: Exception, arguments: argparse.Namespace) -> str:
    """The message, with the name of the target where transformers leaves it out: there is no network."""
    model = getattr(arguments, "model", None)
    if model is None or not str(error).startswith("We couldn't connect"):
        return str(error)
    return f"{model} is no folder here, and as a Hub id: {error}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3-hf", description="EAGLE-3 speculative decoding inside transformers' own generate()."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
