"""A published head in our words: every config key understood, every width read off the tensors and checked against it.

Sizes come from the tensors wherever they can, since published configs are known to be wrong (36 layers for a head of
one); a size that the config names too must agree. Flags decide what the arithmetic is, so a flag without its tensor is
an error, and a tensor without its flag too.
"""

from dataclasses import dataclass, field
from typing import Any

from .config_keys import TARGET_KEYS, flat_view, is_without_meaning, key_notes
from .detection import check_is_head, dialect, is_own_layout, is_speculators, reads_no_features
from .errors import HeadFormatError
from .layer_ids import LayerIds, layer_ids
from .names import FileNames, count_layers, is_dropped, rename
from .rope import multimodal_note, rope_parameters
from .tensors import TensorInfo, rounding_note
from .windows import windows


_Shapes = dict[str, tuple[int, ...]]
_ATTENTION = "layers.0.self_attn."
# What an attention has that compresses its keys, or its queries, to a low rank.
_LOW_RANK_QUERY = ("q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight")
_MLA = (*_LOW_RANK_QUERY, "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight")


@dataclass
class HeadDescription:
    """What is known of a head before its weights are loaded.

    Attributes:
        dialect: Who writes such folders.
        fields: Of `Eagle3DraftConfig`.
        notes: Guesses and traps: warnings at load.
        renamed: File name -> our name, of every tensor that is used.
        tensors: The same tensors' shapes and dtypes, by our names.
        dropped: Tensors that no draft reads.
        ignored: Config keys that mean nothing for a head.
    """

    dialect: str
    fields: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def describe(
    config: dict[str, Any], tensors: dict[str, TensorInfo], overrides: dict[str, Any] | None = None
) -> HeadDescription:
    """Translate a `config.json` and the table of its tensors into `Eagle3DraftConfig` fields.

    Args:
        config: As published, in any dialect.
        tensors: Under the file's names.
        overrides: Config fields that the caller knows better; they take the place of the file's.

    Raises:
        HeadFormatError: not an EAGLE-3 head, one of a kind that is not supported, named, or a config that contradicts
            its tensors, with both numbers.
    """
    overrides = overrides or {}
    if is_own_layout(config):
        return _own(config, tensors, overrides)
    check_is_head(config, set(tensors))
    renamed = rename(tensors)
    used = {name: ours for name, ours in renamed.items() if not _is_unused(ours, overrides)}
    table = {ours: tensors[name] for name, ours in used.items()}
    notes: list[str] = []
    flat = flat_view(config, overrides)
    ids = LayerIds(overrides.get("target_layer_ids"))
    if "target_layer_ids" not in overrides and not reads_no_features(flat):
        ids = layer_ids(config, is_speculators(config), notes)
    names = FileNames(renamed)
    fields = _Reader(flat, {name: info.shape for name, info in table.items()}, ids, notes, names).fields()
    if "rope_parameters" not in overrides:
        fields["rope_parameters"] = rope_parameters(flat, notes)
        notes += multimodal_note(fields["rope_parameters"])
    notes += [*key_notes(config, flat, overrides, set(tensors)), *rounding_note(table, names)]
    return HeadDescription(
        dialect=dialect(config, set(tensors)),
        fields={**fields, **overrides},
        notes=notes,
        renamed=used,
        tensors=table,
        dropped=sorted(set(renamed) - set(used)),
        ignored=sorted(key for key in flat if is_without_meaning(key)),
    )


def _is_unused(name: str, overrides: dict[str, Any]) -> bool:
    """A head trained without its final norm was saved with one all the same."""
    return is_dropped(name) or (name == "norm.weight" and overrides.get("final_norm") is False)


def _own(config: dict[str, Any], tensors: dict[str, TensorInfo], overrides: dict[str, Any]) -> HeadDescription:
    skipped = ("model_type", "architectures", "torch_dtype", "dtype", "auto_map")
    fields = {key: value for key, value in {**config, **overrides}.items() if key not in skipped}
    renamed = rename(tensors)
    counted = count_layers(set(renamed.values()))
    if fields.get("num_hidden_layers", 1) != counted:
        raise HeadFormatError(
            f"its config says num_hidden_layers {fields.get('num_hidden_layers')!r}, but its tensors are of {counted} "
            "layers"
        )
    used = {name: ours for name, ours in renamed.items() if not is_dropped(ours)}
    table = {ours: tensors[name] for name, ours in used.items()}
    notes: list[str] = []
    if "rope_parameters" not in overrides:
        fields["rope_parameters"] = rope_parameters(config, notes)
    fields = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    notes += rounding_note(table, FileNames(renamed))
    return HeadDescription("eagle3_hf", fields, notes, used, table, sorted(set(renamed) - set(used)))


class _Reader:
    """Reads one published head's fields off its flat config and the shapes of its tensors (our names)."""

    def __init__(self, config: dict[str, Any], shapes: _Shapes, ids: LayerIds, notes: list[str], names: FileNames):
        self.config = config
        self.names = names
        self.shapes = shapes
        self.ids = ids
        self.notes = notes

    def fields(self) -> dict[str, Any]:
        hidden, layers = self._hidden_size(), self._num_layers()
        fields = {
            **self._copied(),
            "hidden_size": self._agrees("hidden_size", hidden),
            "vocab_size": self._vocab_size(),
            "num_hidden_layers": layers,
            "intermediate_size": self._agrees("intermediate_size", self._rows("layers.0.mlp.gate_proj.weight")),
            **(self._mla() if self._has_any(*_MLA) else self._attention()),
            **windows(self.config, layers, self.notes),
            **self._switches(),
            **self._features(hidden),
        }
        return {**fields, **self._borrowed(fields)}

    # ----- sizes -----------------------------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        return name in self.shapes

    def _has_any(self, *names: str) -> bool:
        """Whether the first layer's attention has one of these."""
        return any(f"{_ATTENTION}{name}" in self.shapes for name in names)

    def _rows(self, name: str) -> int:
        return self._matrix(name)[0]

    def _matrix(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise HeadFormatError(f"missing tensors ['{self.names.show(name)}']")
        shape = self.shapes[name]
        if len(shape) != 2 or 0 in shape:
            raise HeadFormatError(f"{self.names.show(name)} must be a matrix, got shape {shape}")
        return shape

    def _length(self, name: str) -> int:
        shape = self.shapes.get(name, (0,))
        if len(shape) != 1 or shape[0] < 1:
            shown = self.names.show(name)
            raise HeadFormatError(f"{shown} must be a vector, got shape {self.shapes.get(name, 'none')}")
        return shape[0]

    def _positive(self, name: str) -> int:
        value = self.config.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise HeadFormatError(f"its config must have `{name}`, an integer of at least 1; it says {value!r}")
        return value

    def _agrees(self, name: str, size: int) -> int:
        """The size that the tensors have, if the config does not name another."""
        if self.config.get(name) is not None and self._positive(name) != size:
            raise HeadFormatError(f"its config says {name} {self.config[name]}, but its tensors are made for {size}")
        return size

    def _divide(self, tensor: str, by: int, name: str) -> int:
        """Rows of a tensor for each of `by` parts."""
        rows = self._rows(tensor)
        if rows % by or rows < by:
            raise HeadFormatError(f"{self.names.show(tensor)} has {rows} rows, which is no multiple of {name} {by}")
        return rows // by

    def _hidden_size(self) -> int:
        return self._rows("fc.weight") if self._has("fc.weight") else self._rows(f"{_ATTENTION}o_proj.weight")

    def _num_layers(self) -> int:
        """As many as the tensors are of. A file whose later layers were lost looks like one whose config is wrong."""
        stated, found = self.config.get("num_hidden_layers"), count_layers(self.shapes)
        if stated not in (None, found):
            self.notes.append(
                f"its config says num_hidden_layers {stated!r}, its tensors are of {found}; {found} is used, since "
                "some configs give the target's number; if the head was trained with more, its file is incomplete"
            )
        return found

    def _vocab_size(self) -> int:
        size = self._positive("vocab_size")
        for name in ("t2d", "embed_tokens.weight"):
            if self._has(name) and self.shapes[name][:1] != (size,):
                raise HeadFormatError(
                    f"its config says vocab_size {size}, but {self.names.show(name)} has shape {self.shapes[name]}"
                )
        return size

    # ----- the layer -------------------------------------------------------------------------------------------------

    def _attention(self) -> dict[str, Any]:
        heads, query, key = (
            self._positive("num_attention_heads"),
            f"{_ATTENTION}q_proj.weight",
            f"{_ATTENTION}k_proj.weight",
        )
        head_dim = self._divide(query, heads, "num_attention_heads")
        kv_heads = self._divide(key, head_dim, "head_dim")
        return {
            "num_attention_heads": heads,
            "head_dim": self._agrees("head_dim", head_dim),
            "num_key_value_heads": self._agrees("num_key_value_heads", kv_heads),
            "qk_norm": any(self._has(f"{_ATTENTION}{part}_norm.weight") for part in "qk"),
            **self._attention_bias("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        }

    def _mla(self) -> dict[str, Any]:
        """Multi-head latent attention (DeepSeek V2): the widths follow from its six matrices."""
        heads, low_rank = self._positive("num_attention_heads"), self._has_any(*_LOW_RANK_QUERY)
        kv_rank = self._length(f"{_ATTENTION}kv_a_layernorm.weight")
        rope = self._rows(f"{_ATTENTION}kv_a_proj_with_mqa.weight") - kv_rank
        query = f"{_ATTENTION}{'q_b_proj' if low_rank else 'q_proj'}.weight"
        nope = self._divide(query, heads, "num_attention_heads") - rope
        value = self._divide(f"{_ATTENTION}kv_b_proj.weight", heads, "num_attention_heads") - nope
        sizes = {"kv_lora_rank": kv_rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope, "v_head_dim": value}
        if low_rank:
            sizes["q_lora_rank"] = self._rows(f"{_ATTENTION}q_a_proj.weight")
        elif self.config.get("q_lora_rank") is not None:
            raise HeadFormatError(f"its config says q_lora_rank {self.config['q_lora_rank']}, but it has no q_a_proj")
        return {
            **{name: self._agrees(name, size) for name, size in sizes.items()},
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": rope,
            **({"rope_interleave": self._flag("rope_interleave")} if "rope_interleave" in self.config else {}),
            **self._attention_bias("kv_a_proj_with_mqa.bias", "q_a_proj.bias"),
        }

    def _attention_bias(self, *inputs: str) -> dict[str, bool]:
        """`attention_bias` means all four projections (Llama), `qkv_bias` all but the last (Qwen2)."""
        found, output = self._has_any(*inputs), self._has(f"{_ATTENTION}o_proj.bias")
        flags = {key: self._flag(key) for key in ("attention_bias", "qkv_bias", "bias")}
        found = found or flags["attention_bias"] or flags["qkv_bias"]  # what is missing is named with its tensor
        output = output or (flags["attention_bias"] and self.config.get("attention_output_bias") is not False)
        if flags["bias"] and not (found or output or self._has("fc.bias")):
            raise HeadFormatError("its config says `bias: true`, but none of its tensors is a bias")
        if (found or output) and False in (self.config.get("attention_bias"), self.config.get("qkv_bias")):
            raise HeadFormatError("its attention has biases, but its config says `attention_bias: false`")
        return {"attention_bias": found, "attention_output_bias": output}

    # ----- flags -----------------------------------------------------------------------------------------------------

    def _flag(self, name: str) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise HeadFormatError(f"its config's {name} must be true or false, got {value!r}")
        return bool(value)

    def _switches(self) -> dict[str, bool]:
        per_layer = self._flag("fc_norm") or self._flag("use_aux_norm")
        return {
            "norm_before_residual": self._flag("norm_before_residual"),
            "norm_before_fc": self._flag_and_tensor("norm_before_fc", "input_norm.weight"),
            "fc_norm": self._flag_and_tensor("fc_norm", "fc_norm.0.weight", per_layer),
            "norm_output": self._flag("norm_output") or self._flag("return_hidden_post_norm"),
            "mlp_bias": self._flag_or_tensor("mlp_bias", "layers.0.mlp.gate_proj.bias"),
            "fc_bias": self._has("fc.bias"),
        }

    def _flag_and_tensor(self, flag: str, tensor: str, value: bool | None = None) -> bool:
        value = self._flag(flag) if value is None else value
        if value and not self._has(tensor):
            raise HeadFormatError(f"its config says `{flag}: true`, but it has no tensor {self.names.show(tensor)}")
        if self._has(tensor) and not value:
            raise HeadFormatError(
                f"it has a tensor {self.names.show(tensor)}, but its config does not say `{flag}: true`; if it was "
                f"trained with that norm, load it with {flag}=True"
            )
        return value

    def _flag_or_tensor(self, flag: str, tensor: str) -> bool:
        if self._flag(flag) and not self._has(tensor):
            raise HeadFormatError(f"its config says `{flag}: true`, but it has no tensor {self.names.show(tensor)}")
        if self.config.get(flag) is False and self._has(tensor):
            raise HeadFormatError(f"it has a tensor {self.names.show(tensor)}, but its config says `{flag}: false`")
        return self._has(tensor)

    # ----- what it reads of its target -------------------------------------------------------------------------------

    def _features(self, hidden: int) -> dict[str, Any]:
        target_hidden = (
            hidden if self.config.get("target_hidden_size") is None else self._positive("target_hidden_size")
        )
        if reads_no_features(self.config):
            return self._last_state_alone(hidden, target_hidden)
        width = self._matrix("fc.weight")[1]
        stated = self._stated_count()
        count = stated or 3
        if self.config.get("target_hidden_size") is None and self._has_another_width(width, count, hidden):
            target_hidden = width // count
        if width != count * target_hidden:
            raise HeadFormatError(self._strange_width(width, stated, target_hidden))
        return {
            "target_hidden_size": target_hidden,
            "target_layer_ids": self.ids.ids,
            "guessed_layer_ids": self.ids.guessed,
        }

    def _last_state_alone(self, hidden: int, target_hidden: int) -> dict[str, Any]:
        if self._has("fc.weight"):
            raise HeadFormatError(
                "its config says `use_aux_hidden_state: false`, but it has an fc.weight to fuse features"
            )
        if hidden != target_hidden:
            raise HeadFormatError(f"a head of width {hidden} without `fc` cannot read states of width {target_hidden}")
        return {"use_aux_hidden_state": False, "target_hidden_size": hidden, "target_layer_ids": None}

    def _stated_count(self) -> int | None:
        """How many layers the file says that the head reads; `None` when it does not."""
        ids = self.ids.ids
        stated = None if self.config.get("num_aux_hidden_states") is None else self._positive("num_aux_hidden_states")
        if isinstance(ids, (list, tuple)) and stated not in (None, len(ids)):
            raise HeadFormatError(f"its config says num_aux_hidden_states {stated}, but names the layers {list(ids)}")
        if ids is None and stated not in (None, 3):
            raise HeadFormatError(
                f"its config says num_aux_hidden_states {stated} and not which: load it with target_layer_ids=[...]"
            )
        return stated or (len(ids) if isinstance(ids, (list, tuple)) else None)

    def _has_another_width(self, width: int, count: int, hidden: int) -> bool:
        """Whether the target is wider or narrower than the head, which its config then may leave out.

        Only a head with its own embedding can have such a target. If fc reads whole layers of the head's own width,
        and the named ones would not be whole multiples of it, their number is what is wrong.
        """
        if not self._has("embed_tokens.weight") or width % count:
            return False
        return self._stated_count() is not None and (width % hidden != 0 or width // count % hidden == 0)

    def _strange_width(self, width: int, stated: int | None, target_hidden: int) -> str:
        fc, count = self.names.show("fc.weight"), stated or 3
        given = f"{fc} reads {width} features, but {count} layers of a target of width {target_hidden} give "
        given += f"{count * target_hidden}"
        if stated is not None and width % target_hidden == 0:
            return (
                f"{given}: fc is made for {width // target_hidden} layers, its config (or target_layer_ids) names "
                f"{stated}; load it with target_layer_ids=[...] of {width // target_hidden} numbers"
            )
        return (
            f"{given}: this is not an EAGLE-3 head (an EAGLE-1/2 head reads one), or "
            "target_hidden_size or its layer ids (eagle_aux_hidden_state_layer_ids) are missing from its config; load "
            "it with target_hidden_size= or target_layer_ids=[...]"
        )

    def _borrowed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What a file leaves out must be there to borrow: an embedding of the same width, a head of all V rows."""
        embeds, head, vocab_size = self._has("embed_tokens.weight"), self._has("lm_head.weight"), fields["vocab_size"]
        hidden, target_hidden = fields["hidden_size"], fields["target_hidden_size"]
        if not embeds and hidden != target_hidden:
            raise HeadFormatError(
                f"missing tensors ['embed_tokens.weight']: a head of width {hidden} cannot borrow the embedding of a "
                f"target of width {target_hidden}"
            )
        size = self.config.get("draft_vocab_size") or self.shapes.get("d2t", (vocab_size,))[0]
        if not head and size != vocab_size:
            raise HeadFormatError(
                f"missing tensors ['lm_head.weight']: a head with a draft vocabulary of {size} cannot borrow the "
                f"target's, which has {vocab_size} rows"
            )
        if not head and embeds and self._flag("tie_word_embeddings"):
            raise HeadFormatError("its lm_head is tied to its own embedding, which is not supported: save it untied")
        rows = self._rows("lm_head.weight") if head else vocab_size
        return {
            "own_embeddings": embeds,
            "own_lm_head": head,
            "draft_vocab_size": self._agrees("draft_vocab_size", rows),
        }

    def _copied(self) -> dict[str, Any]:
        copied = ["hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range"]
        copied += ["pad_token_id", "bos_token_id", "eos_token_id", *TARGET_KEYS]
        fields = {key: self.config[key] for key in copied if self.config.get(key) is not None}
        fields.setdefault("target_name_or_path", self._verifier())
        fields.setdefault("rms_norm_eps", 1e-6)  # transformers' own default for a Llama layer
        return fields

    def _verifier(self) -> str | None:
        """The target's name in a speculators config, often a path that leads nowhere: only ever shown."""
        part: Any = self.config
        for key in ("speculators_config", "verifier", "name_or_path"):
            part = part.get(key) if isinstance(part, dict) else None
        return part if isinstance(part, str) else None
