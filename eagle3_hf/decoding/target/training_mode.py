"""A target whose forward draws random numbers, because it, or a part of it, is in training mode.

Plain decoding draws them anew for each token, and a verification runs several tokens at once: the texts would differ.
A target in training mode that draws nothing (all dropouts zero, as in most language models of today) is as good as
any.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..coupling import _default_generator


# Numbers of modules that only count while training: `attention_dropout`, `resid_pdrop`, `layerdrop`, `jitter_noise`.
_RANDOM_WHILE_TRAINING = re.compile("drop|jitter|noise")


def check_training_mode(target: nn.Module) -> None:
    """Raise a ValueError that names the first part of `target` that is random in its present mode."""
    found = [
        (f"{name}.{field}".strip("."), value)
        for name, module in target.named_modules()
        if module.training
        for field, value in _random_fields(module)
    ]
    if found:
        (name, value), more = found[0], f" (and {len(found) - 1} more like it)" if found[1:] else ""
        raise ValueError(
            f"{type(target).__name__} is in training mode with {name} = {value}{more}: its forward is random, so that "
            "several tokens verified at once are not what they are one by one. Call target.eval() before generate, or "
            "set these to 0"
        )


def _random_fields(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Names and values of what makes the module's own code random while training."""
    for name, value in vars(module).items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and value > 0 and _RANDOM_WHILE_TRAINING.search(name):
            yield name, value
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        yield "p", module.p


@contextmanager
def no_random_numbers(target: nn.Module, device: torch.device) -> Iterator[None]:
    """Raise a ValueError if the block, the prefill of a target in training mode, has drawn random numbers.

    For what no field gives away, such as experts that are drawn while training.
    """
    if not any(module.training for module in target.modules()):
        yield
        return
    generators = [_default_generator(torch.device(kind)) for kind in {"cpu", str(device)}]
    before = [generator.get_state() for generator in generators]
    yield
    if not all(torch.equal(generator.get_state(), state) for generator, state in zip(generators, before, strict=True)):
        raise ValueError(
            f"{type(target).__name__} is in training mode, and its forward draws random numbers, so that several "
            "tokens verified at once are not what they are one by one. Call target.eval() before generate"
        )
