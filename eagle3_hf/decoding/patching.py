"""The wrappers around methods of transformers by which `generate(assistant_model=draft)` reaches our loop.

Six methods of `GenerationMixin`, the function by which pipelines load an assistant, the mask interfaces (see
`target/tree_attention.py`) and the attention named `sdpa` (see `model/grouped_attention.py`) are wrapped. A wrapper
acts only when the assistant is a draft head, or an object that cannot be an assistant, or when a draft is attached to
the target; otherwise it calls the original with the arguments it was given. `disable` restores the originals. Where
other code has wrapped one of our wrappers since, ours stays below it and passes every call through.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.pipelines import base as pipelines

from ..model import grouped_attention
from ..utils.logging import get_logger
from .assistants import as_draft, load_draft, reject_lost_head, reject_no_model, reject_path_of_head
from .attachments import Attachment, attachment_of
from .dispatch import decode, decode_attached
from .setting_origins import note
from .target import tree_attention
from .unsupported_call import UnsupportedCall
from .validation import CALL_SETTINGS, check_call, check_mode, reject_settings_without_draft


logger = get_logger(__name__)

_enabled = False
# method name -> (what transformers had, our wrapper)
_wrapped: dict[str, tuple[Callable, Callable]] = {}


def enable() -> None:
    """Let `generate` accept draft heads. `import eagle3_hf` calls this; calling it again changes nothing."""
    global _enabled
    tree_attention.install()
    grouped_attention.install()
    for name, make in _WRAPPERS.items():
        owner = _owner(name)
        original = getattr(owner, name, None)
        if original is not None and not (name in _wrapped and _leads_to(original, _wrapped[name][1])):
            wrapper = functools.wraps(original)(make(original))
            setattr(owner, name, wrapper)
            _wrapped[name] = (original, wrapper)
    _enabled = True


def _leads_to(method: Callable, wrapper: Callable) -> bool:
    """Return whether `method` is `wrapper`, or wraps it (directly or through other wrappers)."""
    while method is not wrapper and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method is wrapper


def disable() -> None:
    """Restore the methods of transformers. A draft head passed to `generate` then raises an error."""
    global _enabled
    for name, (original, wrapper) in list(_wrapped.items()):
        if getattr(_owner(name), name) is wrapper:
            setattr(_owner(name), name, original)
            del _wrapped[name]
    tree_attention.uninstall()
    grouped_attention.uninstall()
    _enabled = False


@contextmanager
def enabled(value: bool = True) -> Iterator[None]:
    """Enable draft heads (or, with `False`, disable them) inside the block; the state before is restored after it."""
    before = _enabled
    (enable if value else disable)()
    try:
        yield
    finally:
        (enable if before else disable)()


def _wrap_decoding(original: Callable) -> Callable:
    def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
        draft = as_draft(assistant_model) if _enabled else None
        if draft is None:
            return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
        return decode(self, draft, input_ids, *args, **kwargs)

    return _assisted_decoding


def _wrap_sampling(original: Callable) -> Callable:
    order = tuple(inspect.signature(original).parameters)[2:]  # behind self and input_ids

    def _sample(self, input_ids, *args, **kwargs):
        attachment = _active_attachment(self)
        if attachment is None:
            return original(self, input_ids, *args, **kwargs)
        return decode_attached(self, attachment, original, input_ids, **dict(zip(order, args, strict=False)), **kwargs)

    return _sample


def _active_attachment(target: Any) -> Attachment | None:
    return attachment_of(target) if _enabled and not torch.compiler.is_compiling() else None


def _wrap_validation(original: Callable) -> Callable:
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        draft = as_draft(assistant)
        if draft is None:
            if _enabled:
                reject_no_model(assistant)
                reject_lost_head(assistant)
                attachment = _active_attachment(self) if assistant is None else None
                if attachment is None:
                    reject_settings_without_draft(generation_config)
                else:
                    _check_attached(self, attachment, generation_mode, generation_config, generation_mode_kwargs)
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        if not _enabled:
            raise ValueError("eagle3_hf is disabled: call eagle3_hf.enable() to pass a draft head as assistant_model")
        return check_call(self, draft, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _check_attached(target, attachment: Attachment, mode, config, mode_kwargs: dict[str, Any]) -> None:
    """Reject invalid settings of the draft before anything runs, and say if the call will run without the draft."""
    is_ordinary = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    try:
        if is_ordinary:
            check_call(target, attachment.draft, GenerationMode.ASSISTED_GENERATION, config, mode_kwargs)
        elif mode is not GenerationMode.ASSISTED_GENERATION:  # an assistant of another kind, such as prompt lookup
            check_mode(target, mode, config)
    except UnsupportedCall as error:
        attachment.leave_out(error)


def _wrap_extraction(original: Callable) -> Callable:
    def _extract_generation_mode_kwargs(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
        if _enabled and custom_generate is None and isinstance(assistant_model, (str, os.PathLike)):
            assistant_model = load_draft(assistant_model, self)
        if custom_generate is not None and _enabled:
            if as_draft(assistant_model) is not None:
                raise ValueError("custom_generate and a draft head as assistant_model exclude each other: drop one")
            _leave_out(self, "custom_generate", "custom_generate replaces ordinary decoding")
        return original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)

    return _extract_generation_mode_kwargs


def _wrap_preparation(original: Callable) -> Callable:
    def _prepare_generation_config(self, generation_config=None, *args, **kwargs):
        prepared = original(self, generation_config, *args, **kwargs)
        if _enabled and not torch.compiler.is_compiling():
            note(prepared[0], kwargs, generation_config)
            # Settings of ours, which transformers would take for arguments of the model.
            for name in CALL_SETTINGS:
                if name in prepared[1]:
                    setattr(prepared[0], name, prepared[1].pop(name))
        return prepared

    return _prepare_generation_config


def _wrap_continuous_batching(original: Callable) -> Callable:
    def init_continuous_batching(self, *args, **kwargs):
        _leave_out(self, "continuous batching", "continuous batching runs several calls in one forward")
        return original(self, *args, **kwargs)

    return init_continuous_batching


def _leave_out(target: Any, kind: str, reason: str) -> None:
    """Say that a call will run without the draft that is attached to the target, if there is one."""
    attachment = _active_attachment(target)
    if attachment is not None:
        attachment.leave_out(UnsupportedCall(kind, reason))


def _wrap_assistant_loading(original: Callable) -> Callable:
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        if _enabled and model.can_generate():
            (reject_path_of_head if isinstance(assistant_model, str) else reject_no_model)(assistant_model)
        return original(model, assistant_model, assistant_tokenizer)

    return load_assistant_model


_WRAPPERS: dict[str, Callable[[Callable], Callable]] = {
    "_assisted_decoding": _wrap_decoding,
    "_sample": _wrap_sampling,
    "_validate_generation_mode": _wrap_validation,
    "_extract_generation_mode_kwargs": _wrap_extraction,
    "_prepare_generation_config": _wrap_preparation,
    "init_continuous_batching": _wrap_continuous_batching,
    "load_assistant_model": _wrap_assistant_loading,
}


def _owner(name: str) -> Any:
    """Return the class or module that has the wrapped method or function `name`."""
    if name == "load_assistant_model":
        return pipelines
    return next((kind for kind in GenerationMixin.__mro__ if name in vars(kind)), GenerationMixin)
