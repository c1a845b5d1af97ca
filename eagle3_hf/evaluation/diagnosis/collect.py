"""What is collected of each text of a diagnosis, on the host."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.offload import is_offloaded
from ...model.tree_settings import TreeSettings
from .reading import DepthReading, TargetReading, read_head, read_target
from .rounds import RoundCounts, rounds_of
from .sampling import shares_at
from .settings import HeadSetting, other_settings, with_setting
from .texts import TrueText


@dataclass
class TextEvidence:
    """What was seen on one text.

    Attributes:
        text: The text.
        depths: What the head said at each depth.
        exact: The same at all depths of a float32 copy of a head in float16; otherwise `depths` itself.
        next_tokens: (n,) the text's own tokens behind the positions of depth 1.
        last_tokens: (n,) the tokens at these positions.
        hits: (n,) bool hits at depth 1 under each other setting.
        shares: (temperatures, 3) sums over the positions, see [`AtTemperature`].
        rounds: The rounds.
    """

    text: TrueText
    depths: list[DepthReading]
    exact: list[DepthReading]
    next_tokens: np.ndarray
    last_tokens: np.ndarray
    hits: dict[int, np.ndarray]
    shares: torch.Tensor
    rounds: RoundCounts = field(default_factory=RoundCounts)


class Collector:
    """Collects the evidence of texts, one after the other.

    Args:
        target: The target.
        draft: The head.
        tree: Size of the trees.
        depth: Number of depths.
        temperatures: Temperatures of acceptance in sampling.
        sweep: Whether to try other settings.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Eagle3DraftModel,
        tree: TreeSettings,
        depth: int,
        temperatures: Sequence[float],
        sweep: bool = True,
    ):
        self.target, self.draft, self.tree = target, draft, tree
        self.depth, self.temperatures = depth, list(temperatures)
        self.borrowed = draft.borrow(target)
        self.has_twin = draft.dtype == torch.float16 and not is_offloaded(draft)
        self.exact = copy.deepcopy(draft).float() if self.has_twin else draft
        self.settings: list[HeadSetting] = other_settings(draft, target) if sweep else []
        self._heads = [with_setting(self.exact, setting) for setting in self.settings]
        self._exact_borrowed = self.exact.borrow(target)
        own = draft.config.captured_layer_ids
        self._layer_ids = {*own, *(each for setting in self.settings for each in setting.layer_ids(draft))}

    def collect(self, text: TrueText, most_rounds: int) -> TextEvidence:
        """Run target and head over a text.

        Args:
            text: The text.
            most_rounds: Number of rounds to simulate at most.
        """
        reading = read_target(self.target, text, sorted(self._layer_ids))
        own = reading.joined(self.draft.config.captured_layer_ids)
        shares = torch.zeros(len(self.temperatures), 3, dtype=torch.float64)
        depths = read_head(
            self.draft, self.borrowed, text, own, reading.choices, self.depth, self._shares_into(shares, reading)
        )
        exact = depths
        if self.has_twin:
            exact = read_head(self.exact, self._exact_borrowed, text, own, reading.choices, self.depth)
        evidence = TextEvidence(
            text,
            depths,
            exact,
            text.ids[depths[0].positions + 1].numpy(),
            text.ids[depths[0].positions].numpy(),
            {index: self._hits(index, text, reading) for index in range(len(self.settings))},
            shares,
        )
        for each in rounds_of(self.target, self.draft, self.tree, text, own, reading.choices, most_rounds):
            evidence.rounds.add(each)
        return evidence

    def _hits(self, index: int, text: TrueText, reading: TargetReading) -> np.ndarray:
        """Return (n,) the hits at depth 1 under another setting."""
        features = reading.joined(self.settings[index].layer_ids(self.draft))
        read = read_head(self._heads[index], self._exact_borrowed, text, features, reading.choices, 1)
        return read[0].hits.numpy()

    def _shares_into(self, shares: torch.Tensor, reading: TargetReading):
        """Return a function that adds up the shares of acceptance in sampling."""
        draft_ids, children = self.draft.draft_vocab_ids(), self.tree.top_k

        def look(positions: torch.Tensor, logits: torch.Tensor) -> None:
            above = reading.logits[positions.to(reading.logits.device)]
            for place, temperature in enumerate(self.temperatures):
                shares[place] += shares_at(temperature, above, logits, draft_ids, children)

        return look


__all__ = ["Collector", "TextEvidence"]
