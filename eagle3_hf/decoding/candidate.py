"""`Eagle3Candidate`: target features in, draft tree out; the draft's cache is kept between rounds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..draft_attention import CachedAttention, DraftCache
from ..modeling_eagle3 import Eagle3DraftModel
from .drafting import NoiseRanking, Ranking, TreeGrower, TreeSettings, greedy_ranking
from .noise import Noise
from .tree import DraftTree


class Eagle3Candidate(CandidateGenerator):
    """Drafts for one `generate` call.

    Our own loop calls `draft_tree`; `get_candidates` keeps the contract of transformers' candidate generators (the
    best chain, batch 1) for the stock loop. Both use the same cache and the same growth.

    Args:
        target: The target, from which missing parts of the draft are borrowed for this object's life.
        draft: The head; its dtype, device and mode stay as they are.
        settings: Tree size; the draft's `generation_config` when `None`.
        noise: The noise that sampling will use; `None` for greedy decoding.
        warpers: The call's prefix-free warpers, for the draft's probabilities when sampling.
        start_position: Position of the first row that will be fed (> 0 when an older cache is continued).
        pad_token_id: For padding nodes.
        use_noise: See [`NoiseRanking`].
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
        use_noise: bool = True,
    ):
        draft._require_vocabulary("drafting")
        draft.check_target(target)
        self.draft = draft
        self.settings = settings or tree_settings(draft)
        self._start = start_position
        self._cache = DraftCache(draft.config.num_hidden_layers)
        self._last: torch.Tensor | None = None  # (B, 1, H) output at the last committed row
        self._borrowed = draft.borrow(target)
        ranking: Ranking = greedy_ranking
        if noise is not None:
            ranking = NoiseRanking(noise, draft.draft_vocab_ids(), warpers, use_noise)
        self._grower = TreeGrower(draft, self._borrowed, ranking, pad_token_id)

    @torch.no_grad()
    def extend(self, features: torch.Tensor, tokens: torch.Tensor) -> None:
        """Feed newly committed rows.

        Args:
            features: (B, n, A * Ht) target features of n consecutive tokens.
            tokens: (B, n) the token *after* each of them; the last one is the root of the next tree.
        """
        device = self.draft.layers[0].hidden_norm.weight.device
        tokens = tokens.to(device)
        # A row that overflowed must not spoil all that will attend to it: one bad guess, not the rest of the call.
        hidden = self.draft.fuse(features.to(device)).nan_to_num()
        first = self._start + self._cache.length
        positions = torch.arange(first, first + tokens.shape[1], device=device).expand_as(tokens)
        output = self.draft.run_layers(hidden, self._borrowed.embed(tokens), positions, CachedAttention(self._cache))
        self._cache.commit()
        self._last = output[:, -1:]

    @torch.no_grad()
    def draft_tree(self, features: torch.Tensor, tokens: torch.Tensor, max_depth: int | None = None) -> DraftTree:
        """Feed newly committed rows (see `extend`) and grow the tree below the last token.

        Args:
            max_depth: Deepest level that could still be used; 0 gives the root alone.
        """
        self.extend(features, tokens)
        settings = self.settings
        if max_depth is not None and max_depth < 1:
            return DraftTree.root_only(tokens[:, -1:])
        settings = settings.capped(max_depth or settings.depth)
        root = tokens[:, -1:].to(self._last.device)
        return self._grower.grow(self._last, root, self._cache, self._start + self._cache.length, settings)

    def get_candidates(  # type: ignore[override]
        self, input_ids: torch.Tensor, model_outputs=None, is_first_iteration=None, n_last_matches=None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The best drafted chain behind `input_ids` (1, T), for transformers' own loop.

        The first call returns `input_ids` unchanged, so that the target prefills and gives features.
        """
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        features = self._stock_features(model_outputs.hidden_states)
        new_rows = features.shape[1] if self._last is None else int(n_last_matches) + 1
        tree = self._chain().draft_tree(features[:, :new_rows], input_ids[:, -new_rows:])
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


def tree_settings(draft: Eagle3DraftModel, num_assistant_tokens: int | None = None) -> TreeSettings:
    """The draft's own settings, with a call's number of nodes instead of its own when given."""
    config: Any = draft.generation_config  # the tree's depth and width are fields that transformers does not know
    num_nodes = config.num_assistant_tokens if num_assistant_tokens is None else num_assistant_tokens
    return TreeSettings(num_nodes, config.assistant_tree_depth, config.assistant_tree_top_k)
