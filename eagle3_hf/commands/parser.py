"""Parsers that suggest the option, or the command, that was meant."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An option may be spelt with underscores or hyphens; one that does not exist is refused with the nearest."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None) -> tuple[Any, list[str]]:
        self._words = [self._spelt(word) for word in (sys.argv[1:] if args is None else args)]
        namespace, unknown = super().parse_known_args(self._words, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Exit status 2; argparse tells of a missing option before it tells of the misspelt one."""
        hints = [hint for word in self._words if (hint := self._hint(word))]
        super().error("; ".join([message, *hints]))

    def _spelt(self, word: str) -> str:
        name, equals, value = word.partition("=")
        hyphens = "--" + name[2:].replace("_", "-")
        known = self._option_string_actions
        return hyphens + equals + value if name not in known and hyphens in known else word

    def _hint(self, word: str) -> str | None:
        commands = [name for action in self._actions for name in action.choices or () if action.dest == "command"]
        if commands:  # what follows is the command's own
            return None if word != self._words[0] or word in commands else _nearest(word, commands)
        name = word.partition("=")[0]
        if not name.startswith("--") or any(option.startswith(name) for option in self._option_string_actions):
            return None
        return _nearest(name, self._option_string_actions)


def _nearest(name: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else None
