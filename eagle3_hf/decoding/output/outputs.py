"""What `generate` returns besides ids, step by step: scores, logits, hidden states, attention weights.

Hidden states and attentions are taken from the forward over a tree. The keys that a node attends to, its sequence's
past and the nodes of its path, are scattered over the slots. In plain decoding they are adjacent, and in a window only
the last of them are there. (With a static cache there are also columns for tokens to come.)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig


class KeyColumns(NamedTuple):
    """The keys of one layer for which plain decoding returns attention weights.

    Attributes:
        window: The number of most recent slots that are returned; `None` for all.
        width: The number of columns of a static cache, used or not; `None` for the number of keys.
        from_start: Whether the layer's keys now begin at slot 0; else they end with the last node of the tree.
    """

    window: int | None = None
    width: int | None = None
    from_start: bool = False


class Place(NamedTuple):
    """Where in a forward over trees the logits of a token were computed.

    Attributes:
        sequence: Index of the sequence in the batch.
        step: The step of the token.
        path: Nodes from the root to the node of the logits.
        cache_len: Number of slots of the sequence's past.
        tree_start: Slot of node 0.
        num_nodes: Number of nodes of the tree.
    """

    sequence: int
    step: int
    path: Sequence[int]
    cache_len: int
    tree_start: int
    num_nodes: int


class StepRecord:
    """Collects the outputs of each step in the shapes of plain decoding. Sequences may reach a step in any order.

    Args:
        config: The call's generation config, which says what to return; the rest is `None`, as in plain decoding.
        batch_size: B.
    """

    def __init__(self, config: GenerationConfig, batch_size: int = 1):
        returns_dict = bool(config.return_dict_in_generate)
        self.keep_scores = returns_dict and bool(config.output_scores)
        self.keep_logits = returns_dict and bool(config.output_logits)
        self._states = _LayerSteps(batch_size) if returns_dict and config.output_hidden_states else None
        self._attentions = _LayerSteps(batch_size) if returns_dict and config.output_attentions else None
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []

    @property
    def keeps_logits(self) -> bool:
        """Whether scores or logits are returned."""
        return self.keep_scores or self.keep_logits

    @property
    def keeps_layers(self) -> bool:
        return self._states is not None or self._attentions is not None

    @property
    def keeps_anything(self) -> bool:
        return self.keeps_logits or self.keeps_layers

    def put_logits(self, steps: dict[int, int], scores: torch.Tensor, raw: torch.Tensor) -> None:
        """Record processed scores and raw logits, both (B, V).

        Args:
            steps: Index of a sequence -> the step of its scores and logits.
        """
        if self.keep_scores:
            _put(self._scores, steps, scores)
        if self.keep_logits:
            _put(self._logits, steps, raw)

    def put_prompt(self, outputs: Any) -> None:
        """Record the layers of the forward that gave the first token: over the prompt, or over its last chunk."""
        if self._states is not None:
            self._states.put_all(outputs.hidden_states)
        if self._attentions is not None:
            self._attentions.put_all(outputs.attentions)

    def put_layers(self, outputs: Any, places: Sequence[Place], columns: Callable[[], list[KeyColumns]]) -> None:
        """Record the layers at the nodes that some sequences have reached.

        Args:
            outputs: The outputs of the forward over the trees.
            places: One for each of these sequences.
            columns: Returns the keys that plain decoding would return, layer by layer.
        """
        if self._states is not None:
            for place in places:
                self._states.put(place, _states_at(outputs.hidden_states, place))
        if self._attentions is not None:
            shown = columns() if outputs.attentions else []
            for place in places:
                self._attentions.put(place, _attentions_at(outputs.attentions, shown, place))

    def until(self, step: int) -> dict[str, tuple | None]:
        """Return the outputs of the steps before `step`, by the names of transformers' output object."""
        return {
            "scores": self.scores_until(step),
            "logits": tuple(self._logits[:step]) if self.keep_logits else None,
            "attentions": None if self._attentions is None else self._attentions.until(step),
            "hidden_states": None if self._states is None else self._states.until(step),
        }

    def scores_until(self, step: int) -> tuple[torch.Tensor, ...] | None:
        return tuple(self._scores[:step]) if self.keep_scores else None


class _LayerSteps:
    """Tensors (B, ...) of every layer for each step."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._steps: list[tuple[torch.Tensor, ...]] = []

    def put(self, place: Place, parts: Sequence[torch.Tensor]) -> None:
        """Record one sequence's tensors (1, ...) of all layers, which have the same shapes for all sequences."""
        while len(self._steps) <= place.step:
            self._steps.append(())
        if not self._steps[place.step]:
            self._steps[place.step] = tuple(part.new_zeros(self._batch_size, *part.shape[1:]) for part in parts)
        for whole, part in zip(self._steps[place.step], parts, strict=True):
            whole[place.sequence : place.sequence + 1] = part

    def put_all(self, parts: Sequence[torch.Tensor]) -> None:
        """Record the tensors (B, ...) of the next step for all sequences at once."""
        self._steps.append(tuple(parts))

    def until(self, step: int) -> tuple[tuple[torch.Tensor, ...], ...]:
        return tuple(self._steps[:step])


def _put(kept: list[torch.Tensor], steps: dict[int, int], values: torch.Tensor) -> None:
    if len(steps) == values.shape[0] and set(steps.values()) == {len(kept)}:
        kept.append(values)  # all sequences at once: the usual step of a batch of one
        return
    for index, step in steps.items():
        while len(kept) <= step:
            kept.append(torch.zeros_like(values))
        kept[step][index] = values[index]


def _states_at(states: Sequence[torch.Tensor], place: Place) -> list[torch.Tensor]:
    """Return the hidden states (1, 1, H) of all layers at a node, from those (B, N, H) of a forward.

    If the forward has run the whole text again (see `TargetRun`), those of the whole text are returned, as in plain
    decoding.
    """
    own, node = slice(place.sequence, place.sequence + 1), place.path[-1]
    return [state[own, node : node + 1] if state.shape[1] == place.num_nodes else state[own] for state in states]


def _attentions_at(
    attentions: Sequence[torch.Tensor], layers: Sequence[KeyColumns], place: Place
) -> list[torch.Tensor]:
    """Return the attentions (1, heads, 1, keys) of all layers at a node, of a forward's (B, heads, N, keys)."""
    own, node = slice(place.sequence, place.sequence + 1), place.path[-1]
    found: dict[tuple[KeyColumns, int], torch.Tensor] = {}
    parts = []
    for weights, columns in zip(attentions, layers, strict=len(attentions) > 0):
        if weights.shape[2] != place.num_nodes:
            parts.append(weights[own])
            continue
        key = columns, weights.shape[-1]
        if key not in found:
            first_slot = 0 if columns.from_start else place.tree_start + place.num_nodes - weights.shape[-1]
            found[key] = _slots(columns.window, place) - first_slot
        part = weights[own, :, node : node + 1].index_select(-1, found[key].to(weights.device))
        missing = 0 if columns.width is None else columns.width - part.shape[-1]
        parts.append(torch.nn.functional.pad(part, (0, missing)))
    return parts


def _slots(window: int | None, place: Place) -> torch.Tensor:
    slots = torch.cat([torch.arange(place.cache_len), place.tree_start + torch.tensor(place.path)])
    return slots if window is None else slots[-window:]
