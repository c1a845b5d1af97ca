"""Whether a head fits a target, and the layer ids that its file did not give."""

from transformers import PreTrainedModel

from ..utils.logging import get_logger
from .configuration_eagle3 import Eagle3DraftConfig
from .target_modules import name_of, num_target_layers, table_shape, target_vocab_size


logger = get_logger(__name__)

# Config fields that say how many residual streams there are, and what the design is called.
_STREAMS = {
    "altup_num_inputs": "AltUp",
    "hc_mult": "hyper-connections",
    "hc_count": "hyper-connections",
    "ngram": "future n-grams",
}


def default_layer_ids(num_layers: int) -> list[int]:
    """The reference's `[2, L // 2, L - 3]`; for targets with fewer than 7 layers, three that are spread out."""
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    if num_layers >= 4:
        return [1, num_layers // 2, num_layers - 1]
    return list(range(max(0, num_layers - 2), num_layers + 1))


def check_target(config: Eagle3DraftConfig, target: PreTrainedModel) -> None:
    """Reject a target that a head was not made for; settle the layer ids that its file did not give.

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
    highest = _settle_layer_ids(config, name, layers)[-1]
    if highest > layers:
        raise ValueError(
            f"this head reads hidden_states index {highest}, but {name} has {layers} layers (largest index {layers}): "
            "it was trained for another target"
        )


def _check_streams(target: PreTrainedModel) -> None:
    """Reject a target with several residual streams: a head reads one, with one vector a token."""
    for field, streams in _STREAMS.items():
        count = getattr(target.config.get_text_config(), field, None) or 1
        if isinstance(count, int) and count > 1:
            raise ValueError(
                f"{type(target).__name__} has several residual streams ({streams}, {field}={count}), and a head reads "
                "one: no head can fit it"
            )


def _check_borrowed_widths(config: Eagle3DraftConfig, target: PreTrainedModel) -> None:
    """Check that what a head borrows is as wide as the head."""
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


def _settle_layer_ids(config: Eagle3DraftConfig, name: str, layers: int) -> list[int]:
    """The layer ids of a head, which are written into its config where the file left them open."""
    ids = config.target_layer_ids
    if ids is None:
        ids = _default_ids(config, layers)
    elif config.guessed_layer_ids and ids[-1] == layers + 1:
        ids = _lowered_ids(config, ids, name, layers)
    else:
        return ids
    # With the number of layers, so that what was guessed for this target serves no other.
    config.target_layer_ids, config.guessed_layer_ids, config.target_num_hidden_layers = ids, False, layers
    return ids


def _default_ids(config: Eagle3DraftConfig, layers: int) -> list[int]:
    """The reference's choice, with a warning."""
    ids = default_layer_ids(layers)
    if layers < 7 or len(ids) != config.num_captured_layers:
        raise ValueError(
            f"this head's file names no layer ids and the target has only {layers} layers, too few for "
            "the reference's rule: load it with target_layer_ids=[...]"
        )
    logger.warning_once(
        f"The config of {config._name_or_path or 'this head'} names no target layers; the reference's rule for "
        f"{layers} layers is used: hidden_states indices {ids}. If few drafts are accepted, load the head with "
        "target_layer_ids=[...]."
    )
    return ids


def _lowered_ids(config: Eagle3DraftConfig, guessed: list[int], name: str, layers: int) -> list[int]:
    """The ids of a file that were `hidden_states` indices already, when one was added to them by mistake."""
    ids = [i - 1 for i in guessed]
    logger.warning(
        f"The layer ids of {config._name_or_path or 'this head'} were read as block outputs, hidden_states indices "
        f"{guessed}, but {name} has only {layers} layers: the ids are read as the indices {ids} instead."
    )
    return ids
