"""`eagle3-hf inspect`: what a head is, without loading weights."""

from __future__ import annotations

import argparse

from .settings import add_settings, fields
from .values import place


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what a head is and whether it fits a target, without loading weights",
        description="Show a head's dialect, fields, layers read, rope and what it borrows. The exit status is 1 if it "
        "does not fit.",
    )
    parser.add_argument("head", metavar="HEAD", type=place, help="a local folder or a Hub id")
    parser.add_argument("--target", type=place, help="a local folder or a Hub id, of which only the config is read")
    add_settings(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    from ..inspection import inspect_head

    found = inspect_head(arguments.head, arguments.target, **fields(arguments.set))
    print(found)
    return 1 if found.problems else 0
