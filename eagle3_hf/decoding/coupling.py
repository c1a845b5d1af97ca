"""The random numbers that vanilla sampling would use, known in advance.

`torch.multinomial(p, 1)` is an exponential race: it draws `e ~ Exponential(1)` of p's shape from the default generator
of p's device and returns `argmax(p / e)`. Plain sampling so consumes one such tensor per step, whatever the text.
`Noise` draws the coming ones on a copy of the generator, so that a draft may look at them (coupling by common random
numbers, Daliri et al., arXiv 2408.07978), and moves the real generator only when a token is chosen: after a stop, an
exception or an interrupt it stands where plain sampling would have left it.

Other threads may draw from the same generator at any time. Each draw of torch is atomic, but looking at a copy and
moving the original are two acts. So noise that was looked at is only expected until the generator has moved over it by
a draw of its own; where the generator then stands tells whether somebody else has drawn in between. Whoever finds that
out uses other noise, and from then on draws the coming steps from the generator itself, before they are needed: these
numbers are nobody else's, and a state that several threads move is reproducible for none of them anyway.
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
        device: Where the probabilities live; its default generator is followed.
        dtype: Of the probabilities.
    """

    def __init__(
        self, batch_size: int, vocab_size: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self._shape = (batch_size, vocab_size)
        self._device = torch.device(device)
        self._dtype = dtype
        self._real = _default_generator(self._device)
        self._ahead = torch.Generator(self._real.device)
        # Drawn but not used yet: (noise, state of the generator behind it), the next step first.
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_claimed = False  # the next step's noise is ours: the generator has moved over it
        self._draws_ahead = False  # other threads draw as well: `_steps` come from the real generator, all are ours
        self._was_dropped = False  # noise that was looked at has been replaced since somebody was last told
        self._left_at = self._start()

    @property
    def vocab_size(self) -> int:
        return self._shape[1]

    def fits(self, probs: torch.Tensor) -> bool:
        """Whether `probs` is of the shape and dtype that this noise was made for."""
        return tuple(probs.shape) == self._shape and probs.dtype == self._dtype

    def peek(self, step: int) -> torch.Tensor:
        """The noise `e` `(B, V)` of a step to come, 0 being the next one. The real generator does not move; the tensor
        is the one that the step will use, so do not write to it.
        """
        return self.peek_at([step])[0]

    def peek_at(self, steps: Sequence[int]) -> list[torch.Tensor]:
        """The noise `(B, V)` of each of some steps to come (see `peek`), all from one state of the generator."""
        self._drop_if_moved()
        return [self._draw_up_to(step) for step in steps]

    @staticmethod
    def race(probs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The winners `(B,)` of `argmax(probs / noise)`, and whether they are certainly multinomial's.

        A winner is positive and finite unless the probabilities are invalid (argmax takes NaN for the greatest), save
        for negative ones, which never win: multinomial itself must then say what is wrong, or that all is well.
        """
        race = probs / noise
        winners = race.argmax(dim=-1, keepdim=True)
        best = race.gather(-1, winners)
        valid = bool(((best > 0) & (best < torch.inf)).all() & (probs.min() >= 0))
        return winners.squeeze(-1), valid

    def check(self, probs: torch.Tensor) -> None:
        """Let multinomial itself refuse probabilities `(n, V)` that it cannot draw from; no generator in use moves."""
        torch.multinomial(probs, 1, generator=torch.Generator(self._real.device))

    def claim(self) -> bool:
        """Move the generator over the next step's noise, as plain sampling would move it, so that nobody else gets it.

        Returns:
            Whether that noise is what `peek(0)` gave before. If not, another thread was first: choose with
            what `peek(0)` gives now.
        """
        self._was_dropped = False
        return self._draws_ahead or self._is_claimed or self._move()

    def advance(self) -> bool:
        """The next step's noise has been used, for some sequences perhaps before others.

        Returns:
            Whether it was the same for all of them and nobody else's. If not, other threads have drawn since:
            the step is still to come, and every choice from it on must be made again.
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
        """Whether somebody else has drawn from the generator, or set it: what was known ahead is then forgotten."""
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
        """Move the generator behind the next step's noise, or find that it has left the place before it."""
        behind = self._steps[0][1]
        if threading.active_count() == 1:  # and no other thread can begin before this one goes on
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
    """Draw, in one atomic act, as many numbers as noise of this shape takes."""
    if generator.device.type == "cpu" and _is_one_integer_each(dtype):
        torch.empty(math.prod(shape), dtype=torch.int64).random_(generator=generator)
    else:
        torch.empty(shape, dtype=dtype, device=generator.device).exponential_(generator=generator)


@cache
def _is_one_integer_each(dtype: torch.dtype) -> bool:
    """Whether an exponential takes as much of a CPU generator as an int64 does, and so a fraction of the time.

    Builds of torch differ: some seed another generator instead.
    """
    noise, integers = torch.Generator(), torch.Generator()
    torch.empty(40, dtype=dtype).exponential_(generator=noise)
    torch.empty(40, dtype=torch.int64).random_(generator=integers)
    return torch.equal(noise.get_state(), integers.get_state())


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator that sampling functions on `device` use when none is named."""
    if device.type == "cpu":
        return torch.default_generator
    backend = getattr(torch, device.type)
    if device.type == "mps":
        return backend._get_default_mps_generator()
    index = backend.current_device() if device.index is None else device.index
    return backend.default_generators[index]
