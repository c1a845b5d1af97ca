"""Where a setting of a `generate` call comes from: its keywords, the generation config passed to it, or the target's.

transformers merges the three before it chooses a loop, and what is merged does not say. So the seam notes, each time
they are merged, which fields were given; a rejection can then name the place to change.
"""

import threading
import weakref
from typing import Any, Literal

from transformers import GenerationConfig, PreTrainedModel


Origin = Literal["call", "passed", "target"]


class _Noted(threading.local):
    """The newest merge of this thread."""

    merged: weakref.ref | None = None
    keywords: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()


_noted = _Noted()


def note(merged: Any, keywords: dict[str, Any], passed: GenerationConfig | None) -> None:
    """Remember what went into a merged generation config.

    Args:
        merged: The config that the call uses.
        keywords: Of the call.
        passed: The `generation_config` of the call.
    """
    fields = vars(passed) if isinstance(passed, GenerationConfig) else {}
    _noted.merged = weakref.ref(merged)
    _noted.keywords = frozenset(keywords)
    _noted.passed = frozenset(name for name, value in fields.items() if value is not None)


def origin(target: PreTrainedModel, merged: GenerationConfig, name: str) -> Origin:
    """Which of the three gave this field its value, in transformers' order of precedence.

    A config that was merged elsewhere (by a class with a `generate` of its own) is compared with the target's.
    """
    own = getattr(target.generation_config, name, None)
    if _noted.merged is None or _noted.merged() is not merged:
        return "target" if own is not None and own == getattr(merged, name) else "call"
    if name in _noted.keywords:
        return "call"
    if name in _noted.passed:
        return "passed"
    return "target" if own is not None else "call"


def rejection(target: PreTrainedModel, merged: GenerationConfig, name: str, reason: str, instead: Any) -> ValueError:
    """The error for a field that cannot be honoured, with the place that it comes from and the way out there.

    Args:
        target: Whose `generate` was called.
        merged: The call's generation config.
        name: The field.
        reason: Why, in the words that follow the value: `"has no meaning with a draft head"`.
        instead: A value that is accepted.
    """
    value, own = getattr(merged, name), getattr(target.generation_config, name, None)
    rejected, keyword = f"{name}={value!r} {reason}", f"pass {name}={instead!r} to this call"
    match origin(target, merged, name):
        case "call":
            way_out = "leave it out" if own in (None, instead) else keyword
            return ValueError(f"{rejected}: {way_out}")
        case "passed":
            also = "" if own in (None, instead) else f" (target.generation_config says {own!r} too)"
            return ValueError(
                f"{rejected}. It was set in the generation_config that was passed to this call{also}; pipelines of "
                "earlier versions of transformers pass a copy of the target's, pipe.generation_config. Set it to "
                f"{instead!r} there, or {keyword}"
            )
    return ValueError(
        f"{rejected}. It was not passed to this call, but comes from the target's own generation config, which is "
        f"saved with a model: set target.generation_config.{name} = {instead!r}, or {keyword}"
    )
