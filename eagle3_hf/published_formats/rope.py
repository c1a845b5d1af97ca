"""Reads a head's own RoPE from the keys of transformers 4 and 5; the target's RoPE is never inherited."""

import sys
from typing import Any

from .errors import HeadFormatError, dictionary


REFERENCE_THETA = 10000.0  # the base that the reference uses when a head's config names none
_SYNONYMS = {"su": "longrope"}
# Entries that the rope types of transformers read, and those that multimodal configs add.
_ENTRIES = {
    *("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor", "truncate"),
    *("attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor", "low_freq_factor"),
    *("high_freq_factor", "mscale", "mscale_all_dim", "mrope_section", "mrope_interleaved"),
}


def rope_parameters(config: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the head's rope parameters in the form of transformers 5.

    `rope_parameters` takes precedence over `rope_scaling` (with `rope_theta`), and this over the base 10000. The key
    `type` is read as `rope_type`.

    Args:
        config: A flat config.
        notes: Assumptions are appended to it.

    Raises:
        HeadFormatError: the parameters are not a dict, their type is not a name, or the base is not positive.
    """
    new, old = dictionary(config, "rope_parameters"), dictionary(config, "rope_scaling")
    _note_two_types(new, old, notes)
    rope = dict(new or old)
    rope_type = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or rope_type or "default"
    if rope_type not in (None, rope["rope_type"]):
        raise HeadFormatError(f"its config's rope has type {rope_type!r} and rope_type {rope['rope_type']!r}")
    if not isinstance(rope["rope_type"], str):
        raise HeadFormatError(f"its config's rope_type must be a name, got {rope['rope_type']!r}")
    rope["rope_type"] = _SYNONYMS.get(rope["rope_type"], rope["rope_type"])
    _set_theta(rope, config, notes)
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    for key in ("original_max_position_embeddings", "partial_rotary_factor"):
        if config.get(key) is not None:
            rope.setdefault(key, config[key])
    return _known_entries(rope, notes)


def multimodal_note(rope: dict[str, Any]) -> list[str]:
    """Return a note if the parameters are those of a multimodal rope with several axes."""
    if "mrope_section" not in rope:
        return []
    return [
        f"multimodal rope (mrope_section {rope['mrope_section']}) is applied as plain rope, which is equal for text, "
        "but not for tokens inside an image"
    ]


def _known_entries(rope: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Return the entries that have a meaning. A dict per layer type is kept: the config rejects it as a whole."""
    unknown = sorted(key for key, value in rope.items() if key not in _ENTRIES and not isinstance(value, dict))
    if unknown:
        notes.append(f"entries of its rope parameters that are not understood and have no effect: {unknown}")
    rope = {key: value for key, value in rope.items() if key not in unknown}
    section, interleaved = rope.get("mrope_section", []), rope.get("mrope_interleaved", False)
    if not isinstance(section, list) or not all(type(part) is int for part in section):
        raise HeadFormatError(f"its config's mrope_section must be a list of integers, got {section!r}")
    if not isinstance(interleaved, bool):
        raise HeadFormatError(f"its config's mrope_interleaved must be true or false, got {interleaved!r}")
    return rope


def _note_two_types(new: dict[str, Any], old: dict[str, Any], notes: list[str]) -> None:
    types = [rope.get("rope_type") or rope.get("type") or "default" for rope in (new, old)]
    if new and old and types[0] != types[1]:
        notes.append(
            f"its config has rope_parameters of type {types[0]!r} and a rope_scaling of type {types[1]!r}; the first "
            "are used, as transformers does; pass rope_parameters={...} to override"
        )


def _set_theta(rope: dict[str, Any], config: dict[str, Any], notes: list[str]) -> None:
    inner, outer = rope.get("rope_theta"), config.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        notes.append(
            f"its config says rope_theta {outer}, but {inner} inside its rope parameters; the latter is used, as "
            "transformers does; pass rope_parameters={...} to override"
        )
    theta = inner if inner is not None else outer if outer is not None else REFERENCE_THETA
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta <= sys.float_info.max:
        raise HeadFormatError(f"its config's rope_theta must be a positive number, got {theta!r}")
    rope["rope_theta"] = float(theta)
