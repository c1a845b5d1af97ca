"""Keep one path of a verified tree in a key-value cache of transformers, and drop the rest.

A verification forward appends one entry per tree node behind the committed ones. `keep_path` moves the accepted nodes'
entries to the end of the committed ones, in place, and cuts what follows: the cost depends on the path, not on the
text. Sliding-window layers must not evict while a tree is in the cache; `prepare` sees to that, `finish` undoes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..output.attentions import KeyColumns
from .static_cache import RoomyLayer, give_back_room, make_room


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


class _RaggedWindowLayer(_RecordingWindowLayer):
    """
    A sliding layer of a batch whose rows end at different slots: it keeps what the shortest row can still see.

    Like its base it lives between `prepare` and `finish` only.
    """

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.keys.shape[2] if self.is_initialized else 0
        return kept + query_length, self.cumulative_length - kept


class _Paths:
    """Several rows' paths: where their entries are, and where they go."""

    def __init__(self, ends: Sequence[int], paths: Sequence[Sequence[int]], num_nodes: int):
        self.tree_start = max(ends)
        self.num_nodes = num_nodes
        self.longest = max(map(len, paths))
        moves = [
            _padded_moves(end, path, self.tree_start, self.longest) for end, path in zip(ends, paths, strict=True)
        ]
        self._sources = [[source for source, _ in row] for row in moves]
        self._places = [[place for _, place in row] for row in moves]
        self._indices: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def compact(self, states: torch.Tensor, offset: int) -> None:
        """Move the paths' entries of `states` (`(B, heads, slots, head_dim)`), whose first slot is `offset`."""
        if not self.longest:
            return
        key = (states.device, offset)
        if key not in self._indices:
            source = torch.tensor(self._sources, device=states.device) - offset
            place = torch.tensor(self._places, device=states.device) - offset
            self._indices[key] = source, place
        shape = (-1, states.shape[1], -1, states.shape[3])
        source, place = (index[:, None, :, None].expand(shape) for index in self._indices[key])
        states.scatter_(2, place, states.gather(2, source))


def _padded_moves(end: int, path: Sequence[int], tree_start: int, length: int) -> list[tuple[int, int]]:
    """From slot to slot for each node of a row's path; shorter paths make their last move several times."""
    moves = [(tree_start + node, end + i) for i, node in enumerate(path)] or [(tree_start, tree_start)]
    return moves + moves[-1:] * (length - len(moves))


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
    _RaggedWindowLayer: _keep_sliding,
    StaticLayer: _keep_static,
    RoomyLayer: _keep_static,
}
if hasattr(cache_utils, "DummyLayer"):
    _KEEPERS[cache_utils.DummyLayer] = _keep_nothing


def supported(cache: Any) -> str | None:
    """
    Why a draft tree cannot be verified on this cache, or `None` if it can.

    Known: dynamic and static layers, full or sliding, and layers that share another layer's entries.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        return f"{type(cache).__name__} is not a cache of layers that transformers can roll back"
    for index, layer in enumerate(cache.layers):
        reason = _layer_reason(layer)
        if reason is not None:
            return f"cache layer {index} is a {type(layer).__name__}, {reason}"
    return None


def _layer_reason(layer: Any) -> str | None:
    # `prepare` exchanges static windows for the length of a call.
    if type(layer) in _KEEPERS or type(layer) is StaticSlidingWindowLayer:
        return None
    name = type(layer).__name__
    if "Quantized" in name:
        return "whose stored entries cannot be rolled back: use the default cache"
    if "LinearAttention" in name:
        return "whose recurrent state cannot follow several branches"
    return "which this package does not know"


def require_supported(cache: Any) -> None:
    """Raise a ValueError with the reason where `supported` gives one."""
    reason = supported(cache)
    if reason is not None:
        raise ValueError(f"a draft tree cannot be verified on this cache: {reason}")


def key_columns(cache: Cache, layer_types: Sequence[str] | None) -> list[KeyColumns]:
    """What plain decoding shows of each layer's keys; layers that share another's are of a kind with it."""
    found: list[KeyColumns] = []
    for index, layer in enumerate(cache.layers):
        if _KEEPERS.get(type(layer)) is _keep_nothing and layer_types is not None:
            found.append(found[list(layer_types).index(layer_types[index])])
        elif isinstance(layer, RoomyLayer):
            found.append(KeyColumns(layer.window, layer.original.max_cache_len, from_start=True))
        elif isinstance(layer, StaticLayer):
            found.append(KeyColumns(None, layer.max_cache_len, from_start=True))
        else:
            found.append(KeyColumns(getattr(layer, "sliding_window", None)))
    return found


def prepare(cache: Cache, ragged: bool = False, free_slots: int = 0) -> None:
    """
    Ask the cache to keep what a rejected tree would have evicted; call it after the prefill, so that the prompt is
    stored as vanilla stores it.

    Args:
        ragged (`bool`): rows of the batch may come to end at different slots (`keep_paths`).
        free_slots (`int`): that text and trees may take from here on; static caches need them beforehand.
    """
    make_room(cache, free_slots)
    for layer in cache.layers:
        if type(layer) is not DynamicSlidingWindowLayer:
            continue
        if ragged:
            layer.__class__ = _RaggedWindowLayer
        elif hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
        else:
            layer.__class__ = _RecordingWindowLayer


def finish(cache: Cache, kept: bool = True) -> None:
    """
    Undo `prepare`: the cache evicts and measures as one that no tree ever entered.

    Args:
        kept (`bool`): whether anybody sees the cache afterwards; else nothing is copied for it.
    """
    _wait_for_copies(cache)
    give_back_room(cache, kept)
    for layer in cache.layers:
        kind: type = type(layer)
        if isinstance(layer, StaticLayer) and layer.is_initialized:
            layer.keys[:, :, int(layer.get_seq_length()) :] = 0
            layer.values[:, :, int(layer.get_seq_length()) :] = 0
            continue
        if kind in (_RecordingWindowLayer, _RaggedWindowLayer):
            layer.__class__ = DynamicSlidingWindowLayer
        elif getattr(layer, "record_past", False):
            layer.record_past = False
        else:
            continue
        if layer.is_initialized:
            layer.keys = layer.keys[:, :, 1 - layer.sliding_window :]
            layer.values = layer.values[:, :, 1 - layer.sliding_window :]


def _wait_for_copies(cache: Cache) -> None:
    """Offloaded layers are copied to the host in the background: wait before touching them."""
    if getattr(cache, "offloading", False) and torch.accelerator.is_available():
        torch.accelerator.synchronize()


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
    _wait_for_copies(cache)
    for layer in cache.layers:
        keep = _KEEPERS.get(type(layer))
        if keep is None:
            raise ValueError(f"cannot keep a path: {supported(cache)}")
        if layer.is_initialized:
            keep(layer, path)


def keep_paths(
    cache: Cache,
    ends: Sequence[int],
    paths: Sequence[Sequence[int]],
    num_nodes: int,
    new_ends: Sequence[int],
    needed_from: int,
) -> None:
    """
    `keep_path` for rows that end at different slots: each row's path moves to the row's own end, in place.

    Args:
        cache (`Cache`): holds each row's committed entries up to its end, and the tree's nodes behind the longest row.
        ends (`Sequence[int]`): committed slots of each row.
        paths (`Sequence[Sequence[int]]`): nodes of each row, the root first; empty to keep nothing.
        num_nodes (`int`): nodes of the tree that was verified, padding included.
        new_ends (`Sequence[int]`): committed slots of each row from now on; fewer than before takes entries back.
        needed_from (`int`): no row will end before this slot again; windows may forget what is out of its sight.
    """
    moved = _Paths(ends, paths, num_nodes)
    _wait_for_copies(cache)
    surplus = moved.tree_start + num_nodes - max(new_ends)
    for layer in cache.layers:
        if type(layer) not in _KEEPERS:
            raise ValueError(f"cannot keep paths of several rows: {supported(cache)}")
        if _has_entries(layer):
            static = isinstance(layer, StaticLayer)
            offset = 0 if static else moved.tree_start + num_nodes - layer.keys.shape[2]
            moved.compact(layer.keys, offset)
            moved.compact(layer.values, offset)
            _drop_last(layer, surplus)
            if isinstance(layer, _RaggedWindowLayer):
                _forget_unseen(layer, needed_from)


def drop_unfinished(cache: Cache, length: int) -> None:
    """After a forward that was broken off: every layer holds `length` slots, whether it had run by then or not."""
    for layer in cache.layers:
        if _has_entries(layer):
            _drop_last(layer, _slots_held(layer) - length)


def _slots_held(layer: Any) -> int:
    """Slots written so far, evicted ones included."""
    if isinstance(layer, StaticLayer | DynamicSlidingWindowLayer):
        return int(layer.cumulative_length)
    return layer.keys.shape[2]


def cut(cache: Cache, count: int) -> None:
    """Drop the last `count` slots of every layer."""
    for layer in cache.layers:
        if _has_entries(layer):
            _drop_last(layer, count)


def _has_entries(layer: Any) -> bool:
    return layer.is_initialized and _KEEPERS.get(type(layer)) is not _keep_nothing


def _drop_last(layer: Any, count: int) -> None:
    if isinstance(layer, StaticLayer):
        layer.cumulative_length.sub_(count)
        return
    kept = layer.keys.shape[2] - count
    layer.keys, layer.values = layer.keys.narrow(2, 0, kept), layer.values.narrow(2, 0, kept)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length -= count


def _forget_unseen(layer: _RaggedWindowLayer, needed_from: int) -> None:
    first = layer.cumulative_length - layer.keys.shape[2]
    unseen = max(0, needed_from - (layer.sliding_window - 1) - first)
    kept = layer.keys.shape[2] - unseen
    layer.keys, layer.values = layer.keys.narrow(2, unseen, kept), layer.values.narrow(2, unseen, kept)
