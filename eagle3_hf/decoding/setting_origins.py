"""Where a setting of a `generate` call comes from: its keywords, the generation config passed to it, or the target's.

transformers merges the three before it chooses a decoding method, and the merged config does not tell them apart. So
`patching.py` records at each merge which fields were given, and an error about a setting can name the place to change.
"""

import threading
import weakref
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedModel

from .unsupported_call import UnsupportedCall


Origin = Literal["call", "passed", "target"]


class _LastMerge(threading.local):
    """The most recent merge in this thread."""

    merged: weakref.ref | None = None
    keywords: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()


_last = _LastMerge()


def note(merged: Any, keywords: dict[str, Any], passed: GenerationConfig | None) -> None:
    """Record what was merged into a generation config.

    Args:
        merged: The config that the call uses.
        keywords: The keyword arguments of the call.
        passed: The `generation_config` argument of the call.
    """
    fields = vars(passed) if isinstance(passed, GenerationConfig) else {}
    _last.merged = weakref.ref(merged)
    _last.keywords = frozenset(keywords)
    _last.passed = frozenset(name for name, value in fields.items() if value is not None)


def origin(target: PreTrainedModel, merged: GenerationConfig, name: str) -> Origin:
    """Return which of the three gave a field its value, in transformers' order of precedence.

    A config that was merged elsewhere (by a class with its own `generate`) is compared with the target's.
    """
    own = getattr(target.generation_config, name, None)
    if _last.merged is None or _last.merged() is not merged:
        return "target" if own is not None and own == getattr(merged, name) else "call"
    if name in _last.keywords:
        return "call"
    if name in _last.passed:
        return "passed"
    return "target" if own is not None else "call"


def rejection(
    target: PreTrainedModel, merged: GenerationConfig, name: str, reason: str, instead: Any
) -> UnsupportedCall:
    """Return the error for a field that cannot be honoured. It says where the field was set, and what to do there.

    Args:
        target: The model whose `generate` was called.
        merged: The call's merged generation config.
        name: The field.
        reason: The words that follow the value in the message, such as `"has no meaning with a draft head"`.
        instead: A value that is accepted.
    """
    value, own = getattr(merged, name), getattr(target.generation_config, name, None)
    rejected, keyword = f"{name}={value!r} {reason}", f"pass {name}={instead!r} to this call"
    match origin(target, merged, name):
        case "call":
            way_out = "leave it out" if own in (None, instead) else keyword
            return UnsupportedCall(name, f"{rejected}: {way_out}")
        case "passed":
            also = "" if own in (None, instead) else f" (target.generation_config says {own!r} too)"
            return UnsupportedCall(
                name,
                f"{rejected}. It was set in the generation_config that was passed to this call{also}; pipelines of "
                "earlier versions of transformers pass a copy of the target's, pipe.generation_config. Set it to "
                f"{instead!r} there, or {keyword}",
            )
    return UnsupportedCall(
        name,
        f"{rejected}. It was not passed to this call, but comes from the target's own generation config, which is "
        f"saved with a model: set target.generation_config.{name} = {instead!r}, or {keyword}",
    )
