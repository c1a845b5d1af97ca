"""An answer on a terminal while it is written: accepted drafts in the colour of their source, tau and speed."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ..acceptance import SpeculationStats
from ..decoding.draft.mixture import BOTH, HEAD, LOOKUP
from ..decoding.draft.proposer import Proposer
from ..decoding.tree import DraftTree
from ..evaluation.watching import wrapped


COLOURS = {HEAD: "\033[32m", LOOKUP: "\033[36m", BOTH: "\033[33m"}
NAMES = {HEAD: "head", LOOKUP: "lookup", BOTH: "both"}
_OFF = "\033[0m"
_LONGEST_CHARACTER = 4  # tokens: more bytes without a character are none
# A model may write anything: control characters are shown, and do not reach the terminal.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SHOWN |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class LiveText(BaseStreamer):
    """A streamer that writes the tokens of one answer as text, round by round.

    Args:
        tokenizer: The target's tokenizer.
        out: Where the text is written.
        coloured: Whether accepted drafts have the colour of their source.
        status: Is called with tau and tokens per second after each round.
        clock: Returns seconds.

    Attributes:
        token_ids: The tokens so far, without the prompt.
        tau: Mean acceptance length so far; 0.0 before the first round.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        out: TextIO,
        coloured: bool,
        status: Callable[[float, float], None] | None = None,
        clock: Callable[[], float] = perf_counter,
    ):
        self.token_ids: list[int] = []
        self._tokenizer, self._out, self._coloured = tokenizer, out, coloured
        self._status, self._clock = status, clock
        self._prompt_seen = False
        self._waiting: list[int] = []  # tokens of the round that is under way
        self._sources: list[int] = []  # of its accepted drafts
        self._shown_from = self._shown_to = 0  # the tokens whose text was written last
        self._rounds = self._emitted = 0
        self._start: float | None = None

    def watching(self) -> AbstractContextManager[None]:
        """Return a context in which the sources of accepted drafts of this thread's call are known."""

        def count(
            original: Callable,
            proposer: Proposer,
            stats: SpeculationStats,
            paths: dict[int, list[int]],
            tree: DraftTree,
        ) -> None:
            self._sources = proposer.sources(0, paths.get(0, []))
            original(proposer, stats, paths, tree)

        return wrapped(Proposer, "count", count)

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then one token after the other."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        tokens = value.flatten().tolist()
        if self._start is None:  # the first token, which the prefill gives
            self._start = self._clock()
            self._write(tokens, [])
        else:
            self._waiting += tokens

    def end_round(self, accepted: int) -> None:
        """Write the tokens of a round: its accepted drafts, and the target's own token behind them."""
        self._rounds += 1
        self._emitted += accepted + 1
        self._flush()
        if self._status is not None:
            self._status(self.tau, self.tokens_per_second)

    def end(self) -> None:
        """Write what is left, also half a character."""
        self._flush()
        self._write_text(self._text_behind(complete=False), None)

    @property
    def tau(self) -> float:
        return self._emitted / self._rounds if self._rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since the first one; 0.0 before the second one."""
        seconds = 0.0 if self._start is None else self._clock() - self._start
        return (len(self.token_ids) - 1) / seconds if seconds > 0 and len(self.token_ids) > 1 else 0.0

    def _flush(self) -> None:
        waiting, sources = self._waiting, self._sources
        self._waiting, self._sources = [], []
        self._write(waiting, sources)

    def _write(self, tokens: Sequence[int], sources: Sequence[int]) -> None:
        for place, token in enumerate(tokens):
            self.token_ids.append(token)
            self._write_text(self._text_behind(complete=True), sources[place] if place < len(sources) else None)
        self._out.flush()

    def _text_behind(self, complete: bool) -> str:
        """Return the text of the tokens that has not been written; with `complete`, none that ends inside a character.

        A few tokens before are decoded too, since the text of a token may depend on the one before.
        """
        before = self._decode(self.token_ids[self._shown_from : self._shown_to])
        after = self._decode(self.token_ids[self._shown_from :])
        is_half = after.endswith("\ufffd") and len(self.token_ids) - self._shown_to < _LONGEST_CHARACTER
        if len(after) <= len(before) or (complete and is_half):
            return ""
        self._shown_from, self._shown_to = self._shown_to, len(self.token_ids)
        return after[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _write_text(self, text: str, source: int | None) -> None:
        text = text.translate(_SHOWN)
        if text and source is not None and self._coloured:
            text = f"{COLOURS[source]}{text}{_OFF}"
        self._out.write(text)


class StatusLine:
    """The last line of a terminal, which stays where it is while text scrolls above it; a context manager.

    Args:
        out: The terminal.
        size: Returns its columns and lines.
    """

    def __init__(self, out: TextIO, size: Callable[[], Any] = shutil.get_terminal_size):
        self._out, self._size = out, size
        self._lines = 0

    def __enter__(self) -> "StatusLine":
        self._out.write("\n\033[1A")  # a cursor in the last line moves up
        self._reserve(self._size()[1])
        return self

    def show(self, text: str) -> None:
        """Write a text, cut to the width of the terminal, into the line."""
        columns, lines = self._size()
        if lines != self._lines:
            self._reserve(lines)
        self._out.write(f"\0337\033[{lines};1H\033[2K\033[7m{text[:columns]}{_OFF}\0338")
        self._out.flush()

    def __exit__(self, *error: Any) -> None:
        self._out.write(f"\0337\033[r\033[{self._lines};1H\033[2K\0338")
        self._out.flush()

    def _reserve(self, lines: int) -> None:
        """Let only the lines above the last one scroll."""
        self._out.write(f"\0337\033[1;{max(1, lines - 1)}r\0338")
        self._lines = lines


def legend(coloured: bool) -> str:
    """Return which colour stands for which source of accepted drafts; nothing without colours."""
    return ", ".join(f"{COLOURS[each]}{NAMES[each]}{_OFF}" for each in NAMES) if coloured else ""


__all__ = ["COLOURS", "LiveText", "StatusLine", "legend"]
