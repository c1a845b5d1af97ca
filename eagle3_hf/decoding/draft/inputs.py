"""The inputs of the draft: the target's features at committed positions, and the token after each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..transfers import upload, upload_parts


@dataclass(frozen=True, eq=False)
class DraftInputs:
    """Consecutive positions that the draft has not been fed yet.

    Attributes:
        features: (B, n, A * Ht) target features.
        tokens: (B, n) the token *after* each of them. The last one is the root of the next tree.
        positions: (B, n) if sequences differ in length; `None` if the positions follow those fed before.
        valid: (B, n) bool, which of the `positions` exist.
        embeds: (B, n, H) the target's input embeddings, used in place of some tokens (such as those of an image), or
            `None`.
        embedded: (B, n) bool, for which tokens `embeds` is used.
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
        """Return the positions of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        like = next((part.embeds for part in parts if part.embeds is not None), None)
        if like is not None:
            parts = [part._with_embeds(like) for part in parts]
        # If the target is spread over devices, features of the prompt and of nodes may be on different ones.
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
        """Return the inputs at the accepted nodes of each sequence's tree.

        Args:
            features: (B, N, A * Ht) at the nodes.
            paths: Accepted nodes of each sequence, which may be none.
            tokens: The tokens after these nodes.
            positions: Position of each sequence's first node.
        """
        device = features.device
        if len(paths) == 1:
            path, count = list(paths[0]), len(paths[0])
            if path == list(range(count)):
                return cls(features[:, :count], upload(tokens[0], device)[None])
            table = upload([*tokens[0], *path], device)
            return cls(features.index_select(1, table[count:]), table[None, :count])
        batch, longest = len(paths), max(1, *map(len, paths))
        missing = [longest - len(path) for path in paths]
        numbers: list[int] = []
        for own, lacks in zip(paths, missing, strict=True):
            numbers += [*own, *[0] * lacks]
        for own, lacks in zip(tokens, missing, strict=True):
            numbers += [*own, *[0] * lacks]
        for first in positions:
            numbers += range(first, first + longest)
        valid = b"".join(b"\1" * len(path) + b"\0" * lacks for path, lacks in zip(paths, missing, strict=True))
        moved = upload_parts(device, numbers, flags=valid)
        nodes, following, places = moved.ints.view(3, batch, longest)
        chosen = features.gather(1, nodes[..., None].expand(-1, -1, features.shape[-1]))
        return cls(chosen, following, places, moved.flags.view(batch, longest))

    @classmethod
    def of_prompt(
        cls,
        features: torch.Tensor,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        roots: Sequence[int],
        media: "PromptMedia | None" = None,
    ) -> "DraftInputs":
        """Return the inputs of the prompt, without padding and without positions whose next token is unknown.

        If there are fewer ids than features (a prompt given as embeddings), only the last position is left. If there
        are fewer features than ids (an earlier cache is continued), the last positions are left.

        Args:
            features: (B, T, A * Ht) of the prompt.
            ids: (B, P + 1) the prompt and the first token behind it.
            mask: (B, M) the prompt's attention mask, or `None` for all ones.
            roots: Position of each sequence's first new token.
            media: The prompt's images, videos and sounds, or `None`.
        """
        length = min(features.shape[1], ids.shape[1] - 1)
        if features.shape[1] > length:
            length = 1
        features, tokens = features[:, -length:], ids[:, -length:]
        shown = None
        if mask is not None and mask.dim() == 2:
            shown = mask[:, -length:].bool()
            # A prompt of padding alone is continued from its last position.
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
        # The distance between a feature and the root is the number of features from this one on.
        behind = shown.flip(1).cumsum(1).flip(1)
        positions = torch.tensor(roots, device=tokens.device)[:, None] - behind
        return cls(features, tokens, positions, shown, embeds, embedded)

    def _without_holes(self, shown: torch.Tensor | None) -> "DraftInputs":
        """Return the inputs of a single sequence without masked positions."""
        if shown is None or bool(shown.all()):
            return self
        kept = shown[0]
        given = {name: value for name, value in vars(self).items() if value is not None}
        return replace(self, **{name: value[:, kept.to(value.device)] for name, value in given.items()})

    def rewind(self, index: int, position: int) -> None:
        """Remove the inputs of one sequence from `position` on."""
        if self.positions is not None and self.valid is not None:
            self.valid[index] &= self.positions[index] < position


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """Images, videos and sounds of a prompt.

    Attributes:
        embeds: (B, T, H) the input embeddings of the target's text model.
        tokens: Ids of the placeholder tokens.
    """

    embeds: torch.Tensor
    tokens: Sequence[int]


def _media_behind(tokens: torch.Tensor, media: PromptMedia | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `embeds` and `embedded` of [`DraftInputs`] for the tokens (B, n) after the features."""
    if media is None or media.embeds.shape[1] < tokens.shape[1]:
        return None, None
    embedded = torch.isin(tokens, torch.tensor(media.tokens, device=tokens.device))
    embedded[:, -1] = False  # the first new token is no placeholder
    if not bool(embedded.any()):
        return None, None
    # The token after a feature is one position further.
    return nn.functional.pad(media.embeds[:, -tokens.shape[1] + 1 :], (0, 0, 0, 1)), embedded


def _next_shown(shown: torch.Tensor) -> torch.Tensor:
    """Return (B, n) for each feature the index of the next token that is not padding, among the tokens after them."""
    length = shown.shape[1]
    is_shown = nn.functional.pad(shown[:, 1:], (0, 1), value=True)
    places = torch.arange(length, device=shown.device).expand_as(shown)
    return places.masked_fill(~is_shown, length).flip(1).cummin(1).values.flip(1)
