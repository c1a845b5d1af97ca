"""Room for trees in a static cache, for the time of one call.

`generate` sizes a static cache for the text, so that the last trees would not fit behind it, and a static window
overwrites what a rejected branch would need back. A layer that lacks the room is exchanged for one that has it, of
full length, where the masks alone apply the window. That is done behind the prefill, which so runs as it always does;
afterwards what the call has committed goes into the layer's own buffers, by its own `update`, and the layer is back in
the cache. The buffers keep their addresses.
"""

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer


class RoomyLayer(StaticLayer):
    """
    A static layer in the place of another one.

    Args:
        original: The layer to stand in for; it is not touched before `give_back`.
        slots (`int`): room, counted from the first slot of the text.
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
        """The entries at their own slots; those that a window has evicted are zeros, which no mask shows."""
        held = min(self._given, states.shape[2])
        return torch.nn.functional.pad(states[:, :, :held], (0, 0, self._given - held, 0))

    def give_back(self) -> None:
        """Hand the entries since the start to the original layer."""
        length = int(self.get_seq_length())
        if length == self._given:
            return
        self.original.prefetch()
        keys: Any = self.keys
        values: Any = self.values
        device = self.original.keys.device if self.original.is_initialized else self.device
        # A window fills up first and rolls then, as it would token by token: its length is counted in two ways.
        full = min(length, max(self._given, self.original.max_cache_len))
        for new in (slice(self._given, full), slice(full, length)):
            if new.stop > new.start:
                self.original.update(keys[:, :, new].to(device), values[:, :, new].to(device))


def text_capacity(cache: Any) -> int | None:
    """Slots that a text may fill: those of the shortest static layer that evicts nothing, or `None` without one."""
    return min((layer.max_cache_len for layer in cache.layers if type(layer) is StaticLayer), default=None)


def has_shortened_windows(cache: Any, windows: Iterable[int | None], length: int) -> bool:
    """
    Whether static windows of `cache` are shorter than those of the model's masks, so that a text of `length` slots
    shows it.

    A window of a cache that is shorter than the window itself evicts what the masks still let through.
    """
    return any(
        isinstance(layer, StaticSlidingWindowLayer)
        and layer.max_cache_len < length
        and layer.max_cache_len not in windows
        for layer in getattr(cache, "layers", ())
    )


def make_room(cache: Any, free_slots: int) -> None:
    """Every static layer of `cache` gets at least `free_slots` slots behind what it holds, and evicts nothing."""
    static = [layer for layer in cache.layers if type(layer) in (StaticLayer, StaticSlidingWindowLayer)]
    if not static:
        return
    # Layers of one kind of mask must be equally long.
    slots = max(free_slots + int(static[0].get_seq_length()), *(layer.max_cache_len for layer in static))
    for place, layer in enumerate(cache.layers):
        if layer in static and (type(layer) is StaticSlidingWindowLayer or layer.max_cache_len < slots):
            cache.layers[place] = RoomyLayer(layer, slots)


def give_back_room(cache: Any, kept: bool) -> None:
    """Undo `make_room`; unless the cache is `kept` nobody sees it again, and nothing is copied back."""
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, RoomyLayer):
            cache.layers[place] = layer.original
            if kept:
                layer.give_back()
                if getattr(cache, "offloading", False):
                    layer.original.offload()
