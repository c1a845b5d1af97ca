"""What a head borrows from its target, as tensors of its own, for formats that keep nothing outside the file.

An embedding is taken by calling the target's module, as the head itself does: some models scale inside it (Gemma), and
an engine that shared the bare weight would feed the head other numbers.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ..model.features import call_at_home
from .errors import ExportError


_ROWS = 4096


@torch.no_grad()
def embedding_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """(V, Ht) what the target's embedding gives for every token, on the CPU."""
    embed = call_at_home(target.get_input_embeddings())
    chunks = torch.arange(vocab_size).split(_ROWS)
    return torch.cat([embed(ids).cpu() for ids in chunks])


def scales_embedding(target: PreTrainedModel, embedding: torch.Tensor) -> bool:
    """Whether the target's module gives something else than the rows of its weight, which is what engines share."""
    weight = _weight(target.get_input_embeddings(), "input embedding")
    return not torch.equal(weight[: len(embedding)].cpu(), embedding)


@torch.no_grad()
def lm_head_of(target: PreTrainedModel, vocab_size: int) -> torch.Tensor:
    """(V, Ht) the rows of the target's output layer, a copy on the CPU."""
    head = target.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ExportError(f"the lm_head of {type(target).__name__} has a bias, which no exported head can carry")
    return _weight(head, "lm_head")[:vocab_size].cpu().clone()


def _weight(module: nn.Module | None, what: str) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2 or weight.device.type == "meta" or not weight.is_floating_point():
        raise ExportError(
            f"the target's {what} has no plain weight (quantised or offloaded?): load the target unquantised, on a "
            "CPU if need be"
        )
    return weight.detach()


__all__ = ["embedding_of", "lm_head_of", "scales_embedding"]
