"""Growing a dynamic draft tree: expand the best nodes level by level, then keep the best of all candidates.

This is the drafting of EAGLE-2 (arXiv 2406.16858, section 4), which EAGLE-3 has not changed. A node's score is the sum
of the increments on its path, each level expands the best `top_k` nodes of the level before, and the tree is the best
nodes of the whole pool. Scores are float32 and every increment is at most 0, so a kept node's parent is always kept.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import nn

from ...model.attention import CachedAttention, DraftCache, Rotary
from ...model.modeling_eagle3 import Borrowed, Eagle3DraftModel
from ...model.tree_settings import TreeSettings
from ..coupling import Noise
from ..tree import DraftTree, select
from .mixture import Pool


# Takes the draft's logits (B, R, D) of one level, the level (0 for the children of the root), and a number k of
# children. Returns the draft ids of the best k children of each node, the increments that rank them, and the draft's
# own log-probabilities, (B, R, k) each, the last two float32 and at most 0. They are one tensor if they do not differ.
Ranking = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


# Chooses which candidates of a level the next one expands: from their scores (B, M), the children of each node of the
# level above together, and the number of children, to their indices (B, R).
Expansion = Callable[[torch.Tensor, int], torch.Tensor]


def greedy_ranking(logits: torch.Tensor, level: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rank by the draft's own probability."""
    logits = logits.float()
    best, ids = logits.topk(count, dim=-1)
    increments = best - logits.logsumexp(-1, keepdim=True)
    return ids, increments, increments


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

    def __call__(
        self, logits: torch.Tensor, level: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = logits.float().flatten(0, -2)
        # Some warpers raise an error on NaN. In the draft's logits, NaN must only prune the node.
        broken = ~scores.amax(-1, keepdim=True).isfinite()
        scores = scores.masked_fill(broken, 0.0)
        for warper in self._warpers:
            scores = warper(None, scores)
        scores, broken = scores.view(logits.shape), broken.view(*logits.shape[:-1], 1)
        race = scores - self._log_noise(level, logits.device)[:, None] if self._use_noise else scores
        best, ids = race.topk(count, dim=-1)
        increments = (best - race.logsumexp(-1, keepdim=True)).masked_fill(broken, -torch.inf)
        if not self._use_noise:
            return ids, increments, increments
        own = scores.gather(-1, ids) - scores.logsumexp(-1, keepdim=True)
        return ids, increments, own.masked_fill(broken, -torch.inf)

    def _log_noise(self, level: int, device: torch.device) -> torch.Tensor:
        """Return the logarithm (B, D) of a level's noise, of the tokens of the draft vocabulary."""
        noise = self._coming(level).to(device)
        if self._missing:
            noise = nn.functional.pad(noise, (0, self._missing), value=torch.inf)
        return noise.index_select(1, self._draft_ids).log()

    def _coming(self, level: int) -> torch.Tensor:
        """Return the noise (B, V) of the step that each sequence reaches at this level."""
        if self.offsets is None or not any(self.offsets):
            return self._noise.peek(level)
        coming = self._noise.peek_at([ahead + level for ahead in self.offsets])
        return torch.stack([noise[index] for index, noise in enumerate(coming)])


@dataclass
class CandidatePool:
    """All candidates of the growing trees, level by level: (B, M) each.

    The children of an expanded node follow each other, the best one first: those of the root, then those of the nodes
    that level 1 expanded, in the order of their expansion, and so on.

    Attributes:
        width: Number of children of an expanded node.
        tokens: In the target's vocabulary.
        scores: Cumulative rank scores.
        log_probs: Cumulative log-probabilities of the draft.
        expanded: For each expanded level but the first, of which all are expanded, those (B, R) among its candidates.
    """

    width: int
    tokens: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)
    expanded: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_levels(self) -> int:
        """Number of levels so far."""
        return len(self.tokens)

    def add(self, tokens: torch.Tensor, scores: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Add the candidates of a level."""
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.log_probs.append(log_probs)

    def joined(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens, parents, scores and log-probabilities, (B, M) each, as [`select`] takes them.

        A parent is an index in the pool, -1 for the root.
        """
        scores = torch.cat(self.scores, 1)
        log_probs = scores if self._scores_are_own else torch.cat(self.log_probs, 1)
        return torch.cat(self.tokens, 1), self._parents(), scores, log_probs

    @property
    def _scores_are_own(self) -> bool:
        """Whether the draft's own log-probabilities are the scores."""
        return all(own is rank for own, rank in zip(self.log_probs, self.scores, strict=True))

    def _parents(self) -> torch.Tensor:
        """Return (B, M) the index of each candidate's parent."""
        batch, device = self.tokens[0].shape[0], self.tokens[0].device
        if self.num_levels == 1:
            return torch.full((batch, self.width), -1, device=device)
        # All candidates of level 1 are expanded, the best first.
        above = [torch.arange(-1, self.width, device=device).expand(batch, -1)]
        levels, chosen = self.tokens[1:-1], self.expanded[: self.num_levels - 2]
        sizes = [level.shape[1] for level in levels]
        if len(set(sizes)) == 1 and len({level.shape[1] for level in chosen}) == 1:
            end = self.width + sum(sizes)
            firsts = torch.arange(self.width, end, sizes[0], device=device)[:, None]
            above.append((torch.stack(chosen, 1) + firsts).flatten(1))
        else:
            firsts_by_level = accumulate(sizes, initial=self.width)
            above += [level + first for level, first in zip(chosen, firsts_by_level, strict=False)]
        return torch.cat(above, 1)[..., None].expand(-1, -1, self.width).flatten(1)

    def host(self) -> list[Pool]:
        """Return the pool of each sequence as Python lists, in one transfer."""
        tokens, parents, scores, log_probs = self.joined()
        # Floats travel as the integers of the same bits.
        floats = [part.float().view(torch.int32) for part in (scores, log_probs)[: 1 if log_probs is scores else 2]]
        table = torch.cat([tokens.int(), parents.int(), *floats], 1).tolist()
        size = tokens.shape[1]
        pools = []
        for line in table:
            values = array("f", array("i", line[2 * size :]).tobytes()).tolist()
            pools.append(Pool(line[:size], line[size : 2 * size], values[:size], values[size:] or values, self.width))
        return pools


@dataclass
class _Frontier:
    """The nodes that the next level expands: (B, R) each, and their features (B, R, H).

    `visible` (B, R, L) bool says to which entries of the draft's cache a node attends, its own level's included.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    log_probs: torch.Tensor
    hidden: torch.Tensor
    visible: torch.Tensor


class Positions:
    """Positions that follow each other, whose rotary positions are computed together.

    Args:
        draft: The head.
        hidden: (B, n, H) features, whose dtype and device the rotary positions have.
        first: The first position, (B, 1) if sequences differ.
        count: The number of positions.
    """

    def __init__(self, draft: Eagle3DraftModel, hidden: torch.Tensor, first: int | torch.Tensor, count: int):
        if isinstance(first, int):
            self._positions = torch.arange(first, first + count, device=hidden.device)[None]
        else:
            self._positions = first + torch.arange(count, device=hidden.device)
        self._rotary = draft.rotary_emb(hidden, self._positions)

    def at(self, start: int, end: int) -> tuple[torch.Tensor, Rotary]:
        """Return positions (B or 1, n) and rotary positions from index `start` to `end`."""
        cos, sin = self._rotary
        return self._positions[:, start:end], (cos[:, start:end], sin[:, start:end])


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
        self._target_ids = draft.draft_vocab_ids()
        self._diagonal = torch.eye(0, dtype=torch.bool)[None]

    def grow(
        self,
        hidden: torch.Tensor,
        root_tokens: torch.Tensor,
        cache: DraftCache,
        position: int | torch.Tensor,
        settings: TreeSettings,
        ahead: tuple[Positions, int] | None = None,
    ) -> DraftTree:
        """Return the trees below the roots: the best `settings.num_nodes` candidates of each.

        Args:
            hidden: (B, 1, H) the draft's output, before the final norm, at its last committed position.
            root_tokens: (B, 1) the last committed token, which was fed at this position.
            cache: The draft's cache.
            position: Position of all nodes of the first level, (B, 1) if sequences differ.
            settings: The size of the trees, capped to what can be used.
            ahead: See [`grow_pool`].
        """
        pool = self.grow_pool(hidden, cache, position, settings, ahead=ahead)
        tree = select(*pool.joined(), root_tokens, settings.num_nodes, self.pad_token_id, pool.num_levels)
        return tree if pool.width == 1 else tree.likeliest_first()

    def grow_pool(
        self,
        hidden: torch.Tensor,
        cache: DraftCache,
        position: int | torch.Tensor,
        settings: TreeSettings,
        goes_on: Callable[[int, torch.Tensor], bool] | None = None,
        expansion: Expansion | None = None,
        ahead: tuple[Positions, int] | None = None,
    ) -> CandidatePool:
        """Return all candidates of the trees below the roots.

        Args:
            hidden, cache, position, settings: See [`grow`].
            goes_on: Returns whether to grow another level, from the number of levels and the scores (B, R) of the
                nodes that it would expand; `None` for all levels.
            expansion: Chooses the nodes to expand; `None` for the best `top_k` of each level.
            ahead: Positions that are known already, and the index among them of that of the first level.
        """
        positions, first = ahead or (None, 0)
        children = min(settings.top_k, self.draft.config.draft_vocab_size)
        pool = CandidatePool(children)
        frontier = self._first_level(hidden, children, pool, cache)
        for level in range(1, settings.depth):
            if goes_on is not None and not goes_on(level, frontier.scores):
                break
            if positions is None:
                positions, first = Positions(self.draft, hidden, position, settings.depth - 1), 0
            output = self._pass(frontier, cache, *positions.at(first + level - 1, first + level))
            is_last = level == settings.depth - 1
            frontier = self._next_level(frontier, output, level, pool, is_last, expansion)
        cache.rollback()
        return pool

    def _best_children(self, hidden: torch.Tensor, level: int, children: int):
        """Return tokens, increments and draft log-probabilities (B, R, children) of the nodes' best children.

        Args:
            hidden: (B, R, H) the draft's outputs at the nodes, before the final norm.
            level: Level of the children, 0 for those of the root.
            children: Number of children of each node.
        """
        ids, increments, log_probs = self.ranking(self.draft.compute_logits(hidden, self.borrowed), level, children)
        # A NaN logit makes all children of a node NaN: they are pruned. Children that a cutoff excludes stay at -inf,
        # so that they are never kept.
        best = increments.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
        return self._to_target(ids), best, best if log_probs is increments else log_probs

    def _to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target's ids of draft ids."""
        if self._target_ids.device != ids.device:
            self._target_ids = self._target_ids.to(ids.device)
        return self._target_ids[ids]

    def _first_level(self, hidden: torch.Tensor, children: int, pool: CandidatePool, cache: DraftCache) -> _Frontier:
        tokens, scores, log_probs = self._best_children(hidden, 0, children)
        is_own = log_probs is scores
        tokens, scores = tokens.squeeze(1), scores.squeeze(1)
        log_probs = scores if is_own else log_probs.squeeze(1)
        pool.add(tokens, scores, log_probs)
        itself = self._itself(children, tokens.device)
        past = itself.new_ones(()) if cache.valid is None else cache.valid[:, None]
        past = past.expand(tokens.shape[0], children, cache.length)
        return _Frontier(
            tokens=tokens,
            scores=scores,
            log_probs=log_probs,
            hidden=self.draft.feedback(hidden).expand(-1, children, -1),
            visible=torch.cat([past, itself.expand(len(tokens), -1, -1)], dim=-1),
        )

    def _itself(self, width: int, device: torch.device) -> torch.Tensor:
        """Return (1, R, R) bool, true on the diagonal: nodes of one level do not attend to each other."""
        if self._diagonal.shape[-1] != width or self._diagonal.device != device:
            self._diagonal = torch.eye(width, dtype=torch.bool, device=device)[None]
        return self._diagonal

    def _pass(self, frontier: _Frontier, cache: DraftCache, position: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """Run the draft over the frontier; return its outputs (B, R, H) before the final norm."""
        attend = CachedAttention(cache, frontier.visible[:, None])
        positions = position.expand(frontier.tokens.shape)
        embeds = self.borrowed.embed(frontier.tokens)
        return self.draft.run_layers(frontier.hidden, embeds, positions, attend, rotary)

    def _next_level(
        self,
        frontier: _Frontier,
        output: torch.Tensor,
        level: int,
        pool: CandidatePool,
        is_last: bool,
        expansion: Expansion | None,
    ) -> _Frontier:
        """Add the children of the frontier to the pool, and return the best of them unless they are the last ones."""
        children = pool.width
        tokens, increments, own = self._best_children(output, level, children)
        is_own = own is increments and frontier.log_probs is frontier.scores
        tokens = tokens.flatten(1)
        scores = (frontier.scores[..., None] + increments).flatten(1)
        log_probs = scores if is_own else (frontier.log_probs[..., None] + own).flatten(1)
        pool.add(tokens, scores, log_probs)
        if is_last:
            return frontier
        if expansion is None:
            best, chosen = scores.topk(children, dim=1)
        else:
            chosen = expansion(scores, children)
            best = scores.gather(1, chosen)
        pool.expanded.append(chosen)
        parent = (chosen // children)[..., None]
        seen = frontier.visible.gather(1, parent.expand(-1, -1, frontier.visible.shape[2]))
        itself = self._itself(chosen.shape[1], chosen.device).expand(len(chosen), -1, -1)
        return _Frontier(
            tokens=tokens.gather(1, chosen),
            scores=best,
            log_probs=best if is_own else log_probs.gather(1, chosen),
            hidden=self.draft.feedback(output).gather(1, parent.expand(-1, -1, output.shape[2])),
            visible=torch.cat([seen, itself], dim=-1),
        )
