"""What is known of a head from its config and the table of its tensors, before a weight is loaded."""

from dataclasses import dataclass, field
from typing import Any

from .config_keys import flat_view, is_without_meaning, key_notes
from .detection import check_is_head, format_name, is_own_format, is_speculators, reads_no_features
from .errors import HeadFormatError
from .fields import read_fields
from .head_file import HeadFile
from .layer_ids import LayerIds, layer_ids
from .names import FileNames, count_layers, is_dropped, rename
from .rope import multimodal_note, rope_parameters
from .tensors import TensorInfo, rounding_note


@dataclass
class HeadDescription:
    """What is known of a head before its weights are loaded.

    Attributes:
        format_name: Which project writes such folders, for people to read.
        fields: Fields of `Eagle3DraftConfig`.
        notes: What had to be assumed, and known traps; each becomes a warning at load.
        renamed: The name in the file -> the canonical name, for every tensor that is used.
        tensors: Shapes and dtypes of the same tensors, by canonical name.
        dropped: Tensors that no draft reads.
        ignored: Config keys that have no meaning for a head.
    """

    format_name: str
    fields: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


def describe(
    config: dict[str, Any], tensors: dict[str, TensorInfo], overrides: dict[str, Any] | None = None
) -> HeadDescription:
    """Translate a `config.json` and the table of its tensors into fields of `Eagle3DraftConfig`.

    Args:
        config: The config as published, in any format.
        tensors: The tensors under the file's names.
        overrides: Config fields given by the caller; they replace those of the file.

    Raises:
        HeadFormatError: this is not an EAGLE-3 head, it is a variant that is not supported (the message names it), or
            the config contradicts the tensors (the message gives both numbers).
    """
    overrides = overrides or {}
    if is_own_format(config):
        return _describe_own(config, tensors, overrides)
    check_is_head(config, set(tensors))
    renamed = rename(tensors)
    used = {name: canonical for name, canonical in renamed.items() if not _is_unused(canonical, overrides)}
    table = {canonical: tensors[name] for name, canonical in used.items()}
    notes: list[str] = []
    flat = flat_view(config, overrides)
    ids = LayerIds(overrides.get("target_layer_ids"))
    if "target_layer_ids" not in overrides and not reads_no_features(flat):
        ids = layer_ids(config, is_speculators(config), notes)
    names = FileNames(renamed)
    fields = read_fields(HeadFile(flat, {name: info.shape for name, info in table.items()}, names, notes), ids)
    if "rope_parameters" not in overrides:
        fields["rope_parameters"] = rope_parameters(flat, notes)
        notes += multimodal_note(fields["rope_parameters"])
    notes += [*key_notes(config, flat, overrides, set(tensors)), *rounding_note(table, names)]
    return HeadDescription(
        format_name=format_name(config, set(tensors)),
        fields={**fields, **overrides},
        notes=notes,
        renamed=used,
        tensors=table,
        dropped=sorted(set(renamed) - set(used)),
        ignored=sorted(key for key in flat if is_without_meaning(key)),
    )


def _is_unused(name: str, overrides: dict[str, Any]) -> bool:
    """Whether no draft reads this tensor. A head trained without a final norm is saved with one nevertheless."""
    return is_dropped(name) or (name == "norm.weight" and overrides.get("final_norm") is False)


def _describe_own(
    config: dict[str, Any], tensors: dict[str, TensorInfo], overrides: dict[str, Any]
) -> HeadDescription:
    """Describe a head that `Eagle3DraftModel.save_pretrained` wrote: its config holds the fields themselves."""
    skipped = ("model_type", "architectures", "torch_dtype", "dtype", "auto_map")
    fields = {key: value for key, value in {**config, **overrides}.items() if key not in skipped}
    renamed = rename(tensors)
    counted = count_layers(set(renamed.values()))
    if fields.get("num_hidden_layers", 1) != counted:
        raise HeadFormatError(
            f"its config says num_hidden_layers {fields.get('num_hidden_layers')!r}, but it has tensors of {counted} "
            "layers"
        )
    used = {name: canonical for name, canonical in renamed.items() if not is_dropped(canonical)}
    table = {canonical: tensors[name] for name, canonical in used.items()}
    notes: list[str] = []
    if "rope_parameters" not in overrides:
        fields["rope_parameters"] = rope_parameters(config, notes)
    fields = {name: value for name, value in fields.items() if name not in ("rope_theta", "rope_scaling")}
    notes += rounding_note(table, FileNames(renamed))
    return HeadDescription("eagle3_hf", fields, notes, used, table, sorted(set(renamed) - set(used)))
