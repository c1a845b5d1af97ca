"""Formatters of `--help`, and the line that names the next command."""

import argparse
import shlex


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Appends to a help text that an option is required, or its default if there is one that the text leaves out."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or "(default" in action.help:
            return action.help
        if action.required or getattr(action, "is_needed", False):
            return f"{action.help} (required)"
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class OneSpelling(Defaults):
    """Shows options with underscores only in that spelling, and choices instead of the name of the value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(option for option in action.option_strings if "-" not in option[2:])
        choices = [str(choice) for choice in action.choices or ()]
        return f"{names} {{{','.join(choices)}}}" if choices and action.nargs != 0 else names


def say_next(*words: object) -> None:
    """Print the command that usually follows, ready to copy; words in capitals are to be filled in."""
    print(f"next: eagle3-hf {shlex.join(map(str, words))}")
