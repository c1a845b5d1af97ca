"""What plain `generate` does with the logits of a step: process, record, choose, stop, stream; in its order.

The decoding loop only decides which logits come next; everything that a user can observe of a token happens here, so
that processors, criteria, streamers and random numbers see what they would see without a draft.

Sequences may run ahead of each other (see `decoding/sequence.py`). Criteria and streamers hear of a step, and the
generator moves, when the step is committed, with the whole batch. A criterion that ends a sequence at a step, or a
callback that moves the generator, rewinds what was emitted behind it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList

from ..coupling import Noise
from ..sequence import Batch, Sequence
from ..verification import Walk
from .outputs import KeyColumns, Place, StepRecord
from .processors import HARMLESS_PROCESSORS, PREFIX_FREE_WARPERS, STATELESS_PROCESSORS, StopTest


# A sequence further ahead than this waits: the noise of every step in between is kept.
FURTHEST_AHEAD = 48
# Earlier versions of transformers stream a token before they ask the criteria about it.
_STREAMS_FIRST = "streamer.put(next_tokens" in inspect.getsource(GenerationMixin._sample)


class TokenEmitter:
    """Turns the logits at verified positions into emitted tokens of the sequences.

    Args:
        batch: The sequences.
        processors, streamer: Of the call.
        stop: Tests the call's stopping criteria.
        do_sample: Whether tokens are drawn, as in the call's generation config.
        record: What `generate` returns besides ids.

    Attributes:
        done: Every sequence is finished: nothing more is to be emitted.
        was_moved: Callbacks move the generator between steps, so that nothing ahead of a step can be known.
        asks_of_pads: What finished sequences' pad tokens lead to must be known before a step is committed: plain
            decoding draws for these sequences too, and rejects probabilities that processors have broken.
        noise: The coming random numbers when sampling, from the first logits on; `None` for greedy decoding.
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
        """Forwards behind the prefill that plain decoding would have made by now, also in the middle of a callback."""
        return self._batch.steps - self._is_committing

    @property
    def is_plain_greedy(self) -> bool:
        """Whether nothing but the argmax is needed of the logits."""
        return not self._do_sample and not self._processors and not self.record.keeps_logits

    @property
    def needs_lock_step(self) -> bool:
        """Whether somebody may notice that sequences are at different steps: a processor that remembers its calls or
        knows its sequence, a criterion that is shown the scores of finished sequences."""
        if len(self._batch) == 1:
            return False
        shown = self._stop.may_read_scores and self._stop.has_eos and self.record.keep_scores
        return shown or any(type(item) not in STATELESS_PROCESSORS for item in self._processors)

    def limit(self, steps: int) -> None:
        """No more steps than these, whether anybody ends the call by then or not."""
        self._limit = steps

    @property
    def is_full(self) -> bool:
        """Whether all steps are committed that `limit` allows."""
        return self._limit is not None and self._batch.steps >= self._limit

    def room(self, index: int) -> int | None:
        """Tokens that a sequence lacks to the greatest length, where there is one."""
        longest = self._stop.max_length
        limits = [self._limit, None if longest is None else longest - self._batch.prompt_length]
        most = min((limit for limit in limits if limit is not None), default=None)
        return None if most is None else most - len(self._batch[index].token_ids)

    # ----- emitting -------------------------------------------------------------------------------------------------

    def chooser(
        self, walk: Walk, outputs: Any, num_nodes: int, key_columns: Callable[[], list[KeyColumns]]
    ) -> Callable[[dict[int, int]], dict[int, int]]:
        """From the node that each sequence's walk has reached to the token behind it, which is emitted on the way.

        Args:
            walk: Asks, and holds the paths so far.
            outputs: Of the target's forward over the trees.
            num_nodes: N of the trees, padding included.
            key_columns: See [`StepRecord.put_layers`].
        """
        logits = outputs.logits[:, -num_nodes:]
        greedy = logits.argmax(-1).tolist() if self._chooses_at_once(logits.device) else None

        def choose(nodes: dict[int, int]) -> dict[int, int]:
            if self.record.keeps_layers:
                places = [self._place(index, walk.paths[index], num_nodes) for index in nodes]
                self.record.put_layers(outputs, places, key_columns)
            if greedy is not None:
                return self.emit_tokens({index: greedy[index][node] for index, node in nodes.items()})
            steps = {index: self._batch[index].root_step + len(walk.paths[index]) for index in nodes}
            return self.emit(_logits_at(logits, nodes), steps)

        return choose

    def _chooses_at_once(self, device: torch.device) -> bool:
        """One transfer for all nodes instead of one per visited node; on a CPU the argmax itself is what costs."""
        return self.is_plain_greedy and device.type != "cpu"

    def _place(self, index: int, path: list[int], num_nodes: int) -> Place:
        sequence = self._batch[index]
        step = sequence.root_step + len(path)
        return Place(index, step, path, sequence.cache_len, self._batch.longest, num_nodes)

    def emit(self, logits: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        """Process raw logits; choose, record and append a token of some sequences; commit the steps this allows.

        Args:
            logits: (B, V), of which only those of the sequences in `steps` mean anything.
            steps: Index of a sequence -> the step that its logits are of: its next, or any step of a finished one.

        Returns:
            Index -> token, without sequences whose logits would raise at a step that plain decoding may never reach.
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
        """Append choices that are on the host; returns them, with pad tokens for those of finished sequences."""
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
        """Blank the logits that nobody asks for, and of sequences ahead those from which nothing can be drawn."""
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
        """Scores (B, V): the processors get whole batches, of equally long sequences where they read ids."""
        if not self._processors or not steps:
            return raw
        lengths = set(steps.values())
        if self._all_prefix_free or len(lengths) == 1:
            return self._processors(self._batch.ids_until(max(lengths)), raw)
        scores = torch.empty_like(raw)
        for length in sorted(lengths):
            equal = [index for index, step in steps.items() if step == length]
            scores[equal] = self._processors(self._batch.ids_until(length), raw.clone())[equal]
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
        """Whether these are all that the next step still lacks, and none has chosen with its noise before."""
        next_step = self._batch.steps
        return not self.done and all(
            steps.get(sequence.index) == next_step
            or (sequence.is_padding and sequence.finished_before(next_step) and self._has_next(sequence))
            for sequence in self._batch
        )

    def _drawn(self, noise: Noise, steps: dict[int, int]) -> torch.Tensor:
        """The noise of each sequence's own step; of pad tokens behind the others any will do."""
        if len(self._batch) == 1:
            return noise.peek(0)
        coming = noise.peek_at([max(0, step - self._batch.steps) for step in steps.values()])
        return torch.stack([drawn[index] for index, drawn in zip(steps, coming, strict=True)])

    def _without_invalid(
        self, noise: Noise, tokens: dict[int, int], probs: torch.Tensor, drawn: torch.Tensor, steps: dict[int, int]
    ) -> dict[int, int]:
        """Sequences at the next step raise what multinomial raises; those ahead wait, should they get that far."""
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
        """Tell criteria and streamer of every step that no sequence has still to reach."""
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
        """Whether all is known that plain decoding would know of a sequence when it has made the next step."""
        if not sequence.is_padding:
            return len(sequence.token_ids) > self._batch.steps
        own = not self.asks_of_pads or not sequence.finished_before(self._batch.steps)
        return own or sequence.pads_chosen > self._batch.steps

    def _reject_pads(self) -> None:
        """Raise what multinomial raises for a finished sequence at the next step."""
        for sequence in self._batch:
            pad = sequence.unusable_pad
            if self.noise is not None and pad is not None and pad[0] == self._batch.steps:
                self.noise.check(pad[1])

    def end_round(self, emitted: int) -> None:
        """Tell a streamer that asks (by having `end_round`): the last tokens were some drafts and one more."""
        if emitted and self._streamer is not None and hasattr(self._streamer, "end_round"):
            self._streamer.end_round(emitted - 1)

    def finish(self) -> None:
        """Tell the streamer that the text has ended."""
        if self._streamer is not None:
            self._streamer.end()


def _logits_at(logits: torch.Tensor, nodes: dict[int, int]) -> torch.Tensor:
    """(B, N, V) at each sequence's node -> (B, V); those of sequences without one are their roots'."""
    if logits.shape[0] == 1:
        return logits[:, nodes[0]]
    at = torch.tensor([nodes.get(index, 0) for index in range(logits.shape[0])], device=logits.device)
    return logits[torch.arange(logits.shape[0], device=logits.device), at]
