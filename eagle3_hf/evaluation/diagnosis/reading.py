"""What target and head say about a text, from one forward of the target and a few of the head.

The target's choices are what the head is to draft. Given the text, they are known at all positions at once, and the
head can be asked at all positions at once too: at depth 1 it reads the target's features, at each further depth its
own output, with the text's tokens in between (as in training-time test, see `ttt.unroll`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from ...model.borrowed import Borrowed
from ...model.features import FeatureReader
from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.offload import device_of_head
from ...ttt.attention import TTTAttention
from .texts import TrueText, input_device


_NUMBERS = 2**24  # logits of the head that exist at a time


@dataclass(frozen=True, eq=False)
class TargetReading:
    """What the target computes on a text.

    Attributes:
        choices: (T,) int64 the target's first choice behind each token, on the CPU.
        logits: (T, V) in the target's dtype and on its device.
        features: Features (1, T, Ht) by layer id.
    """

    choices: torch.Tensor
    logits: torch.Tensor
    features: dict[int, torch.Tensor]

    def joined(self, layer_ids: Sequence[int]) -> torch.Tensor:
        """Return the features (1, T, A * Ht) of some layers, as a head reads them."""
        return torch.cat([self.features[each] for each in layer_ids], dim=-1)


@torch.no_grad()
def read_target(target: PreTrainedModel, text: TrueText, layer_ids: Sequence[int]) -> TargetReading:
    """Run the target over a text, and keep the features of these layers."""
    ids = text.ids[None].to(input_device(target))
    read = sorted(set(layer_ids))
    with FeatureReader(target, read) as reader:
        logits = target(input_ids=ids, use_cache=False).logits[0]
        features = reader.take()
    parts = features.split(features.shape[-1] // len(read), dim=-1)
    return TargetReading(logits.argmax(-1).cpu(), logits, dict(zip(read, parts, strict=True)))


@dataclass(frozen=True, eq=False)
class DepthReading:
    """What the head says at one depth, at the n positions of a text where it can be asked.

    Attributes:
        positions: (n,) int64 index of the token behind which the target chooses what the head is to draft.
        choices: (n,) int64 the target's choices.
        first: (n,) int64 draft id of the head's first choice.
        first_token: (n,) int64 the token that it stands for.
        probability: (n,) float32 the head's probability of it.
        is_finite: (n,) bool, whether all of the head's numbers there are.
    """

    positions: torch.Tensor
    choices: torch.Tensor
    first: torch.Tensor
    first_token: torch.Tensor
    probability: torch.Tensor
    is_finite: torch.Tensor

    @property
    def hits(self) -> torch.Tensor:
        """(n,) bool, whether the head's first choice is the target's."""
        return (self.first_token == self.choices) & self.is_finite


@torch.no_grad()
def read_head(
    draft: Eagle3DraftModel,
    borrowed: Borrowed,
    text: TrueText,
    features: torch.Tensor,
    choices: torch.Tensor,
    steps: int,
    look: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> list[DepthReading]:
    """Ask the head at every position of a text's answers, at depths 1 to `steps`.

    Args:
        draft: The head.
        borrowed: What it borrows from its target.
        text: The text.
        features: (1, T, A * Ht) the target's features of the text.
        choices: (T,) the target's choices behind each token.
        steps: Number of depths.
        look: Is shown the head's logits (m, D) at depth 1, part by part, each with its positions (m,).
    """
    found = []
    for step, (hidden, finite) in enumerate(_unrolled(draft, borrowed, text, features, steps)):
        positions = asked_at(text, step)
        at = (positions - step - 1).to(hidden.device)  # the feature of the last token that was verified
        first, probability = [], []
        for part in at.split(max(1, _NUMBERS // draft.config.draft_vocab_size)):
            logits = draft.compute_logits(hidden[0, part], borrowed).float()
            if look is not None and step == 0:
                look(part + 1, logits)
            best = logits.softmax(-1).max(-1)
            first.append(best.indices)
            probability.append(best.values)
        ids, chances = torch.cat(first), torch.cat(probability)
        found.append(
            DepthReading(
                positions,
                choices[positions],
                ids.cpu(),
                draft.draft_to_target(ids).cpu(),
                chances.cpu(),
                (finite[0, at] & chances.isfinite()).cpu(),
            )
        )
    return found


def asked_at(text: TrueText, step: int) -> torch.Tensor:
    """Return the (n,) positions p such that the head can be asked for the token behind p, `step` tokens deep.

    The last verified token, `step` tokens before, is one of the same answer (its first one included).
    """
    marked = text.is_answer
    drafted = marked.clone()
    for back in range(1, step + 1):
        drafted[back:] &= marked[:-back]
        drafted[:back] = False
    return drafted.nonzero()[:, 0] - 1


def _unrolled(
    draft: Eagle3DraftModel, borrowed: Borrowed, text: TrueText, features: torch.Tensor, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the head's outputs (1, T, H) before the final norm at each depth, and where all were finite (1, T)."""
    device = device_of_head(draft)
    ids = text.ids[None].to(device)
    embeds = borrowed.embed(nn.functional.pad(ids, (0, steps)))
    positions = torch.arange(ids.shape[1], device=device)[None]
    attend = TTTAttention(positions)
    raw = features.to(device, draft.dtype)
    hidden = draft.fuse(raw)
    finite = raw.isfinite().all(-1) & hidden.isfinite().all(-1)
    hidden = hidden.nan_to_num()  # as decoding does
    for step in range(steps):
        attend.step = step
        hidden = draft.run_layers(hidden, embeds[:, step + 1 : step + 1 + ids.shape[1]], positions + step, attend)
        finite = finite & hidden.isfinite().all(-1)
        yield hidden, finite
        hidden = draft.feedback(hidden)


__all__ = ["DepthReading", "TargetReading", "asked_at", "read_head", "read_target"]
