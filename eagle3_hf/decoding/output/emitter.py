"""What vanilla `generate` does with the logits of a step: process, record, choose, stop, stream; in its order.

The decoding loop only decides which logits come next; everything that a user can observe of a token happens here, so
that processors, criteria, streamers and random numbers see what they would see without a draft.

Rows of a batch may run ahead of each other. A *step* is one token of every row; it is closed when the slowest row has
reached it, and only then do criteria and streamers hear of it, step by step and with the whole batch, and the
generator moves. What a row has emitted behind the last closed step is provisional: a criterion that ends the row
there, or a callback that moves the generator, takes it back.
"""

import inspect

import torch
from torch import nn
from transformers import GenerationMixin, LogitsProcessorList, StoppingCriteriaList

from ..coupling import Noise
from .outputs import StepRecord
from .processors import HARMLESS_PROCESSORS, PREFIX_FREE_WARPERS, STATELESS_PROCESSORS, StopTest


# A row further ahead than this waits: the noise of every step in between is kept.
FURTHEST_AHEAD = 48
_FEW_TOKENS = 4
# Earlier versions of transformers stream a token before they ask the criteria about it.
_STREAMS_FIRST = "streamer.put(next_tokens" in inspect.getsource(GenerationMixin._sample)


class TokenEmitter:
    """Turns the logits at committed positions into emitted tokens.

    Attributes:
        steps: Closed steps.
        done: Every row is finished: nothing more is to be emitted.
        was_moved: Callbacks move the generator between steps, so that nothing ahead of a step can be known.
        asks_of_pads: What finished rows' pad tokens lead to must be known before a step is closed: vanilla draws for
            these rows too, and refuses probabilities that processors have broken.
        record: What `generate` returns besides ids.
        noise: The coming random numbers when sampling, from the first logits on; `None` for greedy decoding.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer,
        pad_token_id: int | None,
        do_sample: bool,
        record: StepRecord,
    ):
        self.rows, self.prompt_length = input_ids.shape
        self.steps = 0
        self.done = False
        self._limit: int | None = None
        self.was_moved = False
        self.record = record
        self.noise: Noise | None = None
        self._pad = pad_token_id or 0
        self._ids = nn.functional.pad(input_ids, (0, 64), value=self._pad)
        # The same tokens on the host, each row's own without the pads of a closed row, and those not yet in `_ids`.
        self._tokens: list[list[int]] = [[] for _ in range(self.rows)]
        self._unwritten: list[tuple[int, int, int]] = []
        self._finished_at: list[int | None] = [None] * self.rows  # step of the row's last token of its own
        self._taken_back: dict[int, int] = {}  # row -> the first step whose token has changed since it was emitted
        # Closed rows: the steps seen so far, and the first one at which nothing can be drawn, with its probabilities.
        self._seen_pads: dict[int, int] = {}
        self._refused_pads: dict[int, tuple[int, torch.Tensor]] = {}
        self._is_closing = False
        self._processors = processors
        self._stop = StopTest(criteria)
        self._streamer = streamer
        self._do_sample = do_sample
        self._all_prefix_free = all(type(item) in PREFIX_FREE_WARPERS for item in processors)
        harmless = all(type(item) in HARMLESS_PROCESSORS for item in processors)
        self.asks_of_pads = do_sample and self.rows > 1 and self._stop.has_eos and not harmless

    # ----- what the loop asks ---------------------------------------------------------------------------------------

    @property
    def input_ids(self) -> torch.Tensor:
        """(B, T) prompt and the tokens of all closed steps."""
        return self._ids_until(self.steps)

    @property
    def counts(self) -> list[int]:
        """Tokens that each row has emitted, provisional ones included; behind those a closed row is pad tokens."""
        return [len(tokens) for tokens in self._tokens]

    @property
    def steps_run(self) -> int:
        """Forwards behind the prefill that vanilla would have made by now, also in the middle of a callback."""
        return self.steps - self._is_closing

    @property
    def num_emitted(self) -> int:
        """Tokens of all rows that the text kept, pads and the first token of each row aside."""
        return sum(min(len(tokens), self.steps) - 1 for tokens in self._tokens)

    @property
    def device(self) -> torch.device:
        return self._ids.device

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the argmax is needed of the logits."""
        return not self._do_sample and not self._processors and not self.record.keeps_logits

    @property
    def needs_lock_step(self) -> bool:
        """Whether somebody may notice that rows are at different steps: a processor that remembers its calls or knows
        its row, a criterion that is shown the scores of closed rows."""
        if self.rows == 1:
            return False
        shown = self._stop.may_read_scores and self._stop.has_eos and self.record.keep_scores
        return shown or any(type(item) not in STATELESS_PROCESSORS for item in self._processors)

    def is_closed(self, row: int) -> bool:
        """Whether this row only writes pad tokens from now on."""
        return self._stop.has_eos and self._finished_at[row] is not None

    def limit(self, steps: int) -> None:
        """No more steps than these, whether anybody ends the call by then or not."""
        self._limit = steps

    @property
    def is_full(self) -> bool:
        """Whether all steps are closed that `limit` allows."""
        return self._limit is not None and self.steps >= self._limit

    def room(self, row: int) -> int | None:
        """Tokens up to the greatest length, where there is one."""
        longest = self._stop.max_length
        limits = [self._limit, None if longest is None else longest - self.prompt_length]
        most = min((limit for limit in limits if limit is not None), default=None)
        return None if most is None else most - len(self._tokens[row])

    def lead(self, row: int) -> int:
        """Steps that a row is ahead of the slowest."""
        return max(0, len(self._tokens[row]) - self.steps)

    def known(self, row: int, step: int, count: int) -> list[int]:
        """A row's tokens from a step on; those of a closed row go on with pads."""
        tokens = self._tokens[row][step : step + count]
        return tokens + [self._pad] * (count - len(tokens))

    def taken_back_from(self, row: int) -> int | None:
        """The first step of a row whose token has been taken back since the last `forget_taken_back`."""
        return self._taken_back.get(row)

    def forget_taken_back(self) -> None:
        self._taken_back.clear()

    def columns(self, end: int) -> torch.Tensor:
        """(B, end) ids, provisional ones and pads included."""
        self._make_room(end)
        self._write()
        return self._ids[:, :end]

    # ----- emitting -------------------------------------------------------------------------------------------------

    def emit(self, logits: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        """Process raw logits and choose, record and append the next token of some rows; closes the steps this allows.

        Args:
            logits: (B, V), of which only the rows in `steps` mean anything.
            steps: Row -> the step that its logits are of: its own count, or any step of a closed row.

        Returns:
            Row -> token, without rows whose logits would raise at a step that vanilla may never reach.
        """
        raw = logits.to(copy=True, dtype=torch.float32, device=self._ids.device)
        if self.rows > 1:
            steps = self._without_broken(raw, steps)
        scores = self._processed(raw, steps)
        self.record.put_logits(steps, scores, raw)
        chosen = self._chosen(scores, steps)
        closed = {row: self._pad for row in steps if self.is_closed(row)}
        for row in closed:
            self._seen_pads[row] = max(steps[row] + 1, self._seen_pads.get(row, 0))
        self.emit_tokens({row: token for row, token in chosen.items() if row not in closed})
        return {**chosen, **closed}

    def emit_tokens(self, tokens: dict[int, int]) -> None:
        """Append plain greedy choices that are on the host already."""
        for row, token in tokens.items():
            self._append(row, token)
        self._close_steps()

    def _without_broken(self, raw: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        """Blank the logits that nobody asks for, and of rows ahead those from which nothing can be drawn."""
        broken: set[int] = set()
        ahead = [row for row, step in steps.items() if step > self.steps and not self.is_closed(row)]
        if ahead and self._do_sample:
            usable = raw[ahead].amax(-1).isfinite().tolist()
            broken = {row for row, fine in zip(ahead, usable, strict=True) if not fine}
        blank = [row for row in range(self.rows) if row not in steps or row in broken]
        if blank:
            raw[blank] = 0.0
        return {row: step for row, step in steps.items() if row not in broken}

    def _processed(self, raw: torch.Tensor, steps: dict[int, int]) -> torch.Tensor:
        """Scores (B, V): the processors get whole batches, of rows that are equally long where they read ids."""
        if not self._processors or not steps:
            return raw
        lengths = set(steps.values())
        if self._all_prefix_free or len(lengths) == 1:
            return self._processors(self._ids_until(max(lengths)), raw)
        scores = torch.empty_like(raw)
        for length in sorted(lengths):
            rows = [row for row, step in steps.items() if step == length]
            scores[rows] = self._processors(self._ids_until(length), raw.clone())[rows]
        return scores

    def _chosen(self, scores: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        rows = list(steps)
        if not rows:
            return {}
        picked = scores if rows == list(range(self.rows)) else scores[rows]
        if self._do_sample:
            return self._sampled(picked, scores, steps)
        return dict(zip(rows, picked.argmax(-1).tolist(), strict=True))

    def _sampled(self, picked: torch.Tensor, scores: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        if self.noise is None or not self.noise.fits(scores):
            self.noise = Noise(scores.shape[0], scores.shape[1], scores.device, scores.dtype)
        probs = nn.functional.softmax(picked, dim=-1)
        tokens = self._raced(probs, steps)
        if self._closes_next(steps):
            self._refuse_pads()
            if not self.noise.claim():
                tokens = self._raced(probs, steps)
        return tokens

    def _raced(self, probs: torch.Tensor, steps: dict[int, int]) -> dict[int, int]:
        drawn = self._drawn(steps)
        chosen, valid = self.noise.race(probs, drawn)
        tokens = dict(zip(steps, chosen.tolist(), strict=True))
        return tokens if valid else self._without_invalid(tokens, probs, drawn, steps)

    def _closes_next(self, steps: dict[int, int]) -> bool:
        """Whether these rows are all that the next step still lacks, and none has chosen with its noise before."""
        return not self.done and all(
            steps.get(row) == self.steps or (self._is_over(row) and self._has_next(row)) for row in range(self.rows)
        )

    def _is_over(self, row: int) -> bool:
        """Whether this row only writes pad tokens from the next step on."""
        return self.is_closed(row) and self._finished_at[row] < self.steps

    def _drawn(self, steps: dict[int, int]) -> torch.Tensor:
        """The noise of each row's own step; of pad tokens behind the others any will do."""
        if self.rows == 1:
            return self.noise.peek(0)
        coming = self.noise.peek_at([max(0, step - self.steps) for step in steps.values()])
        return torch.stack([noise[row] for row, noise in zip(steps, coming, strict=True)])

    def _without_invalid(
        self, tokens: dict[int, int], probs: torch.Tensor, drawn: torch.Tensor, steps: dict[int, int]
    ) -> dict[int, int]:
        """Rows at the next step raise what multinomial raises; rows ahead of it wait, should they get that far."""
        kept = {}
        for place, (row, step) in enumerate(steps.items()):
            own = probs[place : place + 1]
            if not self.noise.race(own, drawn[place : place + 1])[1]:
                if step <= self.steps:
                    self.noise.check(own)
                elif not self.is_closed(row):
                    continue
                else:
                    self._refused_pads.setdefault(row, (step, own))
            kept[row] = tokens[row]
        return kept

    def _append(self, row: int, token: int) -> None:
        step = len(self._tokens[row])
        column = self.prompt_length + step
        self._tokens[row].append(token)
        self._unwritten.append((row, column, token))
        if self._stop.after_token(token, column + 1):
            self._finish(row, step)

    def _finish(self, row: int, step: int) -> None:
        """A row's last token of its own is that of `step`, if no earlier one is; the rest becomes pad tokens."""
        at = self._finished_at[row]
        if at is not None and at <= step:
            return
        self._finished_at[row] = step
        self._forget_pads(row)
        if self._stop.has_eos:
            self._take_back(row, step + 1)
            self._write()
            self._ids[row, self.prompt_length + step + 1 :] = self._pad

    def _forget_pads(self, row: int) -> None:
        self._seen_pads.pop(row, None)
        self._refused_pads.pop(row, None)

    def _take_back(self, row: int, step: int) -> None:
        if len(self._tokens[row]) > step:
            self._write()
            del self._tokens[row][step:]
            self._taken_back[row] = min(step, self._taken_back.get(row, step))

    # ----- closing steps --------------------------------------------------------------------------------------------

    def _close_steps(self) -> None:
        """Tell criteria and streamer of every step that no row has still to reach."""
        while not self.done and all(map(self._has_next, range(self.rows))):
            step = self.steps
            if self._do_sample:
                self._refuse_pads()
                if not self.noise.advance():
                    self._take_back_all()
                    return
            self.steps += 1
            self._is_closing = True
            if _STREAMS_FIRST:
                self._stream(step)
            if not self._stop.is_simple:
                ids = self._ids_until(self.steps)
                for row, finished in enumerate(self._stop.after_step(ids, self.record.scores_until(self.steps))):
                    if finished:
                        self._finish(row, step)
            self.done = all(at is not None and at <= step for at in self._finished_at)
            if not _STREAMS_FIRST:
                self._stream(step)
            if self._do_sample and self.rows > 1 and not self.done and self.noise.was_moved():
                self.was_moved = True
                self._take_back_all()
            self._is_closing = False

    def _stream(self, step: int) -> None:
        if self._streamer is not None:
            self._streamer.put(torch.tensor([self.known(row, step, 1)[0] for row in range(self.rows)]))

    def _has_next(self, row: int) -> bool:
        """Whether all is known that vanilla would know of a row when it closes the next step."""
        if not self.is_closed(row):
            return len(self._tokens[row]) > self.steps
        own = not self.asks_of_pads or self.steps <= self._finished_at[row]
        return own or self._seen_pads.get(row, 0) > self.steps

    def _refuse_pads(self) -> None:
        """Raise what multinomial raises for a closed row at the next step."""
        for step, probs in self._refused_pads.values():
            if step == self.steps:
                self.noise.check(probs)

    def _take_back_all(self) -> None:
        """What rows have chosen with noise that has changed since."""
        for row in range(self.rows):
            self._take_back(row, self.steps)
            at = self._finished_at[row]
            if at is not None and at >= self.steps:
                self._finished_at[row] = None
                self._forget_pads(row)

    def end_round(self, emitted: int) -> None:
        """Tell a streamer that asks (by having `end_round`): the last tokens were some drafts and one more."""
        if emitted and self._streamer is not None and hasattr(self._streamer, "end_round"):
            self._streamer.end_round(emitted - 1)

    def finish(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    # ----- ids ------------------------------------------------------------------------------------------------------

    def _ids_until(self, step: int) -> torch.Tensor:
        """(B, T) ids before `step`, in memory of their own as vanilla's are."""
        return self.columns(self.prompt_length + step).clone()

    def _write(self) -> None:
        """Put the newest tokens where the others are: all at once, or one by one where that is sooner."""
        if len(self._unwritten) > _FEW_TOKENS:
            rows, columns, tokens = torch.tensor(self._unwritten, device=self._ids.device).unbind(1)
            self._make_room(max(column for _, column, _ in self._unwritten) + 1)
            self._ids[rows, columns] = tokens.to(self._ids.dtype)
        else:
            for row, column, token in self._unwritten:
                self._make_room(column + 1)
                self._ids[row, column] = token
        self._unwritten.clear()

    def _make_room(self, length: int) -> None:
        if length > self._ids.shape[1]:
            self._ids = nn.functional.pad(self._ids, (0, length), value=self._pad)
