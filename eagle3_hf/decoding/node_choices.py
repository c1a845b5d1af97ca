"""What the target says at the nodes that a walk visits: its choices, and what `generate` returns beside them."""

import torch

from .output.attentions import Place, step_attentions, step_states
from .output.emitter import TokenEmitter
from .target.runner import TargetRun
from .verification import Walk, greedy_choices


class NodeChoices:
    """
    From the nodes that each row's walk has reached to the tokens behind them, which are emitted on the way.

    Args:
        tokens: Emits the tokens.
        target: Whose outputs these are.
        walk: The walk that asks.
        outputs: Of the forward over the trees.
        num_nodes: N of the trees, padding included.
        at_once: Make plain greedy choices for all nodes, in one transfer to the host.
    """

    def __init__(
        self, tokens: TokenEmitter, target: TargetRun, walk: Walk, outputs, num_nodes: int, at_once: bool = False
    ):
        self._tokens = tokens
        self._target = target
        self._walk = walk
        self._outputs = outputs
        self._num_nodes = num_nodes
        self._logits = outputs.logits[:, -num_nodes:]
        self._greedy = greedy_choices(self._logits).tolist() if at_once else None

    def __call__(self, cursor: dict[int, int]) -> dict[int, int]:
        """Row -> node to row -> token."""
        if self._tokens.record.keeps_layers:
            self._keep_layers(cursor)
        if self._greedy is None:
            return self._tokens.emit(pick(self._logits, cursor), {row: self._step(row) for row in cursor})
        tokens = {row: self._greedy[row][node] for row, node in cursor.items()}
        self._tokens.emit_tokens(tokens)
        return tokens

    def _step(self, row: int) -> int:
        """The step of the token behind the node that a row's walk has reached."""
        return self._target.ends[row] - self._target.first_end + len(self._walk.paths[row])

    def _keep_layers(self, cursor: dict[int, int]) -> None:
        """Hidden states and attentions that each emitted token came from: one position each."""
        record, rows, ends = self._tokens.record, self._tokens.rows, self._target.ends
        if record.states is not None:
            for row, node in cursor.items():
                states = step_states(self._outputs.hidden_states, row, node, self._num_nodes)
                record.states.put(self._step(row), row, states, rows)
        if record.attentions is not None:
            columns = self._target.key_columns() if self._outputs.attentions else []
            for row in cursor:
                place = Place(row, self._walk.paths[row], ends[row], max(ends), self._num_nodes)
                weights = step_attentions(self._outputs.attentions, columns, place)
                record.attentions.put(self._step(row), row, weights, rows)


def pick(logits: torch.Tensor, cursor: dict[int, int]) -> torch.Tensor:
    """(B, N, V) at each row's node -> (B, V); rows that are not walked give their root's."""
    if logits.shape[0] == 1:
        return logits[:, cursor[0]]
    nodes = torch.tensor([cursor.get(row, 0) for row in range(logits.shape[0])], device=logits.device)
    return logits[torch.arange(logits.shape[0], device=logits.device), nodes]
