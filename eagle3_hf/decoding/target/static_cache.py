"""Room for trees in a static cache, for the duration of one call.

`generate` sizes a static cache for the text, so that the last trees would not fit behind it, and a static window
overwrites entries that are needed again if a branch is rejected. Such a layer is replaced by a larger one of full
length, for which the masks alone apply the window. This happens after the prefill, which is not affected. At the end
of the call, the committed entries are written into the buffers of the original layer by its own `update`, and the
layer returns to the cache. The buffers keep their addresses.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer


class RoomyLayer(StaticLayer):
    """A larger static layer in the place of another one.

    Args:
        original: The layer to replace, which is not changed before `give_back`.
        slots: The number of slots, counted from the first slot of the text.
    """

    def __init__(self, original: StaticLayer, slots: int):
        super().__init__(max_cache_len=slots)
        self.original: Any = original
        self.window = original.max_cache_len if isinstance(original, StaticSlidingWindowLayer) else None
        self._given = int(original.get_seq_length())
        if self._given:
            original.prefetch()
            given: Any = original
            self.update(self._all_slots(given.keys), self._all_slots(given.values))

    def _all_slots(self, states: torch.Tensor) -> torch.Tensor:
        """Return the entries at their slots. Those that a window has evicted are zeros, which are always masked."""
        held = min(self._given, states.shape[2])
        return torch.nn.functional.pad(states[:, :, :held], (0, 0, self._given - held, 0))

    def give_back(self) -> None:
        """Write the entries of this call to the original layer."""
        length = int(self.get_seq_length())
        if length == self._given:
            return
        self.original.prefetch()
        keys: Any = self.keys
        values: Any = self.values
        device = self.original.keys.device if self.original.is_initialized else self.device
        # A window is filled first and then rolls, in two updates: a layer counts its length differently in each.
        full = min(length, max(self._given, self.original.max_cache_len))
        for new in (slice(self._given, full), slice(full, length)):
            if new.stop > new.start:
                self.original.update(keys[:, :, new].to(device), values[:, :, new].to(device))


def text_capacity(cache: Any) -> int | None:
    """Return the number of slots of the shortest static layer that evicts nothing; `None` if there is none."""
    return min((layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer), default=None)


def has_shortened_windows(cache: Any, windows: Iterable[int | None], length: int) -> bool:
    """Return whether static windows of the cache evict entries to which the model's masks still let tokens attend.

    Args:
        cache: The cache.
        windows: Sizes of the model's windows.
        length: The number of slots of the text.
    """
    return any(
        isinstance(layer, StaticSlidingWindowLayer)
        and layer.max_cache_len < length
        and layer.max_cache_len not in windows
        for layer in getattr(cache, "layers", ())
    )


def make_room(cache: Any, free_slots: int) -> None:
    """Give every static layer at least `free_slots` slots behind its entries, and keep it from evicting any."""
    static = [layer for layer in cache.layers if type(layer) in (StaticLayer, StaticSlidingWindowLayer)]
    if not static:
        return
    # Layers that share a mask must have the same number of slots.
    slots = max(free_slots + int(static[0].get_seq_length()), *(layer.max_cache_len for layer in static))
    for place, layer in enumerate(cache.layers):
        if layer in static and (type(layer) is StaticSlidingWindowLayer or layer.max_cache_len < slots):
            cache.layers[place] = RoomyLayer(layer, slots)


def give_back_room(cache: Any, kept: bool) -> None:
    """Undo `make_room`. Entries are copied back only if the cache is `kept`, that is, used afterwards."""
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, RoomyLayer):
            cache.layers[place] = layer.original
            if kept:
                layer.give_back()
                if getattr(cache, "offloading", False):
                    layer.original.offload()
