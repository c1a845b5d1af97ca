"""Formatters of `--help`, and the line that names the next command."""

import argparse
import shlex


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Appends the default to a help text, unless it is empty or the text mentions it already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or action.default in (None, False, []) or "(default" in action.help:
            return action.help
        return super()._get_help_string(action)


class OneSpelling(Defaults):
    """Shows options with underscores only in that spelling, and without the name of the value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return ", ".join(option for option in action.option_strings if "-" not in option[2:])


def say_next(*words: object) -> None:
    """Print the command that usually follows, ready to copy; words in capitals are to be filled in."""
    print(f"next: eagle3-hf {shlex.join(map(str, words))}")
