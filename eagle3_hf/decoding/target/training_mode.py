"""A target whose forward draws random numbers, because it, or a part of it, is in training mode.

Plain decoding draws them for each token, while a verification runs several tokens at once, so the texts would differ.
A target in training mode that draws none (all dropouts are zero, as in most current language models) is supported.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..coupling import default_generator
from ..unsupported_call import UnsupportedCall


# Names of fields that only have an effect in training mode, such as `attention_dropout`, `resid_pdrop`, `layerdrop`
# and `jitter_noise`.
_RANDOM_WHILE_TRAINING = re.compile("drop|jitter|noise")


def check_training_mode(target: nn.Module) -> None:
    """Raise an `UnsupportedCall` that names the first part of `target` that is random in its present mode."""
    found = [
        (f"{name}.{field}".strip("."), value)
        for name, module in target.named_modules()
        if module.training
        for field, value in _random_fields(module)
    ]
    if found:
        (name, value), more = found[0], f" (and {len(found) - 1} more like it)" if found[1:] else ""
        raise UnsupportedCall(
            "training mode",
            f"{type(target).__name__} is in training mode with {name} = {value}{more}: its forward is random, so that "
            "tokens that are verified together would differ from ordinary decoding. Call target.eval() before "
            "generate, or set these to 0",
        )


def _random_fields(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield names and values of the fields that make the module's own code random in training mode."""
    for name, value in vars(module).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value > 0 and _RANDOM_WHILE_TRAINING.search(name):
            yield name, value
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        yield "p", module.p


@contextmanager
def no_random_numbers(target: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise a ValueError if the prefill inside the block, of a target in training mode, draws random numbers.

    This finds randomness that does not show in any field, such as a random choice of experts.
    """
    if not any(module.training for module in target.modules()):
        yield
        return
    generators = [default_generator(torch.device(kind)) for kind in {"cpu", str(device)}]
    before = [generator.get_state() for generator in generators]
    yield
    if not all(torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)):
        raise ValueError(
            f"{type(target).__name__} is in training mode, and its forward draws random numbers, so that tokens that "
            "are verified together would differ from ordinary decoding. Call target.eval() before generate"
        )
