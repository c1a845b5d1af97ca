"""Hidden states and attention weights of single steps, read out of the forward over a tree.

A node attends to its row's past and to the nodes of its path, wherever those stand; plain decoding would have had
these keys one behind the other, in a window only the last ones. (A static cache also has columns for what is to come.)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class KeyColumns(NamedTuple):
    """The keys that one layer shows in plain decoding.

    Attributes:
        window: As many of the last slots are there; `None`: all.
        width: Columns of a static cache, used or not; `None`: as many as there are keys.
        from_start: Whether this layer's keys begin at slot 0 now; else they end with the tree's last node.
    """

    window: int | None = None
    width: int | None = None
    from_start: bool = False


class Place(NamedTuple):
    """Where a token's forward was.

    Attributes:
        row: Of the batch.
        path: Nodes from the root to the one that the token came from.
        end: Slots of the row's past.
        tree_start: Slot of node 0.
        num_nodes: Of the tree.
    """

    row: int
    path: Sequence[int]
    end: int
    tree_start: int
    num_nodes: int


def step_states(states: Sequence[torch.Tensor], row: int, node: int, num_nodes: int) -> list[torch.Tensor]:
    """One row's hidden states (1, 1, H) at a node, from those (B, N, H) of all layers.

    A forward that ran the whole text again (see `TargetRun`) shows all of it, beside a draft and without.
    """
    return [
        state[row : row + 1, node : node + 1] if state.shape[1] == num_nodes else state[row : row + 1]
        for state in states
    ]


def step_attentions(
    attentions: Sequence[torch.Tensor], layers: Sequence[KeyColumns], place: Place
) -> list[torch.Tensor]:
    """One row's attentions (1, heads, 1, keys) in every layer, from those (B, heads, N, keys) of a forward.

    Args:
        layers: What plain decoding would show of each.
    """
    row, node = place.row, place.path[-1]
    found: dict[tuple[KeyColumns, int], torch.Tensor] = {}
    parts = []
    for weights, columns in zip(attentions, layers, strict=len(attentions) > 0):
        if weights.shape[2] != place.num_nodes:
            parts.append(weights[row : row + 1])
            continue
        key = columns, weights.shape[-1]
        if key not in found:
            first_slot = 0 if columns.from_start else place.tree_start + place.num_nodes - weights.shape[-1]
            found[key] = _slots(columns.window, place) - first_slot
        part = weights[row : row + 1, :, node : node + 1].index_select(-1, found[key].to(weights.device))
        missing = 0 if columns.width is None else columns.width - part.shape[-1]
        parts.append(torch.nn.functional.pad(part, (0, missing)))
    return parts


def _slots(window: int | None, place: Place) -> torch.Tensor:
    slots = torch.cat([torch.arange(place.end), place.tree_start + torch.tensor(place.path)])
    return slots if window is None else slots[-window:]
