"""The decoding loop: draft a tree, verify it in one target pass, walk it by the target's choices, commit the path."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from ..acceptance import SpeculationStats
from ..features import FeatureReader
from ..modeling_eagle3 import Eagle3DraftModel
from . import cache as cache_paths
from .candidate import Eagle3Candidate
from .choosing import TokenEmitter, prefix_free_warpers
from .drafting import TreeSettings
from .masks import tree_attention
from .tree import DraftTree
from .verification import foreseen, greedy_choices, walk


logger = logging.get_logger(__name__)

# Renamed in transformers 5.24, in forward, in model kwargs and in outputs alike.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"

_TRIAL_ROUNDS = 64
_TRIAL_ACCEPTED = 0.1


class SpeculativeDecoding:
    """One `generate` call with a draft, batch 1.

    Args:
        target, draft: The models; both are left as they were.
        input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: What `generate`
            hands to a decoding method.
        settings: Size of the tree.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Eagle3DraftModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer,
        model_kwargs: dict[str, Any],
        settings: TreeSettings,
    ):
        self.target, self.draft = target, draft
        self.config = generation_config
        self.model_kwargs = model_kwargs
        self.settings = settings
        self.stats = SpeculationStats()
        returns_dict = generation_config.return_dict_in_generate
        self.hidden_states: tuple | None = () if returns_dict and generation_config.output_hidden_states else None
        self.warpers = prefix_free_warpers(logits_processor)
        self.tokens = TokenEmitter(
            input_ids,
            logits_processor,
            stopping_criteria,
            streamer,
            do_sample=bool(generation_config.do_sample),
            keep_scores=bool(returns_dict and generation_config.output_scores),
            keep_logits=bool(returns_dict and generation_config.output_logits),
        )

    def run(self):
        """Decode; returns what vanilla returns (ids, or the output object with `speculation` attached)."""
        start = perf_counter()
        with FeatureReader(self.target, self.draft.config.target_layer_ids) as reader:
            try:
                features, next_tokens = self._prefill(reader)
                while not self.tokens.done:
                    features, next_tokens = self._round(reader, features, next_tokens)
            finally:
                cache_paths.finish(self.model_kwargs[CACHE_KEY])
        self.tokens.finish()
        spent = perf_counter() - start - self._prefill_seconds
        self.stats.other_seconds = spent - self.stats.draft_seconds - self.stats.verify_seconds
        self.draft.stats = self.stats
        return self._result()

    # ----- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self, reader: FeatureReader) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the prompt, emit the first token; returns the prompt's features and the token after each of them."""
        start = perf_counter()
        prompt = self.tokens.input_ids
        mask = self.model_kwargs.get("attention_mask")
        outputs = self.target._prefill(prompt, self.config, self.model_kwargs)
        cache = outputs[CACHE_KEY]
        _require_rollback(cache)
        cache_paths.prepare(cache)
        features = reader.take()
        self.model_kwargs = self.target._update_model_kwargs_for_generation(outputs, self.model_kwargs)
        self._keep_states(outputs, None)
        self.tokens.emit(outputs.logits[:, -1])
        features, next_tokens = _prompt_rows(features, self.tokens.input_ids, mask)
        self._candidate = Eagle3Candidate(
            self.target,
            self.draft,
            self.settings,
            noise=self.tokens.noise,
            warpers=self.warpers,
            start_position=int(self.model_kwargs["position_ids"].max()) - features.shape[1],
            pad_token_id=int(next_tokens[0, -1]),
            use_noise=getattr(self.draft.generation_config, "assistant_known_noise", True),
        )
        self._prefill_seconds = perf_counter() - start
        return features, next_tokens

    # ----- rounds ---------------------------------------------------------------------------------------------------

    def _round(self, reader: FeatureReader, features, next_tokens) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft, verify, walk, commit; returns the features of the committed rows and the token after each."""
        start = perf_counter()
        if self._remaining() > 1:
            # Fewer candidates than asked for (a cutoff or NaN ruled them out) make a smaller forward.
            tree = self._candidate.draft_tree(features, next_tokens, max_depth=self._remaining() - 1).trimmed()
        else:
            tree = DraftTree.root_only(next_tokens[:, -1:])
        drafted = perf_counter()
        cache = self.model_kwargs[CACHE_KEY]
        past_length = cache.get_seq_length()
        reader.clear()
        outputs = self._verify(tree, past_length)
        features = reader.take()
        verified = perf_counter()

        path: list[int] = []
        try:
            accepted = self._walk(tree, outputs, path)
        finally:
            # Also when a callback raises: a user's cache then holds what it would hold without a draft.
            cache_paths.keep_path(cache, past_length, path, tree.tokens.shape[1])
        self.model_kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, num_new_tokens=len(path)
        )
        self.stats.draft_seconds += drafted - start
        self.stats.verify_seconds += verified - drafted
        # A text that ends at an accepted draft leaves what is below that draft untried.
        self.stats.record(accepted, accepted if accepted == len(path) else tree.max_depth, len(path))
        if tree.max_depth:
            self._watch_acceptance(accepted)
        self.tokens.end_round(len(path) - 1)
        return features[:, path], self.tokens.input_ids[:, -len(path) :]

    def _walk(self, tree: DraftTree, outputs, path: list[int]) -> int:
        """Emit the target's choice at each node of its way through the tree; returns how many drafts were right.

        Args:
            path: Filled with the visited nodes, one per emitted token.
        """
        tokens, parents = tree.host()[0]
        choose = self._chooser(outputs)

        def visit(node: int) -> int:
            path.append(node)
            return choose(node)

        for node, token in walk(tokens, parents, visit):
            if self.tokens.done:
                return len(path) - 1 + foreseen(tokens, parents, node, token)
        return len(path) - 1

    def _verify(self, tree: DraftTree, past_length: int):
        """The target's forward over the tree's nodes, each seeing the past and its ancestors."""
        tokens = tree.tokens.to(self.tokens.input_ids.device)
        num_nodes = tokens.shape[1]
        kwargs = _tree_kwargs(self.model_kwargs, tree, num_nodes)
        candidate_ids = torch.cat([self.tokens.input_ids, tokens[:, 1:]], dim=1)
        if num_nodes == 1:
            return self._forward(candidate_ids, 1, kwargs)
        with tree_attention(tree.ancestors, tree.depths, past_length) as active:
            outputs = self._forward(candidate_ids, num_nodes, kwargs)
        if not active.used:
            raise ValueError(
                f"{type(self.target).__name__} makes its attention masks outside transformers' mask functions, so it "
                "cannot verify a draft tree: generate without assistant_model"
            )
        return outputs

    def _forward(self, candidate_ids: torch.Tensor, num_nodes: int, kwargs: dict[str, Any]):
        inputs = self.target.prepare_inputs_for_generation(candidate_ids, next_sequence_length=num_nodes, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_nodes
        return self.target(**inputs, return_dict=True)

    def _chooser(self, outputs) -> Callable[[int], int]:
        """From a node to the token that the target puts behind it, emitting it on the way."""
        logits = outputs.logits
        if self.tokens.is_plain_greedy and logits.device.type != "cpu":
            # One transfer for all nodes instead of one per visited node; on CPU the argmax itself is what costs.
            choices = greedy_choices(logits)[0].tolist()
            return lambda node: self._emit(outputs, node, lambda: self.tokens.emit_token(choices[node]))
        return lambda node: self._emit(outputs, node, lambda: self.tokens.emit(logits[:, node]))

    def _emit(self, outputs, node: int, emit: Callable[[], int]) -> int:
        self._keep_states(outputs, node)
        return emit()

    def _keep_states(self, outputs, node: int | None) -> None:
        """Per emitted token the hidden states it came from: the whole prompt's first, then one position each."""
        if self.hidden_states is not None:
            states = outputs.hidden_states
            picked = states if node is None else tuple(state[:, node : node + 1] for state in states)
            self.hidden_states += (picked,)

    def _remaining(self) -> int:
        return self.config.max_length - self.tokens.input_ids.shape[1]

    def _watch_acceptance(self, accepted: int) -> None:
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

    def _result(self):
        if not self.config.return_dict_in_generate:
            return self.tokens.input_ids
        output = GenerateDecoderOnlyOutput(
            sequences=self.tokens.input_ids,
            scores=self.tokens.scores,
            logits=self.tokens.logits,
            hidden_states=self.hidden_states,
            **{CACHE_KEY: self.model_kwargs[CACHE_KEY]},
        )
        output.speculation = self.stats  # an attribute, not a key: the output's keys and to_tuple() stay vanilla's
        return output


def _require_rollback(cache) -> None:
    reason = cache_paths.supported(cache)
    if reason is not None:
        raise ValueError(f"a draft tree cannot be verified on this cache: {reason}")


def _prompt_rows(features: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None):
    """The prompt's rows for the draft: features and next tokens, without padding and without unknown tokens.

    Fewer ids than features (a prompt given as embeddings) leave only the last row; fewer features than ids (an older
    cache continued) leave the newest ones.
    """
    length = min(features.shape[1], ids.shape[1] - 1)
    if features.shape[1] > length:
        length = 1
    features, next_tokens = features[:, -length:], ids[:, -length:]
    if mask is not None and mask.dim() == 2:
        shown = mask[0, -length:].bool()
        if not bool(shown.any()):
            shown[-1] = True  # the text goes on even from a prompt that is all padding
        if not bool(shown.all()):
            following = torch.cat([shown[1:], shown.new_ones(1)])
            features, next_tokens = features[:, shown.to(features.device)], next_tokens[:, following]
    return features, next_tokens[:, -features.shape[1] :]


def _tree_kwargs(model_kwargs: dict[str, Any], tree: DraftTree, num_nodes: int) -> dict[str, Any]:
    """The model kwargs of one verification: positions along the tree, masks and token types long enough for it."""
    kwargs = dict(model_kwargs)
    positions = kwargs["position_ids"]
    depths = tree.depths.to(positions.device, positions.dtype)
    kwargs["position_ids"] = torch.cat([positions[..., :-1], positions[..., -1:] + depths], dim=-1)
    mask = kwargs.get("attention_mask")
    if mask is not None:
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], num_nodes - 1)], dim=-1)
    types = kwargs.get("token_type_ids")
    if types is not None:
        kwargs["token_type_ids"] = torch.cat([types, types[:, -1:].expand(-1, num_nodes - 1)], dim=-1)
    types = kwargs.get("mm_token_type_ids")
    if types is not None:
        kwargs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(types.shape[0], num_nodes - 1)], dim=-1)
    return kwargs
