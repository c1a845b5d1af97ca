"""Copies the parts that a head borrows from its target, for formats in which a head must hold all of its tensors.

An embedding is read by calling the target's module, as the head itself does: some models scale their embedding inside
the module (Gemma), and an engine that shares the bare weight would feed the head other numbers.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..model.borrowed import call_on_module_device
from ..model.configuration_eagle3 import Eagle3DraftConfig
from .errors import ExportError


_TOKENS_AT_ONCE = 4096
_SCALED_EMBEDDINGS = "gemma"  # prefix of the model types whose embedding scales its weight
_SCALES_REASON = "the target scales its embedding inside the module"


def needs_target_weights(config: Eagle3DraftConfig, to: str, target: PreTrainedConfig | None = None) -> bool:
    """Whether the export needs the target's weights, to write or to compare them.

    Args:
        config: The head's config.
        to: The format, see [`export_head`].
        target: The target's config, for what the head has not recorded.
    """
    model_type = config.target_model_type or (target.get_text_config().model_type if target is not None else "")
    may_scale = model_type.startswith(_SCALED_EMBEDDINGS)
    if to == "speculators":
        return not (config.own_embeddings and config.own_lm_head)
    same_width = config.hidden_size == config.target_hidden_size
    if to == "sglang":
        return same_width and (config.own_embeddings or may_scale)
    return to == "vllm" and not config.own_embeddings and may_scale


def borrowed_tensors(
    draft: Any, config: Eagle3DraftConfig, to: str, target: PreTrainedModel | PreTrainedConfig | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the target's tensors that the file must hold, and the reasons why that is not possible."""
    model = target if isinstance(target, PreTrainedModel) else None
    if to == "speculators":
        return _speculators_tensors(config, model)
    if not needs_target_weights(config, to):
        return {}, []
    if model is None:
        what = "its embedding must be compared with the target's" if config.own_embeddings else _SCALES_REASON
        return {}, [f"embed_tokens: {what}; pass the target itself, a model, as target= (--target)"]
    embedding = _embedding_of(model, config.vocab_size)
    scales = _scales_embedding(model, embedding)
    if to == "vllm":
        return ({"embed_tokens.weight": embedding} if scales else {}), []
    if config.own_embeddings and not torch.equal(draft.embed_tokens.weight.detach().cpu().float(), embedding.float()):
        return {}, ["embed_tokens: the head's own differs from the target's, by which SGLang replaces it"]
    return {}, ([f"embed_tokens: {_SCALES_REASON}, and SGLang shares the bare weight"] if scales else [])


def _speculators_tensors(
    config: Eagle3DraftConfig, model: PreTrainedModel | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    owned = {"embed_tokens": config.own_embeddings, "lm_head": config.own_lm_head}
    missing = [name for name, own in owned.items() if not own]
    if missing and model is None:
        return {}, [
            f"{name}: speculators leaves a missing tensor uninitialised, and this head borrows it; pass the target "
            "itself, a model, as target= (--target)"
            for name in missing
        ]
    if model is None or config.hidden_size != config.target_hidden_size:
        return {}, []
    read = {"embed_tokens": _embedding_of, "lm_head": _lm_head_of}
    return {f"{name}.weight": read[name](model, config.vocab_size) for name in missing}, []


@torch.no_grad()
def _embedding_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """Return (V, Ht), the output of the target's embedding for every token, on the CPU."""
    embed = call_on_module_device(target.get_input_embeddings())
    chunks = torch.arange(vocab_size).split(_TOKENS_AT_ONCE)
    return torch.cat([embed(ids).cpu() for ids in chunks])


def _scales_embedding(target: PreTrainedModel, embedding: torch.Tensor) -> bool:
    """Whether the target's embedding returns something else than the rows of its weight, which engines share."""
    weight = _weight(target.get_input_embeddings(), "input embedding")
    return not torch.equal(weight[: len(embedding)].cpu(), embedding)


@torch.no_grad()
def _lm_head_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """Return (V, Ht), a copy of the target's output layer on the CPU.

    Raises:
        ExportError: the output layer has a bias, or no plain weight.
    """
    head = target.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ExportError(f"the lm_head of {type(target).__name__} has a bias, which no exported format can hold")
    return _weight(head, "lm_head")[:vocab_size].cpu().clone()


def _weight(module: nn.Module | None, what: str) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or weight.device.type == "meta" or not weight.is_floating_point():
        raise ExportError(
            f"the target's {what} has no plain weight (it may be quantised or offloaded): load the target "
            "unquantised, on the CPU if necessary"
        )
    return weight.detach()


__all__ = ["borrowed_tensors", "needs_target_weights"]
