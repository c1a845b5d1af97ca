"""One canonical description of an EAGLE-3 draft head.

Whatever format a head was published in, it is translated into this class once, at load (see `published_formats`).
Layer ids are indices into the target's `hidden_states`: 0 is the embedding output, `L` the output of the last block
*before* the final norm.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from huggingface_hub.dataclasses import strict, validated_field
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..published_formats import REFERENCE_THETA, shortened
from ..utils.logging import get_logger
from .config_fields import (
    checked,
    is_integer,
    not_negative,
    optional_shares,
    optional_text,
    optional_token,
    positive,
    size,
    switch,
    value_errors,
)
from .rope import check_rope, check_rope_table, without_unset


logger = get_logger(__name__)

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LAYER_IDS = "ascending, distinct hidden_states indices >= 0 (0 = embeddings)"
_LAYER_TYPES = ("full_attention", "sliding_attention")
# What no head has: with more than this, building the modules or the rotary table would take for ever.
_MOST_LAYERS, _MOST_TARGET_LAYERS, _MOST_HEAD_DIM = 256, 2**12, 2**16


def _as_list(config: Any, value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in ACT2FN


def _are_layer_types(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(t, str) and t in _LAYER_TYPES for t in value))


def _are_layer_ids(value: Any) -> bool:
    """Whether these are ids in ascending order, or the one id -1, or none."""
    if value is None or value == [-1]:
        return True
    if not isinstance(value, list) or not value or not all(is_integer(i) for i in value):
        return False
    return sorted(set(value)) == value and value[0] >= 0 and value[-1] <= _MOST_TARGET_LAYERS


def _layer_ids(config: Any, value: Any) -> Any:
    """A head without `fc` reads the target's final output where its config names no layers."""
    return [-1] if value is None and config.use_aux_hidden_state is False else _as_list(config, value)


@value_errors
@strict
class Eagle3DraftConfig(PreTrainedConfig):
    """Configuration of [`Eagle3DraftModel`]; each field is described below its declaration.

    A field is checked whenever it is set, and fields that must agree when the config is made, loaded or saved.

    Raises:
        ValueError: a field of the wrong type, or fields that contradict each other; values are named.
    """

    model_type = "eagle3_draft"
    default_theta = REFERENCE_THETA
    # Multimodal configs have these; they are kept for engines, and transformers shall not warn of them.
    ignore_keys_at_rope_validation = {"mrope_section", "mrope_interleaved"}

    # ----- sizes ----------------------------------------------------------------------------------------------------

    hidden_size: int = size(4096)
    """Width `H` of the draft."""
    target_hidden_size: int = size(derived=lambda config: config.hidden_size)
    """Width `Ht` of the target's residual stream; `hidden_size` when not given."""
    intermediate_size: int = size(14336)
    """Width of the draft's MLP."""
    num_hidden_layers: int = size(1, most=_MOST_LAYERS)
    """Draft layers; the first reads `[embedding, feature]` (2H wide), the others are ordinary."""
    num_attention_heads: int = size(32)
    """Query heads."""
    num_key_value_heads: int = size(derived=lambda config: config.num_attention_heads)
    """Key and value heads; `num_attention_heads` when not given."""
    kv_lora_rank: int | None = size()
    """Set for latent attention (MLA, DeepSeek V3 and Kimi), which then needs the three widths below `q_lora_rank`."""
    q_lora_rank: int | None = size()
    """Rank of latent attention's queries, where they have one."""
    qk_nope_head_dim: int | None = size()
    """Latent attention: width of the part of queries and keys that is not rotated."""
    qk_rope_head_dim: int | None = size(most=_MOST_HEAD_DIM)
    """Latent attention: width of the part of queries and keys that is rotated."""
    v_head_dim: int | None = size()
    """Latent attention: width of the values."""
    head_dim: int = size(
        most=_MOST_HEAD_DIM,
        derived=lambda config: config.qk_rope_head_dim or config.hidden_size // config.num_attention_heads,
    )
    """Width of an attention head, `hidden_size / num_attention_heads` when not given; `qk_rope_head_dim` in latent
    attention."""

    # ----- vocabulary -----------------------------------------------------------------------------------------------

    vocab_size: int = size(128256)
    """Vocabulary `V` of the *target*."""
    draft_vocab_size: int = size(derived=lambda config: config.vocab_size)
    """Vocabulary `D <= V` of the draft's own output layer; `vocab_size` when not given."""
    own_embeddings: bool = switch()
    """The head carries its own input embedding; otherwise it borrows the target's."""
    own_lm_head: bool = switch(True)
    """The head carries its own output layer; otherwise (only with `D == V`) it borrows the target's."""
    pad_token_id: int | None = optional_token()
    bos_token_id: int | None = optional_token()
    eos_token_id: int | list[int] | None = optional_token(several=True)

    # ----- what is read from the target -----------------------------------------------------------------------------

    use_aux_hidden_state: bool = switch(True)
    """`False` for heads that read one feature only, the target's output *after* its final norm (id -1), and have no
    `fc`."""
    target_layer_ids: list[int] | None = checked(_LAYER_IDS, _are_layer_ids, prepare=_layer_ids)
    """Ascending `hidden_states` indices to read. `None` means that the file did not say; `bind` then falls back to the
    reference's `[2, L // 2, L - 3]`, with a warning."""
    guessed_layer_ids: bool = switch()
    """The ids come from a file whose convention had to be guessed (block outputs, so one was added); where the target
    proves the guess wrong, `bind` takes the one off again, with a warning."""

    # ----- norms, biases, activation --------------------------------------------------------------------------------

    hidden_act: str = checked("the name of an activation function of transformers", _is_activation, default="silu")
    """Activation function of the draft's MLP."""
    rms_norm_eps: int | float = positive(1e-5)
    """What the norms add to a variance."""
    initializer_range: int | float = not_negative(0.02)
    """Standard deviation of new weights."""
    norm_before_residual: bool = switch()
    """The layer's residual is the normalised feature instead of the raw one."""
    norm_before_fc: bool = switch()
    """One RMSNorm over the concatenated features before `fc`."""
    fc_norm: bool = switch()
    """One RMSNorm per captured layer before `fc`. Excludes `norm_before_fc`."""
    norm_output: bool = switch()
    """Feed the output *after* the final norm back, instead of before it (EAGLE-3.1)."""
    final_norm: bool = switch(True)
    """`False` for heads whose output layer reads the last layer's output without a norm."""
    qk_norm: bool = switch()
    """Queries and keys are normalised."""
    attention_bias: bool = switch()
    """The projections to queries, keys and values have a bias."""
    attention_output_bias: bool = switch(None, derived=lambda config: config.attention_bias)
    """The attention's output projection has a bias; as `attention_bias` when not given."""
    mlp_bias: bool = switch()
    """The MLP has biases."""
    fc_bias: bool = switch()
    """`fc` has a bias."""

    # ----- positions and windows ------------------------------------------------------------------------------------

    max_position_embeddings: int = size(2048)
    """The longest text that the head was made for."""
    rope_parameters: Any = validated_field(
        check_rope, default=None, metadata={"prepare": lambda config, value: without_unset(value)}
    )
    """Rotary positions, as in transformers; the reference's base of 10000 when not given."""
    rope_interleave: bool = switch(True)
    """Latent attention rotates neighbouring numbers as pairs, instead of numbers half a width apart."""
    layer_types: list[str] | None = checked(f"a list of {list(_LAYER_TYPES)}", _are_layer_types, prepare=_as_list)
    """`"full_attention"` or `"sliding_attention"` for each draft layer; all full when not given."""
    sliding_window: int | None = size()
    """How many positions `W` a sliding layer sees, its own included: those above `p - W`."""

    # ----- what the head was trained for; checked when a target or a tokenizer is at hand ---------------------------

    target_name_or_path: str | None = optional_text()
    target_model_type: str | None = optional_text()
    target_num_hidden_layers: int | None = size(most=_MOST_TARGET_LAYERS)
    target_vocab_hash: str | None = optional_text()
    target_chat_template_hash: str | None = optional_text()
    held_out_accuracy: list[float] | None = optional_shares()
    """How often the first choice was the target's at each step of training-time test, on chats that were held out of
    training. A head that accepts far less in `generate` warns."""

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("tie_word_embeddings", False)
        try:
            super().__post_init__(**kwargs)
        except Exception as error:  # a file can hold anything under any key, and transformers raises what it likes
            raise ValueError(_in_words(error, self.rope_parameters)) from error

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """Make a config from a dict, without the keys that no head has.

        Some of those would replace a method, others make transformers download an attention kernel.
        """
        strange = unknown_keys(config_dict)
        if strange:
            logger.warning(shortened(f"config keys that are not understood and have no effect: {strange}"))
        known = {name: value for name, value in config_dict.items() if name in _KNOWN}
        try:
            result: Any = super().from_dict(known, **kwargs)
            if FIELDS & kwargs.keys():  # these were set one by one, and may not agree with the rest
                config = result[0] if isinstance(result, tuple) else result
                config.validate()
        except ValueError as error:
            raise ValueError(shortened(str(error))) from error
        return result

    @property
    def num_captured_layers(self) -> int:
        """How many target layers are read (`A`): three when the file does not say."""
        return len(self.target_layer_ids) if self.target_layer_ids is not None else 3

    @property
    def captured_layer_ids(self) -> list[int]:
        """The `target_layer_ids`, of a head that has met its target.

        Raises:
            ValueError: the file did not say, and no target has settled it.
        """
        if self.target_layer_ids is None:
            raise ValueError(
                "target_layer_ids is None: which layers the head reads is settled by draft.bind(target), or give them"
            )
        return self.target_layer_ids

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are expanded from a latent vector (MLA)."""
        return self.kv_lora_rank is not None

    @property
    def latent_widths(self) -> tuple[int, int, int, int]:
        """Of latent attention: the latent; of each head its unrotated part, its rotary part and its value."""
        return cast(Any, (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim))

    def window(self, layer_idx: int) -> int | None:
        """How many positions a draft layer sees, its own included; `None` for all."""
        sliding = self.layer_types is not None and self.layer_types[layer_idx] == "sliding_attention"
        return self.sliding_window if sliding else None

    # ----- fields that must agree -----------------------------------------------------------------------------------

    def validate_architecture(self) -> None:
        """Check heads and norms. As every method `validate_*`, it is called by `@strict`."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them to False")
        if self.norm_output and not self.final_norm:
            raise ValueError(
                "norm_output=True feeds back the output of a final norm that final_norm=False says is not there: set "
                "norm_output=False or final_norm=True"
            )

    def validate_dtype(self) -> None:
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else self.dtype
        if self.dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must name a dtype of torch, got {self.dtype!r}")

    def validate_rope(self) -> None:
        """Check what transformers has made of older keys, too."""
        try:
            super().validate_rope()
        except Exception as error:
            raise ValueError(_in_words(error, self.rope_parameters)) from error
        check_rope_table(self)
        if self.is_latent and self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"latent attention rotates all of qk_rope_head_dim ({self.qk_rope_head_dim}), but rope_parameters has "
                f"partial_rotary_factor {self.rope_parameters['partial_rotary_factor']}: leave that out"
            )

    def validate_vocabulary(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size ({self.draft_vocab_size}) is larger than the target's vocab_size "
                f"({self.vocab_size}): the draft's tokens must be a subset of the target's"
            )
        if self.draft_vocab_size < self.vocab_size and not self.own_lm_head:
            raise ValueError(
                f"a head without its own lm_head borrows the target's, which has {self.vocab_size} tokens, but "
                f"draft_vocab_size is {self.draft_vocab_size}"
            )
        if not self.own_embeddings and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"a draft of width {self.hidden_size} cannot borrow the embedding of a target of width "
                f"{self.target_hidden_size}: it needs its own (own_embeddings=True)"
            )

    def validate_latent_attention(self) -> None:
        given = [name for name in ("q_lora_rank", *_LATENT) if getattr(self, name) is not None]
        if not self.is_latent:
            if given:
                raise ValueError(f"{given} belong to latent attention (MLA): set kv_lora_rank too, or leave them out")
            return
        missing = [name for name in _LATENT if getattr(self, name) is None]
        if missing:
            raise ValueError(f"latent attention (kv_lora_rank={self.kv_lora_rank}) also needs {missing}")
        if self.head_dim != self.qk_rope_head_dim:
            raise ValueError(
                f"head_dim ({self.head_dim}) is the rotary width in latent attention, but qk_rope_head_dim is "
                f"{self.qk_rope_head_dim}: leave head_dim out"
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"latent attention has as many key as query heads, but num_key_value_heads is "
                f"{self.num_key_value_heads} and num_attention_heads {self.num_attention_heads}: leave the former out"
            )
        if self.qk_norm:
            raise ValueError("latent attention norms its latents, not queries and keys: set qk_norm=False")

    def validate_layer_type(self) -> None:
        types, window = self.layer_types, self.sliding_window
        if types is None:
            if window is not None:
                raise ValueError(
                    f"sliding_window is {window}, but layer_types does not say which layers slide: give one of "
                    f"{list(_LAYER_TYPES)} for each layer, or leave sliding_window out"
                )
            return
        if len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(types)} entries, but num_hidden_layers is {self.num_hidden_layers}"
            )
        if "sliding_attention" in types and window is None:
            raise ValueError(
                f"layer_types {types} needs sliding_window, the number of positions that a sliding layer sees"
            )

    def validate_target_layer_ids(self) -> None:
        ids, layers = self.target_layer_ids, self.target_num_hidden_layers
        if ids is None or (ids == [-1] and not self.use_aux_hidden_state):
            return
        if ids == [-1]:
            raise ValueError(f"target_layer_ids must be {_LAYER_IDS} with use_aux_hidden_state=True, got {ids}")
        if self.guessed_layer_ids and ids[0] < 1:
            raise ValueError(
                f"target_layer_ids {ids} were not guessed from block outputs: set guessed_layer_ids=False"
            )
        if layers is not None and ids[-1] > layers + self.guessed_layer_ids:  # a guess is settled with the target
            raise ValueError(
                f"target_layer_ids {ids} go beyond the target's last block: it has {layers} layers, so the largest id "
                f"is {layers}"
            )

    def validate_single_feature(self) -> None:
        """A head without `fc` reads one feature, as wide as itself, and nothing that would come before `fc`."""
        if self.use_aux_hidden_state:
            return
        if self.target_layer_ids != [-1]:
            raise ValueError(
                f"use_aux_hidden_state=False reads the target's final output alone (target_layer_ids [-1]), but "
                f"target_layer_ids is {self.target_layer_ids}: leave one of them out"
            )
        extra = [name for name in ("norm_before_fc", "fc_norm", "fc_bias", "guessed_layer_ids") if getattr(self, name)]
        if extra:
            raise ValueError(f"use_aux_hidden_state=False has no fc and one known feature: set {extra} to False")
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"use_aux_hidden_state=False has no fc to make {self.hidden_size} (hidden_size) of "
                f"{self.target_hidden_size} (target_hidden_size) numbers: both must be equal"
            )


def _in_words(error: Exception, rope_parameters: Any) -> str:
    """The message of an error of transformers; a `KeyError` is about rotary entries and does not say so."""
    return f"rope_parameters {rope_parameters}: {error.args[0]}" if isinstance(error, KeyError) else str(error)


# Those that are declared here.
FIELDS = frozenset(Eagle3DraftConfig.__annotations__)
# With those that every config of transformers has or had, and the one that it adds to what it has downloaded.
_KNOWN = FIELDS | PreTrainedConfig().to_dict().keys()
_KNOWN |= {"_name_or_path", "torch_dtype", "rope_theta", "rope_scaling", "_commit_hash"}


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of a config that say something and that neither a head's config nor transformers' own has."""
    return sorted(name for name, value in config.items() if value and name not in _KNOWN)


__all__ = ["FIELDS", "Eagle3DraftConfig", "unknown_keys"]
