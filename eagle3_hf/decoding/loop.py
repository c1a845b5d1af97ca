"""The decoding loop: propose a tree for each sequence, verify all in one forward of the target, accept, commit.

Sequences of a batch accept different numbers of drafts, so that some run ahead of others. Where a caller could notice
that (see `TokenEmitter.needs_lock_step`), or where the target does not support it, all sequences stay in step: the
round ends for all with the first sequence whose draft is wrong. The further tokens of a finished sequence are pad
tokens. Since they are known, its tree is a chain of them, which needs no draft and is always accepted.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..acceptance import SpeculationStats
from ..model.features import FeatureReader
from ..model.lookup_draft import LookupDraft
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..model.target_modules import media_token_ids
from ..model.tree_settings import TreeSettings
from .draft import known_sizes
from .draft.candidate import Eagle3Candidate
from .draft.inputs import DraftInputs, PromptMedia
from .draft.lookup import Lookup
from .draft.proposer import Proposer
from .draft.sizing import FixedSizes, TreeSizer
from .handover import CacheHandover
from .output.emitter import FURTHEST_AHEAD, TokenEmitter
from .output.outputs import StepRecord
from .output.processors import StopTest, prefix_free_warpers
from .sequence import Batch
from .target.capability import TREE, Capability, VerifyMode
from .target.compiled_code import uncompiled
from .target.runner import CACHE_KEY, TargetRun, rope_limits
from .target.synced_gpus import synced_gpus_of
from .target.training_mode import no_random_numbers
from .tree import DraftTree
from .verification import Walk


class SpeculativeDecoding:
    """One `generate` call with a draft.

    Args:
        target, draft: The models; both are left as they were.
        input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: What `generate`
            hands to a decoding method.
        settings: Size of the tree, or its limits.
        capability: What the target can verify.
        synced_gpus: Whether other processes of torch.distributed take part in every forward.
        clock: Returns seconds.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Eagle3DraftModel | LookupDraft,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer,
        model_kwargs: dict[str, Any],
        settings: TreeSettings,
        capability: Capability = TREE,
        synced_gpus: bool = False,
        clock: Callable[[], float] = perf_counter,
    ):
        self.draft = draft
        self.config = generation_config
        self.settings = settings
        self.stats = SpeculationStats()
        self._clock = clock
        self._prefill_seconds = 0.0
        self._model = target
        self._prompt_mask = model_kwargs.get("attention_mask")
        self._rope_limits = rope_limits(target)
        self._warpers = prefix_free_warpers(logits_processor)
        stop = StopTest(stopping_criteria)
        self.batch = Batch(input_ids, _pad_token_id(generation_config), stop.has_eos)
        record = StepRecord(generation_config, len(input_ids))
        sampled = bool(generation_config.do_sample)
        self.tokens = TokenEmitter(self.batch, logits_processor, stop, streamer, sampled, record)
        synced = synced_gpus_of(target, draft, input_ids, synced_gpus)
        self.target = TargetRun(target, generation_config, model_kwargs, self.batch, capability, synced)
        self._handover = CacheHandover(self.target, self.batch, self.tokens)
        self._under_way: tuple[Walk, int] | None = None  # the walk whose tree is in the cache, and the tree's nodes

    def run(self):
        """Decode, and return what plain decoding returns: ids, or the output object with `speculation` attached."""
        start = self._clock()
        try:
            with uncompiled(self._model), self._new_reader() as self._reader:
                try:
                    self._prefill()
                    while not self.tokens.done and not self.tokens.is_full:
                        self._round()
                    self._handover.complete()
                except BaseException:
                    self._handover.interrupted(self._under_way)
                    raise
                finally:
                    self.target.finish()
                if not self.tokens.done:
                    self.target.overflow(self.batch.input_ids)
            if self.target.synced is not None:
                self.target.synced.run_along()
            self.tokens.finish()
            known_sizes.keep(self._sizes)
        finally:  # also after an exception: the statistics must not be those of the call before
            self._finish_stats(self._clock() - start)
        return self._result()

    # ----- a round --------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        start, steps = self._clock(), self.batch.steps
        live = [sequence.index for sequence in self.batch if not sequence.is_padding]
        active = [index for index in live if self._may_advance(index)]
        tree, padding = self._propose(active)
        proposed = self._clock()
        outputs, features = self._verify(tree)
        verified = self._clock()
        walk = self._accept(tree, outputs, active, padding)
        accepted = self._clock()
        paths = {index: walk.paths[index] for index in active}
        self._proposer.observe(paths, proposed - start, accepted - proposed)
        self._proposer.count(self.stats, paths, tree)
        self._commit(walk, features, tree.tokens.shape[1], live)
        self.stats.draft_seconds += proposed - start
        self.stats.verify_seconds += verified - proposed
        self._count(walk, tree, active)
        self.tokens.end_round(self.batch.steps - steps)

    def _propose(self, active: list[int]) -> tuple[DraftTree, list[int]]:
        """Draft a tree below the newest token of each sequence.

        Args:
            active: Sequences that advance in this round; the others get only their root, or a chain of pad tokens.

        Returns:
            The trees, and the sequences that got a chain of pad tokens.
        """
        tree = self._proposer.propose(self._depth_left(active), active)
        chains = self._handover.pad_chains(tree, active)
        idle = {each.index: each.upcoming(1) for each in self.batch if each.index not in active}
        return tree.with_chains({**idle, **chains}), list(chains)

    def _verify(self, tree: DraftTree):
        """Return the target's outputs for the trees, and its features (B, N, A * Ht) at their nodes for a head."""
        if self._reader is None:
            return self.target.verify(tree), None
        self._reader.clear()
        outputs = self.target.verify(tree)
        return outputs, self._reader.take()[:, -tree.tokens.shape[1] :]

    def _accept(self, tree: DraftTree, outputs, active: list[int], padding: list[int]) -> Walk:
        """Walk each sequence's tree along the target's choices, and emit them.

        Args:
            tree: The trees.
            outputs: The target's outputs for them.
            active: Sequences that advance in this round.
            padding: Sequences whose trees are chains of pad tokens.
        """
        together = range(len(self.batch)) if self._in_step else active if self.tokens.was_moved else ()
        choices = self.tokens.choices(outputs.logits[:, -tree.tokens.shape[1] :], tree)
        walk = Walk(tree.host(), together)
        self._under_way = walk, tree.tokens.shape[1]
        shown = self._in_step or self.tokens.record.keeps_anything or self.tokens.asks_of_pads

        def goes_on(index: int) -> bool:
            sequence = self.batch[index]
            if self.tokens.done or sequence.rewound_to is not None:
                return False
            return index in padding or (self.tokens.room(index) != 0 and (shown or not sequence.is_padding))

        if not shown:
            for index in padding:
                walk.take_all(index)
        choose = self.tokens.chooser(walk, outputs, tree.tokens.shape[1], self.target.key_columns, choices)
        walk.run(sorted(active + padding) if shown else active, choose, goes_on)
        return walk

    def _commit(self, walk: Walk, features: torch.Tensor | None, num_nodes: int, live: list[int]) -> None:
        """Keep the emitted tokens that were not rewound, in the target's cache and as inputs of the draft.

        Args:
            walk: The paths through the trees.
            features: (B, N, A * Ht) at the nodes; `None` without a head.
            num_nodes: N.
            live: Sequences that were not finished before the round. The draft is not fed pad tokens.
        """
        steps = [sequence.root_step + 1 for sequence in self.batch]
        old_lens, positions = self.batch.cache_lens, [sequence.root_position for sequence in self.batch]
        self._under_way = None
        kept = self._handover.keep(walk, num_nodes)
        if features is not None:
            told = [path if index in live else [] for index, path in enumerate(kept)]
            tokens = [sequence.tokens(steps[sequence.index], len(told[sequence.index])) for sequence in self.batch]
            self._proposer.feed_later(DraftInputs.on_paths(features, told, tokens, positions))
        for sequence in self.batch:
            if sequence.rewound_to is not None:
                was_fed = sequence.cache_len < old_lens[sequence.index]
                position = sequence.root_position if was_fed else None
                self._proposer.rewind(sequence.index, sequence.rewound_to, position)
        self.batch.forget_rewound()

    # ----- parts of a round -----------------------------------------------------------------------------------------

    def _may_advance(self, index: int) -> bool:
        """Whether a sequence has a token left to emit, and need not wait for others that are far behind."""
        if len(self.batch) == 1:
            return True
        return self.tokens.room(index) != 0 and self.batch[index].lead(self.batch.steps) < FURTHEST_AHEAD

    def _depth_left(self, active: list[int]) -> int:
        """Return the deepest level whose tokens can still be emitted; 0 if a tree would change rotary frequencies."""
        if self.target.forgets:
            return 0
        for limit, constant_behind in self._rope_limits:
            # Some models count columns (padding too) and some positions, so that both must be clear of the limit.
            furthest = max(max(each.length, each.root_position + 1) for each in self.batch)
            nearest = min(min(each.length - 1, each.root_position) for each in self.batch)
            if furthest + self.settings.num_nodes > limit and not (constant_behind and nearest > limit):
                return 0
        room = [self.tokens.room(index) for index in active]
        return min((self.config.max_length if left is None else left for left in room), default=0) - 1

    def _count(self, walk: Walk, tree: DraftTree, active: list[int]) -> None:
        """Count the round in the statistics.

        If the text ends at an accepted draft, the levels below that draft have not been tried.
        """
        for index in active:
            accepted, path = walk.accepted[index], walk.paths[index]
            if path:
                depth = tree.host()[index].depth
                self.stats.record(accepted, accepted if accepted == len(path) else depth, len(path))

    # ----- before and after the rounds ------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Run the prompt and emit the first token of each sequence."""
        start = self._clock()
        with no_random_numbers(self._model, self.batch.device):
            outputs = self.target.prefill(self.batch.input_ids, *self._slots_behind())
        if self.target.capacity is not None:
            # The last token of a text has no slot yet.
            self.tokens.limit(self.target.capacity - self.batch.longest + 1)
        embeds, features = (None, None) if self._reader is None else (self._reader.take_embeds(), self._reader.take())
        self.tokens.record.put_prompt(outputs)
        self.tokens.emit(outputs.logits[:, -1], {sequence.index: 0 for sequence in self.batch})
        # All sequences, finished ones included, then stay at the same step throughout.
        forced = bool(self._rope_limits) or self.target.capability.mode is VerifyMode.CHAIN or self.target.forgets
        self._in_step = self.tokens.needs_lock_step or (len(self.batch) > 1 and forced)
        self._handover.begin(self._in_step)
        self._proposer = self._new_proposer(features, embeds)
        self._prefill_seconds = self._clock() - start

    def _slots_behind(self) -> tuple[int, int]:
        """Return how many slots the text can fill behind the prompt, and trees behind the text."""
        new, nodes = self.config.max_length - self.batch.prompt_length, self.settings.num_nodes + 1
        # In a batch, the tree of a finished sequence is a chain of pad tokens.
        chain = 0 if len(self.batch) == 1 else min(new, FURTHEST_AHEAD) + self.settings.reach + 1
        return new, max(nodes, chain)

    def _new_reader(self) -> AbstractContextManager[FeatureReader | None]:
        if isinstance(self.draft, LookupDraft):
            return nullcontext()
        layer_ids, media = self.draft.config.captured_layer_ids, media_token_ids(self._model)
        return FeatureReader(self._model, layer_ids, embeds=bool(media))

    def _new_proposer(self, features: torch.Tensor | None, embeds: torch.Tensor | None) -> Proposer:
        """Return the proposer of the call.

        Args:
            features: (B, T, A * Ht) the target's features at the prompt; `None` without a head.
            embeds: (B, T, H) the embeddings of the prompt if it holds images; else `None`.
        """
        coupled = getattr(self.draft.generation_config, "assistant_coupled_sampling", None) is not False
        head = lookup = None
        if isinstance(self.draft, Eagle3DraftModel) and features is not None:
            head = self._new_candidate(self.draft, features, embeds, coupled)
        if self.settings.lookup_levels is not None:
            lookup = Lookup(self._prompts(), media_token_ids(self._model))
        noise = self.tokens.noise if coupled else None
        self._sizes = self._new_sizes()
        return Proposer(self.batch, self.settings, self._sizes, head, lookup, noise)

    def _new_candidate(
        self, draft: Eagle3DraftModel, features: torch.Tensor, embeds: torch.Tensor | None, coupled: bool
    ) -> Eagle3Candidate:
        media = None if embeds is None else PromptMedia(embeds, media_token_ids(self._model))
        roots = [sequence.root_position for sequence in self.batch]
        inputs = DraftInputs.of_prompt(features, self.batch.ids_until(1), self._prompt_mask, roots, media)
        candidate = Eagle3Candidate(
            self._model,
            draft,
            self.settings,
            noise=self.tokens.noise,
            warpers=self._warpers,
            start_position=roots[0] - inputs.count,
            pad_token_id=int(inputs.tokens[0, -1]),
            coupled=coupled,
            window=getattr(self.config, "assistant_window", None),
        )
        candidate.feed_later(inputs)
        return candidate

    def _prompts(self) -> list[list[int]]:
        """Return the tokens of each sequence's prompt, without padding."""
        ids, mask = self.batch.ids_until(0), self._prompt_mask
        if mask is None or mask.dim() != 2 or mask.shape[1] < ids.shape[1]:
            return ids.tolist()
        shown = mask[:, mask.shape[1] - ids.shape[1] :].tolist()
        return [
            [token for token, is_shown in zip(own, seen, strict=True) if is_shown]
            for own, seen in zip(ids.tolist(), shown, strict=True)
        ]

    def _new_sizes(self) -> FixedSizes | TreeSizer:
        """Return what chooses the sizes: fixed, or by what calls of the same costs and acceptance have learnt."""
        if not self.settings.at_most:
            return FixedSizes(self.settings)
        model, sampled = self._model, self.tokens.noise is not None
        kind = model.device, model.dtype, torch.get_num_threads(), sampled, self._in_step, self.tokens.is_plain_greedy
        return known_sizes.sizer_of(self.draft, model, self.settings, len(self.batch), kind)

    def _finish_stats(self, seconds: float) -> None:
        self.stats.emitted = self.batch.num_emitted
        self.stats.prefill_seconds = self._prefill_seconds
        spent = seconds - self._prefill_seconds
        self.stats.other_seconds = spent - self.stats.draft_seconds - self.stats.verify_seconds
        self.draft.stats = self.stats

    def _result(self):
        if not self.config.return_dict_in_generate:
            return self.batch.input_ids
        fields: dict[str, Any] = {CACHE_KEY: self.target.cache, **self.tokens.record.until(self.batch.steps)}
        output = GenerateDecoderOnlyOutput(sequences=self.batch.input_ids, **fields)
        output.speculation = self.stats  # an attribute, not a key: keys and to_tuple() stay those of plain decoding
        return output


def _pad_token_id(config: GenerationConfig) -> int | None:
    pad = config._pad_token_tensor
    return None if pad is None else int(pad)
