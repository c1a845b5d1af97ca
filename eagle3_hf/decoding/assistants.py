"""What is passed as `assistant_model`: the draft head behind it, and what cannot be an assistant at all."""

import os
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..model.modeling_eagle3 import Eagle3DraftModel
from ..published_formats import is_head_config


def as_draft(assistant: Any) -> Eagle3DraftModel | None:
    """The draft head behind an `assistant_model`, also when compiled, DDP- or PEFT-wrapped; `None` for others."""
    for _ in range(4):
        if isinstance(assistant, Eagle3DraftModel):
            return assistant
        if hasattr(assistant, "get_base_model"):
            assistant = assistant.get_base_model()
        else:
            assistant = getattr(assistant, "_orig_mod", getattr(assistant, "module", None))
    return None


def reject_no_model(assistant: Any) -> None:
    """Refuse what has no forward; transformers would fail on it later, at an attribute that it lacks.

    Raises:
        TypeError: says what was given, and the line to write.
    """
    if assistant is None or _may_be_model(assistant):
        return
    given, folder = _in_words(assistant)
    raise TypeError(
        f"assistant_model must be a loaded model, got {given}. Load the draft head first: "
        f"assistant_model=Eagle3DraftModel.from_pretrained({folder}) (an ordinary assistant: AutoModelForCausalLM)"
    )


def _may_be_model(assistant: Any) -> bool:
    if isinstance(assistant, type):
        return False
    return isinstance(assistant, nn.Module) or callable(getattr(assistant, "generate", None))


def _in_words(assistant: Any) -> tuple[str, str]:
    """What was given, and the folder to load in its place as one writes it."""
    kind = type(assistant).__name__
    if isinstance(assistant, type):
        return f"the class {assistant.__name__}", '"..."'
    if isinstance(assistant, (str, os.PathLike)):
        path = os.fspath(assistant)
        return f"the {'string' if isinstance(assistant, str) else kind} {path!r}", repr(path)
    if isinstance(assistant, PreTrainedConfig):
        return f"a {kind}, which has no weights", repr(assistant._name_or_path or "...")
    if isinstance(assistant, PreTrainedTokenizerBase):
        return f"the tokenizer {kind}", '"..."'
    return f"a {kind}", '"..."'


def reject_path_of_head(path: str) -> None:
    """Refuse a folder or Hub id that holds a head, where transformers would look for a class of its own for it.

    Raises:
        ValueError: says the line to write.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except Exception:  # whatever is wrong with the path: transformers is about to say it
        return
    if is_head_config(config):
        raise ValueError(
            f"assistant_model={path!r} holds an EAGLE-3 draft head, which a pipeline cannot load from its name. Load "
            f"it first: assistant_model=Eagle3DraftModel.from_pretrained({path!r})"
        )


def reject_lost_head(assistant: Any) -> None:
    """A published head opened by AutoModel becomes a random model of the class its config claims: say so.

    Raises:
        ValueError: says the line to write.
    """
    config = getattr(assistant, "config", None)
    if any(getattr(config, name, None) is not None for name in ("draft_vocab_size", "eagle_config")):
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__} whose config speaks of a draft vocabulary: a published "
            "EAGLE-3 head opened under the wrong class, so with random weights. Load it with "
            "eagle3_hf.Eagle3DraftModel.from_pretrained(...)"
        )
