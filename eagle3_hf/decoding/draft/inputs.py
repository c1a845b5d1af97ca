"""Committed rows on their way to the draft: features of the target, and the token behind each."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class DraftRows(NamedTuple):
    """Rows that the draft has not been fed yet.

    Attributes:
        features: (B, n, A * Ht).
        tokens: (B, n), the token behind each.
        positions: (B, n) where batch rows differ, else `None`: they follow the rows before.
        valid: (B, n) bool with `positions`: which of them exist.
        embeds: (B, n, H) what to feed in place of a token's own embedding, or `None`.
        embedded: (B, n) bool with `embeds`: for which tokens.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    embeds: torch.Tensor | None = None
    embedded: torch.Tensor | None = None


def join(parts: Sequence[DraftRows]) -> DraftRows:
    """Rows one behind the other."""
    if len(parts) == 1:
        return parts[0]
    like = next((part.embeds for part in parts if part.embeds is not None), None)
    columns = zip(*(part if like is None else _with_embeds(part, like) for part in parts), strict=True)
    return DraftRows(*(None if column[0] is None else torch.cat(column, dim=1) for column in columns))


def _with_embeds(part: DraftRows, like: torch.Tensor) -> DraftRows:
    if part.embeds is not None:
        return part
    embeds = like.new_zeros(*part.tokens.shape, like.shape[-1])
    return part._replace(embeds=embeds, embedded=torch.zeros_like(part.tokens, dtype=torch.bool))


def ragged_rows(
    features: torch.Tensor, paths: Sequence[list[int]], tokens: Sequence[list[int]], positions: Sequence[int]
) -> DraftRows:
    """Rows of a batch that accepted different numbers.

    Args:
        features: (B, N, A * Ht) at the nodes of the trees.
        paths: Nodes of each row to take; may be empty.
        tokens: As many of each row, those behind the nodes.
        positions: Of each row's first node.
    """
    device, longest = features.device, max(1, *map(len, paths))
    nodes = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=device)
    steps = torch.arange(longest, device=device)
    return DraftRows(
        features.gather(1, nodes[..., None].expand(-1, -1, features.shape[-1])),
        torch.tensor([row + [0] * (longest - len(row)) for row in tokens], device=device),
        torch.tensor(positions, device=device)[:, None] + steps,
        steps < torch.tensor([len(path) for path in paths], device=device)[:, None],
    )


def forget(parts: Sequence[DraftRows], row: int, position: int) -> None:
    """One batch row no longer has anything from this position on."""
    for part in parts:
        if part.positions is not None and part.valid is not None:
            part.valid[row] &= part.positions[row] < position


class PromptMedia(NamedTuple):
    """Images, videos and sounds of a prompt.

    Attributes:
        embeds: (B, T, H) what the target's text model was given.
        tokens: Ids that hold their places.
    """

    embeds: torch.Tensor
    tokens: Sequence[int]


def prompt_rows(
    features: torch.Tensor,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    roots: Sequence[int],
    media: PromptMedia | None = None,
) -> DraftRows:
    """The prompt's rows: features and next tokens, without padding and without unknown tokens.

    Fewer ids than features (a prompt given as embeddings) leave only the last row; fewer features than ids (an older
    cache continued) leave the newest ones.

    Args:
        features: (B, T, A * Ht) of the prompt.
        ids: (B, P + 1) the prompt and the first token behind it.
        mask: (B, M) the prompt's attention mask, or `None` for all ones.
        roots: Position of each row's first new token.
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
        shown = torch.where(shown.any(1, keepdim=True), shown, torch.arange(length, device=mask.device) == length - 1)
    embeds, embedded = _media_behind(tokens, media)
    if shown is not None and not bool(shown.all()):
        following = _next_shown(shown)
        tokens = tokens.gather(1, following)
        if embeds is not None:
            embeds = embeds.gather(1, following.to(embeds.device)[..., None].expand_as(embeds))
            embedded = embedded.gather(1, following)
    if len(roots) == 1:
        return _compressed(DraftRows(features, tokens, None, None, embeds, embedded), shown)
    if shown is None:
        shown = torch.ones_like(tokens, dtype=torch.bool)
    # A row sits as many positions before the root as there are rows from it on.
    behind = shown.flip(1).cumsum(1).flip(1)
    positions = torch.tensor(roots, device=tokens.device)[:, None] - behind
    return DraftRows(features, tokens, positions, shown, embeds, embedded)


def _media_behind(tokens: torch.Tensor, media: PromptMedia | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """For the tokens (B, n) behind the rows: the embeddings (B, n, H) and for which of them they stand (B, n)."""
    if media is None or media.embeds.shape[1] < tokens.shape[1]:
        return None, None
    embedded = torch.isin(tokens, torch.tensor(media.tokens, device=tokens.device))
    embedded[:, -1] = False  # the first new token, which no image can be
    if not bool(embedded.any()):
        return None, None
    # The token behind a row stands one further.
    return torch.nn.functional.pad(media.embeds[:, -tokens.shape[1] + 1 :], (0, 0, 0, 1)), embedded


def _compressed(rows: DraftRows, shown: torch.Tensor | None) -> DraftRows:
    """One row without its holes."""
    if shown is None or bool(shown.all()):
        return rows
    kept = shown[0]
    return DraftRows(*(None if part is None else part[:, kept.to(part.device)] for part in rows))


def _next_shown(shown: torch.Tensor) -> torch.Tensor:
    """(B, n): for each row the place of the next token that is no padding, among the tokens behind the rows."""
    length = shown.shape[1]
    is_shown = torch.nn.functional.pad(shown[:, 1:], (0, 1), value=True)
    places = torch.arange(length, device=shown.device).expand_as(shown)
    return places.masked_fill(~is_shown, length).flip(1).cummin(1).values.flip(1)
