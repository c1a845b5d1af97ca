"""Errors as one line for a terminal: what is wrong and the way out, without internals."""

from __future__ import annotations

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
    """What to print of an error that ended a command.

    Args:
        error: Any; one that no check of ours raised is named as unexpected, with the way to its traceback.
        places: Folders or Hub ids that the command was given.
    """
    ours = type(error).__module__.startswith("eagle3_hf")  # lists of reasons, one a line
    text = str(error) if ours else " ".join(_text(error).split())
    if _is_full(error):
        return f"the disk is full: {text}. Make room and run the same command again; it goes on where it can"
    if not isinstance(error, ServerError) and _OFFLINE.search(f"{type(error).__name__} {text}"):
        return _unreachable(places, text)
    if text.startswith("Couldn't instantiate the backend tokenizer") and places:
        return f"{places[0]} has no tokenizer that transformers can load: {text}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"{error.name} is missing ({text}): pip install {error.name}"
    if not isinstance(error, _EXPECTED) or not text:
        return f"unexpected {type(error).__name__}: {text} (eagle3-hf --traceback COMMAND ... shows where)"
    return text


def _text(error: Exception) -> str:
    """A KeyError's text is the key as Python writes it, in quotes; transformers raises some with a sentence."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _is_full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) == errno.ENOSPC or _FULL.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _unreachable(places: Sequence[str], text: str) -> str:
    """With the place that the error names, else the first that is not here: transformers may leave its name out."""
    absent = [place for place in places if not exists(place.partition(":")[0])]
    named = [place for place in absent if place in text]
    if not absent:
        return f"the Hub cannot be reached: {text}"
    place = (named or absent)[0]
    return f"{place} is no folder or file here, and the Hub cannot be reached: check the name, or the network"
