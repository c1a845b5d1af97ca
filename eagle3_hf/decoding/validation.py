"""The checks of a `generate` call with a draft head, made before any forward pass.

An argument that cannot be honoured is rejected with an error that names it and says what to do instead.
"""

from typing import Any
from weakref import WeakKeyDictionary

import transformers
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from ..model.lookup_draft import LookupDraft
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..model.offload import device_of_head, is_offloaded
from ..model.tree_settings import TreeSettings, draft_window, tree_settings
from ..model.vocab import check_tokenizer
from ..utils.logging import get_logger
from .setting_origins import origin, rejection
from .unsupported_call import UnsupportedCall


logger = get_logger(__name__)

# Filled in by transformers, so that it cannot be told from a value that the user set.
_DEFAULT_NUM_ASSISTANT_TOKENS = 20

# Generation-config fields of other decoding methods, which are rejected unless they have the value filled in by
# transformers.
_MEANINGLESS: dict[str, Any] = {
    "assistant_ensemble_weight": None,
    "assistant_early_exit": None,
    "prompt_lookup_num_tokens": None,
    "max_matching_ngram_size": None,
    "dola_layers": None,  # another decoding method, which transformers ignores if there is an assistant
    "use_mtp": None,
    "speculation_type": None,
    "assistant_confidence_threshold": 0.4,
    "num_assistant_tokens_schedule": "constant",
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}

# Settings of ours that a call may override, as it may override transformers' own `num_assistant_tokens`.
CALL_SETTINGS = ("assistant_tree_depth", "assistant_tree_top_k", "assistant_window", "assistant_lookup")

_NEWEST_TESTED = (5, 24)

# tokenizer -> the state in which it was last compared with a head
_checked: WeakKeyDictionary[Any, tuple] = WeakKeyDictionary()


def check_call(
    target, draft: Eagle3DraftModel | LookupDraft, mode, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    """Check a call before any forward pass.

    Args:
        target: The model whose `generate` was called.
        draft: The assistant.
        mode: transformers' `GenerationMode` of the call.
        config: The call's merged generation config.
        mode_kwargs: Arguments of `generate` that only some decoding methods take.

    Raises:
        UnsupportedCall: an argument cannot be honoured.
        ValueError: a setting of the draft has no meaning, or the head does not fit the target.
    """
    _warn_if_untested(transformers.__version__)
    if isinstance(draft, Eagle3DraftModel):
        draft._require_vocabulary("generate")
        _check_device(draft)
        draft.check_target(target)
        call_window(draft, config)
        _check_tokenizer(draft, mode_kwargs.get("tokenizer"))
    check_mode(target, mode, config)
    check_options(target, config, mode_kwargs)
    _check_number(target, draft, config)


def _warn_if_untested(installed: str) -> None:
    """Warn once if transformers is newer than the versions that the tests run with."""
    if tuple(int(part) for part in installed.split(".")[:2]) > _NEWEST_TESTED:
        logger.warning_once(
            f"transformers {installed} is newer than the newest that this version of eagle3_hf was tested with "
            f"({'.'.join(map(str, _NEWEST_TESTED))}). If the output differs from ordinary decoding, please report it."
        )


def _check_device(draft: Eagle3DraftModel) -> None:
    device_of_head(draft)
    if is_offloaded(draft):
        logger.warning_once(
            "The draft head's weights are offloaded and fetched again for every level of every tree, which takes "
            "longer than drafting saves. Load it without a device_map, or with one that keeps it on one device."
        )


def _check_tokenizer(draft: Eagle3DraftModel, tokenizer: Any) -> None:
    """Compare a tokenizer with the hashes recorded in the head's config, once for each state of the tokenizer.

    Hashing a large vocabulary takes a while. A mismatch is only a warning, since the tokenizer only serves stop
    strings here, and the user may have added a pad token.
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
        logger.warning(f"{error}. Output is unaffected, but fewer drafts may be accepted.")


def check_mode(target, mode, config: GenerationConfig) -> None:
    """Raise an `UnsupportedCall` for a decoding method in which a draft can have no part."""
    if config.num_beams and config.num_beams > 1:
        raise rejection(target, config, "num_beams", "with a draft head is not supported (one beam is)", 1)
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise UnsupportedCall(
            f"generation mode {mode}",
            f"generation mode {mode} with a draft head is not supported: use greedy decoding or sampling",
        )
    modes = getattr(target, "_supported_generation_modes", None)
    if modes is not None and mode not in modes:
        raise UnsupportedCall(
            f"generation mode {mode}",
            f"{type(target).__name__} only supports {modes}: generate without assistant_model",
        )


def check_options(target, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise an `UnsupportedCall` for an option that does not go with a draft."""
    if config.use_cache is False:
        reason = "with a draft head is not supported, since verification needs the cache"
        raise rejection(target, config, "use_cache", reason, True)
    for name, default in _MEANINGLESS.items():
        value = getattr(config, name, None)
        if value is not None and value != default:
            raise rejection(target, config, name, "has no meaning with a draft head", default)
    if mode_kwargs.get("assistant_tokenizer") is not None:
        raise UnsupportedCall(
            "assistant_tokenizer",
            "assistant_tokenizer has no meaning with a draft head, which drafts in the target's own tokens: leave it "
            "out (a pipeline that demands it no longer does so after draft.bind(model))",
        )
    if config.cache_implementation == "quantized":
        reason = "with a draft head is not supported, since quantized entries cannot be rolled back"
        raise rejection(target, config, "cache_implementation", reason, None)


def _check_number(target, draft: Eagle3DraftModel | LookupDraft, config: GenerationConfig) -> None:
    try:
        call_settings(target, draft, config)
    except ValueError as error:
        name = "num_assistant_tokens"
        if name not in str(error) or config.num_assistant_tokens is None or origin(target, config, name) == "call":
            raise
        raise ValueError(rejection(target, config, name, f"is rejected ({error})", None)) from error


def call_settings(target, draft: Eagle3DraftModel | LookupDraft, config: GenerationConfig) -> TreeSettings:
    """Return the tree settings of a call: the draft's own, except for those that the call sets."""
    number = config.num_assistant_tokens
    number = None if number in (None, _DEFAULT_NUM_ASSISTANT_TOKENS) else number
    depth, top_k, window, lookup = (getattr(config, name, None) for name in CALL_SETTINGS)
    settings = tree_settings(draft, target, number, lookup, depth, top_k)
    if isinstance(draft, LookupDraft) and window is not None:
        raise ValueError(f"assistant_window={window!r} has no meaning with a LookupDraft, which has no cache: drop it")
    if isinstance(draft, LookupDraft) and settings.lookup_levels is None:
        raise ValueError("assistant_lookup=False leaves a LookupDraft nothing to draft: generate without it")
    return settings


def call_window(draft: Eagle3DraftModel, config: GenerationConfig) -> int | None:
    """Return how many positions the draft looks back in a call: the call's `assistant_window`, else the draft's."""
    return draft_window(draft, getattr(config, "assistant_window", None))


def reject_settings_without_draft(config: GenerationConfig) -> None:
    """Reject settings of a draft in a call that has none, where they would have no effect."""
    for name in CALL_SETTINGS:
        value = getattr(config, name, None)
        if value is not None:
            raise ValueError(f"{name}={value!r} needs a draft as assistant_model: leave it out")
