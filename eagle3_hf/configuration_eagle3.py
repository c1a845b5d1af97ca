"""One canonical description of an EAGLE-3 draft head.

Whatever dialect a head was published in, it is translated into this class once, at load (see `layouts`). Layer ids
are indices into the target's `hidden_states`: 0 is the embedding output, `L` the output of the last block *before* the
final norm.
"""

from typing import cast

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
)
_SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
    "mlp_bias",
    "fc_bias",
    "qk_norm",
    "own_embeddings",
    "own_lm_head",
)


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
        norm_before_residual: The layer's residual is the normalised feature instead of the raw one.
        norm_before_fc: One RMSNorm over the concatenated features before `fc`.
        fc_norm: One RMSNorm per captured layer before `fc`. Excludes `norm_before_fc`.
        norm_output: Feed the output *after* the final norm back, instead of before it (EAGLE-3.1).
        attention_bias, mlp_bias, fc_bias, qk_norm: Extra tensors of the layer.
        own_embeddings: The head carries its own input embedding; otherwise it borrows the target's.
        own_lm_head: The head carries its own output layer; otherwise (only with `D == V`) it borrows the target's.
        target_name_or_path, target_model_type, target_num_hidden_layers, target_vocab_hash, target_chat_template_hash:
            What the head was trained for; checked when a target or a tokenizer is at hand.

    Raises:
        ValueError: a field of the wrong type, or fields that contradict each other; values are named.
    """

    model_type = "eagle3_draft"
    default_theta = 10000.0  # what the reference uses when a head's config names no base

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
        norm_before_residual: bool = False,
        norm_before_fc: bool = False,
        fc_norm: bool = False,
        norm_output: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        fc_bias: bool = False,
        qk_norm: bool = False,
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
        self.rope_parameters = rope_parameters
        self.vocab_size = vocab_size
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.target_layer_ids = list(target_layer_ids) if isinstance(target_layer_ids, tuple) else target_layer_ids
        self.norm_before_residual = norm_before_residual
        self.norm_before_fc = norm_before_fc
        self.fc_norm = fc_norm
        self.norm_output = norm_output
        self.attention_bias = attention_bias
        self.mlp_bias = mlp_bias
        self.fc_bias = fc_bias
        self.qk_norm = qk_norm
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
            self.head_dim = hidden_size // num_attention_heads
        self._check_fields()
        kwargs.setdefault("tie_word_embeddings", False)
        try:
            super().__init__(**kwargs)
        except KeyError as error:  # transformers' word for a rope type that lacks its numbers
            raise ValueError(f"rope_parameters {rope_parameters}: {error.args[0]}") from error

    @property
    def num_captured_layers(self) -> int:
        """How many target layers are read (`A`): three when the file does not say."""
        return len(self.target_layer_ids) if self.target_layer_ids is not None else 3

    def _check_types(self) -> None:
        """Wrong types would only show later, as an error about something else."""
        for name in _SIZES:
            value = getattr(self, name)
            unset = value is None and name == "head_dim"
            if not unset and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        for name in ("rms_norm_eps", "initializer_range"):
            if isinstance(getattr(self, name), bool) or not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act {self.hidden_act!r} is unknown to transformers")
        self._check_rope_type()

    def _check_rope_type(self) -> None:
        rope = self.rope_parameters
        if rope is None:
            return
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters must be a dict like {{'rope_type': 'default'}}, got {rope!r}")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
            raise ValueError(f"rope_type {rope_type!r} is unknown; known: {known}")

    def _check_fields(self) -> None:
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
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: set one of them to False")
        if not self.own_embeddings and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"a draft of width {self.hidden_size} cannot borrow the embedding of a target of width "
                f"{self.target_hidden_size}: it needs its own (own_embeddings=True)"
            )
        self._check_layer_ids()

    def _check_layer_ids(self) -> None:
        ids = self.target_layer_ids
        if ids is None:
            return
        integers = isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        if not integers or not ids or sorted(set(ids)) != ids or ids[0] < 0:
            raise ValueError(
                f"target_layer_ids must be ascending, distinct hidden_states indices >= 0 (0 = embeddings), got {ids}"
            )
        if self.target_num_hidden_layers is not None and ids[-1] > self.target_num_hidden_layers:
            raise ValueError(
                f"target_layer_ids {ids} go beyond the target's last block: it has "
                f"{self.target_num_hidden_layers} layers, so the largest id is {self.target_num_hidden_layers}"
            )


__all__ = ["Eagle3DraftConfig"]
