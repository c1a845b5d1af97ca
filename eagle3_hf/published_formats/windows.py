"""Which draft layers attend to a sliding window, from the keys that transformers' configs have for it."""

from typing import Any

from .errors import HeadFormatError


_KINDS = ("full_attention", "sliding_attention")


def windows(config: dict[str, Any], layers: int, notes: list[str]) -> dict[str, Any]:
    """Return `layer_types` and `sliding_window` if a draft layer has a window, else nothing.

    Args:
        config: A flat config. Its `layer_types` may be those of a deeper model; the first `layers` entries are used.
        layers: Number of draft layers.
        notes: Assumptions are appended to it.

    Raises:
        HeadFormatError: `layer_types` is not a list, is too short, or names sliding layers without a window.
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
    unknown = [kind for kind in types if kind not in _KINDS]
    if unknown:
        notes.append(
            f"its layer_types {unknown} are not known ({list(_KINDS)} are), and these layers get full attention; pass "
            "layer_types=[...] to override"
        )
    return ["full_attention" if kind in unknown else kind for kind in types]
