"""Keeping the accepted paths of verified trees in a key-value cache of transformers, and dropping the other nodes.

A verification appends one entry for each tree node behind the committed ones. `keep_paths` moves the entries of the
accepted nodes to the end of each sequence's committed ones, in place, and cuts off what follows, so that the cost
depends on the paths and not on the text. Sliding-window layers must not evict while a tree is in the cache: `prepare`
prevents it, and `finish` restores the layers.
"""

from collections.abc import Sequence
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

from ..output.outputs import KeyColumns
from ..transfers import upload
from ..unsupported_call import UnsupportedCall
from .static_cache import RoomyLayer, give_back_room, make_room


class _TreeWindowLayer(DynamicSlidingWindowLayer):
    """A sliding layer that evicts nothing by itself. Each `keep_paths` cuts it to what a sequence can still attend to.

    It is only used between `prepare` and `finish`, by changing the class of the user's layer, which stays the same
    object with the same fields.
    """

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # This is the `update` of full layers, which evicts nothing.
        keys, values = super(DynamicSlidingWindowLayer, self).update(key_states, value_states, *args, **kwargs)
        self.cumulative_length += key_states.shape[2]
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.keys.shape[2] if self.keys is not None else 0
        return kept + query_length, self.cumulative_length - kept


class _Moves:
    """The slots from which and to which the entries of the accepted nodes move.

    Args:
        cache_lens: Committed slots of each sequence.
        paths: Accepted nodes of each sequence, the root first.
    """

    def __init__(self, cache_lens: Sequence[int], paths: Sequence[Sequence[int]]):
        start, longest = max(cache_lens), max(map(len, paths))
        moves = [_padded_moves(own, path, start, longest) for own, path in zip(cache_lens, paths, strict=True)]
        # Leading entries are often in the right slots already: all of them, if the best chain was accepted.
        self._count = longest - next(
            (i for i in range(longest) if any(own[i][0] != own[i][1] for own in moves)), longest
        )
        moves = [own[longest - self._count :] for own in moves]
        self._is_shared = all(own == moves[0] for own in moves)
        self._sources = [[source for source, _ in own] for own in moves]
        self._slots = [[slot for _, slot in own] for own in moves]
        self._indices: dict[tuple[torch.device, int, bool], torch.Tensor] = {}

    def apply(self, layers: Sequence[tuple[torch.Tensor, int]]) -> None:
        """Move the entries of all layers.

        Args:
            layers: States (B, heads, slots, head_dim), and their first slot.
        """
        if not self._count:
            return
        if self._is_shared:  # the slots of a single path follow one another, so that they need no index
            first = self._slots[0][0]
            moved = [
                states.index_select(2, self._index(states.device, at, is_source=True)[0]) for states, at in layers
            ]
            torch._foreach_copy_([states.narrow(2, first - at, self._count) for states, at in layers], moved)
            return
        for states, offset in layers:
            self._scatter(states, offset)

    def _scatter(self, states: torch.Tensor, offset: int) -> None:
        source = self._index(states.device, offset, is_source=True)
        slot = self._index(states.device, offset, is_source=False)
        shape = (-1, states.shape[1], -1, states.shape[3])
        source, slot = (index[:, None, :, None].expand(shape) for index in (source, slot))
        states.scatter_(2, slot, states.gather(2, source))

    def _index(self, device: torch.device, offset: int, is_source: bool) -> torch.Tensor:
        """Return (B, count) places in states whose first slot is `offset`, made once per device."""
        key = device, offset, is_source
        if key not in self._indices:
            slots = self._sources if is_source else self._slots
            places = upload([slot - offset for own in slots for slot in own], device)
            self._indices[key] = places.view(len(slots), self._count)
        return self._indices[key]


def _padded_moves(cache_len: int, path: Sequence[int], tree_start: int, length: int) -> list[tuple[int, int]]:
    """Return (from, to) for each node of a sequence's path. Shorter paths repeat their last move up to `length`."""
    moves = [(tree_start + node, cache_len + i) for i, node in enumerate(path)] or [(tree_start, tree_start)]
    return moves + moves[-1:] * (length - len(moves))


# Exact classes, since a subclass may store more than keys and values (quantized residuals, recurrent states).
_KNOWN: set[type] = {
    DynamicLayer,
    DynamicSlidingWindowLayer,
    _TreeWindowLayer,
    StaticLayer,
    RoomyLayer,
}
# Layers that read another layer's entries and hold none of their own.
_EMPTY = tuple(getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name))


def supported(cache: Any) -> str | None:
    """Return why a draft tree cannot be verified on this cache, or `None` if it can.

    Supported are dynamic and static layers, full or sliding, and layers that share another layer's entries.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "layers"):
        return f"{type(cache).__name__} is not a cache of layers that transformers can roll back"
    for index, layer in enumerate(cache.layers):
        reason = _layer_reason(layer)
        if reason is not None:
            return f"cache layer {index} is a {type(layer).__name__}, {reason}"
    return None


def _layer_reason(layer: Any) -> str | None:
    # `prepare` replaces static windows for the duration of a call.
    if type(layer) in (*_KNOWN, *_EMPTY, StaticSlidingWindowLayer):
        return None
    name = type(layer).__name__
    if "Quantized" in name:
        return "whose stored entries cannot be rolled back: use the default cache"
    if "LinearAttention" in name:
        return "whose recurrent state cannot follow several branches"
    return "which this package does not know"


def require_supported(cache: Any) -> None:
    """Raise an `UnsupportedCall` if the cache is not supported, with the reason."""
    reason = supported(cache)
    if reason is not None:
        raise UnsupportedCall("cache", f"a draft tree cannot be verified on this cache: {reason}")


def key_columns(cache: Cache, layer_types: Sequence[str] | None) -> list[KeyColumns]:
    """Return the keys of each layer for which plain decoding returns attention weights.

    Args:
        cache: The cache.
        layer_types: The target's layer types. A layer without entries has the keys of the first one of its type.
    """
    found: list[KeyColumns] = []
    for index, layer in enumerate(cache.layers):
        if type(layer) in _EMPTY and layer_types is not None:
            found.append(found[list(layer_types).index(layer_types[index])])
        elif isinstance(layer, RoomyLayer):
            found.append(KeyColumns(layer.window, layer.original.max_cache_len, from_start=True))
        elif isinstance(layer, StaticLayer):
            found.append(KeyColumns(None, layer.max_cache_len, from_start=True))
        else:
            found.append(KeyColumns(getattr(layer, "sliding_window", None)))
    return found


def prepare(cache: Cache, free_slots: int = 0) -> None:
    """Prevent rejected trees from evicting entries.

    This must be called after the prefill, so that the prompt is stored as in plain decoding.

    Args:
        cache: The cache.
        free_slots: The number of slots that text and trees may fill from here on, which static caches must reserve.
    """
    make_room(cache, free_slots)
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = _TreeWindowLayer


def finish(cache: Cache, kept: bool = True) -> None:
    """Undo `prepare`: the cache is then as if no tree had entered it.

    Args:
        cache: The cache.
        kept: Whether the cache is used afterwards. If not, nothing is copied back to it.
    """
    _wait_for_copies(cache)
    give_back_room(cache, kept)
    for layer in _layers(cache):
        kind: type = type(layer)
        if issubclass(kind, StaticLayer) and layer.is_initialized:
            layer.keys[:, :, int(layer.get_seq_length()) :] = 0
            layer.values[:, :, int(layer.get_seq_length()) :] = 0
        elif kind is _TreeWindowLayer:
            layer.__class__ = DynamicSlidingWindowLayer
            if layer.is_initialized:
                layer.keys = layer.keys[:, :, 1 - layer.sliding_window :]
                layer.values = layer.values[:, :, 1 - layer.sliding_window :]


def _layers(cache: Cache) -> list[Any]:
    """Return the layers, untyped: their tensors are optional for the type checker."""
    return cache.layers


def _wait_for_copies(cache: Cache) -> None:
    """Wait until offloaded layers have been copied to the host, which happens in the background."""
    if getattr(cache, "offloading", False) and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def keep_paths(
    cache: Cache,
    cache_lens: Sequence[int],
    paths: Sequence[Sequence[int]],
    num_nodes: int,
    new_lens: Sequence[int],
    needed_from: int,
) -> None:
    """Keep each sequence's path behind its own committed entries, in every layer, in place, and drop the other nodes.

    Args:
        cache: Holds each sequence's committed entries, and the trees' nodes behind the longest sequence.
        cache_lens: Committed slots of each sequence, those included that sliding windows have evicted.
        paths: Accepted nodes of each sequence, ascending, the root (0) first; empty to keep nothing.
        num_nodes: Nodes of the tree that was verified, padding included.
        new_lens: Committed slots of each sequence from now on; fewer than before takes entries back.
        needed_from: No sequence will end before this slot again; windows may forget what is out of its sight.

    Raises:
        ValueError: the cache's length is not that of the longest sequence and the tree, or a layer's class is not
            known.
    """
    end = max(cache_lens) + num_nodes
    moves = _Moves(cache_lens, paths)
    _wait_for_copies(cache)
    held: list[tuple[Any, int]] = []
    for layer in _layers(cache):
        if type(layer) not in (*_KNOWN, *_EMPTY):
            raise ValueError(f"cannot keep a path of the tree: {supported(cache)}")
        if not _has_entries(layer):
            continue
        is_static = isinstance(layer, StaticLayer)
        if not is_static and _slots_held(layer) != end:
            raise ValueError(
                f"the cache holds {_slots_held(layer)} entries, but {max(cache_lens)} committed ones and {num_nodes} "
                f"tree nodes make {end}; call `keep_paths` once after each verification forward"
            )
        held.append((layer, 0 if is_static else end - layer.keys.shape[2]))
    moves.apply([(states, offset) for layer, offset in held for states in (layer.keys, layer.values)])
    for layer, _ in held:
        _drop_last(layer, end - max(new_lens))
        if isinstance(layer, _TreeWindowLayer):
            _forget_unseen(layer, needed_from)


def drop_unfinished(cache: Cache, length: int) -> None:
    """Cut every layer to `length` slots after an interrupted forward, which only some layers have run."""
    for layer in cache.layers:
        if _has_entries(layer):
            _drop_last(layer, _slots_held(layer) - length)


def _slots_held(layer: Any) -> int:
    """Return the number of slots written so far, evicted ones included."""
    if isinstance(layer, StaticLayer | DynamicSlidingWindowLayer):
        return int(layer.cumulative_length)
    return layer.keys.shape[2]


def cut(cache: Cache, count: int) -> None:
    """Drop the last `count` slots of every layer."""
    for layer in cache.layers:
        if _has_entries(layer):
            _drop_last(layer, count)


def _has_entries(layer: Any) -> bool:
    return layer.is_initialized and type(layer) not in _EMPTY


def _drop_last(layer: Any, count: int) -> None:
    if isinstance(layer, StaticLayer):
        layer.cumulative_length.sub_(count)
        return
    kept = layer.keys.shape[2] - count
    layer.keys, layer.values = layer.keys.narrow(2, 0, kept), layer.values.narrow(2, 0, kept)
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length -= count


def _forget_unseen(layer: Any, needed_from: int) -> None:
    first = layer.cumulative_length - layer.keys.shape[2]
    unseen = max(0, needed_from - (layer.sliding_window - 1) - first)
    kept = layer.keys.shape[2] - unseen
    layer.keys, layer.values = layer.keys.narrow(2, unseen, kept), layer.values.narrow(2, unseen, kept)
