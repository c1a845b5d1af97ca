"""The parts of a target that a head needs to know: its decoder blocks, tables and text model, and its inputs."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


def num_target_layers(target: PreTrainedModel) -> int:
    return num_blocks(target.config.get_text_config())


def num_blocks(text_config: PreTrainedConfig) -> int:
    """The number of decoder blocks; LongCat-Flash's `num_hidden_layers` counts two attentions a block."""
    blocks = getattr(text_config, "num_layers", None)
    return min(blocks or text_config.num_hidden_layers, text_config.num_hidden_layers)


def text_backbone(target: PreTrainedModel) -> nn.Module:
    """The module whose output is the input of the target's output layer: blocks and final norm, no head."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    if decoder in (None, target) or decoder is target.get_output_embeddings():  # ModernBERT's is called `decoder`
        return getattr(target, "base_model", target)
    return decoder


def table_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """How many tokens an embedding or output layer has, and its width; `None` if unknown.

    Both are read from the module's attributes, since a packed weight has another shape. Adapters do not change them.
    """
    # The wrappers of peft have the attributes of a linear layer, also around an embedding.
    while isinstance(base := getattr(module, "base_layer", None), nn.Module):
        module = base
    for tokens, width in (("num_embeddings", "embedding_dim"), ("out_features", "in_features")):
        shape = getattr(module, tokens, None), getattr(module, width, None)
        if all(isinstance(size, int) for size in shape):
            return cast("tuple[int, int]", shape)
    return None


def target_vocab_size(target: PreTrainedModel) -> int:
    """How many tokens the target both reads and writes; its embedding or its output layer may have more."""
    tables = target.get_input_embeddings(), target.get_output_embeddings()
    sizes = [shape[0] for shape in map(table_shape, tables) if shape is not None]
    return min(sizes, default=target.config.get_text_config().vocab_size)


def virtual_tokens(target: PreTrainedModel) -> str | None:
    """The kind of prompt-learning adapter that a target runs with, or `None`.

    Args:
        target: A PeftModel, or during its `generate` the model below it, whose inputs it then prepares.
    """
    prepare = vars(target).get("prepare_inputs_for_generation")
    peft_model = target if hasattr(target, "active_peft_config") else getattr(prepare, "__self__", None)
    config = getattr(peft_model, "active_peft_config", None)
    return config.peft_type.value if config is not None and getattr(config, "is_prompt_learning", False) else None


def require_own_tokens(target: PreTrainedModel) -> None:
    """Reject a target whose inputs are longer than its ids, so that features and tokens would not line up.

    Raises:
        ValueError: naming the adapter and the way out.
    """
    adapter = virtual_tokens(target)
    if adapter is not None:
        raise ValueError(
            f"the target has an adapter with virtual tokens ({adapter}), which a head cannot be trained for: its "
            "features would not line up with the ids. Train it for the model without the adapter "
            "(target.get_base_model())"
        )


def media_token_ids(target: PreTrainedModel) -> list[int]:
    """The ids of placeholders in a prompt, for which the target inserts images, videos or sounds."""
    names = (f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index"))
    found = {getattr(target.config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int))


def decoder_blocks(target: PreTrainedModel) -> nn.ModuleList:
    """The target's list of decoder blocks, found by its length under the text backbone.

    Raises:
        ValueError: no module list of `num_hidden_layers` entries exists.
    """
    count = num_target_layers(target)
    for module in _text_modules(text_backbone(target), type(target.config.get_text_config())):
        if isinstance(module, nn.ModuleList) and len(module) == count and not isinstance(module[0], nn.ModuleList):
            return module
    raise ValueError(
        f"{type(target).__name__} has no list of {count} decoder blocks (num_hidden_layers), so its features cannot "
        "be read"
    )


def _text_modules(module: nn.Module, text_config: type) -> Iterator[nn.Module]:
    """As `module.modules()`, without encoders of images and sounds, whose config is of another class."""
    yield module
    for child in module.children():
        if not isinstance(child, PreTrainedModel) or isinstance(child.config.get_text_config(), text_config):
            yield from _text_modules(child, text_config)


def name_of(target: Any) -> str:
    """A target's name for messages: its class, or its path or Hub id where only its config is known."""
    if isinstance(target, nn.Module):
        return type(target).__name__
    return getattr(target.config, "name_or_path", "") or f"a target of type {target.config.model_type}"
