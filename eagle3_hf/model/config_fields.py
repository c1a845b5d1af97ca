"""Kinds of config fields: the default of each, what it may hold, and the error where it holds something else.

`@strict` of huggingface_hub checks a field whenever it is set. Its errors are no `ValueError`s and speak of Python
types; [`value_errors`] turns them into `ValueError`s that name the field, its rule and the value.
"""

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from huggingface_hub.dataclasses import validated_field
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError


Config = TypeVar("Config")
Derive = Callable[[Any], Any]  # from a config, of which the fields declared so far are set
Prepare = Callable[[Any, Any], Any]  # from such a config and what a field is set to


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A number that a float can hold; NaN and the infinities are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


# ----- declaring fields ----------------------------------------------------------------------------------------------


def checked(must_be: str, holds: Callable[[Any], bool], default: Any = None, prepare: Prepare | None = None) -> Any:
    """A field that may be set to what `holds` is true of.

    Args:
        must_be: The rule in words, such as "an integer", for the error.
        holds: The rule.
        default: The value where none is given.
        prepare: Its result is checked and set in place of what was given.
    """

    def check(value: Any) -> None:
        if not holds(value):
            raise ValueError(f"must be {must_be}")

    return validated_field(check, default=default, metadata={"must_be": must_be, "prepare": prepare})


def size(default: int | None = None, most: int = 2**31 - 1, derived: Derive | None = None) -> Any:
    """A number of things, at least 1 and at most `most`.

    With `derived` that is the value where none, or `None`, is given; with neither `derived` nor `default` the field
    may be `None`.
    """
    optional = default is None and derived is None

    def holds(value: Any) -> bool:
        return (value is None and optional) or (is_integer(value) and 1 <= value <= most)

    return checked(f"an integer from 1 to {most}{', or None' * optional}", holds, default, _prepared(derived))


def switch(default: bool | None = False, derived: Derive | None = None) -> Any:
    return checked("True or False", lambda value: isinstance(value, bool), default, _prepared(derived))


def positive(default: float) -> Any:
    return checked("a finite number above 0", lambda value: is_number(value) and value > 0, default)


def not_negative(default: float) -> Any:
    return checked("a finite number, at least 0", lambda value: is_number(value) and value >= 0, default)


def optional_text() -> Any:
    return checked("a string, or None", lambda value: value is None or isinstance(value, str))


def optional_shares() -> Any:
    """A list of numbers from 0 to 1."""

    def holds(value: Any) -> bool:
        return value is None or (isinstance(value, list) and all(is_number(one) and 0 <= one <= 1 for one in value))

    return checked("a list of numbers from 0 to 1, or None", holds)


def optional_token(several: bool = False) -> Any:
    """The id of a special token; where a model may have `several`, a list of ids too."""

    def holds(value: Any) -> bool:
        ids = value if several and isinstance(value, list) else [value]
        return value is None or all(is_integer(token) for token in ids)

    return checked("a token id, a list of them, or None" if several else "a token id, or None", holds)


def _prepared(derived: Derive | None) -> Prepare | None:
    return None if derived is None else lambda config, value: derived(config) if value is None else value


# ----- errors --------------------------------------------------------------------------------------------------------


def value_errors(config_class: type[Config]) -> type[Config]:
    """Make the errors of a `@strict` config `ValueError`s, and let its fields prepare what they are set to."""
    set_strictly: Callable[[Any, str, Any], None] = config_class.__setattr__
    validate_strictly: Callable[[Any], None] = config_class.validate  # type: ignore[attr-defined] # added by `@strict`

    def __setattr__(self: Any, name: str, value: Any) -> None:
        field = type(self).__dataclass_fields__.get(name)
        metadata = {} if field is None else field.metadata
        if metadata.get("prepare") is not None:
            value = metadata["prepare"](self, value)
        try:
            set_strictly(self, name, value)
        except StrictDataclassFieldValidationError as error:
            raise ValueError(_what_is_wrong(name, value, metadata.get("must_be"), error.__cause__)) from error

    @wraps(validate_strictly)  # with the mark by which `@strict` knows its own method
    def validate(self: Any) -> None:
        try:
            validate_strictly(self)
        except StrictDataclassClassValidationError as error:
            raise ValueError(str(error.__cause__)) from error

    config_class.__setattr__ = __setattr__  # type: ignore[method-assign]
    config_class.validate = validate  # type: ignore[attr-defined]
    return config_class


def _what_is_wrong(name: str, value: Any, must_be: str | None, cause: BaseException | None) -> str:
    if must_be is not None:
        return f"{name} must be {must_be}, got {value!r}"
    if isinstance(cause, TypeError):  # a field of transformers, in the words of `@strict`
        return f"{name} cannot be {value!r}: {cause}"
    return str(cause)
