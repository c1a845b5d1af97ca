"""A parser that suggests the option or command that was probably meant."""

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Accepts options with underscores or hyphens, and suggests the nearest name for one that does not exist."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None) -> tuple[Any, list[str]]:
        self._words = [self._known_spelling(word) for word in (sys.argv[1:] if args is None else args)]
        namespace, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. The hints name misspelt options, since argparse reports a missing option first."""
        hints = [hint for word in self._words if (hint := self._hint(word))]
        super().error("; ".join([message, *hints]))

    def _known_spelling(self, word: str) -> str:
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        hyphens = "--" + name[2:].replace("_", "-")
        known = self._option_string_actions
        return hyphens + equals + value if name not in known and hyphens in known else word

    def _hint(self, word: str) -> str | None:
        commands = [name for action in self._actions for name in action.choices or () if action.dest == "command"]
        if commands:  # the words behind a command are parsed by the command
            return None if word != self._words[0] or word in commands else _nearest(word, commands)
        name = word.partition("=")[0]
        if not name.startswith("--") or any(option.startswith(name) for option in self._option_string_actions):
            return None
        return _nearest(name, self._option_string_actions)


def _nearest(name: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else None
