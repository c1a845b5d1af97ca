"""Processes that generate at the same time with a target that is distributed over them (FSDP, ZeRO-3).

All of them must take part in every forward, but need different numbers of rounds. So a process announces every forward
after the prefill, and one that has finished answers with a dummy forward, until all have finished. The messages are
those of plain `generate`: one sum of flags for each forward.
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from ...model.lookup_draft import LookupDraft
from ...model.modeling_eagle3 import Eagle3DraftModel
from ..unsupported_call import UnsupportedCall


class SyncedGpus:
    """The other processes of a `generate` call with `synced_gpus=True`.

    Args:
        target: The model that all of them run.
        input_ids: (B, T) ids of this process.
    """

    def __init__(self, target: PreTrainedModel, input_ids: torch.Tensor):
        self._target = target
        self._token = input_ids.new_zeros(1, 1)

    def announce(self) -> None:
        """Announce a forward to the other processes."""
        self._sum_of_flags(1.0)

    @torch.no_grad()
    def run_along(self) -> None:
        """Run dummy forwards until all processes have finished."""
        while self._sum_of_flags(0.0).item():
            self._target(input_ids=self._token, use_cache=False)

    def _sum_of_flags(self, mine: float) -> torch.Tensor:
        flag = torch.tensor(mine, device=self._token.device)
        dist.all_reduce(flag, op=dist.ReduceOp.SUM)
        return flag


def synced_gpus_of(
    target: PreTrainedModel, draft: Eagle3DraftModel | LookupDraft, input_ids: torch.Tensor, synced_gpus: bool | None
) -> SyncedGpus | None:
    """Return the other processes of a call, or `None` if this process generates alone.

    Raises:
        UnsupportedCall: the head borrows a layer that is distributed over the processes. They do not draft at the same
            time, so that they could not all take part in the calls of this layer.
    """
    if not synced_gpus or not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    borrowed = {}
    if isinstance(draft, Eagle3DraftModel) and not draft.config.own_embeddings:
        borrowed["embedding"] = target.get_input_embeddings()
    if isinstance(draft, Eagle3DraftModel) and not draft.config.own_lm_head:
        borrowed["output layer"] = target.get_output_embeddings()
    for name, module in borrowed.items():
        if _is_spread(module):
            raise UnsupportedCall(
                "synced_gpus",
                f"the {name} of {type(target).__name__} is spread over {dist.get_world_size()} processes, and this "
                "head borrows it: use a head with one of its own, or leave that layer whole in every process",
            )
    return SyncedGpus(target, input_ids)


def _is_spread(module: nn.Module) -> bool:
    """Return whether a module is distributed, by FSDP2, ZeRO-3 or FSDP."""
    from torch.distributed.tensor import DTensor  # slow to import, and not in every build of torch

    weight = getattr(module, "weight", None)
    return isinstance(weight, DTensor) or hasattr(weight, "ds_id") or (weight is not None and weight.dim() < 2)
