"""The one error of loading a head."""

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
