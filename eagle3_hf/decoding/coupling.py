"""The random numbers that plain sampling would use, known in advance.

`torch.multinomial(p, 1)` is an exponential race. It draws `e ~ Exponential(1)` of p's shape from the default generator
of p's device and returns `argmax(p / e)`. So plain sampling consumes one such tensor per step, whatever the text.
`Noise` draws the coming ones from a copy of the generator, so that the draft can use them (coupling by common random
numbers, Daliri et al., arXiv 2408.07978). The real generator moves only when a token is chosen: after a stop, an
exception or an interrupt it has the state in which plain sampling would have left it.

Other threads may draw from the same generator at any time. A single draw of torch is atomic, but peeking at a copy and
then moving the original are two operations. So the noise of a step is only an expectation until the real generator has
moved over it by a draw. The state after that draw tells whether another thread has drawn in between. If so, the noise
is replaced, and from then on the coming steps are drawn from the real generator before they are needed: no other
thread gets these numbers, and when several threads share a generator, none of them has reproducible results anyway.
"""

import math
import threading
from collections.abc import Sequence
from functools import cache

import torch


class Noise:
    """The exponential noise of the coming sampling steps.

    Args:
        batch_size: B of the sampled probabilities.
        vocab_size: Size V of the target's vocabulary.
        device: Device of the probabilities, whose default generator is used.
        dtype: Data type of the probabilities.
    """

    def __init__(
        self, batch_size: int, vocab_size: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self._shape = (batch_size, vocab_size)
        self._device = torch.device(device)
        self._dtype = dtype
        self._real = default_generator(self._device)
        self._ahead = torch.Generator(self._real.device)
        # Drawn but not used yet: (noise, state of the generator after it), the next step first.
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_claimed = False  # the real generator has moved over the next step's noise
        self._draws_ahead = False  # other threads draw as well, so `_steps` are drawn from the real generator
        self._was_dropped = False  # noise that was peeked at has been replaced since the last report
        self._left_at = self._start()

    @property
    def vocab_size(self) -> int:
        return self._shape[1]

    def fits(self, probs: torch.Tensor) -> bool:
        """Return whether `probs` has the shape and dtype of this noise."""
        return tuple(probs.shape) == self._shape and probs.dtype == self._dtype

    def peek(self, step: int) -> torch.Tensor:
        """Return the noise `e` (B, V) of a coming step, where 0 is the next one.

        The real generator does not move. The step will use the same tensor, so do not write to it.
        """
        return self.peek_at([step])[0]

    def peek_at(self, steps: Sequence[int]) -> list[torch.Tensor]:
        """Return the noise (B, V) of each of some coming steps (see `peek`), all from one state of the generator."""
        self._drop_if_moved()
        return [self._draw_up_to(step) for step in steps]

    @staticmethod
    def race(probs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the winners (B,) of `argmax(probs / noise)`, and whether they are surely those of multinomial.

        A winner is positive and finite unless the probabilities are invalid (argmax takes NaN for the greatest value).
        Negative probabilities, which never win, are tested separately. If the result is not sure, call `check`.
        """
        race = probs / noise
        winners = race.argmax(dim=-1, keepdim=True)
        best = race.gather(-1, winners)
        valid = bool(((best > 0) & (best < torch.inf)).all() & (probs.min() >= 0))
        return winners.squeeze(-1), valid

    def check(self, probs: torch.Tensor) -> None:
        """Let `torch.multinomial` raise its error for invalid probabilities (n, V). No generator in use moves."""
        torch.multinomial(probs, 1, generator=torch.Generator(self._real.device))

    def claim(self) -> bool:
        """Move the generator over the next step's noise, as plain sampling does, so that no other thread draws it.

        Returns:
            Whether that noise is what `peek(0)` returned before. If not, another thread has drawn it: choose again,
            with what `peek(0)` returns now.
        """
        self._was_dropped = False
        return self._draws_ahead or self._is_claimed or self._move()

    def advance(self) -> bool:
        """Drop the noise of the next step, once all sequences have used it.

        Returns:
            Whether the noise was the same for all sequences, and no other thread has drawn it. If not, nothing is
            advanced, and all choices from this step on must be made again.
        """
        if self._was_dropped:
            self._draw_ahead()
            return False
        self._draw_up_to(0)
        if not self.claim():
            return False
        del self._steps[0]
        self._is_claimed = False
        return True

    def was_moved(self) -> bool:
        """Return whether other code has moved the generator; the noise of coming steps is then dropped."""
        self._drop_if_moved()
        moved, self._was_dropped = self._was_dropped, False
        return moved

    def _draw_up_to(self, step: int) -> torch.Tensor:
        generator = self._real if self._draws_ahead else self._ahead
        while len(self._steps) <= step:
            noise = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            noise.exponential_(generator=generator)
            self._steps.append((noise, generator.get_state()))
        return self._steps[step][0]

    def _move(self) -> bool:
        """Move the generator over the next step's noise; return whether it was still in the state before it."""
        behind = self._steps[0][1]
        if threading.active_count() == 1:  # so that no other thread can draw between the next two lines
            is_ours = self._stands_at(self._left_at)
            if is_ours:
                self._real.set_state(behind)
        else:
            _pass_over(self._real, self._shape, self._dtype)
            is_ours = self._stands_at(behind)
        if is_ours:
            self._left_at, self._is_claimed = behind, True
        else:
            self._draw_ahead()
        return is_ours

    def _draw_ahead(self) -> None:
        self._steps.clear()
        self._draws_ahead, self._was_dropped = True, False

    def _drop_if_moved(self) -> None:
        if not self._draws_ahead and not self._stands_at(self._left_at):
            self._was_dropped = True
            del self._steps[int(self._is_claimed) :]
            self._left_at = self._start()

    def _stands_at(self, state: torch.Tensor) -> bool:
        return torch.equal(self._real.get_state(), state)

    def _start(self) -> torch.Tensor:
        state = self._real.get_state()
        self._ahead.set_state(state)
        return state


def _pass_over(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Draw as many numbers as noise of this shape takes, in one atomic operation."""
    if generator.device.type == "cpu" and _is_one_integer_each(dtype):
        torch.empty(math.prod(shape), dtype=torch.int64).random_(generator=generator)
    else:
        torch.empty(shape, dtype=dtype, device=generator.device).exponential_(generator=generator)


@cache
def _is_one_integer_each(dtype: torch.dtype) -> bool:
    """Return whether an exponential moves a CPU generator as far as an int64 does, which is much faster to draw.

    Builds of torch differ in this: some seed another generator instead.
    """
    noise, integers = torch.Generator(), torch.Generator()
    torch.empty(40, dtype=dtype).exponential_(generator=noise)
    torch.empty(40, dtype=torch.int64).random_(generator=integers)
    return torch.equal(noise.get_state(), integers.get_state())


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that sampling functions on `device` use by default."""
    if device.type == "cpu":
        return torch.default_generator
    backend = getattr(torch, device.type)
    if device.type == "mps":
        return backend._get_default_mps_generator()
    index = backend.current_device() if device.index is None else device.index
    return backend.default_generators[index]
