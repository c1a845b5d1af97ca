"""What a target can verify in one forward: a tree, a chain, or nothing; and what its config says about that.

Three things stand in the way of a tree. Positions taken from cache slots (ALiBi, windows by slot), since siblings
stand in different slots; states that follow one text only (recurrent, convolutional), since branches need several; and
attention masks made where no tree can be shown. A chain needs none of it: it is the text itself, a few tokens ahead.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PreTrainedModel

from ...model.features import virtual_tokens
from . import tree_attention


class VerifyMode(Enum):
    """How drafts are verified."""

    TREE = "tree"
    CHAIN = "chain"
    PLAIN = "plain"


@dataclass(frozen=True)
class Capability:
    """
    What a target can verify.

    Attributes:
        mode: The most it can do.
        reason: Why not more, in words; empty for a tree.
        restores: Its cache holds states that cannot be cut, only put back (see `snapshots`).
    """

    mode: VerifyMode
    reason: str = ""
    restores: bool = False


TREE = Capability(VerifyMode.TREE)

# Positions from cache slots.
_SLOT_BOUND = ("bloom", "mpt", "gpt_neo")
# Verified trees agree with separate paths in the tests (docs/families.md), whatever the config, but for `alibi`.
_TESTED_TREES = {
    "llama", "mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma4_text", "phi", "phi3", "gpt_oss", "olmo2", "olmo3", "granite", "granitemoe", "glm", "glm4",
    "glm4_moe", "deepseek_v3", "cohere", "cohere2", "smollm3", "llama4_text", "starcoder2", "stablelm", "gpt_neox",
    "gptj", "gpt2", "falcon", "opt", "biogpt", "xglm", "codegen", "persimmon", "nemotron", "exaone4",
    "hunyuan_v1_dense", "ernie4_5", "seed_oss", "minimax_m2", "dots1", "qwen2_vl_text", "qwen2_5_vl_text",
    "qwen3_vl_text",
}  # fmt: skip

# The same of models that see images, by their own type: a text model's class says little of what stands around it.
_TESTED_AROUND = {"gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "mistral3", "idefics3", "paligemma"}


def known_capability(target: PreTrainedModel) -> Capability | None:
    """What class and config say about a target by themselves; `None` where only a trial can tell.

    Only transformers' own classes are known, and only with attention that takes any mask: the same name elsewhere, or
    another kernel, may compute something else.
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
    """`is_remote_code` and a subclass of the user's both show in the module's name; FSDP's subclass is torch's."""
    modules = [base.__module__ for base in kind.__mro__]
    return next(name for name in modules if not name.startswith("torch.")).startswith("transformers.models.")


def has_cross_attention(target: PreTrainedModel) -> bool:
    """Whether layers of a decoder attend to an encoder's output (an image), and are skipped where there is none."""
    config = target.config.get_text_config()
    return bool(getattr(config, "cross_attention_layers", None) or getattr(config, "cross_layer_interval", None))
