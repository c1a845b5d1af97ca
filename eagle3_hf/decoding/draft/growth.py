"""Growing a dynamic draft tree: expand the best nodes level by level, then keep the best of all candidates.

This is the drafting of EAGLE-2 (arXiv 2406.16858, section 4), which EAGLE-3 has not changed. A node's score is the sum
of the increments on its path, each level expands the best `top_k` nodes of the level before, and the tree is the best
nodes of the whole pool. Scores are float32 and every increment is at most 0, so a kept node's parent is always kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...model.attention import CachedAttention, DraftCache
from ...model.modeling_eagle3 import Borrowed, Eagle3DraftModel
from ...model.tree_settings import TreeSettings
from ..coupling import Noise
from ..tree import DraftTree, select
from .mixture import Pool


# Takes the draft's logits (B, R, D) of one level, and the level (0 for the children of the root). Returns the
# increments that rank the children and the draft's own log-probabilities, both (B, R, D) float32 and at most 0.
Ranking = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


# Chooses which candidates of a level the next one expands: from their scores (B, M), the children of each node of the
# level above together, and the number of children, to their indices (B, R).
Expansion = Callable[[torch.Tensor, int], torch.Tensor]


def greedy_ranking(logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank by the draft's own probability."""
    log_probs = logits.float().log_softmax(-1)
    return log_probs, log_probs


class CoupledRanking:
    """Rank by the draft's probabilities together with the coming noise (coupled sampling).

    The target will choose `argmax(p / e)` with a known `e` (see `coupling.py`). The best guess of this is
    `argmax(q / e)`. An increment is the log-softmax of `log q - log e`, hence at most 0.

    Args:
        noise: The noise of the call.
        draft_ids: (D,) target ids of the draft vocabulary.
        warpers: The call's temperature and cutoffs, which are applied to the draft's logits as to the target's.
        coupled: `False` ranks by the warped `q` alone, to measure what coupled sampling gains.

    Attributes:
        offsets: The number of steps by which each sequence is ahead of the generator; `None` for 0.
    """

    def __init__(self, noise: Noise, draft_ids: torch.Tensor, warpers: Sequence[Callable], coupled: bool = True):
        self._noise = noise
        self._draft_ids = draft_ids
        self._warpers = warpers
        self._use_noise = coupled
        self.offsets: list[int] | None = None
        # The number of ids that a processor has cut off the end of the scores, so that they cannot be chosen.
        self._missing = max(0, int(draft_ids.max()) + 1 - noise.vocab_size)

    def __call__(self, logits: torch.Tensor, level: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.float().flatten(0, -2)
        # Some warpers raise an error on NaN. In the draft's logits, NaN must only prune the node.
        broken = ~scores.amax(-1, keepdim=True).isfinite()
        scores = scores.masked_fill(broken, 0.0)
        for warper in self._warpers:
            scores = warper(None, scores)
        log_probs = scores.log_softmax(-1).masked_fill(broken, -torch.inf).view(logits.shape)
        if not self._use_noise:
            return log_probs, log_probs
        noise = self._coming(level).to(logits.device)
        if self._missing:
            noise = nn.functional.pad(noise, (0, self._missing), value=torch.inf)
        race = noise[:, self._draft_ids]
        return (log_probs - race.log()[:, None]).log_softmax(-1), log_probs

    def _coming(self, level: int) -> torch.Tensor:
        """Return the noise (B, V) of the step that each sequence reaches at this level."""
        if self.offsets is None or not any(self.offsets):
            return self._noise.peek(level)
        coming = self._noise.peek_at([ahead + level for ahead in self.offsets])
        return torch.stack([noise[index] for index, noise in enumerate(coming)])


@dataclass
class CandidatePool:
    """All candidates of the growing trees, level by level: (B, M) each.

    Attributes:
        width: Number of children of an expanded node. They follow each other, the best one first.
        tokens: In the target's vocabulary.
        parents: Index in the pool, -1 for the root.
        scores: Cumulative rank scores.
        log_probs: Cumulative log-probabilities of the draft.
        size: Number of candidates so far.
        num_levels: Number of levels so far.
    """

    width: int
    tokens: list[torch.Tensor] = field(default_factory=list)
    parents: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)
    size: int = 0

    @property
    def num_levels(self) -> int:
        return len(self.tokens)

    def add(self, tokens, parents, scores, log_probs) -> None:
        """Add the candidates of a level."""
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.scores.append(scores)
        self.log_probs.append(log_probs)
        self.size += tokens.shape[1]

    def joined(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, parents, scores and log-probabilities, (B, M) each, as [`select`] takes them."""
        tokens, parents, scores, log_probs = (
            torch.cat(part, 1) for part in (self.tokens, self.parents, self.scores, self.log_probs)
        )
        return tokens, parents, scores, log_probs

    def host(self) -> list[Pool]:
        """Return the pool of each sequence as Python lists, in one transfer."""
        ids = torch.cat([*self.tokens, *self.parents], 1).int()
        # Floats travel as the integers of the same bits.
        values = torch.cat([*self.scores, *self.log_probs], 1).float()
        table = torch.cat([ids, values.view(torch.int32)], 1).cpu()
        values, size = table[:, ids.shape[1] :].view(torch.float32), self.size
        lines = zip(table[:, : ids.shape[1]].tolist(), values.tolist(), strict=True)
        return [Pool(i[:size], i[size:], v[:size], v[size:], self.width) for i, v in lines]


@dataclass
class _Frontier:
    """The nodes that the next level expands: (B, R) each, and their features (B, R, H)."""

    tokens: torch.Tensor
    pool_index: torch.Tensor
    scores: torch.Tensor
    log_probs: torch.Tensor
    hidden: torch.Tensor
    seen: torch.Tensor  # (B, R, n) bool: to which of the tree's n entries in the draft's cache a node attends


class TreeGrower:
    """Grows a tree for each sequence. The draft's cache is used for it, and is left as it was.

    Args:
        draft: The head.
        borrowed: What the head borrows from its target.
        ranking: Ranks the candidates of a level.
        pad_token_id: Token of padding nodes.
    """

    def __init__(self, draft: Eagle3DraftModel, borrowed: Borrowed, ranking: Ranking, pad_token_id: int = 0):
        self.draft = draft
        self.borrowed = borrowed
        self.ranking = ranking
        self.pad_token_id = pad_token_id

    def grow(
        self,
        hidden: torch.Tensor,
        root_tokens: torch.Tensor,
        cache: DraftCache,
        position: int | torch.Tensor,
        settings: TreeSettings,
    ) -> DraftTree:
        """Return the trees below the roots: the best `settings.num_nodes` candidates of each.

        Args:
            hidden: (B, 1, H) the draft's output, before the final norm, at its last committed position.
            root_tokens: (B, 1) the last committed token, which was fed at this position.
            cache: The draft's cache.
            position: Position of all nodes of the first level, (B, 1) if sequences differ.
            settings: The size of the trees, capped to what can be used.
        """
        pool = self.grow_pool(hidden, cache, position, settings)
        return select(*pool.joined(), root_tokens, settings.num_nodes, self.pad_token_id)

    def grow_pool(
        self,
        hidden: torch.Tensor,
        cache: DraftCache,
        position: int | torch.Tensor,
        settings: TreeSettings,
        goes_on: Callable[[int, torch.Tensor], bool] | None = None,
        expansion: Expansion | None = None,
    ) -> "CandidatePool":
        """Return all candidates of the trees below the roots.

        Args:
            hidden, cache, position, settings: See [`grow`].
            goes_on: Returns whether to grow another level, from the number of levels and the scores (B, R) of the
                nodes that it would expand; `None` for all levels.
            expansion: Chooses the nodes to expand; `None` for the best `top_k` of each level.
        """
        children = min(settings.top_k, self.draft.config.draft_vocab_size)
        pool = CandidatePool(children)
        frontier = self._first_level(hidden, children, pool)
        for level in range(1, settings.depth):
            if goes_on is not None and not goes_on(level, frontier.scores):
                break
            output = self._pass(frontier, cache, position + level - 1)
            frontier = self._next_level(frontier, output, level, children, pool, expansion)
        cache.rollback()
        return pool

    def _best_children(self, hidden: torch.Tensor, level: int, children: int):
        """Return tokens, increments and draft log-probabilities (B, R, children) of the nodes' best children.

        Args:
            hidden: (B, R, H) the draft's outputs at the nodes, before the final norm.
            level: Level of the children, 0 for those of the root.
            children: Number of children of each node.
        """
        increments, log_probs = self.ranking(self.draft.compute_logits(hidden, self.borrowed), level)
        best, ids = increments.topk(children, dim=-1)
        # A NaN logit makes all children of a node NaN: they are pruned. Children that a cutoff excludes stay at -inf,
        # so that they are never kept.
        best = best.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return self.draft.draft_to_target(ids), best, log_probs.gather(-1, ids)

    def _first_level(self, hidden: torch.Tensor, children: int, pool: CandidatePool) -> _Frontier:
        tokens, scores, log_probs = (part.squeeze(1) for part in self._best_children(hidden, 0, children))
        pool.add(tokens, torch.full_like(tokens, -1), scores, log_probs)
        batch, device = tokens.shape[0], tokens.device
        return _Frontier(
            tokens=tokens,
            pool_index=torch.arange(children, device=device).expand(batch, -1),
            scores=scores,
            log_probs=log_probs,
            hidden=self.draft.feedback(hidden).expand(-1, children, -1),
            seen=torch.eye(children, dtype=torch.bool, device=device).expand(batch, -1, -1),
        )

    def _pass(self, frontier: _Frontier, cache: DraftCache, position: int | torch.Tensor) -> torch.Tensor:
        """Run the draft over the frontier; return its outputs (B, R, H) before the final norm."""
        past = frontier.seen.new_ones(()) if cache.valid is None else cache.valid[:, None]
        past = past.expand(*frontier.seen.shape[:2], cache.length)
        visible = torch.cat([past, frontier.seen], dim=-1)[:, None]
        positions = torch.zeros_like(frontier.tokens) + position
        embeds = self.borrowed.embed(frontier.tokens)
        return self.draft.run_layers(frontier.hidden, embeds, positions, CachedAttention(cache, visible))

    def _next_level(
        self,
        frontier: _Frontier,
        output: torch.Tensor,
        level: int,
        children: int,
        pool: CandidatePool,
        expansion: Expansion | None,
    ) -> _Frontier:
        tokens, increments, own = self._best_children(output, level, children)
        scores = (frontier.scores[..., None] + increments).flatten(1)
        log_probs = (frontier.log_probs[..., None] + own).flatten(1)
        tokens = tokens.flatten(1)
        first = pool.size
        pool.add(tokens, frontier.pool_index.repeat_interleave(children, dim=1), scores, log_probs)
        chosen = scores.topk(children, dim=1).indices if expansion is None else expansion(scores, children)
        batch, width = chosen.shape
        parent = chosen // children
        new = torch.eye(width, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        seen = frontier.seen.gather(1, parent[..., None].expand(-1, -1, frontier.seen.shape[2]))
        return _Frontier(
            tokens=tokens.gather(1, chosen),
            pool_index=first + chosen,
            scores=scores.gather(1, chosen),
            log_probs=log_probs.gather(1, chosen),
            hidden=self.draft.feedback(output).gather(1, parent[..., None].expand(-1, -1, output.shape[2])),
            seen=torch.cat([seen, new], dim=-1),
        )
