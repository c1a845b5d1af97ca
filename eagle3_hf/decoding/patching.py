"""The wrappers around methods of transformers by which `generate(assistant_model=draft)` reaches our loop.

Four methods of `GenerationMixin`, the function by which pipelines load an assistant, the mask interfaces (see
`target/tree_attention.py`) and the attention named `sdpa` (see `model/grouped_attention.py`) are wrapped. A wrapper
acts only when the assistant is a draft head, or an object that cannot be an assistant; otherwise it calls the original
with the arguments it was given. `disable` restores the originals. Where other code has wrapped one of our wrappers
since, ours stays below it and passes every call through.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.pipelines import base as pipelines

from ..model import grouped_attention
from ..utils.logging import get_logger
from .assistants import as_draft, reject_lost_head, reject_no_model, reject_path_of_head
from .dispatch import decode
from .setting_origins import note
from .target import tree_attention
from .validation import check_call


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


def _wrap_validation(original: Callable) -> Callable:
    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        draft = as_draft(assistant)
        if draft is None:
            if _enabled:
                reject_no_model(assistant)
                reject_lost_head(assistant)
                lookup = getattr(generation_config, "assistant_lookup", None)
                if lookup is not None:
                    raise ValueError(f"assistant_lookup={lookup!r} needs a draft as assistant_model: leave it out")
            return original(self, generation_mode, generation_config, generation_mode_kwargs)
        if not _enabled:
            raise ValueError("eagle3_hf is disabled: call eagle3_hf.enable() to pass a draft head as assistant_model")
        return check_call(self, draft, generation_mode, generation_config, generation_mode_kwargs)

    return _validate_generation_mode


def _wrap_extraction(original: Callable) -> Callable:
    def _extract_generation_mode_kwargs(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
        if custom_generate is not None and _enabled and as_draft(assistant_model) is not None:
            raise ValueError("custom_generate and a draft head as assistant_model exclude each other: drop one")
        return original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)

    return _extract_generation_mode_kwargs


def _wrap_preparation(original: Callable) -> Callable:
    def _prepare_generation_config(self, generation_config=None, *args, **kwargs):
        prepared = original(self, generation_config, *args, **kwargs)
        if _enabled and not torch.compiler.is_compiling():
            note(prepared[0], kwargs, generation_config)
            # A setting of ours, which transformers would take for an argument of the model.
            if "assistant_lookup" in prepared[1]:
                prepared[0].assistant_lookup = prepared[1].pop("assistant_lookup")
        return prepared

    return _prepare_generation_config


def _wrap_assistant_loading(original: Callable) -> Callable:
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        if _enabled and model.can_generate():
            (reject_path_of_head if isinstance(assistant_model, str) else reject_no_model)(assistant_model)
        return original(model, assistant_model, assistant_tokenizer)

    return load_assistant_model


_WRAPPERS: dict[str, Callable[[Callable], Callable]] = {
    "_assisted_decoding": _wrap_decoding,
    "_validate_generation_mode": _wrap_validation,
    "_extract_generation_mode_kwargs": _wrap_extraction,
    "_prepare_generation_config": _wrap_preparation,
    "load_assistant_model": _wrap_assistant_loading,
}


def _owner(name: str) -> Any:
    """Return the class or module that has the wrapped method or function `name`."""
    return pipelines if name == "load_assistant_model" else GenerationMixin
