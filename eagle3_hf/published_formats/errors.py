"""The error that loading a head raises, and a check that most readers of a config share."""

from collections.abc import Mapping
from typing import Any


_LONGEST = 1200  # characters; a file can put a megabyte where a number belongs


def shortened(text: str, longest: int = _LONGEST) -> str:
    """Return the text without its middle if it is too long to be read; what to do stands at its end, which stays."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end]} [...] {text[-end:]}"


class HeadFormatError(ValueError):
    """The folder is not an EAGLE-3 head, is damaged, or has a format that is not supported."""

    def __init__(self, message: str):
        super().__init__(shortened(message))


def dictionary(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the dict under this key, an empty one if the key is absent.

    Raises:
        HeadFormatError: the value is not a dict.
    """
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise HeadFormatError(f"its config's {key} must be a dict, got {value!r}")
    return value or {}
