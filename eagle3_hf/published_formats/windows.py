"""Which draft layers see a window of rows only, from the keys that transformers' configs have for it."""

from typing import Any

from .errors import HeadFormatError


_KINDS = ("full_attention", "sliding_attention")


def windows(config: dict[str, Any], layers: int, notes: list[str]) -> dict[str, Any]:
    """`layer_types` and `sliding_window`, if a layer of the draft slides; else nothing.

    Args:
        config: A flat config. Its `layer_types` may be those of a deeper model; the first `layers` count.
        layers: Of the draft.
        notes: What was assumed is appended.

    Raises:
        HeadFormatError: no list, too short a list, or layers that slide without a window.
    """
    window, types = config.get("sliding_window"), config.get("layer_types")
    if types is None:
        if window is not None and config.get("use_sliding_window") is not False:
            notes.append(
                f"its sliding_window {window} is not applied, since no layer_types say to which layers (as in vLLM); "
                "pass layer_types=[...] and sliding_window= to override"
            )
        return {}
    if not isinstance(types, list) or len(types) < layers:
        raise HeadFormatError(f"its layer_types must be a list that names each of its {layers} layers, got {types!r}")
    types = _known(types[:layers], notes)
    if "sliding_attention" not in types:
        return {}
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise HeadFormatError(
            f"its layer_types name sliding_attention, but its config has no sliding_window of at least 1: {window!r}"
        )
    return {"layer_types": types, "sliding_window": window}


def _known(types: list[Any], notes: list[str]) -> list[str]:
    strange = [kind for kind in types if kind not in _KINDS]
    if strange:
        notes.append(
            f"its layer_types {strange} are not known ({list(_KINDS)} are), and these layers get full attention; pass "
            "layer_types=[...] to override"
        )
    return ["full_attention" if kind in strange else kind for kind in types]
