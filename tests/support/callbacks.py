"""Callbacks of a user's that stop or raise at a given call, and what a call must leave as it was."""

import torch
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from eagle3_hf.decoding.target import tree_attention
from support.drafts import Recorder


class AfterCalls(StoppingCriteria):
    """Stops at its n-th call, whatever the text."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left <= 0)


class Raising:
    """A logits processor, or a criterion, that raises at its n-th call."""

    def __init__(self, at: int, error: type[BaseException], is_criterion: bool):
        self.left, self.error, self.is_criterion = at, error, is_criterion

    def __call__(self, input_ids, scores):
        self.left -= 1
        if not self.left:
            raise self.error("raised by a callback")
        return torch.zeros(1, dtype=torch.bool) if self.is_criterion else scores


def raising(kind: str, at: int, error: type[BaseException]) -> dict:
    if kind == "streamer":
        return {"streamer": Recorder(raise_at=at + 1, error=error)}  # the prompt is its first call
    callback = Raising(at, error, kind == "criterion")
    if kind == "criterion":
        return {"streamer": Recorder(), "stopping_criteria": StoppingCriteriaList([callback])}
    return {"streamer": Recorder(), "logits_processor": LogitsProcessorList([callback])}


def surroundings(target, draft) -> list:
    """What a call must leave as it was."""
    state: list = [tree_attention._active.tree]
    for model in (target, draft):
        state += [model.config.to_dict(), model.generation_config.to_dict(), model.dtype]
        state += [[module.training for module in model.modules()]]
        state += [[len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]]
        state += [[parameter.requires_grad for parameter in model.parameters()]]
    return state
