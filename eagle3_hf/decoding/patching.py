"""What we wrap in transformers so that `generate(assistant_model=draft)` reaches our loop, and nothing else changes.

Four methods of `GenerationMixin`, the function by which pipelines load an assistant, and the mask interfaces (see
`masks`). Each wrapper acts only when the assistant is a draft head, or nothing that could be one; `disable` restores
what is still ours on top, and leaves a pass-through where somebody wrapped it since.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.pipelines import base as pipelines

from ..acceptance import SpeculationStats
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..model.offload import home_of, is_offloaded
from ..model.vocab import check_tokenizer
from ..utils.logging import get_logger
from .assistants import as_draft, refuse_lost_head, refuse_no_model, refuse_path_of_head
from .draft.candidate import draft_window, tree_settings
from .draft.growth import TreeSettings
from .loop import SpeculativeDecoding
from .setting_origins import note, origin, rejection
from .target import tree_attention
from .target.capability import Way
from .target.capability_probe import ability_of
from .target.kv_cache import require_supported
from .target.recurrent_cache import require_restorable
from .target.runner import CACHE_KEY
from .target.static_cache import has_shortened_windows
from .target.training_mode import check_training_mode


logger = get_logger(__name__)

_DEFAULT_NUM_ASSISTANT_TOKENS = 20  # transformers fills it in; it cannot be told from a value that the user set

# Generation-config fields that steer other ways of decoding: refused unless at the value transformers fills in.
_MEANINGLESS: dict[str, Any] = {
    "assistant_ensemble_weight": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "max_matching_ngram_size": None,
    "dola_layers": None,  # another mode, which transformers drops beside an assistant
    "use_mtp": None,
    "speculation_type": None,
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}

_NEWEST_TESTED = (5, 24)

# Tokenizers, in the state in which they were compared with a head.
_checked: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()
_enabled = False
# method name -> (what transformers had, our wrapper)
_wrapped: dict[str, tuple[Callable, Callable]] = {}


def enable() -> None:
    """Let `generate` accept draft heads; done once by `import eagle3_hf`. Twice is the same as once."""
    global _enabled
    tree_attention.install()
    for name, make in _WRAPPERS.items():
        owner = _owner(name)
        original = getattr(owner, name, None)
        if original is not None and not (name in _wrapped and _leads_to(original, _wrapped[name][1])):
            wrapper = functools.wraps(original)(make(original))
            setattr(owner, name, wrapper)
            _wrapped[name] = (original, wrapper)
    _enabled = True


def _leads_to(method: Callable, wrapper: Callable) -> bool:
    """Whether `wrapper` is `method` or is below the wrappers that others have put on it since."""
    while method is not wrapper and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method is wrapper


def disable() -> None:
    """Put transformers back. A draft passed to `generate` then raises."""
    global _enabled
    for name, (original, wrapper) in list(_wrapped.items()):
        if getattr(_owner(name), name) is wrapper:
            setattr(_owner(name), name, original)
            del _wrapped[name]
    tree_attention.uninstall()
    _enabled = False


@contextmanager
def enabled(value: bool = True) -> Iterator[None]:
    """Enabled (or, with `False`, disabled) inside the block, and as before after it."""
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
                refuse_no_model(assistant)
                refuse_lost_head(assistant)
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
        return prepared

    return _prepare_generation_config


def _wrap_assistant_loading(original: Callable) -> Callable:
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        if _enabled and model.can_generate():
            (refuse_path_of_head if isinstance(assistant_model, str) else refuse_no_model)(assistant_model)
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
    """Whose attribute a wrapped method or function is."""
    return pipelines if name == "load_assistant_model" else GenerationMixin


def check_call(target, draft: Eagle3DraftModel, mode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Refuse by name, before any forward pass, what this call cannot mean with a draft head.

    Raises:
        ValueError: names the argument or the mismatch, and the way out.
    """
    _say_if_untested(transformers.__version__)
    draft._require_vocabulary("generate")
    _check_place(draft)
    draft.check_target(target)
    _check_mode(target, mode, config)
    _check_options(target, config, mode_kwargs)
    _check_number(target, draft, config)
    draft_window(draft)
    _check_tokenizer(draft, mode_kwargs.get("tokenizer"))


def _say_if_untested(installed: str) -> None:
    """Once: a transformers newer than any that the tests have run with."""
    if tuple(int(part) for part in installed.split(".")[:2]) > _NEWEST_TESTED:
        logger.warning_once(
            f"transformers {installed} is newer than the newest that this version of eagle3_hf was tested with "
            f"({'.'.join(map(str, _NEWEST_TESTED))}); if a text differs from the plain call's, please report it"
        )


def _check_place(draft: Eagle3DraftModel) -> None:
    home_of(draft)
    if is_offloaded(draft):
        logger.warning_once(
            "The draft head's weights are offloaded and fetched again for every level of every tree, which takes "
            "longer than drafting saves. Load it without a device_map, or with one that keeps it on one device."
        )


def _check_tokenizer(draft: Eagle3DraftModel, tokenizer: Any) -> None:
    """Against the head's record, once for each tokenizer as it is: hashing a large vocabulary takes a while.

    Only a warning, since stop strings are all that it serves here, and a user may have added a pad token.
    """
    config = draft.config
    recorded = config.target_vocab_hash, config.target_chat_template_hash
    if tokenizer is None or recorded == (None, None):
        return
    state = len(tokenizer), str(getattr(tokenizer, "chat_template", None)), *recorded
    if _checked.get(tokenizer) == state:
        return
    _checked[tokenizer] = state
    try:
        check_tokenizer(config, tokenizer)
    except ValueError as error:
        logger.warning(f"{error}. The text is the target's all the same; the head may guess less of it.")


def _check_mode(target, mode, config: GenerationConfig) -> None:
    if config.num_beams and config.num_beams > 1:
        raise rejection(target, config, "num_beams", "with a draft head is not supported (one beam is)", 1)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(f"generation mode {mode} with a draft head is not supported: use greedy decoding or sampling")
    modes = getattr(target, "_supported_generation_modes", None)
    if modes is not None and mode not in modes:
        raise ValueError(f"{type(target).__name__} only supports {modes}: generate without assistant_model")


def _check_options(target, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    if config.use_cache is False:
        reason = "with a draft head is not supported, since verification needs the cache"
        raise rejection(target, config, "use_cache", reason, True)
    for name, default in _MEANINGLESS.items():
        value = getattr(config, name, None)
        if value is not None and value != default:
            raise rejection(target, config, name, "has no meaning with a draft head", default)
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer has no meaning with a draft head, which drafts in the target's own tokens: leave it "
            "out (a pipeline that asks for it is content after draft.bind(model))"
        )
    if config.cache_implementation == "quantized":
        reason = "with a draft head is not supported, since quantized entries cannot be rolled back"
        raise rejection(target, config, "cache_implementation", reason, None)


def _check_number(target, draft: Eagle3DraftModel, config: GenerationConfig) -> None:
    try:
        _call_settings(target, draft, config)
    except ValueError as error:
        if config.num_assistant_tokens is None or origin(target, config, "num_assistant_tokens") == "call":
            raise
        raise rejection(target, config, "num_assistant_tokens", f"is rejected ({error})", None) from error


def _call_settings(target, draft: Eagle3DraftModel, config: GenerationConfig) -> TreeSettings:
    number = config.num_assistant_tokens
    return tree_settings(draft, target, None if number in (None, _DEFAULT_NUM_ASSISTANT_TOKENS) else number)


def decode(
    target,
    draft: Eagle3DraftModel,
    input_ids: torch.LongTensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    inputs_tensor=None,
    tokenizer=None,
    **model_kwargs,
):
    """What `generate` calls instead of its own assisted decoding; same arguments, same result.

    Raises:
        ValueError: a cache that cannot be rolled back; a target that is random in its present mode.
    """
    cache = model_kwargs.get(CACHE_KEY)
    if generation_config.cache_implementation == "dynamic_full" and type(cache) is DynamicCache and not cache.layers:
        # Earlier versions of transformers make a cache without windows beside an assistant; ours keep theirs.
        cache = model_kwargs[CACHE_KEY] = DynamicCache(config=target.config.get_text_config(decoder=True))
    ability = ability_of(target, input_ids.device, cache, len(input_ids))
    if ability.way is Way.PLAIN or _needs_its_own_windows(target, cache, input_ids, generation_config, model_kwargs):
        return _decode_plainly(
            target,
            draft,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    check_training_mode(target)
    _do_not_compile(generation_config)
    settings = _call_settings(target, draft, generation_config)
    if ability.way is Way.CHAIN:
        settings = TreeSettings(settings.depth, settings.depth, 1, settings.at_most)
    if ability.restores and generation_config.output_attentions:
        raise ValueError(
            f"output_attentions=True with a draft head is not supported for {type(target).__name__}, whose recurrent "
            "state is restored between forwards: leave it out"
        )
    (require_restorable if ability.restores else require_supported)(cache)
    run = SpeculativeDecoding(
        target,
        draft,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        model_kwargs,
        settings,
        ability,
        synced_gpus,
    )
    return run.run()


def _needs_its_own_windows(target, cache, input_ids, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether static windows shorter than the model's decide what the text sees; a line in the log then says so."""
    text_config, mask = target.config.get_text_config(), model_kwargs.get("attention_mask")
    behind = input_ids.shape[1] if mask is None else mask.shape[-1]
    length = behind + config.max_length - input_ids.shape[1] - 1
    windows = [getattr(text_config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if not has_shortened_windows(cache, windows, length):
        return False
    logger.warning_once(
        "the static cache is shorter than the windows of the target's attention, and keeps less than they show of a "
        f"text of {length} tokens: decoding goes on without the draft. The text is the same; a max_cache_len of at "
        "least the windows' length brings the draft back"
    )
    return True


def _do_not_compile(config: GenerationConfig) -> None:
    """`generate` compiles the forward for static caches on accelerators; this is the call's own config."""
    if config.compile_config is not None:
        logger.warning_once(
            "compile_config is set, but beside a draft head the target runs uncompiled: a compiled forward can "
            "neither be read nor be shown a tree. The text is the same."
        )
    config.disable_compile = True


def _decode_plainly(target, draft: Eagle3DraftModel, input_ids: torch.LongTensor, **kwargs):
    """The target's own decoding, for targets that cannot verify a draft; no rounds in the statistics."""
    draft.stats = SpeculationStats()  # first of all: an exception must not leave those of the call before
    output = target._sample(input_ids, **kwargs)
    if not isinstance(output, torch.Tensor):
        output.speculation = draft.stats
    return output
