"""What a target can verify in one forward (a tree, a chain, or nothing), as far as its config tells.

There are three reasons why a target cannot verify a tree. It takes positions from cache slots (ALiBi, windows by
slot), while siblings are in different slots; it has recurrent or convolutional states, which follow one text, while a
tree has several branches; or it makes its attention masks outside transformers' mask functions. A chain has none of
these problems, since it is simply the next tokens of the text.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedModel

from ...model.target_modules import virtual_tokens
from . import tree_attention


class VerifyMode(Enum):
    """How drafts are verified."""

    TREE = "tree"
    CHAIN = "chain"
    PLAIN = "plain"


@dataclass(frozen=True)
class Capability:
    """What a target can verify.

    Attributes:
        mode: The best supported mode.
        reason: Why no better mode is supported, for messages; empty for a tree.
        restores: Whether its cache holds states that cannot be cut, only restored (see `recurrent_cache.py`).
    """

    mode: VerifyMode
    reason: str = ""
    restores: bool = False


TREE = Capability(VerifyMode.TREE)

# Model types that take positions from cache slots.
_SLOT_BOUND = ("bloom", "mpt", "gpt_neo")
# Text models whose verified trees agree with separate paths in the tests (docs/families.md), with any config except
# `alibi`.
_TESTED_TREES = {
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma4_text", "phi", "phi3", "gpt_oss", "olmo2", "olmo3", "granite", "granitemoe", "glm", "glm4",
    "glm4_moe", "deepseek_v3", "cohere", "cohere2", "smollm3", "llama4_text", "starcoder2", "stablelm", "gpt_neox",
    "gptj", "gpt2", "falcon", "opt", "biogpt", "xglm", "codegen", "persimmon", "nemotron", "exaone4",
    "hunyuan_v1_dense", "ernie4_5", "seed_oss", "minimax_m2", "dots1", "qwen2_vl_text", "qwen2_5_vl_text",
    "qwen3_vl_text",
}  # fmt: skip

# The same for models with images, by their own type: their text model's type does not say how images are handled.
_TESTED_AROUND = {"gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3", "idefics3", "paligemma"}


def known_capability(target: PreTrainedModel) -> Capability | None:
    """Return what class and config tell about a target; `None` if it must be tested (`capability_probe.py`).

    Only transformers' own classes are known, and only with attention that takes any mask: a class of the same name
    from elsewhere, or another kernel, may compute something else.
    """
    config, name = target.config.get_text_config(), type(target).__name__
    has_cache: Any = target._supports_default_dynamic_cache
    if not has_cache():
        return Capability(VerifyMode.PLAIN, f"{name} keeps its past elsewhere than in a cache of transformers")
    if has_cross_attention(target):
        return Capability(
            VerifyMode.PLAIN, f"{name} has cross-attention layers, whose cache entries are not those of tokens"
        )
    if (adapter := virtual_tokens(target)) is not None:
        return Capability(
            VerifyMode.PLAIN, f"{name} has an adapter with virtual tokens ({adapter}), which ids do not show"
        )
    if config.model_type in _SLOT_BOUND or getattr(config, "alibi", False):
        return Capability(VerifyMode.CHAIN, f"{name} takes positions from cache slots (ALiBi or windows by slot)")
    tested = config.model_type in _TESTED_TREES and (
        config is target.config or target.config.model_type in _TESTED_AROUND
    )
    if tested and _is_of_transformers(type(target)) and config._attn_implementation in tree_attention.INTERFACES:
        return TREE
    return None


def _is_of_transformers(kind: type) -> bool:
    """Return whether a class is of transformers itself, not remote code or a user's subclass; FSDP's are ignored."""
    modules = [base.__module__ for base in kind.__mro__]
    return next(name for name in modules if not name.startswith("torch.")).startswith("transformers.models.")


def has_cross_attention(target: PreTrainedModel) -> bool:
    """Return whether some layers attend to an encoder's output, such as an image, and are skipped without one."""
    config = target.config.get_text_config()
    return bool(getattr(config, "cross_attention_layers", None) or getattr(config, "cross_layer_interval", None))
