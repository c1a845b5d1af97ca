"""The choice of a decoding loop: with trees, with chains, or plain decoding if the target can verify neither."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from ..acceptance import SpeculationStats
from ..model.lookup_draft import LookupDraft
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..utils.logging import get_logger
from .attachments import Attachment, without_attachment
from .loop import SpeculativeDecoding
from .target.capability import VerifyMode
from .target.capability_probe import capability_of
from .target.kv_cache import require_supported
from .target.recurrent_cache import require_restorable
from .target.runner import CACHE_KEY
from .target.static_cache import has_shortened_windows
from .target.training_mode import check_training_mode
from .unsupported_call import UnsupportedCall
from .validation import call_settings, check_options


logger = get_logger(__name__)

# Arguments that `generate` hands to a decoding method beside those of the forward, where it has been given them.
_NOT_FOR_FORWARD = ("inputs_tensor", "tokenizer")


def decode(
    target,
    draft: Eagle3DraftModel | LookupDraft,
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
    """Decode in place of transformers' assisted decoding, with the same arguments and the same result.

    Raises:
        UnsupportedCall: the cache cannot be rolled back or restored, the target's forward is random in its present
            mode, or an option does not go with this target (`output_attentions`, `synced_gpus`).
    """
    arguments = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
        "synced_gpus": synced_gpus,
        "streamer": streamer,
    }
    speculation = _speculation(target, draft, input_ids, **arguments, model_kwargs=model_kwargs)
    if speculation is None:
        return _decode_plainly(target, draft, input_ids, **arguments, **model_kwargs)
    _do_not_compile(generation_config)
    return speculation.run()


def decode_attached(target, attachment: Attachment, plainly: Callable, input_ids: torch.LongTensor, **arguments):
    """Decode in place of ordinary decoding, with the same arguments and the same result.

    Args:
        target: The model whose `generate` was called.
        attachment: The draft that is attached to it.
        plainly: Ordinary decoding, for calls that the draft cannot serve.
        input_ids: (B, T) the prompts.
        arguments: The other arguments of ordinary decoding, by name.
    """
    try:
        # Before anything runs, except for what a call that is rejected leaves as it was.
        check_options(target, arguments["generation_config"], arguments)
        speculation = _speculation(target, attachment.draft, input_ids, **_split(arguments))
    except UnsupportedCall as error:
        attachment.leave_out(error)
        return plainly(target, input_ids, **arguments)
    try:
        if speculation is None:
            return _decode_plainly(target, attachment.draft, input_ids, **arguments)
        _do_not_compile(arguments["generation_config"])
        return speculation.run()
    finally:
        # Of this call: other threads may have replaced the draft's.
        attachment.served(attachment.draft.stats if speculation is None else speculation.stats)


def _split(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a decoding method with those of the model's forward in a dict of their own."""
    own = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer")
    model_kwargs = {name: value for name, value in arguments.items() if name not in (*own, *_NOT_FOR_FORWARD)}
    return {**{name: arguments.get(name) for name in own}, "model_kwargs": model_kwargs}


def _speculation(
    target,
    draft: Eagle3DraftModel | LookupDraft,
    input_ids: torch.LongTensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool | None,
    streamer,
    model_kwargs: dict[str, Any],
) -> SpeculativeDecoding | None:
    """Return the loop for a call, or `None` if the target can only decode plainly, which a log line then says.

    Raises:
        UnsupportedCall: see `decode`.
    """
    cache = model_kwargs.get(CACHE_KEY)
    if generation_config.cache_implementation == "dynamic_full" and type(cache) is DynamicCache and not cache.layers:
        # With an assistant, earlier versions of transformers make a cache without windows, which our loop allows.
        cache = model_kwargs[CACHE_KEY] = DynamicCache(config=target.config.get_text_config(decoder=True))
    capability = capability_of(target, input_ids.device, cache, len(input_ids))
    if capability.mode is VerifyMode.PLAIN or _needs_its_own_windows(
        target, cache, input_ids, generation_config, model_kwargs
    ):
        return None
    check_training_mode(target)
    settings = call_settings(target, draft, generation_config)
    if capability.mode is VerifyMode.CHAIN:
        # Not deeper with lookup: an unknown target has been tried with short chains.
        levels = None if settings.lookup_levels is None else 0
        settings = replace(settings, num_nodes=settings.depth, top_k=1, lookup_levels=levels)
    if capability.restores and generation_config.output_attentions:
        raise UnsupportedCall(
            "output_attentions",
            f"output_attentions=True with a draft head is not supported for {type(target).__name__}, whose recurrent "
            "state is restored between forwards: leave it out",
        )
    (require_restorable if capability.restores else require_supported)(cache)
    return SpeculativeDecoding(
        target,
        draft,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        streamer,
        model_kwargs,
        settings,
        capability,
        bool(synced_gpus),
    )


def _needs_its_own_windows(target, cache, input_ids, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Return (and log) whether static windows that are shorter than the model's determine what a token attends to."""
    text_config, mask = target.config.get_text_config(), model_kwargs.get("attention_mask")
    behind = input_ids.shape[1] if mask is None else mask.shape[-1]
    length = behind + config.max_length - input_ids.shape[1] - 1
    windows = [getattr(text_config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if not has_shortened_windows(cache, windows, length):
        return False
    logger.warning_once(
        f"The static cache is shorter than the target's attention windows, so that of {length} tokens it keeps fewer "
        "than they show: decoding goes on without the draft. The text is the same. To use the draft, set "
        "max_cache_len to at least the windows' length."
    )
    return True


def _do_not_compile(config: GenerationConfig) -> None:
    """Keep `generate` from compiling the forward, as it does for static caches on accelerators.

    Args:
        config: The call's own config, which may be changed.
    """
    if config.compile_config is not None:
        logger.warning_once(
            "compile_config is set, but with a draft head the target runs uncompiled, since hooks and tree attention "
            "do not reach a compiled forward. The text is the same."
        )
    config.disable_compile = True


def _decode_plainly(target, draft: Eagle3DraftModel | LookupDraft, input_ids: torch.LongTensor, **kwargs):
    """Run ordinary decoding, for targets that cannot verify drafts; the statistics then count no rounds."""
    draft.stats = SpeculationStats()  # set first: after an exception the statistics must not be those of another call
    with without_attachment(target):
        output = target._sample(input_ids, **kwargs)
    if not isinstance(output, torch.Tensor):
        output.speculation = draft.stats
    return output
