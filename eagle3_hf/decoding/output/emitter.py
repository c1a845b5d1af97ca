"""What plain `generate` does with the logits of a step, in the same order: process, record, choose, stop, stream.

The decoding loop only decides which logits come next. Everything that a user can observe of a token happens here, so
that processors, criteria and streamers get the calls, and the generator the draws, that they get without a draft.

Sequences may run ahead of each other (see `decoding/sequence.py`). When a step is committed, criteria and streamers
are called with the whole batch, and the generator moves. If a criterion ends a sequence at this step, or a callback
moves the generator, the tokens behind the step are rewound.
"""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList

from .. import transfers
from ..coupling import Noise
from ..sequence import Batch, Sequence
from ..tree import DraftTree
from ..verification import Walk
from .at_once import NodeChoices, greedy_choices, sampled_choices
from .outputs import KeyColumns, Place, StepRecord
from .processors import HARMLESS_PROCESSORS, PREFIX_FREE_WARPERS, STATELESS_PROCESSORS, StopTest


# A sequence that is this many steps ahead waits for the others: the noise of all steps in between is kept.
FURTHEST_AHEAD = 48
# Earlier versions of transformers stream a token before they call the criteria.
_STREAMS_FIRST = "streamer.put(next_tokens" in inspect.getsource(GenerationMixin._sample)


class TokenEmitter:
    """Turns the logits at verified positions into emitted tokens of the sequences.

    Args:
        batch: The sequences.
        processors: The call's logits processors.
        stop: Tests the call's stopping criteria.
        streamer: The call's streamer, or `None`.
        do_sample: Whether tokens are sampled, as in the call's generation config.
        record: Collects what `generate` returns besides ids.

    Attributes:
        done: Whether every sequence is finished.
        was_moved: Whether callbacks have moved the generator between steps, so that the noise of later steps is not
            known in advance.
        asks_of_pads: Whether the choices behind the pad tokens of finished sequences must be known before a step is
            committed: plain decoding samples for these sequences too, and raises an error if processors have made
            their probabilities invalid.
        noise: The coming random numbers, from the first logits on; `None` in greedy decoding.
    """

    def __init__(
        self,
        batch: Batch,
        processors: LogitsProcessorList,
        stop: StopTest,
        streamer,
        do_sample: bool,
        record: StepRecord,
    ):
        self.done = False
        self.was_moved = False
        self.record = record
        self.noise: Noise | None = None
        self._batch = batch
        self._limit: int | None = None
        self._most_tokens = None if stop.max_length is None else stop.max_length - batch.prompt_length
        self._is_committing = False
        self._processors = processors
        self._stop = stop
        self._streamer = streamer
        self._do_sample = do_sample
        self._all_prefix_free = all(type(item) in PREFIX_FREE_WARPERS for item in processors)
        harmless = all(type(item) in HARMLESS_PROCESSORS for item in processors)
        self.asks_of_pads = do_sample and len(batch) > 1 and stop.has_eos and not harmless

    # ----- what the loop asks ---------------------------------------------------------------------------------------

    @property
    def steps_run(self) -> int:
        """Forwards after the prefill that plain decoding would have made by now, also when asked inside a callback."""
        return self._batch.steps - self._is_committing

    @property
    def is_plain_greedy(self) -> bool:
        """Whether only the argmax of the logits is needed."""
        return not self._do_sample and not self._processors and not self.record.keeps_logits

    @property
    def needs_lock_step(self) -> bool:
        """Whether a callback could notice that sequences are at different steps.

        This is so for processors that keep a state or depend on the index of a sequence, and for criteria that get the
        scores of finished sequences.
        """
        if len(self._batch) == 1:
            return False
        shown = self._stop.may_read_scores and self._stop.has_eos and self.record.keep_scores
        return shown or any(type(item) not in STATELESS_PROCESSORS for item in self._processors)

    def limit(self, steps: int) -> None:
        """Set the number of steps after which decoding stops, even if no criterion ends it."""
        self._limit = steps
        self._most_tokens = steps if self._most_tokens is None else min(steps, self._most_tokens)

    @property
    def is_full(self) -> bool:
        """Whether as many steps are committed as `limit` allows."""
        return self._limit is not None and self._batch.steps >= self._limit

    def room(self, index: int) -> int | None:
        """Return how many more tokens a sequence can have; `None` if there is no limit."""
        return None if self._most_tokens is None else self._most_tokens - len(self._batch[index].token_ids)

    # ----- emitting -------------------------------------------------------------------------------------------------

    def choices(self, logits: torch.Tensor, tree: DraftTree) -> NodeChoices | None:
        """Return what would be chosen behind all nodes, or `None` if the walk is to ask node by node.

        Unless the trees are on the host already, their nodes come along with the choices, in one transfer.

        Args:
            logits: (B, N, V) of all nodes.
            tree: The trees.
        """
        if not self._chooses_at_once(logits.device):
            return None
        found = self._raced_at_once(logits, tree) if self._do_sample else greedy_choices(logits)
        if found is not None:
            found.set_host(tree.read_with(found.tokens))
        return found

    def _raced_at_once(self, logits: torch.Tensor, tree: DraftTree) -> NodeChoices | None:
        if self.noise is None:
            return None
        firsts = [max(sequence.root_step + 1, self._batch.steps) for sequence in self._batch]
        raw = logits.to(copy=True, dtype=torch.float32, device=self._batch.device)
        levels = max(tree.deepest(index) for index in range(len(firsts)))
        depths = tree.depths.to(raw.device)
        return sampled_choices(raw, depths, levels, self.noise, self._processors, firsts, self._batch.steps)

    def chooser(
        self,
        walk: Walk,
        outputs: Any,
        num_nodes: int,
        key_columns: Callable[[], list[KeyColumns]],
        choices: NodeChoices | None = None,
    ) -> Callable[[dict[int, int]], dict[int, int]]:
        """Return the function by which a walk chooses: from the nodes that it has reached to the tokens behind them.

        The function emits the tokens that it chooses.

        Args:
            walk: The walk, which holds the paths so far.
            outputs: The outputs of the target's forward over the trees.
            num_nodes: The number N of nodes of the trees, padding included.
            key_columns: See [`StepRecord.put_layers`].
            choices: What [`choices`] has found; `None` to choose node by node.
        """
        logits = outputs.logits[:, -num_nodes:]

        def choose(nodes: dict[int, int]) -> dict[int, int]:
            if self.record.keeps_layers:
                places = [self._place(index, walk.paths[index], num_nodes) for index in nodes]
                self.record.put_layers(outputs, places, key_columns)
            steps = {index: self._batch[index].root_step + len(walk.paths[index]) for index in nodes}
            if choices is not None:
                tokens = self._made_before(choices, nodes, steps)
                if tokens is not None:
                    return self.emit_tokens(tokens)
            return self.emit(_logits_at(logits, nodes), steps)

        return choose

    def _chooses_at_once(self, device: torch.device) -> bool:
        """Whether to choose for all nodes in one transfer to the host. On a CPU, this is the larger cost."""
        if not transfers.makes_host_wait(device):
            return False
        needs_only_logits = self._do_sample and self._all_prefix_free and not self.record.keeps_logits
        return self.is_plain_greedy or (needs_only_logits and not self.asks_of_pads)

    def _made_before(
        self, choices: NodeChoices, nodes: dict[int, int], steps: dict[int, int]
    ) -> dict[int, int] | None:
        """Return the tokens that were chosen behind some nodes; `None` if they must be chosen anew."""
        tokens = choices.behind(nodes)
        if tokens is None or not choices.hold(self.noise, steps, self._batch.steps):
            return None
        if self.noise is not None and self._commits_next(steps):
            self._reject_pads()
            if not self.noise.claim():
                return None
        return tokens

    def _place(self, index: int, path: list[int], num_nodes: int) -> Place:
        sequence = self._batch[index]
        step = sequence.root_step + len(path)
        return Place(index, step, path, sequence.cache_len, self._batch.longest, num_nodes)

    def emit(self, logits: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        """Process raw logits; choose, record and append the tokens of some sequences; commit steps that are complete.

        Args:
            logits: (B, V). Those of sequences that are not in `steps` are ignored.
            steps: Index of a sequence -> the step of its logits: its next step, or any step of a finished sequence.

        Returns:
            Index -> token. A sequence is missing if its logits cannot be sampled from: that is an error only if plain
            decoding reaches the step.
        """
        raw = logits.to(copy=True, dtype=torch.float32, device=self._batch.device)
        if len(self._batch) > 1:
            steps = self._without_broken(raw, steps)
        scores = self._processed(raw, steps)
        self.record.put_logits(steps, scores, raw)
        chosen = self._chosen(scores, steps)
        for index, step in steps.items():
            if self._batch[index].is_padding:
                self._batch[index].pads_chosen = max(step + 1, self._batch[index].pads_chosen)
        return self.emit_tokens(chosen)

    def emit_tokens(self, chosen: dict[int, int]) -> dict[int, int]:
        """Append tokens and commit steps that are complete.

        Args:
            chosen: Index of a sequence -> token.

        Returns:
            The same, but with the pad token for finished sequences, to which nothing is appended.
        """
        tokens = {}
        for index, token in chosen.items():
            sequence = self._batch[index]
            if sequence.is_padding:
                tokens[index] = self._batch.pad_token_id
                continue
            tokens[index] = token
            step = sequence.append(token)
            if self._stop.after_token(token, sequence.length):
                sequence.finish(step)
        self._commit_steps()
        return tokens

    def _without_broken(self, raw: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        """Set unused logits to 0, and those of sequences ahead of the others that cannot be sampled from.

        Returns:
            `steps` without the latter sequences.
        """
        broken: set[int] = set()
        ahead = [i for i, step in steps.items() if step > self._batch.steps and not self._batch[i].is_padding]
        if ahead and self._do_sample:
            usable = raw[ahead].amax(-1).isfinite().tolist()
            broken = {index for index, fine in zip(ahead, usable, strict=True) if not fine}
        blank = [index for index in range(len(self._batch)) if index not in steps or index in broken]
        if blank:
            raw[blank] = 0.0
        return {index: step for index, step in steps.items() if index not in broken}

    def _processed(self, raw: torch.Tensor, steps: dict[int, int]) -> torch.Tensor:
        """Return processed scores (B, V). A call of the processors has ids of one length, if they read the ids."""
        if not self._processors or not steps:
            return raw
        lengths = set(steps.values())
        if self._all_prefix_free or len(lengths) == 1:
            return self._run_processors(max(lengths), raw, steps)
        scores = torch.empty_like(raw)
        for length in sorted(lengths):
            equal = [index for index, step in steps.items() if step == length]
            scores[equal] = self._run_processors(length, raw.clone(), equal)[equal]
        return scores

    def _run_processors(self, length: int, scores: torch.Tensor, used: Collection[int]) -> torch.Tensor:
        """Return the scores (B, V) of one call of each processor.

        What becomes of sequences that are not `used` is ignored, but a processor may reject the whole batch for what
        the ones before made of them. So their scores are set to 0 in between.
        """
        ids = self._batch.ids_until(length)
        if len(used) == len(self._batch):
            return self._processors(ids, scores)
        unused = torch.ones(len(self._batch), 1, dtype=torch.bool)
        unused[list(used)] = False
        unused = unused.to(scores.device, non_blocking=True)
        for processor in self._processors:
            scores = processor(ids, scores).masked_fill(unused, 0.0)
        return scores

    def _chosen(self, scores: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        indices = list(steps)
        if not indices:
            return {}
        picked = scores if indices == list(range(len(self._batch))) else scores[indices]
        if self._do_sample:
            return self._sampled(picked, scores, steps)
        return dict(zip(indices, picked.argmax(-1).tolist(), strict=True))

    def _sampled(self, picked: torch.Tensor, scores: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        if self.noise is None or not self.noise.fits(scores):
            self.noise = Noise(scores.shape[0], scores.shape[1], scores.device, scores.dtype)
        probs = nn.functional.softmax(picked, dim=-1)
        tokens = self._raced(self.noise, probs, steps)
        if self._commits_next(steps):
            self._reject_pads()
            if not self.noise.claim():
                tokens = self._raced(self.noise, probs, steps)
        return tokens

    def _raced(self, noise: Noise, probs: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        drawn = self._drawn(noise, steps)
        chosen, valid = noise.race(probs, drawn)
        tokens = dict(zip(steps, chosen.tolist(), strict=True))
        return tokens if valid else self._without_invalid(noise, tokens, probs, drawn, steps)

    def _commits_next(self, steps: dict[int, int]) -> bool:
        """Whether `steps` completes the next step, and no sequence has used the noise of that step before."""
        next_step = self._batch.steps
        return not self.done and all(
            steps.get(sequence.index) == next_step
            or (sequence.is_padding and sequence.finished_before(next_step) and self._has_next(sequence))
            for sequence in self._batch
        )

    def _drawn(self, noise: Noise, steps: dict[int, int]) -> torch.Tensor:
        """Return the noise of each sequence's step. For a pad token at a committed step it has no effect."""
        if len(self._batch) == 1:
            return noise.peek(0)
        coming = noise.peek_at([max(0, step - self._batch.steps) for step in steps.values()])
        return torch.stack([drawn[index] for index, drawn in zip(steps, coming, strict=True)])

    def _without_invalid(
        self, noise: Noise, tokens: dict[int, int], probs: torch.Tensor, drawn: torch.Tensor, steps: dict[int, int]
    ) -> dict[int, int]:
        """Handle probabilities that cannot be sampled from.

        At the next step, raise the error of `torch.multinomial`. Sequences ahead of it are left out, since plain
        decoding may never reach their step.
        """
        kept = {}
        for place, (index, step) in enumerate(steps.items()):
            own, sequence = probs[place : place + 1], self._batch[index]
            if not noise.race(own, drawn[place : place + 1])[1]:
                if step <= self._batch.steps:
                    noise.check(own)
                elif not sequence.is_padding:
                    continue
                elif sequence.unusable_pad is None:
                    sequence.unusable_pad = step, own
            kept[index] = tokens[index]
        return kept

    # ----- committing steps -----------------------------------------------------------------------------------------

    def _commit_steps(self) -> None:
        """Commit every step that all sequences have reached: call criteria and streamer."""
        while not self.done and all(map(self._has_next, self._batch)):
            step = self._batch.steps
            if self.noise is not None:
                self._reject_pads()
                if not self.noise.advance():
                    self._batch.rewind(step)
                    return
            self._batch.steps += 1
            self._is_committing = True
            if _STREAMS_FIRST:
                self._stream(step)
            if not self._stop.is_simple:
                finished = self._stop.after_step(self._batch.input_ids, self.record.scores_until(step + 1))
                for sequence, is_finished in zip(self._batch, finished, strict=True):
                    if is_finished:
                        sequence.finish(step)
            self.done = all(sequence.finished_before(step + 1) for sequence in self._batch)
            if not _STREAMS_FIRST:
                self._stream(step)
            if self.noise is not None and len(self._batch) > 1 and not self.done and self.noise.was_moved():
                self.was_moved = True
                self._batch.rewind(step + 1)
            self._is_committing = False

    def _stream(self, step: int) -> None:
        if self._streamer is not None:
            self._streamer.put(torch.tensor([sequence.tokens(step, 1)[0] for sequence in self._batch]))

    def _has_next(self, sequence: Sequence) -> bool:
        """Whether a sequence has reached the next step, with what plain decoding would have chosen there."""
        if not sequence.is_padding:
            return len(sequence.token_ids) > self._batch.steps
        own = not self.asks_of_pads or not sequence.finished_before(self._batch.steps)
        return own or sequence.pads_chosen > self._batch.steps

    def _reject_pads(self) -> None:
        """Raise the error of `torch.multinomial` if a finished sequence cannot be sampled from at the next step."""
        for sequence in self._batch:
            pad = sequence.unusable_pad
            if self.noise is not None and pad is not None and pad[0] == self._batch.steps:
                self.noise.check(pad[1])

    def end_round(self, emitted: int) -> None:
        """Call the streamer's `end_round(accepted)`, if it has this method; one emitted token is not a draft."""
        if emitted and self._streamer is not None and hasattr(self._streamer, "end_round"):
            self._streamer.end_round(emitted - 1)

    def finish(self) -> None:
        """Call the streamer's `end`."""
        if self._streamer is not None:
            self._streamer.end()


def _logits_at(logits: torch.Tensor, nodes: dict[int, int]) -> torch.Tensor:
    """Return the logits (B, V) at each sequence's node, from those (B, N, V) at all nodes; by default at the root."""
    if logits.shape[0] == 1:
        return logits[:, nodes[0]]
    at = transfers.upload([nodes.get(index, 0) for index in range(logits.shape[0])], logits.device)
    return logits[torch.arange(logits.shape[0], device=logits.device), at]
