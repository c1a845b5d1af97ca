"""The decoding loop: draft a tree, verify it in one target pass, walk it by the target's choices, commit the path."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        self._rope_limits = _rope_limits(target)
        # Committed rows that the draft has not been fed yet: their features, and the token after each.
        self._unfed: list[tuple[torch.Tensor, torch.Tensor]] = []
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
        with _uncompiled(self.target), FeatureReader(self.target, self.draft.config.target_layer_ids) as reader:
            try:
                self._prefill(reader)
                while not self.tokens.done:
                    self._round(reader)
            finally:
                cache_paths.finish(self.model_kwargs[CACHE_KEY])
        self.tokens.finish()
        spent = perf_counter() - start - self._prefill_seconds
        self.stats.other_seconds = spent - self.stats.draft_seconds - self.stats.verify_seconds
        self.draft.stats = self.stats
        return self._result()

    # ----- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self, reader: FeatureReader) -> None:
        """Run the prompt and emit the first token."""
        start = perf_counter()
        prompt = self.tokens.input_ids
        mask = self.model_kwargs.get("attention_mask")
        with _every_prompt_token(self.target, self.model_kwargs):
            outputs = self.target._prefill(prompt, self.config, self.model_kwargs)
        cache = outputs[CACHE_KEY]
        cache_paths.require_supported(cache)
        cache_paths.prepare(cache)
        features = reader.take()
        self.model_kwargs = self.target._update_model_kwargs_for_generation(outputs, self.model_kwargs)
        self._keep_states(outputs, None)
        self.tokens.emit(outputs.logits[:, -1])
        features, next_tokens = _prompt_rows(features, self.tokens.input_ids, mask)
        self._unfed.append((features, next_tokens))
        self._position = int(self.model_kwargs["position_ids"].max())
        self._candidate = Eagle3Candidate(
            self.target,
            self.draft,
            self.settings,
            noise=self.tokens.noise,
            warpers=self.warpers,
            start_position=self._position - features.shape[1],
            pad_token_id=int(next_tokens[0, -1]),
            use_noise=getattr(self.draft.generation_config, "assistant_known_noise", True),
        )
        self._prefill_seconds = perf_counter() - start

    # ----- rounds ---------------------------------------------------------------------------------------------------

    def _round(self, reader: FeatureReader) -> None:
        """Draft, verify, walk, commit."""
        start = perf_counter()
        tree = self._draft_tree()
        drafted = perf_counter()
        cache = self.model_kwargs[CACHE_KEY]
        past_length = cache.get_seq_length()
        reader.clear()
        outputs = self._verify(tree, past_length)
        cache = self._same_or_new_cache(outputs[CACHE_KEY], cache)
        features = reader.take()[:, -tree.tokens.shape[1] :]
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
        self._position += len(path)
        self._unfed.append((features[:, path], self.tokens.input_ids[:, -len(path) :]))
        self.stats.draft_seconds += drafted - start
        self.stats.verify_seconds += verified - drafted
        # A text that ends at an accepted draft leaves what is below that draft untried.
        self.stats.record(accepted, accepted if accepted == len(path) else tree.max_depth, len(path))
        if tree.max_depth:
            self._watch_acceptance(accepted)
        self.tokens.end_round(len(path) - 1)

    def _draft_tree(self) -> DraftTree:
        depth = self._depth_left()
        if depth < 1:
            return DraftTree.root_only(self.tokens.input_ids[:, -1:])
        features, next_tokens = self._unfed[0] if len(self._unfed) == 1 else map(_join, zip(*self._unfed, strict=True))
        self._unfed.clear()
        # Fewer candidates than asked for (a cutoff or NaN ruled them out) make a smaller forward.
        return self._candidate.draft_tree(features, next_tokens, max_depth=depth).trimmed()

    def _depth_left(self) -> int:
        """The deepest level that could still be emitted; 0 where a tree would change the target's frequencies."""
        length = self.tokens.input_ids.shape[1]
        for limit, constant_behind in self._rope_limits:
            # Some models count columns (padding too) and some positions, so that both must be clear of the limit.
            before = max(length, self._position + 1) + self.settings.num_nodes <= limit
            behind = constant_behind and min(length - 1, self._position) > limit
            if not before and not behind:
                return 0
        return self.config.max_length - length - 1

    def _walk(self, tree: DraftTree, outputs, path: list[int]) -> int:
        """Emit the target's choice at each node of its way through the tree; returns how many drafts were right.

        Args:
            path: Filled with the visited nodes, one per emitted token.
        """
        tokens, parents = tree.host()[0]
        choose = self._chooser(outputs, tree.tokens.shape[1])

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

    def _same_or_new_cache(self, used, before):
        """A model that ran the whole text again (see `_rope_limits`) has filled another cache."""
        if used is not before:
            cache_paths.prepare(used)
            self.model_kwargs[CACHE_KEY] = used
        return used

    def _chooser(self, outputs, num_nodes: int) -> Callable[[int], int]:
        """From a node to the token that the target puts behind it, emitting it on the way."""
        logits = outputs.logits[:, -num_nodes:]
        if num_nodes == 1:
            # As in plain decoding, whose hidden states are all that the forward gave.
            return lambda node: self._emit(outputs, None, lambda: self.tokens.emit(logits[:, 0]))
        if self._chooses_at_once(logits.device):
            choices = greedy_choices(logits)[0].tolist()
            return lambda node: self._emit(outputs, node, lambda: self.tokens.emit_token(choices[node]))
        return lambda node: self._emit(outputs, node, lambda: self.tokens.emit(logits[:, node]))

    def _chooses_at_once(self, device: torch.device) -> bool:
        """One transfer for all nodes instead of one per visited node; on a CPU the argmax itself is what costs."""
        return self.tokens.is_plain_greedy and device.type != "cpu"

    def _emit(self, outputs, node: int | None, emit: Callable[[], int]) -> int:
        self._keep_states(outputs, node)
        return emit()

    def _keep_states(self, outputs, node: int | None) -> None:
        """Per emitted token the hidden states it came from: the whole prompt's first, then one position each."""
        if self.hidden_states is not None:
            states = outputs.hidden_states
            picked = states if node is None else tuple(state[:, node : node + 1] for state in states)
            self.hidden_states += (picked,)

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


def _join(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def _rope_limits(target: PreTrainedModel) -> list[tuple[int, bool]]:
    """Lengths at which the target's rotary frequencies change, and whether they are constant behind that.

    `dynamic` and `longrope` frequencies follow the furthest position of a forward, and the nodes of a tree are
    positions that plain decoding has not reached: a tree must end before the change. (Phi-3 also runs the whole text
    again at the change, without its cache.)
    """
    text_config = target.config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = parameters.get("rope_type") or ""
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings") or text_config.max_position_embeddings
            limits.append((original, True))
        elif "dynamic" in kind:
            limits.append((text_config.max_position_embeddings, False))
    return limits


@contextmanager
def _every_prompt_token(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> Iterator[None]:
    """Layers that share keys may skip all prompt tokens but the last (Gemma 4), unless a hidden state is asked for."""
    asked = model_kwargs.get("output_hidden_states")
    if asked or not getattr(target.config.get_text_config(), "num_kv_shared_layers", 0):
        yield
        return
    model_kwargs["output_hidden_states"] = [1]
    try:
        yield
    finally:
        del model_kwargs["output_hidden_states"]
        if asked is not None:
            model_kwargs["output_hidden_states"] = asked


@contextmanager
def _uncompiled(target: PreTrainedModel) -> Iterator[None]:
    """Run a compiled target's own code in this block: compiled code asks neither our hooks nor our masks."""
    compiled = any(
        module._compiled_call_impl is not None
        or "_orig_mod" in module._modules
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for module in target.modules()
    )
    if not compiled:
        yield
        return
    logger.warning_once(
        f"{type(target).__name__} is compiled; beside a draft head it runs uncompiled, since a compiled forward can "
        "neither be read nor be shown a tree. The text is the same."
    )
    with torch.compiler.set_stance("force_eager"):
        yield


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
            return features[:, -1:], next_tokens[:, -1:]  # the text goes on even from a prompt that is all padding
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
