"""Copies the parts that a head borrows from its target, for formats in which a head must hold all of its tensors.

An embedding is read by calling the target's module, as the head itself does: some models scale their embedding inside
the module (Gemma), and an engine that shares the bare weight would feed the head other numbers.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.features import call_at_home
from .errors import ExportError


_TOKENS_AT_ONCE = 4096


@torch.no_grad()
def embedding_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """Return (V, Ht), the output of the target's embedding for every token, on the CPU."""
    embed = call_at_home(target.get_input_embeddings())
    chunks = torch.arange(vocab_size).split(_TOKENS_AT_ONCE)
    return torch.cat([embed(ids).cpu() for ids in chunks])


def scales_embedding(target: PreTrainedModel, embedding: torch.Tensor) -> bool:
    """Whether the target's embedding returns something else than the rows of its weight, which engines share."""
    weight = _weight(target.get_input_embeddings(), "input embedding")
    return not torch.equal(weight[: len(embedding)].cpu(), embedding)


@torch.no_grad()
def lm_head_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
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


__all__ = ["embedding_of", "lm_head_of", "scales_embedding"]
