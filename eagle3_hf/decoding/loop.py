"""The decoding loop: draft a tree a row, verify all in one target pass, walk them by the target's choices, commit.

Rows of a batch accept different numbers of drafts and so run ahead of each other; where something outside may notice
that (see `choosing`), or where it is no use, they stay at the same step: the round ends for all with the first row
that misses. A row that is finished has a chain of known pad tokens for a tree (see `rows`).
"""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from ..acceptance import SpeculationStats
from ..model.features import FeatureReader, media_token_ids
from ..model.modeling_eagle3 import Eagle3DraftModel
from .draft.candidate import Eagle3Candidate
from .draft.growth import TreeSettings
from .draft.inputs import DraftRows, PromptMedia, forget, join, prompt_rows, ragged_rows
from .draft.sizing import TreeSizer, ranks_on_path, sizer_of
from .output.emitter import FURTHEST_AHEAD, TokenEmitter
from .output.outputs import StepRecord
from .output.processors import prefix_free_warpers
from .rows import Rows, depth_of
from .target.capability import TREE, Ability, Way
from .target.compiled_code import uncompiled
from .target.runner import CACHE_KEY, TargetRun, rope_limits
from .target.synced_gpus import peers_of
from .target.training_mode import no_random_numbers
from .tree import DraftTree
from .verification import Walk


# Rounds between two that are watched for what smaller trees would have accepted, where watching costs a wait.
_ROUNDS_UNWATCHED = 8
# Committed tokens whose features wait for the draft while nothing is drafted: those of an 8B model take 24 kB each.
_MOST_UNFED = 256


class SpeculativeDecoding:
    """One `generate` call with a draft.

    Args:
        target, draft: The models; both are left as they were.
        input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs: What `generate`
            hands to a decoding method.
        settings: Size of the tree, or its limits.
        ability: What the target can verify.
        synced_gpus: Other processes of torch.distributed take part in every forward.
        clock: Seconds, from any start.
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
        ability: Ability = TREE,
        synced_gpus: bool = False,
        clock: Callable[[], float] = perf_counter,
    ):
        self.draft = draft
        self.config = generation_config
        self.settings = settings
        self._clock = clock
        self._sizer: TreeSizer | None = None
        self._size: TreeSettings | None = None  # of this round's trees
        self._fed = self._rounds = 0  # rows that the draft was fed in this round; rounds
        self._prefill_seconds = 0.0
        self.stats = SpeculationStats()
        peers = peers_of(target, draft, input_ids, synced_gpus)
        self.target = TargetRun(target, generation_config, model_kwargs, ability, peers)
        self._model = target
        self._prompt_mask = model_kwargs.get("attention_mask")
        self._rope_limits = rope_limits(target)
        self._rows: Rows | None = None
        self._under_way: tuple[Walk, int] | None = None  # whose tree, of so many nodes, is in the cache
        # Committed rows that the draft has not been fed yet.
        self._unfed: list[DraftRows] = []
        returns_dict = bool(generation_config.return_dict_in_generate)
        self.warpers = prefix_free_warpers(logits_processor)
        self.tokens = TokenEmitter(
            input_ids,
            logits_processor,
            stopping_criteria,
            streamer,
            pad_token_id=pad_token_id(generation_config),
            do_sample=bool(generation_config.do_sample),
            record=StepRecord(
                returns_dict and bool(generation_config.output_scores),
                returns_dict and bool(generation_config.output_logits),
                returns_dict and bool(generation_config.output_hidden_states),
                returns_dict and bool(generation_config.output_attentions),
            ),
        )

    def run(self):
        """Decode; returns what vanilla returns (ids, or the output object with `speculation` attached)."""
        start = self._clock()
        layer_ids, media = self.draft.config.target_layer_ids, media_token_ids(self._model)
        try:
            with uncompiled(self._model), FeatureReader(self._model, layer_ids, embeds=bool(media)) as reader:
                try:
                    self._prefill(reader)
                    while not self.tokens.done and not self.tokens.is_full:
                        self._round()
                    self._rows.complete()
                except BaseException:
                    self._leave_cache()
                    raise
                finally:
                    self.target.finish()
                if not self.tokens.done:
                    self.target.overflow(self.tokens.input_ids)
            if self.target.peers is not None:
                self.target.peers.see_off()
            self.tokens.finish()
        finally:  # what an interrupted call did is not what the call before it did
            self._finish_stats(self._clock() - start)
        return self._result()

    def _finish_stats(self, seconds: float) -> None:
        self.stats.emitted = self.tokens.num_emitted
        spent = seconds - self._prefill_seconds
        self.stats.other_seconds = spent - self.stats.draft_seconds - self.stats.verify_seconds
        self.draft.stats = self.stats

    # ----- prefill --------------------------------------------------------------------------------------------------

    def _prefill(self, reader: FeatureReader) -> None:
        """Run the prompt and emit the first token of each row."""
        start = self._clock()
        with no_random_numbers(self._model, self.tokens.device):
            outputs = self.target.prefill(self.tokens.input_ids, *self._slots_behind())
        if self.target.capacity is not None:
            # The last token of a text has no slot yet.
            self.tokens.limit(self.target.capacity - self.target.first_end + 1)
        embeds, features = reader.take_embeds(), reader.take()
        self._keep_prompt_layers(outputs)
        self.tokens.emit(outputs.logits[:, -1], dict.fromkeys(range(self.tokens.rows), 0))
        roots = [self.target.position_of_root(row) for row in range(self.tokens.rows)]
        media = None if embeds is None else PromptMedia(embeds, media_token_ids(self._model))
        columns = self.tokens.columns(self.tokens.prompt_length + 1)
        rows = prompt_rows(features, columns, self._prompt_mask, roots, media)
        self._unfed.append(rows)
        self._candidate = Eagle3Candidate(
            self._model,
            self.draft,
            self.settings,
            noise=self.tokens.noise,
            warpers=self.warpers,
            start_position=roots[0] - rows.features.shape[1],
            pad_token_id=int(rows.tokens[0, -1]),
            use_noise=getattr(self.draft.generation_config, "assistant_known_noise", True),
        )
        # All rows, finished ones too, are then at the same step from the first to the last.
        forced = bool(self._rope_limits) or self.target.ability.way is Way.CHAIN or self.target.forgets
        self._in_step = self.tokens.needs_lock_step or (self.tokens.rows > 1 and forced)
        self._rows = Rows(self.tokens, self.target, reader, self._in_step)
        if self.settings.at_most:
            self._sizer = self._find_sizer()
        self._prefill_seconds = self._clock() - start

    def _slots_behind(self) -> tuple[int, int]:
        """Slots of a cache that the text can take behind the prompt, and trees behind the text."""
        new, nodes = self.config.max_length - self.tokens.prompt_length, self.settings.num_nodes + 1
        # In a batch, finished rows follow the others by chains of known tokens.
        chain = 0 if self.tokens.rows == 1 else min(new, FURTHEST_AHEAD) + self.settings.depth + 1
        return new, max(nodes, chain)

    def _find_sizer(self) -> TreeSizer:
        """Of calls that cost and accept what this one does."""
        model, sampled = self._model, self.tokens.noise is not None
        kind = model.device, model.dtype, torch.get_num_threads(), sampled, self._in_step, self.tokens.is_plain_greedy
        chain = self.target.ability.way is Way.CHAIN
        return sizer_of(self.draft, model, self.settings, self.tokens.rows, chain, kind)

    # ----- rounds ---------------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Draft, verify, walk, commit."""
        start = self._clock()
        live = [row for row in range(self.tokens.rows) if not self.tokens.is_closed(row)]
        walking = self._not_waiting(live)
        tree = self._draft_trees(walking)
        following = self._rows.following(tree, walking)
        idle = [row for row in range(self.tokens.rows) if row not in walking]
        tree = tree.with_chains({row: following.get(row) or self._rows.chain(row, 1) for row in idle})
        drafted = self._clock()
        outputs, features = self._rows.verify(tree)
        verified = self._clock()
        walk = Walk(tree.host(), self._together(walking))
        steps = self.tokens.steps
        self._under_way = walk, tree.tokens.shape[1]
        self._walk(walk, outputs, tree.tokens.shape[1], walking, list(following))
        if self._sizer is not None:
            self._observe(self._sizer, tree, walk, walking, drafted - start, self._clock() - drafted)
        self._commit(walk, features, live)
        self.stats.draft_seconds += drafted - start
        self.stats.verify_seconds += verified - drafted
        for row in walking:
            self._count(walk, row, tree)
        self.tokens.end_round(self.tokens.steps - steps)

    def _leave_cache(self) -> None:
        """Something was raised: a user's cache is to hold what it would hold without a draft."""
        if self._rows is None:
            return  # the prefill is plain decoding's
        if self._under_way is not None:
            self._rows.keep_interrupted(*self._under_way)
        else:
            self._rows.keep_between_rounds()

    def _not_waiting(self, live: list[int]) -> list[int]:
        """Rows with a token left to emit, and not so far ahead that the others must catch up first."""
        if self.tokens.rows == 1:
            return live
        return [row for row in live if self.tokens.room(row) != 0 and self.tokens.lead(row) < FURTHEST_AHEAD]

    def _together(self, walking: list[int]) -> Iterable[int]:
        """Rows whose round ends with the first of them that misses."""
        if self._in_step:
            return range(self.tokens.rows)
        return walking if self.tokens.was_moved else ()

    def _count(self, walk: Walk, row: int, tree: DraftTree) -> None:
        """A walk that ends at an accepted draft leaves what is below that draft untried."""
        accepted, path = walk.accepted[row], walk.paths[row]
        if not path:
            return
        depth = depth_of(tree, row)
        self.stats.record(accepted, accepted if accepted == len(path) else depth, len(path))
        if depth:
            self._candidate.watch(accepted)

    def _observe(
        self, sizer: TreeSizer, tree: DraftTree, walk: Walk, walking: list[int], drafting: float, verifying: float
    ) -> None:
        """Tell the sizer what the round took and gave."""
        usual = drafting if self._fed <= self.settings.depth + 1 else None
        self._rounds += 1
        ranks: list[list[int]] = []
        # One transfer more, so not in every round where that means waiting for a device.
        if self._size is not None and (tree.scores.device.type == "cpu" or self._rounds % _ROUNDS_UNWATCHED == 0):
            scores = tree.scores.tolist()
            ranks = [ranks_on_path(scores[row], walk.paths[row]) for row in walking if walk.paths[row]]
            if ranks and self._together(walking):
                ranks = [[max(level) for level in zip(*ranks, strict=False)]]
        sizer.observe(self._size, tree.tokens.shape[1] - 1, usual, verifying, ranks)

    # ----- drafting -------------------------------------------------------------------------------------------------

    def _draft_trees(self, walking: list[int]) -> DraftTree:
        roots = self._rows.roots()
        depth = self._depth_left(walking)
        self._size = self._next_size(depth)
        if self._size is None:
            if len(self._unfed) > _MOST_UNFED:
                self._candidate.extend(**self._take_unfed())
            return DraftTree.root_only(roots)
        rows = self._take_unfed()
        self._fed = rows["tokens"].shape[1]
        self._candidate.settings = self._size
        if "valid" in rows:
            rows["roots"] = roots
        self._candidate.look_ahead([self.tokens.lead(row) for row in range(self.tokens.rows)])
        # Fewer candidates than asked for (a cutoff or NaN ruled them out) make a smaller forward.
        return self._candidate.draft_tree(max_depth=depth, **rows).trimmed()

    def _take_unfed(self) -> dict[str, torch.Tensor]:
        """All committed rows that the draft has not been fed yet, by the names of `Eagle3Candidate.extend`."""
        rows = join(self._unfed)
        self._unfed.clear()
        return {name: part for name, part in rows._asdict().items() if part is not None}

    def _next_size(self, depth: int) -> TreeSettings | None:
        """Of the trees of this round, at most so deep; `None` to draft nothing."""
        if depth < 1:
            return None
        size = self.settings if self._sizer is None else self._sizer.choose(max(self.target.ends))
        return None if size is None else size.capped(depth)

    def _depth_left(self, walking: list[int]) -> int:
        """The deepest level that could still be emitted; 0 where a tree would change the target's frequencies."""
        if self.target.forgets:
            return 0
        lengths = [self.tokens.prompt_length + count for count in self.tokens.counts]
        positions = [self.target.position_of_root(row) for row in range(self.tokens.rows)]
        for limit, constant_behind in self._rope_limits:
            # Some models count columns (padding too) and some positions, so that both must be clear of the limit.
            before = max(lengths + [place + 1 for place in positions]) + self.settings.num_nodes <= limit
            behind = constant_behind and min([length - 1 for length in lengths] + positions) > limit
            if not before and not behind:
                return 0
        room = [self.tokens.room(row) for row in walking]
        return min((self.config.max_length if left is None else left for left in room), default=0) - 1

    # ----- walking --------------------------------------------------------------------------------------------------

    def _walk(self, walk: Walk, outputs, num_nodes: int, walking: list[int], following: list[int]) -> None:
        """Emit the target's choice at each node of each row's way through its tree.

        Args:
            walking: Rows that emit.
            following: Rows whose trees are chains of pad tokens.
        """
        shown = self._in_step or self.tokens.record.keeps_anything or self.tokens.asks_of_pads

        def goes_on(row: int) -> bool:
            if self.tokens.done or self.tokens.taken_back_from(row) is not None:
                return False
            return row in following or (self.tokens.room(row) != 0 and (shown or not self.tokens.is_closed(row)))

        if not shown:
            for row in following:
                walk.take_all(row)
        asked = sorted(walking + following) if shown else walking
        at_once = self._chooses_at_once(outputs.logits.device)
        walk.run(asked, self._rows.choices(walk, outputs, num_nodes, at_once), goes_on)

    def _chooses_at_once(self, device: torch.device) -> bool:
        """One transfer for all nodes instead of one per visited node; on a CPU the argmax itself is what costs."""
        return self.tokens.is_plain_greedy and device.type != "cpu"

    def _keep_prompt_layers(self, outputs) -> None:
        """Hidden states and attentions of the whole prompt, or of its last chunk: what the first token came from."""
        record = self.tokens.record
        if record.states is not None:
            record.states.put_all(outputs.hidden_states)
        if record.attentions is not None:
            record.attentions.put_all(outputs.attentions)

    # ----- committing -----------------------------------------------------------------------------------------------

    def _commit(self, walk: Walk, features: torch.Tensor, live: list[int]) -> None:
        """Keep in the cache, and hand to the draft, what the rows have emitted and nobody has taken back.

        Args:
            features: (B, N, A * Ht) at the nodes.
            live: Rows that were not closed before the round: the draft is not told of pad tokens.
        """
        old = self.target.ends
        positions = [self.target.position_of_root(row) for row in range(len(old))]
        self._under_way = None
        paths = self._rows.keep(walk, features.shape[1])
        told = [path if row in live else [] for row, path in enumerate(paths)]
        self._unfed.append(self._draft_rows(told, features, old, positions))
        for row, (end, begin) in enumerate(zip(self.target.ends, old, strict=True)):
            if end < begin:
                self._candidate.forget(row, self.target.position_of_root(row))
                forget(self._unfed, row, self.target.position_of_root(row))
        self.tokens.forget_taken_back()

    def _draft_rows(
        self, paths: list[list[int]], features: torch.Tensor, starts: list[int], positions: list[int]
    ) -> DraftRows:
        """The committed nodes' features, and the token behind each."""
        if self.tokens.rows == 1:
            tokens = self.tokens.known(0, starts[0] - self.target.first_end + 1, len(paths[0]))
            return DraftRows(features[:, paths[0]], torch.tensor([tokens], device=self.tokens.device))
        return ragged_rows(
            features,
            paths,
            [
                self.tokens.known(row, start - self.target.first_end + 1, len(paths[row]))
                for row, start in enumerate(starts)
            ],
            positions,
        )

    # ----- results --------------------------------------------------------------------------------------------------

    def _result(self):
        if not self.config.return_dict_in_generate:
            return self.tokens.input_ids
        steps, record = self.tokens.steps, self.tokens.record
        output = GenerateDecoderOnlyOutput(
            sequences=self.tokens.input_ids,
            scores=record.scores_until(steps),
            logits=record.logits_until(steps),
            attentions=None if record.attentions is None else record.attentions.until(steps),
            hidden_states=None if record.states is None else record.states.until(steps),
            **{CACHE_KEY: self.target.cache},
        )
        output.speculation = self.stats  # an attribute, not a key: the output's keys and to_tuple() stay vanilla's
        return output


def pad_token_id(config: GenerationConfig) -> int | None:
    pad = config._pad_token_tensor
    return None if pad is None else int(pad)
