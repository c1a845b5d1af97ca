"""The random numbers that vanilla sampling would use, known in advance.

`torch.multinomial(p, 1)` is an exponential race: it draws `e ~ Exponential(1)` of p's shape from the default generator
of p's device and returns `argmax(p / e)`. Plain sampling so consumes one such tensor per step, whatever the text.
`Noise` draws the coming ones on a copy of the generator, so that a draft may look at them (coupling by common random
numbers, Daliri et al., arXiv 2408.07978), and moves the real generator only when a token is chosen: after a stop, an
exception or an interrupt it stands where plain sampling would have left it.
"""

from collections import deque

import torch


class Noise:
    """
    The exponential noise of the coming sampling steps.

    Args:
        rows (`int`): batch rows B of the sampled probabilities.
        vocab_size (`int`): size V of the target's vocabulary.
        device (`torch.device` or `str`): where the probabilities live; its default generator is followed.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): of the probabilities.
    """

    def __init__(
        self, rows: int, vocab_size: int, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> None:
        self._shape = (rows, vocab_size)
        self._device = torch.device(device)
        self._dtype = dtype
        self._real = _default_generator(self._device)
        self._ahead = torch.Generator(self._real.device)
        # Drawn but not used yet: (noise, state of the generator behind it), the next step first.
        self._steps: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._left_at = self._start()

    @property
    def vocab_size(self) -> int:
        return self._shape[1]

    def fits(self, probs: torch.Tensor) -> bool:
        """Whether `probs` is of the shape and dtype that this noise was made for."""
        return tuple(probs.shape) == self._shape and probs.dtype == self._dtype

    def peek(self, step: int) -> torch.Tensor:
        """
        The noise `e` `(B, V)` of a step to come, 0 being the next one. The real generator does not move; the tensor is
        the one `choose` will use, so do not write to it.
        """
        self._drop_if_moved()
        return self._draw_up_to(step)

    def choose(self, probs: torch.Tensor) -> torch.Tensor:
        """
        What `torch.multinomial(probs, 1)` would return now, and the generator moves as it would.

        Args:
            probs (`torch.Tensor` of shape `(B, V)`): the probabilities after all processors.

        Returns:
            `torch.Tensor` of shape `(B,)`, int64.

        Raises:
            `ValueError`: shape or dtype is not the one this noise was made for.
            `RuntimeError`: torch.multinomial's own, for NaN, inf, negative or all-zero probabilities.
        """
        if not self.fits(probs):
            raise ValueError(
                f"this noise is for probabilities of shape {self._shape} in {self._dtype}, got {tuple(probs.shape)} "
                f"in {probs.dtype}; make a new `Noise` for them"
            )
        winners, valid = self.race(probs, self.peek(0))
        if not valid:
            return torch.multinomial(probs, 1).squeeze(-1)
        self.advance()
        return winners

    @staticmethod
    def race(probs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """
        The winners `(B,)` of `argmax(probs / noise)`, and whether they are certainly multinomial's.

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

    def advance(self) -> None:
        """The next step's noise has been used: the generator moves as plain sampling would have moved it."""
        self._draw_up_to(0)
        _, self._left_at = self._steps.popleft()
        self._real.set_state(self._left_at)

    def was_moved(self) -> bool:
        """Whether somebody else has drawn from the generator, or set it: what was known ahead is then forgotten."""
        return self._drop_if_moved()

    def _draw_up_to(self, step: int) -> torch.Tensor:
        while len(self._steps) <= step:
            noise = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            noise.exponential_(generator=self._ahead)
            self._steps.append((noise, self._ahead.get_state()))
        return self._steps[step][0]

    def _drop_if_moved(self) -> bool:
        moved = not torch.equal(self._real.get_state(), self._left_at)
        if moved:
            self._steps.clear()
            self._left_at = self._start()
        return moved

    def _start(self) -> torch.Tensor:
        state = self._real.get_state()
        self._ahead.set_state(state)
        return state


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator that sampling functions on `device` use when none is named."""
    if device.type == "cpu":
        return torch.default_generator
    backend = getattr(torch, device.type)
    if device.type == "mps":
        return backend._get_default_mps_generator()
    index = backend.current_device() if device.index is None else device.index
    return backend.default_generators[index]
