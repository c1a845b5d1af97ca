"""The draft's inputs on their way to it: target features of committed positions, and the token behind each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """Consecutive positions that the draft has not been fed yet.

    Attributes:
        features: (B, n, A * Ht) target features.
        tokens: (B, n) the token *after* each of them; the last one is the root of the next tree.
        positions: (B, n) where sequences differ in length; `None`: they follow what was fed before.
        valid: (B, n) bool, with `positions`: which of them exist.
        embeds: (B, n, H) what the target was given in place of some tokens, such as parts of an image, or `None`.
        embedded: (B, n) bool, with `embeds`: in place of which tokens.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    embedded: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """n."""
        return self.tokens.shape[1]

    @classmethod
    def joined(cls, parts: Sequence["DraftInputs"]) -> "DraftInputs":
        """The positions of all parts, one behind the other."""
        if len(parts) == 1:
            return parts[0]
        like = next((part.embeds for part in parts if part.embeds is not None), None)
        if like is not None:
            parts = [part._with_embeds(like) for part in parts]
        # Of a target that is spread over devices, prompt and nodes may come from different ones.
        device = parts[0].tokens.device
        names = [name for name, value in vars(parts[0]).items() if value is not None]
        return replace(
            parts[0], **{name: torch.cat([getattr(part, name).to(device) for part in parts], dim=1) for name in names}
        )

    def _with_embeds(self, like: torch.Tensor) -> "DraftInputs":
        if self.embeds is not None:
            return self
        embeds = like.new_zeros(*self.tokens.shape, like.shape[-1])
        return replace(self, embeds=embeds, embedded=torch.zeros_like(self.tokens, dtype=torch.bool))

    @classmethod
    def on_paths(
        cls,
        features: torch.Tensor,
        paths: Sequence[Sequence[int]],
        tokens: Sequence[list[int]],
        positions: Sequence[int],
    ) -> "DraftInputs":
        """What the sequences of a batch have accepted of their trees.

        Args:
            features: (B, N, A * Ht) at the nodes.
            paths: Accepted nodes of each sequence; may be empty.
            tokens: As many of each sequence: those behind the nodes.
            positions: Position of each sequence's first node.
        """
        device = features.device
        if len(paths) == 1:
            return cls(features[:, paths[0]], torch.tensor([tokens[0]], dtype=torch.int64, device=device))
        longest = max(1, *map(len, paths))
        nodes = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device)
        steps = torch.arange(longest, device=device)
        return cls(
            features.gather(1, nodes[..., None].expand(-1, -1, features.shape[-1])),
            torch.tensor([own + [0] * (longest - len(own)) for own in tokens], device=device),
            torch.tensor(positions, device=device)[:, None] + steps,
            steps < torch.tensor([len(path) for path in paths], device=device)[:, None],
        )

    @classmethod
    def of_prompt(
        cls,
        features: torch.Tensor,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        roots: Sequence[int],
        media: "PromptMedia | None" = None,
    ) -> "DraftInputs":
        """The prompt's positions, without padding and without unknown tokens.

        Fewer ids than features (a prompt given as embeddings) leave only the last position; fewer features than ids
        (an older cache continued) leave the newest ones.

        Args:
            features: (B, T, A * Ht) of the prompt.
            ids: (B, P + 1) the prompt and the first token behind it.
            mask: (B, M) the prompt's attention mask, or `None` for all ones.
            roots: Position of each sequence's first new token.
            media: What the target put in the place of some tokens; the draft gets the same.
        """
        length = min(features.shape[1], ids.shape[1] - 1)
        if features.shape[1] > length:
            length = 1
        features, tokens = features[:, -length:], ids[:, -length:]
        shown = None
        if mask is not None and mask.dim() == 2:
            shown = mask[:, -length:].bool()
            # The text goes on even from a prompt that is all padding.
            last = torch.arange(length, device=mask.device) == length - 1
            shown = torch.where(shown.any(1, keepdim=True), shown, last)
        embeds, embedded = _media_behind(tokens, media)
        if shown is not None and not bool(shown.all()):
            following = _next_shown(shown)
            tokens = tokens.gather(1, following)
            if embeds is not None and embedded is not None:
                embeds = embeds.gather(1, following.to(embeds.device)[..., None].expand_as(embeds))
                embedded = embedded.gather(1, following)
        if len(roots) == 1:
            return cls(features, tokens, None, None, embeds, embedded)._without_holes(shown)
        if shown is None:
            shown = torch.ones_like(tokens, dtype=torch.bool)
        # A feature sits as many positions before the root as there are features from it on.
        behind = shown.flip(1).cumsum(1).flip(1)
        positions = torch.tensor(roots, device=tokens.device)[:, None] - behind
        return cls(features, tokens, positions, shown, embeds, embedded)

    def _without_holes(self, shown: torch.Tensor | None) -> "DraftInputs":
        """The positions of a single sequence that its mask shows."""
        if shown is None or bool(shown.all()):
            return self
        kept = shown[0]
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value[:, kept.to(value.device)] for name, value in given.items()})

    def rewind(self, index: int, position: int) -> None:
        """One sequence no longer has anything from this position on."""
        if self.positions is not None and self.valid is not None:
            self.valid[index] &= self.positions[index] < position


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """Images, videos and sounds of a prompt.

    Attributes:
        embeds: (B, T, H) what the target's text model was given.
        tokens: Ids that hold their places.
    """

    embeds: torch.Tensor
    tokens: Sequence[int]


def _media_behind(tokens: torch.Tensor, media: PromptMedia | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """For the tokens (B, n) behind the features: the embeddings (B, n, H) and for which of them they stand (B, n)."""
    if media is None or media.embeds.shape[1] < tokens.shape[1]:
        return None, None
    embedded = torch.isin(tokens, torch.tensor(media.tokens, device=tokens.device))
    embedded[:, -1] = False  # the first new token, which no image can be
    if not bool(embedded.any()):
        return None, None
    # The token behind a feature stands one further.
    return nn.functional.pad(media.embeds[:, -tokens.shape[1] + 1 :], (0, 0, 0, 1)), embedded


def _next_shown(shown: torch.Tensor) -> torch.Tensor:
    """(B, n): for each feature the place of the next token that is no padding, among the tokens behind them."""
    length = shown.shape[1]
    is_shown = nn.functional.pad(shown[:, 1:], (0, 1), value=True)
    places = torch.arange(length, device=shown.device).expand_as(shown)
    return places.masked_fill(~is_shown, length).flip(1).cummin(1).values.flip(1)
