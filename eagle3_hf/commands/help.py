"""How `--help` reads: defaults where they say something, one spelling an option."""

from __future__ import annotations

import argparse
import shlex


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults, but not "None" or "False", nor to a text that tells its own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or action.default in (None, False, []) or "(default" in action.help:
            return action.help
        return super()._get_help_string(action)


class OneSpelling(Defaults):
    """Leaves out the spelling with hyphens where there is one with underscores, and the name of the value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return ", ".join(option for option in action.option_strings if "-" not in option[2:])


def say_next(*words: object) -> None:
    """Name the command that usually follows, to be copied; what is to be filled in is in capitals."""
    print(f"next: eagle3-hf {shlex.join(map(str, words))}")
