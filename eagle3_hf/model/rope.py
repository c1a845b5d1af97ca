"""Checks of `rope_parameters` before a head is built from them, and frequencies that transformers leaves out.

The rope types are those of transformers (`ROPE_INIT_FUNCTIONS`), which only logs wrong numbers, and fails later,
inside a forward pass, or not at all.
"""

import math
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .config_fields import is_number


_ABOVE_ZERO = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_NOT_NEGATIVE = ("mscale", "mscale_all_dim")
_LISTS = ("short_factor", "long_factor")


def without_unset(rope: Any) -> Any:
    """A rotary description without its entries that are `None`, as a dict of its own; anything else as it is."""
    if rope is None:
        return {}
    return {name: value for name, value in rope.items() if value is not None} if isinstance(rope, dict) else rope


def check_rope(rope: Any) -> None:
    """Check a rotary description entry by entry.

    Raises:
        ValueError: not one flat dict, an unknown type, or an entry that is no finite number above 0.
    """
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"rope_parameters must be a dict like {{'rope_type': 'default'}}, one for all layers, got {rope!r}"
        )
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        raise ValueError(f"rope_parameters: rope_type {rope_type!r} is unknown; known: {known}")
    for name in (*_ABOVE_ZERO, *_NOT_NEGATIVE):
        value = rope.get(name, 1.0)
        if not is_number(value) or value < 0 or (value == 0 and name in _ABOVE_ZERO):
            least = "above 0" if name in _ABOVE_ZERO else "of at least 0"
            raise ValueError(f"rope_parameters: {name} must be a finite number {least}, got {value!r}")
    for name in _LISTS:
        values = rope.get(name, [])
        if not isinstance(values, list) or not all(is_number(value) and value > 0 for value in values):
            raise ValueError(f"rope_parameters: {name} must be a list of finite numbers above 0, got {values!r}")
    if not isinstance(rope.get("truncate", True), bool):
        raise ValueError(f"rope_parameters: truncate must be True or False, got {rope['truncate']!r}")


def check_rope_table(config) -> None:
    """Compute a config's frequencies once, which shows numbers that contradict each other, whatever the rope type.

    Raises:
        ValueError: no frequencies, or some that are not finite.
    """
    rope, pairs = config.rope_parameters, (_rotary_width(config) + 1) // 2
    if not 1 <= pairs <= config.head_dim // 2:
        raise ValueError(
            f"partial_rotary_factor {rope['partial_rotary_factor']} of head_dim {config.head_dim} rotates "
            f"{_rotary_width(config)} numbers: at least 1 and at most head_dim can be rotated"
        )
    for name in _LISTS:
        if len(rope.get(name, range(pairs))) != pairs:
            raise ValueError(
                f"rope_parameters: {name} has {len(rope[name])} numbers, but {pairs} pairs of head_dim "
                f"{config.head_dim} are rotated"
            )
    try:
        with torch.device("cpu"):
            frequencies, factor = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], default_frequencies)(config)
        finite = bool(frequencies.isfinite().all()) and math.isfinite(factor)
    except Exception as error:
        raise ValueError(f"rope_parameters {rope} give no frequencies: {error}") from error
    if not finite:
        raise ValueError(f"rope_parameters {rope} give frequencies that are not finite")


def default_frequencies(config, *args, **kwargs) -> tuple[torch.Tensor, float]:
    """Inverse frequencies (pairs,) of unscaled rotary positions, over a part of the head where the config says so.

    transformers' own function for this type always rotates the whole head.
    """
    width = _rotary_width(config)
    return 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float) / width)), 1.0


def _rotary_width(config) -> int:
    return int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
