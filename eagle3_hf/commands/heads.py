"""Loads what a command is given as HEAD."""

from typing import Any

from ..utils.devices import is_slow


def load_head(where: str, target: Any) -> Any:
    """Return the draft of a name for a target: a head, a new one for `random`, or one without weights for `lookup`."""
    import torch

    from .. import Eagle3DraftModel, LookupDraft

    if where == "lookup":
        return LookupDraft()
    if where == "random":
        torch.manual_seed(0)  # the same head for a run that resumes
        ids = torch.randperm(target.config.get_text_config().vocab_size)[:8192].sort().values
        draft = Eagle3DraftModel.from_target(target, draft_vocab=ids, dtype=target.dtype)
        draft.init_weights()
        return draft
    draft = Eagle3DraftModel.from_pretrained(where).to(target.device)
    # A head is saved in half precision, but a CPU without instructions for that computes many times more slowly.
    return draft.to(target.dtype) if is_slow(draft) and not is_slow(target) else draft
