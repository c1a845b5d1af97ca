"""The parser of all commands: one way to write options, places and files of options, and a hint for misspelt words."""

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from .config_file import read_options, words_of
from .help import Defaults


# Two names of the same thing: each command has one of them, and accepts the other.
_SAME = {"--model": "--target", "--target": "--model"}


class Parser(argparse.ArgumentParser):
    """Accepts options with underscores or hyphens, and suggests the nearest name for one that does not exist.

    After `make_uniform`, what was declared as a positional argument may also be given as an option of its name, and
    `--config FILE` gives any of them.
    """

    _words: Sequence[str] = ()
    _places: tuple[argparse.Action, ...] = ()  # options that may be given by position, in this order
    _has_config = False

    def make_uniform(self) -> None:
        """Give the arguments of a command, which are declared by now, the form that they have in all commands."""
        if self.formatter_class is argparse.HelpFormatter:
            self.formatter_class = Defaults
        self._underscores()
        self._positionals_as_options()
        for action in self._actions:
            for name in action.option_strings:
                other = _SAME.get(name)
                if other is not None and other not in self._option_string_actions:
                    self._option_string_actions[other] = action  # accepted, but not shown
        self.add_argument(
            "--config", metavar="FILE", help="YAML or JSON file with options by name; the command line overrides it"
        )
        self._has_config = True

    def _underscores(self) -> None:
        for action in self._actions:
            spelt = ["--" + name[2:].replace("-", "_") if name.startswith("--") else name for name in _names(action)]
            for old, new in zip(action.option_strings, spelt, strict=True):
                del self._option_string_actions[old]
                self._option_string_actions[new] = action
            action.option_strings = spelt

    def _positionals_as_options(self) -> None:
        positionals = [action for action in self._actions if not action.option_strings]
        if not positionals or any(action.nargs not in (None, "?") for action in positionals):
            return  # how many words a place takes would not be clear
        places = []
        names = [str(action.metavar or action.dest) for action in positionals]
        shown = [name if action.required else f"[{name}]" for name, action in zip(names, positionals, strict=True)]
        self.usage = f"%(prog)s {' '.join(shown)} [OPTIONS]"
        group = self.add_argument_group("given by position, in this order, or as options")
        for action, name in zip(positionals, names, strict=True):
            self._remove_action(action)
            self._positionals._group_actions.remove(action)
            option = f"--{action.dest}"
            if option in self._option_string_actions:  # such as `bench --head`, which may be repeated
                place: argparse.Action = argparse.Action([], action.dest)
                self.set_defaults(**{action.dest: None})
            else:
                place = group.add_argument(option, metavar=name, help=action.help)
            place.choices, place.default = action.choices, action.default
            place.metavar, place.type, place.required = name, action.type, False
            place.is_needed = action.required  # type: ignore[attr-defined] # argparse would ask for the option
            places.append(place)
        self._action_groups.remove(group)
        self._action_groups.insert(0, group)
        self._places = tuple(places)

    def parse_known_args(self, args=None, namespace=None) -> tuple[Any, list[str]]:
        self._words = [self._known_spelling(word) for word in (sys.argv[1:] if args is None else args)]
        configured = self._read_config() if self._has_config else set()
        for action in self._actions:  # of an option that may be repeated, argparse would add to the file's values
            is_list = action.dest in configured and isinstance(action.default, list)
            if is_list and any(_values(self._words, *action.option_strings)):
                action.default = []
        namespace, unknown = super().parse_known_args(self._words, namespace)
        if self._places:
            unknown = self._fill_places(namespace, unknown, configured)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def _read_config(self) -> set[str]:
        """Set defaults from the file of `--config`, and return their names."""
        file = next((words for words in _values(self._words, "--config")), None)
        if file is None:
            return set()
        try:
            options = read_options(file)
            for name, value in options.items():
                self._set_default(name, value, file)
        except (ValueError, OSError, ImportError) as error:
            self.error(str(error))
        return {action.dest for name in options if (action := self._option_string_actions.get(f"--{name}"))}

    def _set_default(self, name: str, value: Any, file: str) -> None:
        action = self._option_string_actions.get(f"--{name}")
        if action is None or name in ("config", "help"):
            near = _nearest(name, [known[2:] for known in self._option_string_actions if known.startswith("--")])
            raise ValueError(f"{file}: {name} is not an option of {self.prog}{'; ' + near if near else ''}")
        action.required = False
        if action.nargs == 0:
            if not isinstance(value, bool):
                raise ValueError(f"{file}: {name} is on or off: expected true or false, got {value!r}")
            action.default = value
            return
        words = words_of(value)
        is_list = action.nargs in ("+", "*") or isinstance(action.default, list)
        if len(words) != 1 and not is_list:
            raise ValueError(f"{file}: {name} takes one value, got {value!r}")
        try:
            values = [self._get_value(action, word) for word in words]
            for each in values:
                self._check_value(action, each)
        except argparse.ArgumentError as error:
            raise ValueError(f"{file}: {error}") from None
        action.default = values if is_list else values[0]

    def _fill_places(self, namespace: Any, unknown: list[str], configured: Collection[str]) -> list[str]:
        """Read words without an option as the places that were not given, and return the others."""
        words = [word for word in unknown if not word.startswith("-") or word == "-"]
        given = {place.dest for place in self._places if any(_values(self._words, *place.option_strings))}
        free = [place for place in self._places if place.dest not in given]
        if len(words) < len(free):  # then those in the file stay as they are
            free = [place for place in free if place.dest not in configured]
        for place, word in zip(free, words, strict=False):
            try:
                setattr(namespace, place.dest, self._get_value(place, word))
            except argparse.ArgumentError as error:
                self.error(str(error).replace("argument None", f"argument {place.metavar}"))
        missing = [
            str(place.metavar)
            for place in self._places
            if place.is_needed and getattr(namespace, place.dest) is None  # type: ignore[attr-defined]
        ]
        if missing:
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return [*words[len(free) :], *(word for word in unknown if word not in words)]

    def error(self, message: str) -> NoReturn:
        """Exit with status 2. The hints name misspelt options, since argparse reports a missing option first."""
        hints = [hint for word in self._words if (hint := self._hint(word))]
        super().error("; ".join([message, *hints]))

    def _known_spelling(self, word: str) -> str:
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        if name in self._option_string_actions:
            return word
        for spelt in ("--" + name[2:].replace("-", "_"), "--" + name[2:].replace("_", "-")):
            if any(option.startswith(spelt) for option in self._option_string_actions):
                return spelt + equals + value
        return word

    def _hint(self, word: str) -> str | None:
        commands = [name for action in self._actions for name in action.choices or () if action.dest == "command"]
        if commands:  # the words behind a command are parsed by the command
            return None if word != self._words[0] or word in commands else _nearest(word, commands)
        name = word.partition("=")[0]
        if not name.startswith("--") or any(option.startswith(name) for option in self._option_string_actions):
            return None
        return _nearest(name, self._option_string_actions)


def _names(action: argparse.Action) -> Sequence[str]:
    return action.option_strings


def _values(words: Sequence[str], *names: str) -> list[str]:
    """Return the values that are given to an option."""
    names = (*names, *(_SAME[name] for name in names if name in _SAME))
    found = [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    return found + [value for word, value in zip(words, words[1:], strict=False) if word in names]


def _nearest(name: str, known: Collection[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else None
