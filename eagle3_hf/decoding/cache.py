"""Keep one path of a verified tree in a key-value cache of transformers, and drop the rest.

A verification forward appends one entry per tree node behind the committed ones. `keep_path` moves the accepted nodes'
entries to the end of the committed ones, in place, and cuts what follows: the cost depends on the path, not on the
text. Sliding-window layers must not evict while a tree is in the cache; `prepare` sees to that, `finish` undoes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer


class _Path:
    """The nodes to keep, with the index of those that have to move, made once per device."""

    def __init__(self, past_length: int, nodes: Sequence[int], num_nodes: int):
        self.past_length = past_length
        self.num_nodes = num_nodes
        self.length = len(nodes)
        # Leading nodes that already stand where they belong (all of them, when the best chain was accepted).
        self.first = next((place for place, node in enumerate(nodes) if node != place), self.length)
        self.moving = list(nodes[self.first :])
        self._indices: dict[tuple[torch.device, int], torch.Tensor] = {}

    def compact(self, states: torch.Tensor, start: int) -> None:
        """Move the path's entries of `states` (`(B, heads, slots, head_dim)`) together; the tree begins at `start`."""
        if not self.moving:
            return
        key = (states.device, start)
        index = self._indices.get(key)
        if index is None:
            index = torch.tensor([start + node for node in self.moving], device=states.device)
            self._indices[key] = index
        states.narrow(2, start + self.first, len(self.moving)).copy_(states.index_select(2, index))


class _RecordingWindowLayer(DynamicSlidingWindowLayer):
    """
    A sliding layer that evicts nothing by itself, for transformers before 5.14, whose own cannot be asked to.

    It lives between `prepare` and `finish` only, by exchanging the class of the user's layer: the layer stays the same
    object with the same fields, and each `keep_path` cuts it to the window.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Full layers grow without eviction; the window's own `update` is what must not run.
        keys, values = super(DynamicSlidingWindowLayer, self).update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[2]
        return keys, values


def _keep_dynamic(layer: DynamicLayer, path: _Path) -> None:
    end = layer.keys.shape[2] - path.num_nodes
    _check_length(layer.keys.shape[2], path)
    path.compact(layer.keys, end)
    path.compact(layer.values, end)
    layer.keys = layer.keys.narrow(2, 0, end + path.length)
    layer.values = layer.values.narrow(2, 0, end + path.length)


def _keep_sliding(layer: DynamicSlidingWindowLayer, path: _Path) -> None:
    # The slots before the tree are the last entries of the past, not all of it: count from the end.
    start = layer.keys.shape[2] - path.num_nodes
    _check_length(layer.cumulative_length, path)
    path.compact(layer.keys, start)
    path.compact(layer.values, start)
    end = start + path.length
    begin = max(0, end - (layer.sliding_window - 1))
    layer.keys = layer.keys.narrow(2, begin, end - begin)
    layer.values = layer.values.narrow(2, begin, end - begin)
    layer.cumulative_length = path.past_length + path.length


def _keep_static(layer: StaticLayer, path: _Path) -> None:
    # Buffers keep their addresses (compiled graphs hold them); entries behind the length are overwritten later.
    path.compact(layer.keys, path.past_length)
    path.compact(layer.values, path.past_length)
    layer.cumulative_length.fill_(path.past_length + path.length)


def _keep_nothing(layer: Any, path: _Path) -> None:
    """Layers that read another layer's entries hold none of their own."""


def _check_length(found: int, path: _Path) -> None:
    if found != path.past_length + path.num_nodes:
        raise ValueError(
            f"the cache holds {found} entries, but {path.past_length} committed ones and {path.num_nodes} tree nodes "
            f"make {path.past_length + path.num_nodes}; call `keep_path` once after each verification forward"
        )


# By exact class: a subclass stores more than keys and values (quantized residuals, indexer keys, recurrent states).
_KEEPERS: dict[type, Callable[[Any, _Path], None]] = {
    DynamicLayer: _keep_dynamic,
    DynamicSlidingWindowLayer: _keep_sliding,
    _RecordingWindowLayer: _keep_sliding,
    StaticLayer: _keep_static,
}
if hasattr(cache_utils, "DummyLayer"):
    _KEEPERS[cache_utils.DummyLayer] = _keep_nothing


def supported(cache: Any) -> str | None:
    """
    Why a draft tree cannot be verified on this cache, or `None` if it can.

    Known: dynamic layers, full or sliding, static full layers, and layers that share another layer's entries.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        return f"{type(cache).__name__} is not a cache of layers that transformers can roll back"
    for index, layer in enumerate(cache.layers):
        reason = _layer_reason(layer)
        if reason is not None:
            return f"cache layer {index} is a {type(layer).__name__}, {reason}"
    return None


def _layer_reason(layer: Any) -> str | None:
    if type(layer) in _KEEPERS:
        return None
    name = type(layer).__name__
    if "Quantized" in name:
        return "whose stored entries cannot be rolled back: use the default cache"
    if "StaticSliding" in name:
        return "which overwrites what it would have to restore: use the default cache or a static cache of full layers"
    if "LinearAttention" in name:
        return "whose recurrent state cannot follow several branches"
    return "which this package does not know"


def require_supported(cache: Any) -> None:
    """Raise a ValueError with the reason where `supported` gives one."""
    reason = supported(cache)
    if reason is not None:
        raise ValueError(f"a draft tree cannot be verified on this cache: {reason}")


def has_fixed_room(cache: Cache) -> bool:
    """Whether the cache was allocated for a length: for the text's usually, so that no tree fits behind its end."""
    return any(isinstance(layer, StaticLayer) for layer in cache.layers)


def prepare(cache: Cache) -> None:
    """
    Ask the cache to keep what a rejected tree would have evicted; call it after the prefill, so that the prompt is
    stored as vanilla stores it.
    """
    for layer in cache.layers:
        if type(layer) is not DynamicSlidingWindowLayer:
            continue
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        else:
            layer.__class__ = _RecordingWindowLayer


def finish(cache: Cache) -> None:
    """Undo `prepare`: the cache evicts and measures as one that no tree ever entered."""
    for layer in cache.layers:
        kind: type = type(layer)
        if kind is _RecordingWindowLayer:
            layer.__class__ = DynamicSlidingWindowLayer
        elif getattr(layer, "record_past", False):
            layer.record_past = False
        else:
            continue
        if layer.is_initialized:
            layer.keys = layer.keys[:, :, 1 - layer.sliding_window :]
            layer.values = layer.values[:, :, 1 - layer.sliding_window :]


def keep_path(cache: Cache, past_length: int, nodes: Sequence[int], num_nodes: int) -> None:
    """
    Keep the entries of `nodes` right behind the committed ones and drop the other nodes', in every layer, in place.

    Args:
        cache (`Cache`): holds `past_length` committed entries, then `num_nodes` tree entries, of each row.
        past_length (`int`): committed entries, evicted ones of sliding windows included.
        nodes (`Sequence[int]`): nodes of the path, ascending; the root (0) first. Batch rows share it.
        num_nodes (`int`): nodes of the tree that was verified, padding included.

    Raises:
        `ValueError`: the cache's length is not `past_length + num_nodes`, or a layer's class is not known.
    """
    path = _Path(past_length, nodes, num_nodes)
    if getattr(cache, "offloading", False):
        # Offloaded layers are copied to the host in the background: wait before touching them.
        torch.cuda.synchronize()
    for layer in cache.layers:
        keep = _KEEPERS.get(type(layer))
        if keep is None:
            raise ValueError(f"cannot keep a path: {supported(cache)}")
        if layer.is_initialized:
            keep(layer, path)
