"""Drafts attached to targets: `generate` then uses them in calls that pass no assistant.

Nothing is stored on the target, so that its copies, pickles and saved files are those of a model without a draft. The
wrapper of ordinary decoding in `patching.py` looks up the target of a call here.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationMixin

from ..acceptance import SpeculationStats
from ..model.lookup_draft import LookupDraft
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..utils.logging import get_logger
from .assistants import as_draft, load_draft
from .unsupported_call import UnsupportedCall


logger = get_logger(__name__)

_attachments: "weakref.WeakKeyDictionary[Any, Attachment]" = weakref.WeakKeyDictionary()


class _Plain(threading.local):
    """The targets that this thread runs without their drafts."""

    targets: tuple[Any, ...] = ()


_plain = _Plain()


class Attachment:
    """A draft that is attached to a target, as `attach` returns it. As a context manager it detaches at the end.

    Args:
        target: The target, of which only a weak reference is kept.
        draft: The draft.
        on_call: Called with the draft's statistics after each call that it served.

    Attributes:
        draft: The draft. `draft.stats` are the statistics of its last call.
    """

    def __init__(
        self,
        target: Any,
        draft: Eagle3DraftModel | LookupDraft,
        on_call: Callable[[SpeculationStats], None] | None = None,
    ):
        self.draft = draft
        self._target = weakref.ref(target)
        self._before = _attachments.get(target)
        self._on_call = on_call
        self._left_out: set[str] = set()

    def __enter__(self) -> "Attachment":
        return self

    def __exit__(self, *exception) -> None:
        """Restore what was attached before, unless something else has been attached or detached meanwhile."""
        target = self._target()
        if target is None or _attachments.get(target) is not self:
            return
        if self._before is None:
            detach(target)
        else:
            _attachments[target] = self._before

    def detach(self) -> None:
        """Detach the draft, if it is still attached."""
        target = self._target()
        if target is not None and _attachments.get(target) is self:
            detach(target)

    def leave_out(self, error: UnsupportedCall) -> None:
        """Say, once for each kind of call, that such calls run without the draft."""
        if error.kind not in self._left_out:
            self._left_out.add(error.kind)
            logger.warning(
                f"A call runs without the attached draft, and further ones of its kind ({error.kind}) will too, "
                f"without another message. The text is that of ordinary decoding. Reason: {error}"
            )

    def served(self, stats: SpeculationStats | None) -> None:
        """Pass on the statistics of a call."""
        if self._on_call is not None and stats is not None:
            self._on_call(stats)


def attach(
    target: Any,
    draft: Any,
    on_call: Callable[[SpeculationStats], None] | None = None,
) -> Attachment:
    """Let `target.generate` use a draft in every call that passes no assistant of its own.

    This is for code that calls `generate` itself, such as evaluation harnesses, trainers and servers. The text is the
    same. Calls that a draft cannot serve (beam search, `use_cache=False`, continuous batching, ...) run without it,
    and a log line says so once for each kind. Everything else is as with `assistant_model=draft`.

    ```python
    eagle3_hf.attach(target, draft)      # until eagle3_hf.detach(target)

    with eagle3_hf.attach(target, draft):
        trainer.evaluate()
    ```

    Nothing is stored on the target: a deep copy of it, or one that is pickled and loaded, has no draft. A draft that
    is attached already is replaced. While `eagle3_hf.disable()` holds, attached drafts are not used.

    Args:
        target: A model with `generate`; it may be compiled, or wrapped by PEFT, DDP or accelerate.
        draft: A draft head, a `LookupDraft`, or the path or Hub id of a head, which is loaded to the target's device.
        on_call: Called after each call that the draft served, also after one that ended with an exception, with its
            `SpeculationStats`, in the thread of the call.

    Returns:
        The attachment, which may be used as a context manager.

    Raises:
        TypeError: the target cannot generate, or the draft is not one.
        ValueError: the head does not fit the target, or cannot be loaded; or the target's class has a decoding loop of
            its own.
    """
    model = _generating(target)
    head = load_draft(draft, model) if isinstance(draft, (str, os.PathLike)) else as_draft(draft)
    if head is None:
        raise TypeError(
            f"attach takes a draft head, a LookupDraft, or the path or Hub id of a head; got a {type(draft).__name__}."
            " An ordinary assistant is passed to each call: generate(..., assistant_model=assistant)"
        )
    if isinstance(head, Eagle3DraftModel):
        head._require_vocabulary("attach")
        head.check_target(model)
    attachment = _attachments[model] = Attachment(model, head, on_call)
    return attachment


def detach(target: Any) -> None:
    """Let `target.generate` decode ordinarily again. Without an attached draft, nothing changes.

    Args:
        target: The model that was passed to `attach`, or one that wraps it.
    """
    _attachments.pop(_generating(target), None)


def attachment_of(target: Any) -> Attachment | None:
    """Return the attachment that a call of `target.generate` in this thread is to use; `None` for none."""
    if not _attachments or any(target is plain for plain in _plain.targets):
        return None
    return _attachments.get(target)


@contextmanager
def without_attachment(target: Any) -> Iterator[None]:
    """Let calls in this thread decode ordinarily inside the block, whatever is attached to the target."""
    before = _plain.targets
    _plain.targets = (*before, _unwrapped(target))
    try:
        yield
    finally:
        _plain.targets = before


def _generating(target: Any) -> Any:
    """Return the model of transformers in a target, which may be compiled or wrapped (by PEFT, DDP, accelerate).

    Raises:
        TypeError: there is none that can generate.
        ValueError: its class has a decoding loop of its own.
    """
    model = _unwrapped(target)
    if not isinstance(model, GenerationMixin) or isinstance(model, Eagle3DraftModel):
        raise TypeError(
            f"attach and detach take a model of transformers with generate, such as AutoModelForCausalLM loads, got "
            f"a {type(target).__name__}"
        )
    if type(model)._sample is not GenerationMixin._sample:
        raise ValueError(
            f"{type(model).__name__} has a decoding loop of its own (_sample), in which a draft can have no part: "
            "generate without it"
        )
    return model


def _unwrapped(target: Any) -> Any:
    for _ in range(4):
        if isinstance(target, GenerationMixin):
            break
        inner = "_orig_mod" if hasattr(target, "_orig_mod") else "module"
        target = target.get_base_model() if hasattr(target, "get_base_model") else getattr(target, inner, None)
    return target
