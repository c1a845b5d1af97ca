"""`Eagle3Candidate`: target features in, draft tree out; the draft's cache is kept between rounds."""

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ...model.attention import CachedAttention, DraftCache
from ...model.modeling_eagle3 import Eagle3DraftModel
from ...model.offload import home_of
from ...model.tree_settings import TreeSettings, draft_window, tree_settings
from ...utils.logging import get_logger
from ..coupling import Noise
from ..tree import DraftTree
from .growth import CoupledRanking, Ranking, TreeGrower, greedy_ranking
from .inputs import DraftInputs


logger = get_logger(__name__)

_TRIAL_ROUNDS = 64
_TRIAL_ACCEPTED = 0.1
# Inputs of so many rounds wait while nothing is drafted: features of an 8B model take 24 kB a token.
_MOST_PENDING = 256


class Eagle3Candidate(CandidateGenerator):
    """Drafts for one `generate` call.

    Our own loop calls `draft_tree`; `get_candidates` keeps the contract of transformers' candidate generators (the
    best chain, batch 1) for the stock loop. Both use the same cache and the same growth.

    Args:
        target: The target, from which missing parts of the draft are borrowed for this object's life.
        draft: The head; its dtype, device and mode stay as they are.
        settings: Tree size; what `tree_settings` finds when `None`.
        noise: The noise that sampling will use; `None` for greedy decoding.
        warpers: The call's prefix-free warpers, for the draft's probabilities when sampling.
        start_position: Position of the first feature that will be fed (> 0 when an older cache is continued).
        pad_token_id: For padding nodes.
        coupled: See [`CoupledRanking`].
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
    ):
        draft._require_vocabulary("drafting")
        draft.check_target(target)
        self.draft = draft
        self._device = home_of(draft)
        self.settings = settings or tree_settings(draft, target)
        self._start = start_position
        self._cache = DraftCache(draft.config.num_hidden_layers, draft_window(draft))
        self._pending: list[DraftInputs] = []  # committed, but not fed yet
        self.num_fed = 0
        self._last: torch.Tensor | None = None  # (B, 1, H) output at the last committed position
        self._next: int | torch.Tensor = start_position  # the position behind it, (B, 1) where sequences differ
        self._borrowed = draft.borrow(target)
        self._ranking: Ranking = greedy_ranking
        if noise is not None:
            self._ranking = CoupledRanking(noise, draft.draft_vocab_ids(), warpers, coupled)
        self._grower = TreeGrower(draft, self._borrowed, self._ranking, pad_token_id)

    def feed_later(self, inputs: DraftInputs) -> None:
        """Keep newly committed positions until the next tree is drafted, or until they are many."""
        self._pending.append(inputs)
        if len(self._pending) > _MOST_PENDING:
            self._feed_pending()

    def _feed_pending(self) -> None:
        if not self._pending:  # they were many in the round before, and have been fed there
            return
        inputs = DraftInputs.joined(self._pending)
        self._pending.clear()
        self.extend(inputs)

    @torch.no_grad()
    def extend(self, inputs: DraftInputs) -> None:
        """Feed newly committed positions."""
        device = self._device
        tokens = inputs.tokens.to(device)
        # A position that overflowed must not spoil all that attend to it: one bad guess, not the rest of the call.
        hidden = self.draft.fuse(inputs.features.to(device)).nan_to_num()
        visible = valid = None
        if inputs.positions is None or inputs.valid is None:
            first = self._start + self._cache.length
            positions = torch.arange(first, first + inputs.count, device=device).expand_as(tokens)
            self._next = first + inputs.count
        else:
            positions, valid = inputs.positions.to(device), inputs.valid.to(device)
            visible = self._visible(valid)
        attend = CachedAttention(self._cache, visible)
        embeds = self._embed(tokens, inputs.embeds, inputs.embedded)
        output = self.draft.run_layers(hidden, embeds, positions, attend)
        self._cache.commit()
        self.num_fed = inputs.count
        if valid is None:
            self._last = output[:, -1:]
        else:
            self._cache.mark(positions, valid)
            self._take_last(output, positions, valid)
        self._watch_length()

    def _embed(self, tokens: torch.Tensor, embeds: torch.Tensor | None, embedded: torch.Tensor | None) -> torch.Tensor:
        """(B, n, H): the tokens' embeddings, or what stands in their place."""
        if embeds is None or embedded is None or embeds.shape[-1] != self.draft.config.hidden_size:
            return self._borrowed.embed(tokens)
        embedded = embedded.to(tokens.device)
        # Such an id may lie outside the vocabulary.
        own = self._borrowed.embed(tokens.masked_fill(embedded, 0))
        return torch.where(embedded[..., None], embeds.to(own.device, own.dtype), own)

    def _visible(self, valid: torch.Tensor) -> torch.Tensor:
        """(B, 1, n, past + n): a new position sees those that exist before it, and itself so as to see something."""
        batch, count = valid.shape
        past = self._cache.valid
        if past is None:
            past = valid.new_ones(batch, self._cache.length)
        among = torch.ones(count, count, dtype=torch.bool, device=valid.device).tril()
        among = (among & valid[:, None]) | torch.eye(count, dtype=torch.bool, device=valid.device)
        return torch.cat([past[:, None].expand(-1, count, -1), among], dim=-1)[:, None]

    def _take_last(self, output: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> None:
        """Each sequence's last existing position; where there is no new one, what was the last before."""
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
        """Warn once about a head whose first rounds accept next to nothing: it runs, but something is wrong."""
        rounds, total = self.draft._trial[0] + 1, self.draft._trial[1] + accepted
        self.draft._trial = (rounds, total)
        if rounds == _TRIAL_ROUNDS and total < _TRIAL_ACCEPTED * rounds:
            logger.warning(
                f"The draft head had {total} drafts accepted in its first {rounds} rounds. The text is still the "
                f"target's, but not sooner. Likely causes: wrong target_layer_ids (now "
                f"{self.draft.config.target_layer_ids}), "
                f"wrong rope_parameters (now {self.draft.config.rope_parameters}), or a head for another target."
            )

    def _watch_length(self) -> None:
        """Warn once about a head that is used at positions it has not been trained at."""
        trained = self.draft.config.max_position_embeddings
        # Holes of shorter sequences count in the first number, which only saves a wait for the device.
        if (
            self.draft._warned_of_length
            or self._start + self._cache.length <= trained
            or int(self._furthest()) <= trained
        ):
            return
        self.draft._warned_of_length = True
        logger.warning(
            f"The draft head was made for {trained} positions (max_position_embeddings), and the text goes beyond. "
            "It is still the target's text; the head may guess less of it from here on."
        )

    def _furthest(self) -> int | torch.Tensor:
        return self._next.max() if isinstance(self._next, torch.Tensor) else self._next

    def rewind(self, index: int, position: int) -> None:
        """One sequence takes back what it had from this position on; it must be fed before it drafts again."""
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
        """Feed newly committed positions, also those of `feed_later`, and grow the tree below the last token.

        Args:
            inputs: More positions, behind those that wait.
            max_depth: Deepest level that could still be used; 0 gives the root alone.
            settings: The tree's size, where it is not this object's own.
            roots: (B, 1) the last token of each sequence where these differ in length; else the last one fed.
            leads: How many sampling steps each sequence is ahead of the generator; `None`: none.
        """
        if inputs is not None:
            self._pending.append(inputs)
        if roots is None:
            roots = self._pending[-1].tokens[:, -1:]
        self._feed_pending()
        if max_depth is not None and max_depth < 1:
            return DraftTree.root_only(roots)
        if isinstance(self._ranking, CoupledRanking):
            self._ranking.offsets = leads
        settings = settings or self.settings
        settings = settings.capped(max_depth or settings.depth)
        assert self._last is not None  # something has been fed
        return self._grower.grow(self._last, roots.to(self._last.device), self._cache, self._next, settings)

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, model_outputs=None, is_first_iteration=None, n_last_matches=None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The best drafted chain behind `input_ids` (1, T), for transformers' own loop.

        The first call returns `input_ids` unchanged, so that the target prefills and gives features.
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        features = self._stock_features(model_outputs.hidden_states)
        new = features.shape[1] if self._last is None else int(n_last_matches) + 1
        inputs = DraftInputs(features[:, :new], input_ids[:, -new:])
        tree = self._chain().draft_tree(inputs)
        return torch.cat([input_ids, tree.tokens[:, 1:].to(input_ids.device)], dim=1), None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """The tree's size is fixed for a call."""

    def _chain(self) -> "Eagle3Candidate":
        if self.settings.top_k > 1:
            self.settings = TreeSettings(self.settings.depth, self.settings.depth, 1)
        return self

    def _stock_features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        ids = self.draft.config.target_layer_ids
        if ids[-1] == len(hidden_states) - 1:
            raise ValueError(
                f"hidden_states index {ids[-1]} is the last one, which transformers' own loop only gives after the "
                "final norm: pass the draft as assistant_model= instead"
            )
        return torch.cat([hidden_states[i].to(hidden_states[ids[-1]].device) for i in ids], dim=-1)
