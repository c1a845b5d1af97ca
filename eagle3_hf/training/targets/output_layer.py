"""A target's logits over a draft vocabulary, without its logits over all tokens at all positions.

Targets differ in what they do to their output layer's logits: Cohere and Granite scale them, Gemma soft-caps them,
others do both. None of that is written down here: while the target runs, its output layer is replaced by one that
computes few positions and few columns, and the target's own forward does the rest, whatever it is. The result is
compared once with the target's own logits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from ...model.borrowed import call_on_module_device, compute_dtype


_LOGITS = 2**24  # number of logits over the whole vocabulary that exist at a time
# What a target's forward may raise when its output layer is replaced, because it does not expect other shapes.
_MISFITS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


class OutputLayer:
    """A target's output layer, and what the target does to its logits, at chosen positions over the draft vocabulary.

    Args:
        target: The target, frozen and in eval mode; it runs under `no_grad`.
        draft_ids: (D,) target ids of the draft vocabulary.
    """

    def __init__(self, target: PreTrainedModel, draft_ids: torch.Tensor):
        self.target, self.draft_ids = target, draft_ids
        self._width: int | None = None  # width of the target's logits; its layer may be padded to a larger one
        self._is_plain: bool | None = None  # whether the target leaves its output layer's logits as they are

    @property
    def layer(self) -> nn.Module:
        """The target's output layer."""
        return self.target.get_output_embeddings()

    def fits(self, input_ids: torch.Tensor) -> bool:
        """Whether this gives the target's own logits and first choices on a text (1, t); the target runs twice."""
        expected = _finite(self.target(input_ids=input_ids, use_cache=False).logits[0])
        self._width = expected.shape[-1]
        everywhere = torch.zeros_like(input_ids[0]), torch.arange(input_ids.shape[1], device=input_ids.device)
        try:
            logits, choices = self.read(everywhere, input_ids=input_ids)
        except _MISFITS:
            return False
        wanted = expected[:, self.draft_ids.to(expected.device)].float()
        if logits.shape != wanted.shape:
            return False
        # A product of other shapes may round otherwise; choices between two that are that close may differ.
        bound = max(1e-5, 4 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
        chosen = expected.gather(-1, choices.to(expected.device)[:, None])[:, 0]
        off = float((_finite(logits).to(wanted) - wanted).abs().max())
        return max(off, float((expected.max(-1).values - chosen).max())) <= bound

    def read(self, where: tuple[torch.Tensor, torch.Tensor], **inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target, and return its logits (n, D) and first choices (n,) at some positions.

        Args:
            where: Two (n,) indices, into B and into T.
            inputs: Arguments of the target's forward.
        """
        choices: list[torch.Tensor] = []

        def few(hidden: torch.Tensor) -> torch.Tensor:
            taught = hidden[tuple(index.to(hidden.device) for index in where)]
            columns, first = self._columns(taught, self.layer.forward)  # a call would be replaced again
            choices.append(first)
            return columns[None]

        with self._replaced(few):
            logits = self.target(**inputs, use_cache=False).logits
        return logits[0], choices[0]

    def hidden(self, **inputs) -> torch.Tensor:
        """Run the target without computing logits, and return (B, T, Ht), the input of its output layer."""
        seen: list[torch.Tensor] = []

        def nothing(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return hidden[:, :1, :1]

        with self._replaced(nothing):
            self.target(**inputs, use_cache=False)
        return seen[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the target's logits (n, D) from inputs (n, Ht) of its output layer, such as stored ones."""
        raw = self._draft_columns(hidden)
        if self._is_plain is None:
            probe = torch.linspace(-60, 60, 64, dtype=raw.dtype, device=raw.device)[None]
            self._is_plain = torch.equal(self._process(probe).to(probe), probe)
        return raw if self._is_plain else self._process(raw)

    def choices(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the target's first choices (n,) from inputs (n, Ht) of its output layer."""
        layer = call_on_module_device(self.layer, compute_dtype(self.target))
        return torch.cat([layer(part)[..., : self._width].max(-1).indices for part in self._in_parts(hidden)])

    def _in_parts(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return hidden.split(max(1, _LOGITS // max(self._width or 1, 1)))

    def _columns(self, hidden: torch.Tensor, layer: Callable) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute raw logits (n, D) and the argmax over the whole vocabulary (n,), some positions at a time.

        What targets do to their logits keeps their order, so the raw argmax is the target's.
        """
        ids, parts = self.draft_ids.to(hidden.device), []
        for few in self._in_parts(hidden):
            full = layer(few[None])[0, :, : self._width]
            parts.append((full[:, ids.to(full.device)], full.max(-1).indices))  # faster than argmax on a CPU
        columns, choices = (torch.cat(part) for part in zip(*parts, strict=True))
        return columns, choices

    def _draft_columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute raw logits (n, D), from a plain layer's weights of the draft tokens alone.

        Any other layer (quantised, with adapters) is called as a whole.
        """
        if self._draft_weights is None:
            return self._columns(hidden, call_on_module_device(self.layer, compute_dtype(self.target)))[0]
        weight, bias = self._draft_weights
        return nn.functional.linear(hidden.to(weight), weight, bias).to(hidden.device)

    @cached_property
    def _draft_weights(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        layer = self.layer
        if type(layer) is not nn.Linear or not layer.weight.is_floating_point() or layer.weight.device.type == "meta":
            return None
        if type(layer.weight.data) is not torch.Tensor:  # packed, under the type of a plain layer
            return None
        ids = self.draft_ids.to(layer.weight.device)
        return layer.weight[ids], layer.bias[ids] if layer.bias is not None else None

    def _process(self, raw: torch.Tensor) -> torch.Tensor:
        """Return raw logits (n, D) as the target would return them; this takes a forward over one token."""
        token = self.draft_ids[:1, None].to(raw.device)
        with self._replaced(lambda hidden: raw[None].to(hidden.device)):
            return self.target(input_ids=token, use_cache=False).logits[0].to(raw.device)

    @contextmanager
    def _replaced(self, give: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Make `give(its input)` the layer's output, for one block and in this thread; it runs at one position."""
        thread, seen = threading.get_ident(), []

        def before(module, args):
            if threading.get_ident() == thread:
                seen.append(args[0])
                return (args[0][:, :1], *args[1:])

        def after(module, args, output):
            if threading.get_ident() == thread:
                return give(seen.pop())

        handles = [self.layer.register_forward_pre_hook(before), self.layer.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Replace NaN and infinity, which say nothing about the output layer; the trainer reports those of a target."""
    return logits.nan_to_num(0.0, 0.0, 0.0)
