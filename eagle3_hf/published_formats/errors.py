"""The one error of loading a head, and the check that most of a config begins with."""

from collections.abc import Mapping
from typing import Any


_LONGEST = 1200  # characters; a file can put a megabyte where a number belongs


def shortened(text: str, longest: int = _LONGEST) -> str:
    """The text without its middle, if it is too long to be read; the way out stands at the end."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} [...] {text[-end:]}"


class HeadFormatError(ValueError):
    """A folder that is no EAGLE-3 head, a damaged one, or one in a dialect that is not supported."""

    def __init__(self, message: str):
        super().__init__(shortened(message))


def dictionary(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The dict under this key, empty where there is none.

    Raises:
        HeadFormatError: something else is there.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise HeadFormatError(f"its config's {key} must be a dict, got {value!r}")
    return value or {}
