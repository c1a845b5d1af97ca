"""`eagle3-hf inspect`: reports what a head is, without loading weights."""

import argparse
import json

from .settings import add_settings, fields
from .values import place


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "inspect",
        help="report what a head is and whether it fits a target, without loading weights",
        description="Show a head's format, config fields, the layers it reads, its rope and what it borrows. The exit "
        "status is 1 if it does not fit.",
    )
    parser.add_argument("head", metavar="HEAD", type=place, help="draft head: a local folder or a Hub id")
    parser.add_argument(
        "--target", type=place, help="target: a local folder or a Hub id, of which only the config is read"
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    add_settings(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from ..inspection import inspect_head

    found = inspect_head(arguments.head, arguments.target, **fields(arguments.set))
    print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) if arguments.json else found)
    return 1 if found.problems else 0
