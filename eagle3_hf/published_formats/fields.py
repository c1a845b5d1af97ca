"""All fields of `Eagle3DraftConfig` that a published head settles, from its flat config and the shapes of its tensors.

Sizes come from the tensors wherever that is possible, since published configs are known to be wrong (36 layers for a
head that has one); a size that the config names too must agree. Flags decide what the arithmetic is, so a flag without
its tensor is an error, and so is a tensor without its flag.
"""

from typing import Any

from .attention_fields import attention_fields
from .config_keys import TARGET_KEYS
from .errors import HeadFormatError
from .feature_fields import feature_fields
from .head_file import HeadFile
from .layer_ids import LayerIds
from .names import count_layers
from .windows import windows


_COPIED = (
    *("hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
    *TARGET_KEYS,
)


def read_fields(head: HeadFile, layer_ids: LayerIds) -> dict[str, Any]:
    """Return the config fields of a published head, all but its RoPE.

    Raises:
        HeadFormatError: config and tensors contradict each other, or something that the head needs is missing.
    """
    hidden, layers = _hidden_size(head), _num_layers(head)
    fields = {
        **_copied(head),
        "hidden_size": head.agreed("hidden_size", hidden),
        "vocab_size": _vocab_size(head),
        "num_hidden_layers": layers,
        "intermediate_size": head.agreed("intermediate_size", head.height("layers.0.mlp.gate_proj.weight")),
        **attention_fields(head),
        **windows(head.config, layers, head.notes),
        **_flags(head),
        **feature_fields(head, layer_ids, hidden),
    }
    return {**fields, **_borrowed(head, fields)}


def _hidden_size(head: HeadFile) -> int:
    return head.height("fc.weight" if head.has("fc.weight") else "layers.0.self_attn.o_proj.weight")


def _num_layers(head: HeadFile) -> int:
    """Count the layers in the tensors. A file whose later layers were lost looks like one whose config is wrong."""
    stated, found = head.config.get("num_hidden_layers"), count_layers(head.shapes)
    if stated not in (None, found):
        head.notes.append(
            f"its config says num_hidden_layers {stated!r}, but it has tensors of {found}; {found} is used, since "
            "some configs give the target's number; if the head was trained with more, its file is incomplete"
        )
    return found


def _vocab_size(head: HeadFile) -> int:
    size = head.positive("vocab_size")
    for name in ("t2d", "embed_tokens.weight"):
        if head.has(name) and head.shapes[name][:1] != (size,):
            raise HeadFormatError(
                f"its config says vocab_size {size}, but {head.names.show(name)} has shape {head.shapes[name]}"
            )
    return size


def _flags(head: HeadFile) -> dict[str, bool]:
    norm_per_layer = head.flag("fc_norm") or head.flag("use_aux_norm")
    return {
        "norm_before_residual": head.flag("norm_before_residual"),
        "norm_before_fc": head.flag_with_tensor("norm_before_fc", "input_norm.weight"),
        "fc_norm": head.flag_with_tensor("fc_norm", "fc_norm.0.weight", norm_per_layer),
        "norm_output": head.flag("norm_output") or head.flag("return_hidden_post_norm"),
        "mlp_bias": head.tensor_unless_denied("mlp_bias", "layers.0.mlp.gate_proj.bias"),
        "fc_bias": head.has("fc.bias"),
    }


def _borrowed(head: HeadFile, fields: dict[str, Any]) -> dict[str, Any]:
    """What a file leaves out must be there to borrow: an embedding of the same width, an output layer of all V tokens.

    Raises:
        HeadFormatError: the head lacks a part that it cannot borrow.
    """
    embeds, output, vocab_size = head.has("embed_tokens.weight"), head.has("lm_head.weight"), fields["vocab_size"]
    hidden, target_hidden = fields["hidden_size"], fields["target_hidden_size"]
    if not embeds and hidden != target_hidden:
        raise HeadFormatError(
            f"missing tensors ['embed_tokens.weight']: a head of width {hidden} cannot borrow the embedding of a "
            f"target of width {target_hidden}"
        )
    size = head.config.get("draft_vocab_size") or head.shapes.get("d2t", (vocab_size,))[0]
    if not output and size != vocab_size:
        raise HeadFormatError(
            f"missing tensors ['lm_head.weight']: a head with a draft vocabulary of {size} tokens cannot borrow the "
            f"target's output layer, which has {vocab_size}"
        )
    if not output and embeds and head.flag("tie_word_embeddings"):
        raise HeadFormatError("its lm_head is tied to its own embedding, which is not supported: save it untied")
    drafted = head.height("lm_head.weight") if output else vocab_size
    return {
        "own_embeddings": embeds,
        "own_lm_head": output,
        "draft_vocab_size": head.agreed("draft_vocab_size", drafted),
    }


def _copied(head: HeadFile) -> dict[str, Any]:
    fields = {key: head.config[key] for key in _COPIED if head.config.get(key) is not None}
    fields.setdefault("target_name_or_path", _verifier(head))
    fields.setdefault("rms_norm_eps", 1e-6)  # transformers' own default for a Llama layer
    return fields


def _verifier(head: HeadFile) -> str | None:
    """Return the target's name in a speculators config. It is often a path of another machine, and only ever shown."""
    part: Any = head.config
    for key in ("speculators_config", "verifier", "name_or_path"):
        part = part.get(key) if isinstance(part, dict) else None
    return part if isinstance(part, str) else None
