"""Turns errors into one line for a terminal: what is wrong and what to do, without internals."""

import errno
import re
from collections.abc import Sequence

from ..training.datagen.errors import ServerError
from .models import exists


_OFFLINE = re.compile(
    r"We couldn't connect|LocalEntryNotFound|Cannot reach|offline mode|OfflineModeIsEnabled|Couldn't reach|"
    r"ConnectError|ConnectionError|Max retries exceeded|Name or service not known|"
    r"Temporary failure in name resolution"
)
_FULL = re.compile(r"No space left on device|PytorchStreamWriter failed writing|os error 28")
_EXPECTED = (OSError, RuntimeError, ValueError, ImportError)  # what our own checks raise


def in_words(error: Exception, places: Sequence[str] = ()) -> str:
    """Return what to print for an error that ended a command.

    Args:
        error: Any error. One that no check raised is reported as unexpected, with the option that shows its traceback.
        places: Folders or Hub ids that the command was given.
    """
    ours = type(error).__module__.startswith("eagle3_hf")  # may list reasons on several lines
    text = str(error) if ours else " ".join(_text(error).split())
    if _is_full(error):
        return f"the disk is full: {text}. Make room and run the same command again; it resumes where it can"
    if not isinstance(error, ServerError) and _OFFLINE.search(f"{type(error).__name__} {text}"):
        return _unreachable(places, text)
    if text.startswith("Couldn't instantiate the backend tokenizer") and places:
        return f"{places[0]} has no tokenizer that transformers can load: {text}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is not installed ({text}): pip install {error.name}"
    if not isinstance(error, _EXPECTED) or not text:
        return f"unexpected {type(error).__name__}: {text} (eagle3-hf --traceback COMMAND ... shows where)"
    return text


def _text(error: Exception) -> str:
    """Return the error's text. Python puts that of a KeyError in quotes, also where it is a sentence."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or _FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unreachable(places: Sequence[str], text: str) -> str:
    """Name the place that could not be reached. If the error does not name it, it is the first that is not local."""
    absent = [place for place in places if not exists(place.partition(":")[0])]
    named = [place for place in absent if place in text]
    if not absent:
        return f"the Hub cannot be reached: {text}"
    place = (named or absent)[0]
    return f"{place} is not a local folder or file, and the Hub cannot be reached: check the name, or the network"
