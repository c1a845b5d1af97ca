"""`Eagle3Candidate`: drafts trees from the target's features, and keeps the draft's cache between rounds."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ...model.attention import CachedAttention, DraftCache
from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.offload import device_of_head
from ...model.tree_settings import TreeSettings, draft_window, tree_settings
from ...utils.logging import get_logger
from ..coupling import Noise
from ..tree import DraftTree
from . import trial
from .growth import CandidatePool, CoupledRanking, Expansion, Positions, Ranking, TreeGrower, greedy_ranking
from .inputs import DraftInputs


logger = get_logger(__name__)

# The number of rounds whose inputs are kept while nothing is drafted: features of an 8B model take 24 kB per token.
_MOST_PENDING = 256


class Eagle3Candidate(CandidateGenerator):
    """Drafts for one `generate` call.

    Our own loop calls `draft_tree` for trees of a fixed size that the head drafts alone, and `draft_pool` if nodes are
    chosen on the host. `get_candidates` implements the candidate generators of transformers (the best chain, batch 1)
    for transformers' own loop. All use the same cache.

    Args:
        target: The target, from which the draft borrows missing parts as long as this object exists.
        draft: The head. Its dtype, device and mode are not changed.
        settings: Size of the trees; `None` for what `tree_settings` returns.
        noise: The noise of the sampling steps; `None` for greedy decoding.
        warpers: The call's warpers that depend on a token's scores alone, applied to the draft's logits in sampling.
        start_position: Position of the first feature that will be fed, which is greater than 0 if an earlier cache is
            continued.
        pad_token_id: Token of padding nodes.
        coupled: See [`CoupledRanking`].
        window: How many positions the draft looks back; by default what its generation config says.

    Attributes:
        num_fed: Number of positions that were fed most recently, in one forward.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Eagle3DraftModel,
        settings: TreeSettings | None = None,
        noise: Noise | None = None,
        warpers: Sequence[Callable] = (),
        start_position: int = 0,
        pad_token_id: int = 0,
        coupled: bool = True,
        window: int | None = None,
    ):
        draft._require_vocabulary("drafting")
        draft.check_target(target)
        self.draft = draft
        self._device = device_of_head(draft)
        self.settings = settings or tree_settings(draft, target)
        self._start = start_position
        self._cache = DraftCache(draft.config.num_hidden_layers, draft_window(draft, window))
        self._pending: list[DraftInputs] = []  # committed, but not fed yet
        self.num_fed = 0
        self._last: torch.Tensor | None = None  # (B, 1, H) output at the last committed position
        self._next: int | torch.Tensor = start_position  # the position behind it, (B, 1) where sequences differ
        # Positions that were computed with those fed last, and the index of `_next` among them; `None` if sequences
        # differ.
        self._ahead: tuple[Positions, int] | None = None
        self._borrowed = draft.borrow(target)
        self._ranking: Ranking = greedy_ranking
        if noise is not None:
            self._ranking = CoupledRanking(noise, draft.draft_vocab_ids(), warpers, coupled)
        self._grower = TreeGrower(draft, self._borrowed, self._ranking, pad_token_id)

    @property
    def cache(self) -> DraftCache:
        """The draft's cache."""
        return self._cache

    def feed_later(self, inputs: DraftInputs) -> None:
        """Keep the inputs of a round until the next tree is drafted, or until many rounds are kept."""
        self._pending.append(inputs)
        if len(self._pending) > _MOST_PENDING:
            self._feed_pending()

    def _feed_pending(self) -> None:
        if not self._pending:  # many were kept, and were fed at the end of the round before
            return
        inputs = DraftInputs.joined(self._pending)
        self._pending.clear()
        self.extend(inputs)

    @torch.no_grad()
    def extend(self, inputs: DraftInputs) -> None:
        """Feed newly committed positions."""
        device = self._device
        tokens = inputs.tokens.to(device)
        # A position that overflows must not make all later ones NaN: it costs one draft, not all that follow.
        hidden = self.draft.fuse(inputs.features.to(device)).nan_to_num()
        visible = valid = rotary = self._ahead = None
        if inputs.positions is None or inputs.valid is None:
            first = self._start + self._cache.length
            # The levels of the tree follow these positions.
            together = Positions(self.draft, hidden, first, inputs.count + self.settings.depth - 1)
            positions, rotary = together.at(0, inputs.count)
            self._next, self._ahead = first + inputs.count, (together, inputs.count)
        else:
            positions, valid = inputs.positions.to(device), inputs.valid.to(device)
            visible = self._visible(valid)
        attend = CachedAttention(self._cache, visible)
        embeds = self._embed(tokens, inputs.embeds, inputs.embedded)
        output = self.draft.run_layers(hidden, embeds, positions.expand_as(tokens), attend, rotary)
        self._cache.commit()
        self.num_fed = inputs.count
        if valid is None:
            self._last = output[:, -1:]
        else:
            self._cache.mark(positions, valid)
            self._take_last(output, positions, valid)
        self._watch_length()

    def _embed(self, tokens: torch.Tensor, embeds: torch.Tensor | None, embedded: torch.Tensor | None) -> torch.Tensor:
        """Return (B, n, H): the embeddings of the tokens, or of an image in the place of some of them."""
        if embeds is None or embedded is None or embeds.shape[-1] != self.draft.config.hidden_size:
            return self._borrowed.embed(tokens)
        embedded = embedded.to(tokens.device)
        # The id of a placeholder may be outside the vocabulary.
        own = self._borrowed.embed(tokens.masked_fill(embedded, 0))
        return torch.where(embedded[..., None], embeds.to(own.device, own.dtype), own)

    def _visible(self, valid: torch.Tensor) -> torch.Tensor:
        """Return the mask (B, 1, n, past + n): a position attends to existing ones before it, and always to itself."""
        batch, count = valid.shape
        past = self._cache.valid
        if past is None:
            past = valid.new_ones(batch, self._cache.length)
        among = torch.ones(count, count, dtype=torch.bool, device=valid.device).tril()
        among = (among & valid[:, None]) | torch.eye(count, dtype=torch.bool, device=valid.device)
        return torch.cat([past[:, None].expand(-1, count, -1), among], dim=-1)[:, None]

    def _take_last(self, output: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> None:
        """Keep the output at each sequence's last valid position. A sequence without one keeps its earlier output."""
        count = valid.shape[1]
        index = (valid * torch.arange(1, count + 1, device=valid.device)).amax(1, keepdim=True)
        at = (index - 1).clamp(min=0)
        last = output.gather(1, at[..., None].expand(-1, -1, output.shape[-1]))
        following = positions.gather(1, at) + 1
        if self._last is not None:
            last = torch.where((index > 0)[..., None], last, self._last)
            following = torch.where(index > 0, following, self._next)
        self._last, self._next = last, following

    def watch(self, accepted: int) -> None:
        """Count the accepted drafts of one sequence in a round, see [`trial.watch`]."""
        trial.watch(self.draft, accepted, self._ranking is greedy_ranking)

    def _watch_length(self) -> None:
        """Warn once if the text is longer than the sequences that the head was trained on."""
        trained = self.draft.config.max_position_embeddings
        # The length of the cache is an upper bound. It is compared first, since `_next` may have to be waited for.
        if self.draft._warned_of_length or self._start + self._cache.length <= trained:
            return
        if (self._next if isinstance(self._next, int) else int(self._next.max())) <= trained:
            return
        self.draft._warned_of_length = True
        logger.warning(
            f"The text is longer than the {trained} positions that the draft head was made for "
            "(max_position_embeddings). Output is unaffected, but fewer drafts may be accepted from here on."
        )

    def rewind(self, index: int, position: int) -> None:
        """Remove the positions of one sequence from `position` on. It must be fed before it drafts again."""
        self._cache.forget(index, position)
        for inputs in self._pending:
            inputs.rewind(index, position)

    @torch.no_grad()
    def draft_tree(
        self,
        inputs: DraftInputs | None = None,
        max_depth: int | None = None,
        settings: TreeSettings | None = None,
        roots: torch.Tensor | None = None,
        leads: list[int] | None = None,
    ) -> DraftTree:
        """Feed the inputs given to `feed_later`, and grow the trees below the last tokens.

        Args:
            inputs: Further inputs, which follow them.
            max_depth: The deepest level that can still be used; 0 gives the root alone.
            settings: Size of the trees; `None` for `self.settings`.
            roots: (B, 1) the last token of each sequence; `None` for the last one of the inputs.
            leads: The number of sampling steps by which each sequence is ahead of the generator; `None` for 0.
        """
        if inputs is not None:
            self._pending.append(inputs)
        if roots is None:
            roots = self._pending[-1].tokens[:, -1:]
        self._feed_pending()
        if max_depth is not None and max_depth < 1:
            return DraftTree.root_only(roots)
        settings = settings or self.settings
        settings = settings.capped(max_depth or settings.depth)
        last = self._ready(leads)
        roots, ahead = roots.to(last.device), self._positions_for(settings)
        return self._grower.grow(last, roots, self._cache, self._next, settings, ahead)

    @torch.no_grad()
    def draft_pool(
        self,
        settings: TreeSettings,
        leads: list[int] | None = None,
        goes_on: Callable[[int, torch.Tensor], bool] | None = None,
        expansion: Expansion | None = None,
    ) -> CandidatePool:
        """Feed the inputs given to `feed_later`, and return all candidates below the last tokens.

        Args:
            settings: The largest size, capped to what can be used.
            leads: See [`draft_tree`].
            goes_on, expansion: See [`TreeGrower.grow_pool`].
        """
        self.num_fed = 0
        self._feed_pending()
        last, ahead = self._ready(leads), self._positions_for(settings)
        return self._grower.grow_pool(last, self._cache, self._next, settings, goes_on, expansion, ahead)

    def _positions_for(self, settings: TreeSettings) -> tuple[Positions, int] | None:
        """Return the positions that were computed ahead, if they are enough for all levels."""
        return self._ahead if settings.depth <= self.settings.depth else None

    def _ready(self, leads: list[int] | None) -> torch.Tensor:
        """Return the output at the last committed position, once the ranking knows how far sequences are ahead."""
        if isinstance(self._ranking, CoupledRanking):
            self._ranking.offsets = leads
        assert self._last is not None  # something has been fed
        return self._last

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, model_outputs=None, is_first_iteration=None, n_last_matches=None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return `input_ids` (1, T) followed by the best drafted chain, for transformers' own loop.

        The first call returns `input_ids` unchanged, since features only exist after the target's prefill.
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        features = self._stock_features(model_outputs.hidden_states)
        new = features.shape[1] if self._last is None else int(n_last_matches) + 1
        inputs = DraftInputs(features[:, :new], input_ids[:, -new:])
        depth, is_chain = self.settings.depth, self.settings.top_k == 1
        tree = self.draft_tree(inputs, settings=self.settings if is_chain else TreeSettings(depth, depth, 1))
        return torch.cat([input_ids, tree.tokens[:, 1:].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Do nothing: the size of the trees is fixed in a call."""

    def _stock_features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        ids = self.draft.config.captured_layer_ids
        if ids[-1] == len(hidden_states) - 1:
            raise ValueError(
                f"the head reads hidden_states[{ids[-1]}], the last one, which transformers' own loop only provides "
                "after the final norm: pass the draft as assistant_model= instead"
            )
        return torch.cat([hidden_states[i].to(hidden_states[ids[-1]].device) for i in ids], dim=-1)
