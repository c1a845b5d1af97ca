"""Other settings of a head, to be compared with its present ones: layer ids, rope bases."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ...model.modeling_eagle3 import Eagle3DraftModel, Eagle3RotaryEmbedding
from ...model.target_check import default_layer_ids
from ...model.target_modules import num_target_layers


LAYER_IDS, ROPE = "target_layer_ids", "rope_parameters"
_SHIFTS = (-1, 1, -2, 2)
_BASES = (1e4, 1e5, 5e5, 1e6, 5e6)


@dataclass(frozen=True)
class HeadSetting:
    """A value of a config field, other than the present one.

    Attributes:
        field: `target_layer_ids` or `rope_parameters`.
        value: The value.
    """

    field: str
    value: Any

    def layer_ids(self, draft: Eagle3DraftModel) -> list[int]:
        """Return the layers that the head reads under this setting."""
        return self.value if self.field == LAYER_IDS else draft.config.captured_layer_ids

    def __str__(self) -> str:
        if self.field == LAYER_IDS:
            return f"layer ids {self.value}"
        scaling = "" if self.value.get("rope_type", "default") == "default" else f" ({self.value['rope_type']})"
        return f"rope base {self.value['rope_theta']:g}{scaling}"


def other_settings(draft: Eagle3DraftModel, target: PreTrainedModel) -> list[HeadSetting]:
    """Return what is worth trying: neighbouring layers and the reference's, the usual rope bases and the target's."""
    layers = [HeadSetting(LAYER_IDS, ids) for ids in _other_layer_ids(draft, target)]
    return layers + [HeadSetting(ROPE, rope) for rope in _other_ropes(draft, target)]


def with_setting(draft: Eagle3DraftModel, setting: HeadSetting) -> Eagle3DraftModel:
    """Return a head that shares all weights with `draft` and has another setting. `draft` is left as it is."""
    other = copy.copy(draft)
    other._modules, other.config = dict(draft._modules), copy.copy(draft.config)
    setattr(other.config, setting.field, copy.copy(setting.value))
    if setting.field == ROPE:
        rotary: Any = Eagle3RotaryEmbedding(other.config)  # type: ignore[arg-type] # as much of a LlamaConfig as it reads
        other._modules["rotary_emb"] = rotary.to(draft.rotary_emb.inv_freq.device)
    return other


def _other_layer_ids(draft: Eagle3DraftModel, target: PreTrainedModel) -> Iterator[list[int]]:
    present, layers = draft.config.captured_layer_ids, num_target_layers(target)
    if present == [-1]:
        return
    tried = [[each + shift for each in present] for shift in _SHIFTS]
    for place in range(len(present)):
        for shift in (-1, 1):
            tried.append([each + shift * (at == place) for at, each in enumerate(present)])
    tried.append(default_layer_ids(layers))
    seen = [present]
    for ids in tried:
        is_valid = len(ids) == len(present) and sorted(set(ids)) == ids and ids[0] >= 0 and ids[-1] <= layers
        if is_valid and ids not in seen:
            seen.append(ids)
            yield ids


def _other_ropes(draft: Eagle3DraftModel, target: PreTrainedModel) -> Iterator[dict[str, Any]]:
    present = dict(draft.config.rope_parameters)
    own = _rope_of(target)
    bases = dict.fromkeys([*_BASES, *([own["rope_theta"]] if own else [])])
    tried = [{**present, "rope_theta": float(base)} for base in bases]
    if present.get("rope_type", "default") != "default":
        partial = {name: value for name, value in present.items() if name in ("rope_theta", "partial_rotary_factor")}
        tried.append({"rope_type": "default", **partial})
    for rope in tried:
        if rope != present:
            yield rope


def _rope_of(target: PreTrainedModel) -> dict[str, Any] | None:
    """Return the target's rotary description, if it has one for all layers with a base."""
    rope = getattr(target.config.get_text_config(), "rope_parameters", None)
    return rope if isinstance(rope, dict) and isinstance(rope.get("rope_theta"), (int, float)) else None


__all__ = ["LAYER_IDS", "ROPE", "HeadSetting", "other_settings", "with_setting"]
