"""The sequences of one `generate` call: one object owns what a sequence says and how much of it the cache holds.

A *step* is one token of every sequence. Sequences accept different numbers of drafts and so run ahead of each other; a
step is committed once the slowest sequence has reached it, and only then do stopping criteria and streamers hear of
it. What a sequence has emitted behind the committed steps is provisional: `Sequence.rewind` takes it back.

A *slot* of the target's cache is a column of the ids: sequence `b` has its entries in the slots up to its own
`cache_len`. Its newest token, the root of its next draft tree, has no entry yet.
"""

from collections.abc import Sequence as Sized
from typing import cast

import torch
from torch import nn


_FEW_TOKENS = 4
_FREE_COLUMNS = 64


class Sequence:
    """One sequence of the batch.

    Args:
        index: Its place in the batch.
        ids: The ids of all sequences on the device.
        prompt_length: Columns of the prompt in `ids`.
        pads_after_end: Whether a finished sequence goes on with pad tokens, as plain decoding's does where there is
            an end-of-sequence token.

    Attributes:
        token_ids: Emitted tokens, provisional ones included, without the pad tokens of a finished sequence.
        finished_at: Step of the last token of its own, once it is known.
        rewound_to: The first step whose token was taken back since the last commit.
        cache_len: Slots of the target's cache that hold its entries.
        pads_chosen: Of a finished sequence: steps up to which the choices that plain decoding discards are known.
        unusable_pad: The first such step from whose probabilities (1, V) nothing can be drawn, with these.
    """

    def __init__(self, index: int, ids: "_TokenIds", prompt_length: int, pads_after_end: bool):
        self.index = index
        self.token_ids: list[int] = []
        self.finished_at: int | None = None
        self.rewound_to: int | None = None
        self.cache_len = 0
        self.pads_chosen = 0
        self.unusable_pad: tuple[int, torch.Tensor] | None = None
        self._prefill_len = self._first_position = 0
        self._ids = ids
        self._prompt_length = prompt_length
        self._pads_after_end = pads_after_end

    def start(self, cache_len: int, position: int) -> None:
        """The prefill is done: the cache holds so many slots, and the first new token will be at this position."""
        self.cache_len = self._prefill_len = cache_len
        self._first_position = position

    @property
    def is_padding(self) -> bool:
        """Whether the sequence only writes pad tokens from now on."""
        return self._pads_after_end and self.finished_at is not None

    @property
    def root_step(self) -> int:
        """The step whose token is the root of the next tree."""
        return self.cache_len - self._prefill_len

    @property
    def root_position(self) -> int:
        """The root's position; of several position axes, the largest."""
        return self._first_position + self.root_step

    @property
    def length(self) -> int:
        """Tokens of prompt and text, without pad tokens behind the end."""
        return self._prompt_length + len(self.token_ids)

    def finished_before(self, step: int) -> bool:
        """Whether the last token of its own is that of an earlier step."""
        return self.finished_at is not None and self.finished_at < step

    def lead(self, steps: int) -> int:
        """Steps that the sequence is ahead of the committed `steps`."""
        return max(0, len(self.token_ids) - steps)

    def tokens(self, step: int, count: int) -> list[int]:
        """The tokens of `count` steps from `step` on; a finished sequence goes on with pad tokens."""
        tokens = self.token_ids[step : step + count]
        return tokens + [self._ids.pad] * (count - len(tokens))

    def upcoming(self, count: int) -> list[int]:
        """The next tokens of a finished sequence, its root first."""
        return self.tokens(self.root_step, count)

    def append(self, token: int) -> int:
        """Emit a token; returns its step."""
        step = len(self.token_ids)
        self.token_ids.append(token)
        self._ids.put(self.index, self._prompt_length + step, token)
        return step

    def finish(self, step: int) -> None:
        """The last token of its own is that of `step`, unless an earlier one is; what it has behind is taken back."""
        if self.finished_before(step + 1):
            return
        self.finished_at = step
        self._forget_pads()
        if self._pads_after_end:
            self._take_back(step + 1)
            self._ids.end(self.index, self._prompt_length + step + 1)

    def rewind(self, step: int) -> None:
        """Take back all tokens from `step` on, and an end that was reached there."""
        self._take_back(step)
        if self.finished_at is not None and self.finished_at >= step:
            self.finished_at = None
            self._forget_pads()

    def _take_back(self, step: int) -> None:
        if len(self.token_ids) > step:
            self._ids.write()
            del self.token_ids[step:]
            self.rewound_to = step if self.rewound_to is None else min(step, self.rewound_to)

    def _forget_pads(self) -> None:
        self.pads_chosen, self.unusable_pad = 0, None

    def slot_of(self, step: int) -> int:
        """The slot in which the entry of a step's token stands."""
        return self._prefill_len + step

    def committed_len(self, path: Sized[int]) -> int:
        """`cache_len` after a round that visited these nodes: all tokens but the newest have entries."""
        if self.is_padding:
            return self.verified_len(path)
        return self.slot_of(len(self.token_ids) - 1)

    def verified_len(self, path: Sized[int]) -> int:
        """Slots up to the last entry of this round whose token has not been taken back."""
        reached = self.cache_len + len(path)
        return reached if self.rewound_to is None else min(reached, self.slot_of(self.rewound_to))


class Batch(list[Sequence]):
    """The sequences of one call, in the order of the batch.

    Args:
        input_ids: (B, P) the prompt.
        pad_token_id: What a finished sequence writes.
        pads_after_end: See [`Sequence`].

    Attributes:
        prompt_length: P.
        steps: Committed steps.
    """

    def __init__(self, input_ids: torch.Tensor, pad_token_id: int | None = None, pads_after_end: bool = False):
        self.prompt_length = input_ids.shape[1]
        self.steps = 0
        self._ids = _TokenIds(input_ids, pad_token_id or 0)
        super().__init__(
            Sequence(index, self._ids, self.prompt_length, pads_after_end) for index in range(len(input_ids))
        )

    @property
    def device(self) -> torch.device:
        return self._ids.device

    @property
    def pad_token_id(self) -> int:
        return self._ids.pad

    @property
    def input_ids(self) -> torch.LongTensor:
        """(B, T) prompt and the tokens of all committed steps."""
        return self.ids_until(self.steps)

    @property
    def num_emitted(self) -> int:
        """Tokens of all sequences that the text kept, pad tokens and the first token of each sequence aside."""
        return sum(min(len(sequence.token_ids), self.steps) - 1 for sequence in self)

    @property
    def cache_lens(self) -> list[int]:
        return [sequence.cache_len for sequence in self]

    @property
    def longest(self) -> int:
        """Slots of the longest sequence; the nodes of all trees stand behind these."""
        return max(sequence.cache_len for sequence in self)

    @property
    def is_even(self) -> bool:
        """Whether all sequences end at the same slot."""
        return all(sequence.cache_len == self[0].cache_len for sequence in self)

    @property
    def new_slots(self) -> int:
        """Slots that the longest sequence has taken since the prefill."""
        return max(sequence.root_step for sequence in self)

    def slot_of(self, step: int) -> int:
        """The slot in which the entries of a step's tokens stand."""
        return self[0].slot_of(step)

    def roots(self) -> torch.Tensor:
        """(B, 1) the newest token of each sequence, whose entry is not in the cache yet."""
        return torch.tensor([sequence.upcoming(1) for sequence in self], device=self.device)

    def ids_until(self, step: int) -> torch.LongTensor:
        """(B, T) ids before `step`, in memory of their own as plain decoding's are."""
        return cast(torch.LongTensor, self._ids.until(self.prompt_length + step).clone())

    def cached_ids(self) -> torch.Tensor:
        """(B, T) ids of all columns that have a slot, provisional ones and pad tokens included."""
        return self._ids.until(self.prompt_length + self.new_slots)

    def rewind(self, step: int) -> None:
        """Take back what any sequence has from `step` on."""
        for sequence in self:
            sequence.rewind(step)

    def forget_rewound(self) -> None:
        """Cache and draft know of everything that was taken back."""
        for sequence in self:
            sequence.rewound_to = None


class _TokenIds:
    """Ids (B, T) on the device; new tokens wait on the host, to be written together.

    Args:
        prompt: (B, P).
        pad: Id of the columns that nobody has written to.
    """

    def __init__(self, prompt: torch.Tensor, pad: int):
        self.pad = pad
        self._ids = nn.functional.pad(prompt, (0, _FREE_COLUMNS), value=pad)
        self._waiting: list[tuple[int, int, int]] = []

    @property
    def device(self) -> torch.device:
        return self._ids.device

    def put(self, index: int, column: int, token: int) -> None:
        self._waiting.append((index, column, token))

    def end(self, index: int, column: int) -> None:
        """A sequence has pad tokens from this column on."""
        self.write()
        self._ids[index, column:] = self.pad

    def until(self, column: int) -> torch.Tensor:
        self._make_room(column)
        self.write()
        return self._ids[:, :column]

    def write(self) -> None:
        """Write the tokens that wait: all at once, or one by one where that is sooner."""
        if not self._waiting:
            return
        self._make_room(max(column for _, column, _ in self._waiting) + 1)
        if len(self._waiting) > _FEW_TOKENS:
            indices, columns, tokens = torch.tensor(self._waiting, device=self.device).unbind(1)
            self._ids[indices, columns] = tokens.to(self._ids.dtype)
        else:
            for index, column, token in self._waiting:
                self._ids[index, column] = token
        self._waiting.clear()

    def _make_room(self, length: int) -> None:
        if length > self._ids.shape[1]:
            self._ids = nn.functional.pad(self._ids, (0, length), value=self.pad)
