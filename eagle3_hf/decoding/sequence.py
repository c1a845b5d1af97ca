"""The sequences of one `generate` call. One object owns the tokens of a sequence and its length in the target's cache.

A *step* is one token of every sequence. Sequences accept different numbers of drafts, so that some run ahead of
others. A step is committed once the slowest sequence has reached it, and only then stopping criteria and streamers are
called for it. Tokens behind the committed steps are provisional: `Sequence.rewind` removes them.

A *slot* of the target's cache is a column of the ids. The entries of a sequence are in the slots before its own
`cache_len`. Its newest token, which is the root of its next draft tree, has no entry yet.
"""

from typing import cast

import torch
from torch import nn

from .transfers import upload


_FREE_COLUMNS = 64  # allocated behind the prompt


class Sequence:
    """One sequence of the batch.

    Args:
        index: Index of the sequence in the batch.
        ids: The ids of all sequences on the device.
        prompt_length: Number of columns of the prompt in `ids`.
        pads_after_end: Whether a finished sequence goes on with pad tokens, as in plain decoding if there is an
            end-of-sequence token.

    Attributes:
        token_ids: Emitted tokens, provisional ones included, without the pad tokens of a finished sequence.
        finished_at: The step of the last token that is not a pad token, once it is known.
        rewound_to: The first step whose token was removed since the last commit.
        cache_len: Number of slots of the target's cache that hold entries of the sequence.
        pads_chosen: For a finished sequence, the number of steps whose choices are known. Plain decoding makes these
            choices too, and replaces them by pad tokens.
        unusable_pad: The first of these steps whose probabilities cannot be sampled from, with these (1, V).
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
        """Record the end of the prefill: the slots that it filled, and the position of the first new token."""
        self.cache_len = self._prefill_len = cache_len
        self._first_position = position

    @property
    def is_padding(self) -> bool:
        """Whether all further tokens of the sequence are pad tokens."""
        return self._pads_after_end and self.finished_at is not None

    @property
    def root_step(self) -> int:
        """The step whose token is the root of the next tree."""
        return self.cache_len - self._prefill_len

    @property
    def root_position(self) -> int:
        """The position of the root; the largest one if the model has several position axes."""
        return self._first_position + self.root_step

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the text, without pad tokens behind the end."""
        return self._prompt_length + len(self.token_ids)

    def finished_before(self, step: int) -> bool:
        """Whether the sequence has ended at a step before `step`."""
        return self.finished_at is not None and self.finished_at < step

    def lead(self, steps: int) -> int:
        """Return by how many steps the sequence is ahead of the committed `steps`."""
        return max(0, len(self.token_ids) - steps)

    def tokens(self, step: int, count: int) -> list[int]:
        """Return the tokens of `count` steps from `step` on, with pad tokens behind the end of the sequence."""
        tokens = self.token_ids[step : step + count]
        return tokens + [self._ids.pad] * (count - len(tokens))

    def upcoming(self, count: int) -> list[int]:
        """Return `count` tokens from the root on; those behind the newest token are pad tokens."""
        return self.tokens(self.root_step, count)

    def append(self, token: int) -> int:
        """Append a token and return its step."""
        step = len(self.token_ids)
        self.token_ids.append(token)
        self._ids.put(self.index, self._prompt_length + step, token)
        return step

    def finish(self, step: int) -> None:
        """End the sequence with the token of `step`, unless it has ended before. Tokens behind the end are removed."""
        if self.finished_before(step + 1):
            return
        is_chosen = len(self.token_ids) > step + 1  # the token behind the end, by what plain decoding reads there
        self.finished_at = step
        self._forget_pads()
        if self._pads_after_end:
            self.pads_chosen = step + 2 if is_chosen else 0
            self._take_back(step + 1)
            self._ids.end(self.index, self._prompt_length + step + 1)

    def rewind(self, step: int) -> None:
        """Remove all tokens from `step` on. If the sequence had ended there, it is no longer finished."""
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
        """Return the slot of the entry of a step's token."""
        return self._prefill_len + step

    def committed_len(self, path: list[int]) -> int:
        """Return `cache_len` after a round that visited the nodes `path`: all tokens but the newest have entries."""
        if self.is_padding:
            return self.verified_len(path)
        return self.slot_of(len(self.token_ids) - 1)

    def verified_len(self, path: list[int]) -> int:
        """Return the slots up to the last entry of a round that visited `path` whose token has not been removed."""
        reached = self.cache_len + len(path)
        return reached if self.rewound_to is None else min(reached, self.slot_of(self.rewound_to))


class Batch(list[Sequence]):
    """The sequences of one call, in the order of the batch.

    Args:
        input_ids: (B, P) the prompt.
        pad_token_id: The token behind the end of a finished sequence.
        pads_after_end: See [`Sequence`].

    Attributes:
        prompt_length: P.
        steps: Number of committed steps.
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
        """Committed tokens of all sequences, without pad tokens and without the first token of each sequence."""
        return sum(min(len(sequence.token_ids), self.steps) - 1 for sequence in self)

    @property
    def cache_lens(self) -> list[int]:
        return [sequence.cache_len for sequence in self]

    @property
    def longest(self) -> int:
        """Number of slots of the longest sequence. The nodes of all trees are behind them."""
        return max(sequence.cache_len for sequence in self)

    @property
    def is_aligned(self) -> bool:
        """Whether all sequences end at the same slot."""
        return all(sequence.cache_len == self[0].cache_len for sequence in self)

    @property
    def new_slots(self) -> int:
        """Number of slots that the longest sequence has filled since the prefill."""
        return max(sequence.root_step for sequence in self)

    def slot_of(self, step: int) -> int:
        """Return the slot of the entries of a step's tokens."""
        return self[0].slot_of(step)

    def roots(self) -> torch.Tensor:
        """Return (B, 1) the newest token of each sequence, which has no entry in the cache yet."""
        columns = [self.prompt_length + sequence.root_step for sequence in self]
        ids = self._ids.until(max(columns) + 1)
        if min(columns) == max(columns):
            return ids[:, columns[0] :]
        return ids.gather(1, upload(columns, self.device)[:, None])

    def ids_until(self, step: int) -> torch.LongTensor:
        """Return (B, T) the ids before `step`, as a copy: callers may keep it, as in plain decoding."""
        return cast(torch.LongTensor, self._ids.until(self.prompt_length + step).clone())

    def cached_ids(self) -> torch.Tensor:
        """Return (B, T) the ids of all columns that have a slot, provisional tokens and pad tokens included."""
        return self._ids.until(self.prompt_length + self.new_slots)

    def rewind(self, step: int) -> None:
        """Rewind every sequence to `step`."""
        for sequence in self:
            sequence.rewind(step)

    def forget_rewound(self) -> None:
        """Reset `rewound_to`, once the caches of target and draft have been rewound as well."""
        for sequence in self:
            sequence.rewound_to = None


class _TokenIds:
    """The ids (B, T) on the device. New tokens are collected on the host and written together.

    Args:
        prompt: (B, P).
        pad: The id in all columns that have not been written.
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
        """Fill a sequence with pad tokens from `column` on."""
        self.write()
        self._ids[index, column:].fill_(self.pad)

    def until(self, column: int) -> torch.Tensor:
        self._make_room(column)
        self.write()
        return self._ids[:, :column]

    def write(self) -> None:
        """Write the collected tokens to the device."""
        if not self._waiting:
            return
        self._make_room(max(column for _, column, _ in self._waiting) + 1)
        indices, columns, tokens = zip(*self._waiting, strict=True)
        first, count = columns[0], len(columns)
        if columns == tuple(range(first, first + count)) and len(set(indices)) == 1:
            self._ids[indices[0], first : first + count] = upload(tokens, self.device)
        else:
            rows, places, values = upload((*indices, *columns, *tokens), self.device).view(3, count)
            self._ids[rows, places] = values.to(self._ids.dtype)
        self._waiting.clear()

    def _make_room(self, length: int) -> None:
        if length > self._ids.shape[1]:
            self._ids = nn.functional.pad(self._ids, (0, length), value=self.pad)
