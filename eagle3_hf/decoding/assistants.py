"""Finding the draft in an `assistant_model`, loading it from its name, and rejecting what cannot be an assistant."""

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..model.lookup_draft import LookupDraft
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..published_formats import is_head_config
from ..utils.logging import get_logger


logger = get_logger(__name__)

# target -> name -> the head that was loaded for it
_loaded: WeakKeyDictionary[Any, dict[str, Eagle3DraftModel]] = WeakKeyDictionary()
_loading = threading.Lock()


def as_draft(assistant: Any) -> Eagle3DraftModel | LookupDraft | None:
    """Return the draft in an `assistant_model`, else `None`. A head may be compiled, or wrapped by DDP or PEFT."""
    if isinstance(assistant, LookupDraft):
        return assistant
    for _ in range(4):
        if isinstance(assistant, Eagle3DraftModel):
            return assistant
        if hasattr(assistant, "get_base_model"):
            assistant = assistant.get_base_model()
        else:
            assistant = getattr(assistant, "_orig_mod", getattr(assistant, "module", None))
    return None


def load_draft(name: str | os.PathLike, target: Any) -> Eagle3DraftModel:
    """Load the head that a call names, to the target's device. It is kept for further calls while the target exists.

    Args:
        name: A local folder or a Hub id.
        target: The model whose `generate` was called.

    Raises:
        ValueError: no head can be loaded. The message says how to pass an ordinary assistant.
    """
    name = os.fspath(name)
    with _loading:
        heads = _loaded.setdefault(target, {})
        if name not in heads:
            try:
                heads[name] = Eagle3DraftModel.from_pretrained(name).to(target.device)
            except (ValueError, OSError) as error:
                reason = " ".join(str(error).split()).rstrip(".")
                raise ValueError(
                    f"assistant_model={name!r} is not a draft head that can be loaded: {reason}. An ordinary "
                    f"assistant must be a loaded model: assistant_model=AutoModelForCausalLM.from_pretrained({name!r})"
                ) from error
            logger.info(f"The draft head {name} has been loaded, and is kept while its target exists.")
        return heads[name]


def reject_no_model(assistant: Any) -> None:
    """Reject an assistant that is not a model, on which transformers would fail later with an `AttributeError`.

    Raises:
        TypeError: the assistant is not a model. The message says what was given, and the line to write instead.
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
    return isinstance(assistant, (nn.Module, LookupDraft)) or callable(getattr(assistant, "generate", None))


def _in_words(assistant: Any) -> tuple[str, str]:
    """Return a description of what was given, and the argument of `from_pretrained` to load instead, as code."""
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
    """Reject the path or Hub id of a draft head, for which transformers would look for a class of its own.

    Raises:
        ValueError: the path holds a draft head. The message says the line to write instead.
    """
    try:
        config, _ = PreTrainedConfig.get_config_dict(path)
    except Exception:  # transformers reports whatever is wrong with the path
        return
    if is_head_config(config):
        raise ValueError(
            f"assistant_model={path!r} holds an EAGLE-3 draft head, which a pipeline cannot load from its name. Load "
            f"it first: assistant_model=Eagle3DraftModel.from_pretrained({path!r})"
        )


def reject_lost_head(assistant: Any) -> None:
    """Reject a published head that was loaded by AutoModel: as the class its config names, with random weights.

    Raises:
        ValueError: the assistant is such a model. The message says the line to write instead.
    """
    config = getattr(assistant, "config", None)
    if any(getattr(config, name, None) is not None for name in ("draft_vocab_size", "eagle_config")):
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__} whose config has a draft vocabulary: a published "
            "EAGLE-3 head opened under the wrong class, hence with random weights. Load it with "
            "eagle3_hf.Eagle3DraftModel.from_pretrained(...)"
        )
