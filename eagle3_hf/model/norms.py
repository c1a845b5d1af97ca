"""The norm of the draft's modules."""

import torch
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import LlamaRMSNorm


class Eagle3RMSNorm(LlamaRMSNorm):
    """Llama's norm as one call, which torch computes in one kernel where it has one.

    In half precision, the weight is applied before the result is rounded, not after it.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return rms_norm(hidden_states, list(self.weight.shape), self.weight, self.variance_epsilon)
