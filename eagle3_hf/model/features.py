"""What a draft takes from its target: features at a few layers, and calls of modules that its own file lacks.

A feature is the raw residual stream at a `hidden_states` index: 0 is the embedding output, `i` the output of block
`i - 1`, `L` the output of the last block before the final norm. Forward hooks on the decoder blocks give exactly these
on every transformers version, also where `hidden_states[L]` is already normed. Index -1 is that normed output, which
heads without `fc` read. Training and generation use the same reader, so that a head never sees other features than it
was trained on.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..utils.logging import get_logger
from .configuration_eagle3 import Eagle3DraftConfig


logger = get_logger(__name__)


@dataclass
class Borrowed:
    """A head's embedding and output layer for one call, its own or its target's.

    Callables, so that offloaded and quantised modules of a target work.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    lm_head: Callable[[torch.Tensor], torch.Tensor]


# Config fields that say how many residual streams there are, and what the design is called.
_STREAMS = {
    "altup_num_inputs": "AltUp",
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
    "ngram": "future n-grams",
}

# Dtypes to compute in: packed integers and eight-bit floats are what a weight is stored in, not what it is read with.
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def call_at_home(
    module: nn.Module, compute_dtype: torch.dtype | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The call of a module of another model: its input goes to that module's device and dtype, its output comes back.

    Offloaded modules have no device of their own (`meta`) and see to it themselves. The weights of quantised ones say
    nothing of the dtype that the module computes in: `compute_dtype` does, the rest of their model's.
    """
    weight = next(chain(module.parameters(), module.buffers()), None)
    if weight is None:
        return module
    home_dtype = weight.dtype if weight.dtype in COMPUTE_DTYPES else compute_dtype

    def call(inputs: torch.Tensor) -> torch.Tensor:
        dtype = home_dtype if inputs.is_floating_point() and home_dtype is not None else inputs.dtype
        device = inputs.device if weight.device.type == "meta" else weight.device
        return module(inputs.to(device, dtype)).to(inputs.device)

    return call


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """What a model computes in, by its first parameter that is not packed (of quantised models a norm's)."""
    return next((p.dtype for p in model.parameters() if p.dtype in COMPUTE_DTYPES), None)


def default_layer_ids(num_layers: int) -> list[int]:
    """The reference's `[2, L // 2, L - 3]`; for targets with fewer than 7 layers, low/middle/high spread out."""
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    if num_layers >= 4:
        return [1, num_layers // 2, num_layers - 1]
    return list(range(max(0, num_layers - 2), num_layers + 1))


def num_target_layers(target: nn.Module) -> int:
    return num_blocks(target.config.get_text_config())


def num_blocks(text_config: PreTrainedConfig) -> int:
    """Decoder blocks; LongCat-Flash's `num_hidden_layers` counts two attentions a block, for the cache."""
    blocks = getattr(text_config, "num_layers", None)
    return min(blocks or text_config.num_hidden_layers, text_config.num_hidden_layers)


def text_backbone(target: nn.Module) -> nn.Module:
    """The module whose output is the input of the target's output layer: blocks and final norm, no head."""
    decoder = target.get_decoder() if hasattr(target, "get_decoder") else None
    if decoder in (None, target) or decoder is target.get_output_embeddings():  # ModernBERT's is called `decoder`
        return getattr(target, "base_model", target)
    return decoder


def table_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """Rows and width of an embedding or output layer, which adapters on it leave as they are; `None` if unknown.

    By what the module says of itself: a packed weight has another shape.
    """
    while isinstance(getattr(module, "base_layer", None), nn.Module):  # peft's speak of an embedding as of a layer
        module = cast(nn.Module, module.base_layer)
    for rows, width in (("num_embeddings", "embedding_dim"), ("out_features", "in_features")):
        shape = getattr(module, rows, None), getattr(module, width, None)
        if all(isinstance(size, int) for size in shape):
            return cast("tuple[int, int]", shape)
    return None


def target_vocab_size(target: nn.Module) -> int:
    """How many tokens the target both reads and writes; either of its tables may have more rows than that."""
    tables = target.get_input_embeddings(), target.get_output_embeddings()
    rows = [shape[0] for shape in map(table_shape, tables) if shape is not None]
    return min(rows, default=target.config.get_text_config().vocab_size)


def virtual_tokens(target: nn.Module) -> str | None:
    """The kind of prompt-learning adapter that a target runs with, or `None`.

    Args:
        target: A PeftModel, or during its `generate` the model below it, whose inputs it then prepares.
    """
    prepare = vars(target).get("prepare_inputs_for_generation")
    peft_model = target if hasattr(target, "active_peft_config") else getattr(prepare, "__self__", None)
    config = getattr(peft_model, "active_peft_config", None)
    return config.peft_type.value if getattr(config, "is_prompt_learning", False) else None


def require_own_tokens(target: nn.Module) -> None:
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


def media_token_ids(target: nn.Module) -> list[int]:
    """Ids that only hold a place in a prompt: where they stand, the target puts images, videos or sounds instead."""
    names = (f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index"))
    found = {getattr(target.config, name, None) for name in names}
    return sorted(token for token in found if isinstance(token, int))


def decoder_blocks(target: nn.Module) -> nn.ModuleList:
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
    """As `module.modules()`, without the towers for images and sounds: models whose config is of another class."""
    yield module
    for child in module.children():
        if not isinstance(child, PreTrainedModel) or isinstance(child.config.get_text_config(), text_config):
            yield from _text_modules(child, text_config)


def name_of(target: Any) -> str:
    """A target in messages: its class, or its folder or Hub id where only its config is known."""
    if isinstance(target, nn.Module):
        return type(target).__name__
    return getattr(target.config, "name_or_path", "") or f"a target of type {target.config.model_type}"


def check_target(config: Eagle3DraftConfig, target: nn.Module) -> None:
    """Refuse a target that a head was not made for; settle the layer ids that its file did not give.

    Raises:
        ValueError: naming both numbers.
    """
    text_config, name, layers = target.config.get_text_config(), name_of(target), num_target_layers(target)
    if getattr(target.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; EAGLE-3 heads draft for decoder-only targets")
    _check_streams(target)
    if config.target_hidden_size != text_config.hidden_size:
        raise ValueError(
            f"this head reads features of width {config.target_hidden_size}, but {name} has hidden_size "
            f"{text_config.hidden_size}: it was trained for another target"
        )
    _check_borrowed_widths(config, target)
    if config.vocab_size not in (text_config.vocab_size, target_vocab_size(target)):
        raise ValueError(
            f"this head was trained for a vocabulary of {config.vocab_size} tokens, but {name} has "
            f"{text_config.vocab_size}: it was trained for another target"
        )
    if config.target_num_hidden_layers not in (None, layers):
        raise ValueError(
            f"this head was trained for a target of {config.target_num_hidden_layers} layers, but {name} has "
            f"{layers}: it was trained for another target"
        )
    if config.target_layer_ids is None:
        _guess_layer_ids(config, layers)
    if config.guessed_layer_ids and config.target_layer_ids[-1] == layers + 1:
        _take_back_guess(config, name, layers)
    if config.target_layer_ids[-1] > layers:
        raise ValueError(
            f"this head reads hidden_states index {config.target_layer_ids[-1]}, but {name} has {layers} layers "
            f"(largest index {layers}): it was trained for another target"
        )


def _check_streams(target: nn.Module) -> None:
    """A head reads one residual stream, with one entry a token."""
    for field, streams in _STREAMS.items():
        count = getattr(target.config.get_text_config(), field, None) or 1
        if isinstance(count, int) and count > 1:
            raise ValueError(
                f"{type(target).__name__} has several residual streams ({streams}, {field}={count}), and a head reads "
                "one: no head can fit it"
            )


def _check_borrowed_widths(config: Eagle3DraftConfig, target: nn.Module) -> None:
    """What a head does not bring itself has to be as wide as the head."""
    name, what = type(target).__name__, f"but this head has hidden_size {config.hidden_size}"
    embedding, output = table_shape(target.get_input_embeddings()), table_shape(target.get_output_embeddings())
    if not config.own_embeddings and embedding is not None and embedding[1] != config.hidden_size:
        raise ValueError(
            f"this head borrows its target's embedding, and that of {name} has width {embedding[1]}, {what}: it needs "
            "its own, make it with own_embeddings=True"
        )
    if not config.own_lm_head and output is not None and output[1] != config.hidden_size:
        raise ValueError(
            f"this head borrows its target's output layer, and that of {name} reads width {output[1]}, {what}: it "
            "needs its own, make it with own_lm_head=True"
        )
    if config.target_layer_ids == [-1] and output is not None and output[1] != config.target_hidden_size:
        raise ValueError(
            f"this head reads its target's final output at width {config.target_hidden_size}, but the output layer of "
            f"{name} reads width {output[1]}: make a head that reads its blocks (use_aux_hidden_state=True)"
        )


def _guess_layer_ids(config: Eagle3DraftConfig, layers: int) -> None:
    """The reference's rule, with a warning; the layer count is kept, so that the guess serves no other target."""
    ids = default_layer_ids(layers)
    if layers < 7 or len(ids) != config.num_captured_layers:
        raise ValueError(
            f"this head's file names no layer ids and the target has only {layers} layers, too few for "
            "the reference's rule: load it with target_layer_ids=[...]"
        )
    logger.warning_once(
        f"The config of {config._name_or_path or 'this head'} names no target layers; the reference's rule for "
        f"{layers} layers is used: hidden_states indices {ids}. If it accepts little, load it with "
        "target_layer_ids=[...]."
    )
    config.target_layer_ids, config.target_num_hidden_layers = ids, layers


def _take_back_guess(config: Eagle3DraftConfig, name: str, layers: int) -> None:
    """One was added to ids that were indices already: kept for this depth only, as the guess of missing ids is."""
    guessed = config.target_layer_ids
    ids = [i - 1 for i in guessed]
    logger.warning(
        f"The layer ids of {config._name_or_path or 'this head'} were taken for block outputs, hidden_states indices "
        f"{guessed}, but {name} has only {layers} layers: they are the indices {ids} themselves, which are used now."
    )
    config.target_layer_ids, config.guessed_layer_ids = ids, False
    config.target_num_hidden_layers = layers


class FeatureReader:
    """Collects the residual stream at `layer_ids` while the target runs, as a context manager.

    ```
    with FeatureReader(target, [2, 15, 27]) as reader:
        target(input_ids)
        features = reader.take()        # (B, T, 3 * Ht), low layer first
    ```

    Several forwards before a `take` (chunked prefill) are joined along T. Of a block that runs more than once in one
    forward (Dory loops over some), the last run counts. Hooks are removed on exit, whatever happens.
    Only forwards of the thread that entered are read: another thread may run the same target meanwhile.

    Args:
        target: The target.
        layer_ids: `hidden_states` indices, ascending.
        embeds: Collect the embeddings too that the text model was given, images in their places (`take_embeds`).
    """

    def __init__(self, target: nn.Module, layer_ids: list[int], embeds: bool = False):
        require_own_tokens(target)
        count = num_target_layers(target)
        if layer_ids[-1] > count:
            raise ValueError(
                f"the draft reads hidden_states index {layer_ids[-1]}, but {name_of(target)} has {count} "
                f"layers (largest index {count}): the head was trained for another target"
            )
        self.layer_ids = list(layer_ids)
        self._backbone = text_backbone(target)
        self._blocks = None if self.layer_ids == [-1] else decoder_blocks(target)
        self._captured: dict[int, list[torch.Tensor]] = {}
        self._name, self._width = type(target).__name__, target.config.get_text_config().hidden_size
        self._forward, self._read_in = 0, dict.fromkeys(self.layer_ids, 0)  # of the backbone, counted
        self._shape: tuple[int, ...] | None = None  # of the tokens of the newest forward: (B, T)
        self._collects_embeds = embeds
        self._embeds: list[torch.Tensor] = []
        self._handles: list = []

    def __enter__(self) -> "FeatureReader":
        self.clear()
        self._thread = threading.get_ident()
        for layer_id in self.layer_ids:
            if layer_id == -1:
                hook = self._backbone.register_forward_hook(self._capture_output(layer_id))
            elif layer_id == 0:
                hook = self._blocks[0].register_forward_pre_hook(self._capture_input, with_kwargs=True)
            else:
                hook = self._blocks[layer_id - 1].register_forward_hook(self._capture_output(layer_id))
            self._handles.append(hook)
        self._handles.append(self._backbone.register_forward_pre_hook(self._begin_forward, with_kwargs=True))
        return self

    def __exit__(self, *exc_info) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        self._captured = {layer_id: [] for layer_id in self.layer_ids}
        self._embeds = []

    def take_embeds(self) -> torch.Tensor | None:
        """(B, T, H) what the text model was given in place of ids since the last `clear` or `take`; `None` for ids.

        Call it before `take`.
        """
        return torch.cat(self._embeds, dim=1) if self._embeds else None

    def take(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Features (B, T, A * Ht) of all forwards since the last `take`, moved once; forgets them.

        Raises:
            RuntimeError: a block did not run, so that its feature is missing.
        """
        missing = [layer_id for layer_id, parts in self._captured.items() if not parts]
        if missing:
            raise RuntimeError(f"the target's forward did not run the blocks behind hidden_states indices {missing}")
        joined = [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in self._captured.values()]
        self.clear()
        device = device or joined[-1].device
        return torch.cat([part.to(device=device, dtype=dtype or part.dtype) for part in joined], dim=-1)

    def _begin_forward(self, module, args, kwargs):
        if threading.get_ident() != self._thread:
            return
        self._forward += 1
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        tokens = next((tensor for tensor in given if isinstance(tensor, torch.Tensor)), None)
        self._shape = None if tokens is None else tuple(tokens.shape[:2])
        if self._collects_embeds and kwargs.get("inputs_embeds") is not None:
            self._embeds.append(kwargs["inputs_embeds"])

    def _capture_output(self, layer_id: int):
        def hook(module, args, output):
            if threading.get_ident() == self._thread:
                self._keep(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    def _capture_input(self, module, args, kwargs):
        if threading.get_ident() == self._thread and (not self._captured[0] or self._read_in[0] != self._forward):
            self._keep(0, args[0] if args else kwargs["hidden_states"])

    def _keep(self, layer_id: int, feature: torch.Tensor) -> None:
        """In place of what an earlier run of the same forward gave.

        Raises:
            ValueError: no vector a token (several residual streams, prompts put in front, time before the batch).
        """
        expected = (*(self._shape or feature.shape[:2]), self._width)
        if feature.shape != expected:
            raise ValueError(
                f"{self._name} gives features of shape {tuple(feature.shape)} at hidden_states index {layer_id}, "
                f"where {expected} was expected, one vector a token: a head cannot read them"
            )
        if self._captured[layer_id] and self._read_in[layer_id] == self._forward:
            self._captured[layer_id].pop()
        self._read_in[layer_id] = self._forward
        self._captured[layer_id].append(feature)
