"""Restoring a cache with recurrent or convolutional states after a draft of which not all was accepted.

Such states cannot be cut to fewer tokens, so they are copied before a verification. Entries of attention layers need
no copy: dynamic layers write every update into new memory, so that the earlier tensors are unchanged.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ..unsupported_call import UnsupportedCall
from .kv_cache import supported


_ENTRIES = ("keys", "values", "cumulative_length")
_STATES = ("conv_states", "recurrent_states")
_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


def has_states(cache: Any) -> bool:
    """Return whether a layer of the cache keeps a state instead of one entry per token."""
    return isinstance(cache, Cache) and any(_is_stateful(layer) for layer in getattr(cache, "layers", ()))


def has_entries(cache: Cache) -> bool:
    """Return whether any layer keeps one entry per token, so that the cache knows their number."""
    return any(hasattr(layer, "keys") for layer in cache.layers)


def require_restorable(cache: Any) -> None:
    """Raise an `UnsupportedCall` if a layer of the cache cannot be restored."""
    for index, layer in enumerate(cache.layers):
        writes_new_memory = isinstance(layer, DynamicLayer) or not hasattr(layer, "keys")
        is_known = _is_stateful(layer) or supported(Cache(layers=[layer])) is None
        if not (writes_new_memory and is_known):
            raise UnsupportedCall(
                "cache",
                f"a draft cannot be verified on this cache: layer {index} is a {type(layer).__name__}, which cannot "
                "be restored: use the default cache",
            )


def _is_stateful(layer: Any) -> bool:
    return all(hasattr(layer, name) for name in _STATES)


def state_difference(cache: Cache, other: Cache) -> float:
    """Return the largest difference of the states of two caches in any layer, relative to the state's norm."""
    worst = 0.0
    for layer, other_layer in zip(cache.layers, other.layers, strict=True):
        for found, right in zip(_states(layer), _states(other_layer), strict=True):
            found, right = found.float(), right.float()  # not in float64, which some devices (MPS) lack
            apart, size = (found - right).norm().item(), right.norm().item()
            worst = max(worst, apart / (size or 1.0))
    return worst


def _states(layer: Any) -> list[torch.Tensor]:
    if not _is_stateful(layer):
        return []
    states = [getattr(layer, name) for name in _STATES]
    flat = [part for state in states for part in (state.values() if isinstance(state, dict) else [state])]
    return [part for part in flat if part is not None]


class Snapshot:
    """The content of a cache when this was created. It can be restored any number of times."""

    def __init__(self, cache: Cache):
        self._layers = [_LayerSnapshot(layer) for layer in cache.layers]

    def restore(self, cache: Cache) -> None:
        for saved, layer in zip(self._layers, cache.layers, strict=True):
            saved.restore(layer)


class _LayerSnapshot:
    def __init__(self, layer: Any):
        self._fields = {name: getattr(layer, name) for name in _ENTRIES if hasattr(layer, name)}
        names = (*_STATES, *_FLAGS) if _is_stateful(layer) else ()
        self._states = {name: _copied(getattr(layer, name)) for name in names if hasattr(layer, name)}

    def restore(self, layer: Any) -> None:
        for name, value in self._fields.items():
            setattr(layer, name, value)
        for name, saved in self._states.items():
            setattr(layer, name, _put_back(getattr(layer, name), saved))


# A layer's states are a tensor or, in newer versions of transformers, a dict of them; its flags likewise.
def _copied(states: Any) -> Any:
    if isinstance(states, dict):
        return {at: _copied(state) for at, state in states.items()}
    return states.clone() if isinstance(states, torch.Tensor) else states


def _put_back(states: Any, saved: Any) -> Any:
    """Return `saved`, written into the memory of `states` if it is a tensor: compiled graphs hold its address."""
    if isinstance(saved, dict):
        return {at: _put_back(states[at], state) for at, state in saved.items()}
    if isinstance(saved, torch.Tensor):
        return states.copy_(saved)
    return saved
