"""One canonical description of an EAGLE-3 draft head.

Whatever dialect a head was published in, it is translated into this class once, at load (see `layouts`). Layer ids
are indices into the target's `hidden_states`: 0 is the embedding output, `L` the output of the last block *before* the
final norm.
"""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..published_formats import REFERENCE_THETA, shortened
from ..utils.logging import get_logger
from .rope import check_rope_table, checked_rope, is_integer, is_number


logger = get_logger(__name__)

_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_SIZES: tuple[str, ...] = ("hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size")
_SIZES += ("draft_vocab_size", "sliding_window", "kv_lora_rank", "q_lora_rank", *_LATENT, "target_num_hidden_layers")
_MAY_BE_NONE = {"head_dim", "sliding_window", "kv_lora_rank", "q_lora_rank", *_LATENT, "target_num_hidden_layers"}
# What no head has: with more than this, building the modules or the rotary table would take for ever.
_MOST = {"num_hidden_layers": 256, "head_dim": 2**16, "qk_rope_head_dim": 2**16, "target_num_hidden_layers": 2**12}
_SWITCHES: tuple[str, ...] = ("use_aux_hidden_state", "norm_before_residual", "norm_before_fc", "fc_norm")
_SWITCHES += ("norm_output", "final_norm", "attention_bias", "attention_output_bias", "mlp_bias", "fc_bias", "qk_norm")
_SWITCHES += ("rope_interleave", "own_embeddings", "own_lm_head", "guessed_layer_ids")
_LAYER_TYPES = ("full_attention", "sliding_attention")


class Eagle3DraftConfig(PreTrainedConfig):
    """Configuration of [`Eagle3DraftModel`].

    Args:
        hidden_size: Width `H` of the draft.
        target_hidden_size: Width `Ht` of the target's residual stream; `hidden_size` when not given.
        intermediate_size: Width of the draft's MLP.
        num_hidden_layers: Draft layers; the first reads `[embedding, feature]` (2H wide), the others are ordinary.
        num_attention_heads, num_key_value_heads, head_dim: As in Llama; `head_dim` may differ from `H / heads`.
        vocab_size: Vocabulary `V` of the *target*.
        draft_vocab_size: Vocabulary `D <= V` of the draft's own head; `vocab_size` when not given.
        target_layer_ids: Ascending `hidden_states` indices to read. `None` means that the file did not say; `bind`
            then falls back to the reference's `[2, L // 2, L - 3]`, with a warning.
        guessed_layer_ids: The ids come from a file whose convention had to be guessed (block outputs, so one was
            added); where the target proves the guess wrong, `bind` takes the one off again, with a warning.
        use_aux_hidden_state: `False` for heads that read one feature only, the target's output *after* its final
            norm (id -1), and have no `fc`.
        norm_before_residual: The layer's residual is the normalised feature instead of the raw one.
        norm_before_fc: One RMSNorm over the concatenated features before `fc`.
        fc_norm: One RMSNorm per captured layer before `fc`. Excludes `norm_before_fc`.
        norm_output: Feed the output *after* the final norm back, instead of before it (EAGLE-3.1).
        final_norm: `False` for heads whose output layer reads the last layer's output without a norm.
        attention_bias, mlp_bias, fc_bias, qk_norm: Extra tensors of the layer.
        attention_output_bias: Bias of the attention's output projection; as `attention_bias` when not given.
        layer_types: `"full_attention"` or `"sliding_attention"` for each draft layer; all full when not given.
        sliding_window: Rows `W` that a sliding layer sees, itself included: those at positions above `p - W`.
        kv_lora_rank: Set for latent attention (MLA, DeepSeek V3 and Kimi). `qk_nope_head_dim`, `qk_rope_head_dim` and
            `v_head_dim` are then needed, `q_lora_rank` is optional, and `head_dim` is the rotary width.
        rope_interleave: Latent attention's rotary pairs are neighbours instead of halves.
        own_embeddings: The head carries its own input embedding; otherwise it borrows the target's.
        own_lm_head: The head carries its own output layer; otherwise (only with `D == V`) it borrows the target's.
        target_name_or_path, target_model_type, target_num_hidden_layers, target_vocab_hash, target_chat_template_hash:
            What the head was trained for; checked when a target or a tokenizer is at hand.

    Raises:
        ValueError: a field of the wrong type, or fields that contradict each other; values are named.
    """

    model_type = "eagle3_draft"
    default_theta = REFERENCE_THETA
    # What multimodal configs add is kept for engines, and is no mistake.
    ignore_keys_at_rope_validation = {"mrope_section", "mrope_interleaved"}

    def __init__(
        self,
        hidden_size: int = 4096,
        target_hidden_size: int | None = None,
        intermediate_size: int = 14336,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 2048,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-5,
        rope_parameters: dict | None = None,
        vocab_size: int = 128256,
        draft_vocab_size: int | None = None,
        target_layer_ids: list[int] | None = None,
        guessed_layer_ids: bool = False,
        use_aux_hidden_state: bool = True,
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        final_norm: bool = True,
        attention_bias: bool = False,
        attention_output_bias: bool | None = None,
        mlp_bias: bool = False,
        fc_bias: bool = False,
        qk_norm: bool = False,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        kv_lora_rank: int | None = None,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        rope_interleave: bool = True,
        own_embeddings: bool = False,
        own_lm_head: bool = True,
        target_name_or_path: str | None = None,
        target_model_type: str | None = None,
        target_num_hidden_layers: int | None = None,
        target_vocab_hash: str | None = None,
        target_chat_template_hash: str | None = None,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        **kwargs,
    ):
        self.hidden_size = hidden_size
        self.target_hidden_size = hidden_size if target_hidden_size is None else target_hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = cast(int, head_dim)  # the default needs sizes that are checked first
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters: Any = rope_parameters
        self.vocab_size = vocab_size
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.target_layer_ids = list(target_layer_ids) if isinstance(target_layer_ids, tuple) else target_layer_ids
        self.guessed_layer_ids = guessed_layer_ids
        self.use_aux_hidden_state = use_aux_hidden_state
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.final_norm = final_norm
        self.attention_bias = attention_bias
        self.attention_output_bias = attention_bias if attention_output_bias is None else attention_output_bias
        self.mlp_bias = mlp_bias
        self.fc_bias = fc_bias
        self.qk_norm = qk_norm
        self.layer_types = list(layer_types) if isinstance(layer_types, tuple) else layer_types
        self.sliding_window = sliding_window
        self.kv_lora_rank = kv_lora_rank
        self.q_lora_rank = q_lora_rank
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.rope_interleave = rope_interleave
        self.own_embeddings = own_embeddings
        self.own_lm_head = own_lm_head
        self.target_name_or_path = target_name_or_path
        self.target_model_type = target_model_type
        self.target_num_hidden_layers = target_num_hidden_layers
        self.target_vocab_hash = target_vocab_hash
        self.target_chat_template_hash = target_chat_template_hash
        self.pad_token_id = pad_token_id
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self._check_types()
        if self.head_dim is None:
            self.head_dim = self.qk_rope_head_dim or hidden_size // num_attention_heads
        if use_aux_hidden_state is False and target_layer_ids is None:
            self.target_layer_ids = [-1]
        self._check_fields()
        kwargs.setdefault("tie_word_embeddings", False)
        try:
            super().__init__(**kwargs)
        except Exception as error:  # a file can hold anything under any key, and transformers raises what it likes
            cause = f"rope_parameters {rope_parameters}: {error.args[0]}" if isinstance(error, KeyError) else error
            raise ValueError(cause) from error
        self._check_with_base()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As in transformers, without the keys that no head has: some would take the place of a method, others make
        transformers fetch an attention kernel."""
        strange = unknown_keys(config_dict)
        if strange:
            logger.warning(shortened(f"config keys that are not understood and have no effect: {strange}"))
        known = {name: value for name, value in config_dict.items() if name in _KNOWN}
        try:
            return super().from_dict(known, **kwargs)
        except ValueError as error:
            raise ValueError(shortened(str(error))) from error

    @property
    def num_captured_layers(self) -> int:
        """How many target layers are read (`A`): three when the file does not say."""
        return len(self.target_layer_ids) if self.target_layer_ids is not None else 3

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are expanded from a latent vector (MLA)."""
        return self.kv_lora_rank is not None

    @property
    def latent_widths(self) -> tuple[int, int, int, int]:
        """Of latent attention: the latent; of each head its unrotated part, its rotary part and its value."""
        return cast(Any, (self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim))

    def window(self, layer_idx: int) -> int | None:
        """How many rows a draft layer sees, itself included; `None` for all."""
        sliding = self.layer_types is not None and self.layer_types[layer_idx] == "sliding_attention"
        return self.sliding_window if sliding else None

    # ----- one field at a time --------------------------------------------------------------------------------------

    def _check_types(self) -> None:
        """Wrong types would only show later, as an error about something else."""
        for name in _SIZES:
            value = getattr(self, name)
            if not (value is None and name in _MAY_BE_NONE):
                _check_size(name, value, _MOST.get(name, 2**31 - 1))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not is_number(self.rms_norm_eps) or self.rms_norm_eps <= 0:
            raise ValueError(f"rms_norm_eps must be a number, got {self.rms_norm_eps!r}: finite and above 0")
        if not is_number(self.initializer_range) or self.initializer_range < 0:
            raise ValueError(f"initializer_range must be a number, got {self.initializer_range!r}: finite, at least 0")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is unknown to transformers")
        self._check_records()
        if self.rope_parameters is not None:
            self.rope_parameters = checked_rope(self.rope_parameters)

    def _check_records(self) -> None:
        records = "name_or_path", "model_type", "vocab_hash", "chat_template_hash"
        for name in (f"target_{record}" for record in records):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} must be a string, got {value!r}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if value is not None and not all(is_integer(i) for i in ids):
                raise ValueError(f"{name} must be a token id, got {value!r}")

    # ----- fields that must agree -----------------------------------------------------------------------------------

    def _check_fields(self) -> None:
        self._check_vocabulary()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them to False")
        if self.norm_output and not self.final_norm:
            raise ValueError(
                "norm_output=True feeds back the output of a final norm that final_norm=False says is not there: set "
                "norm_output=False or final_norm=True"
            )
        self._check_latent()
        self._check_windows()
        self._check_layer_ids()
        self._check_single_feature()

    def _check_with_base(self) -> None:
        """What transformers has read or rewritten."""
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ValueError(f"dtype must name a dtype of torch, got {self.dtype!r}")
        self.rope_parameters = checked_rope(self.rope_parameters)  # again: older keys are folded in by now
        check_rope_table(self)
        if self.is_latent and self.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"latent attention rotates all of qk_rope_head_dim ({self.qk_rope_head_dim}), but rope_parameters has "
                f"partial_rotary_factor {self.rope_parameters['partial_rotary_factor']}: leave that out"
            )

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size ({self.draft_vocab_size}) is larger than the target's vocab_size "
                f"({self.vocab_size}): the draft's tokens must be a subset of the target's"
            )
        if self.draft_vocab_size < self.vocab_size and not self.own_lm_head:
            raise ValueError(
                f"a head without its own lm_head borrows the target's, which has {self.vocab_size} rows, but "
                f"draft_vocab_size is {self.draft_vocab_size}"
            )
        if not self.own_embeddings and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"a draft of width {self.hidden_size} cannot borrow the embedding of a target of width "
                f"{self.target_hidden_size}: it needs its own (own_embeddings=True)"
            )

    def _check_latent(self) -> None:
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

    def _check_windows(self) -> None:
        types, window = self.layer_types, self.sliding_window
        if types is None:
            if window is not None:
                raise ValueError(
                    f"sliding_window is {window}, but layer_types does not say which layers slide: give one of "
                    f"{list(_LAYER_TYPES)} for each layer, or leave sliding_window out"
                )
            return
        if not isinstance(types, list) or not all(isinstance(t, str) and t in _LAYER_TYPES for t in types):
            raise ValueError(f"layer_types must be a list of {list(_LAYER_TYPES)}, got {types!r}")
        if len(types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(types)} entries, but num_hidden_layers is {self.num_hidden_layers}"
            )
        if "sliding_attention" in types and window is None:
            raise ValueError(f"layer_types {types} needs sliding_window, the number of rows that a sliding layer sees")

    def _check_layer_ids(self) -> None:
        ids, layers = self.target_layer_ids, self.target_num_hidden_layers
        if ids is None or (ids == [-1] and not self.use_aux_hidden_state):
            return
        integers = isinstance(ids, list) and all(is_integer(i) for i in ids)
        if not integers or not ids or sorted(set(ids)) != ids or ids[0] < 0 or ids[-1] > 2**12:
            raise ValueError(
                f"target_layer_ids must be ascending, distinct hidden_states indices >= 0 (0 = embeddings), got {ids}"
            )
        if self.guessed_layer_ids and ids[0] < 1:
            raise ValueError(
                f"target_layer_ids {ids} were not guessed from block outputs: set guessed_layer_ids=False"
            )
        if layers is not None and ids[-1] > layers + self.guessed_layer_ids:  # a guess is settled with the target
            raise ValueError(
                f"target_layer_ids {ids} go beyond the target's last block: it has {layers} layers, so the largest id "
                f"is {layers}"
            )

    def _check_single_feature(self) -> None:
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


def _check_size(name: str, value: Any, most: int) -> None:
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    if value > most:
        raise ValueError(f"{name} is {value}, which no head has: the most that is supported is {most}")


FIELDS = frozenset(inspect.signature(Eagle3DraftConfig.__init__).parameters) - {"self", "kwargs"}
# With those that every config of transformers has or had, and the one that it adds to what it has downloaded.
_KNOWN = FIELDS | PreTrainedConfig().to_dict().keys()
_KNOWN |= {"_name_or_path", "torch_dtype", "rope_theta", "rope_scaling", "_commit_hash"}


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys of a config that say something and that neither a head's config nor transformers' own has."""
    return sorted(name for name, value in config.items() if value and name not in _KNOWN)


__all__ = ["FIELDS", "Eagle3DraftConfig", "unknown_keys"]
