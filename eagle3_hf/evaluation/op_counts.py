"""Counts what a round runs: aten ops, and transfers between host and device, by phase.

The counts are exact and the same in every run, on any device. On an accelerator, where a small model's round takes as
long as launching its kernels does, they say more than a clock. They are taken with dispatch modes around real calls of
`generate`; decoding itself knows nothing of them.

- An *op* is a call of an aten operator that computes or copies. Left out are views, which launch nothing (operators
  whose schema says that they return one), and what `NO_WORK` names: views by another name, and allocations.
- A *read* makes the host wait for the device: `item` and what implies it (`int`, `bool`), `tolist`, `cpu`, copies to
  the host, and operators whose result has a size, or is a number, that the host must know (`nonzero`, `equal`, a mask
  as an index, and others in `READS`).
- A *write* moves data of the host to the device, and the host waits for it, too: tensors made from Python numbers or
  lists, lists as indices, copies to the device.
- An *upload* moves data to the device as well, but the host goes on at once (`decoding/transfers.py`).

On a CPU everything is on the host. Counted are then the calls that would be transfers if the model were on an
accelerator, except for comparisons of generator states (uint8), which are on the host everywhere. Counts of different
devices differ all the same, since an operator may be composed of others on one of them, and decoding itself takes
another way through some steps (the walk chooses for all nodes at once on an accelerator). `rms_norm`, which is one
kernel on accelerators, is counted as one op on a CPU as well.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..decoding.attachments import without_attachment
from ..decoding.loop import SpeculativeDecoding


# Views by another name, and allocations.
NO_WORK = frozenset(
    {
        "aten::_unsafe_view",
        "aten::_reshape_alias",
        "aten::lift_fresh",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
    }
)
# Operators after which the host knows a value or a size.
READS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::masked_select",
        "aten::repeat_interleave",
        "aten::_unique",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
    }
)
_HOST_CALLS = (torch.Tensor.tolist, torch.Tensor.cpu)
_FUSED = {torch.nn.functional.rms_norm: "aten::_fused_rms_norm"}

# Methods of the loop by phase. What a round runs besides belongs to `OTHER`, and the rest of a call to `OUTSIDE`.
PHASES = {"_prefill": "prefill", "_propose": "draft", "_verify": "verify", "_accept": "walk", "_commit": "commit"}
OTHER, OUTSIDE = "other", "outside"
ROUND_PHASES = ("draft", "verify", "walk", "commit", OTHER)


@dataclass
class PhaseCounts:
    """What ran in one phase.

    Attributes:
        ops: Calls by the name of the operator.
        reads: Transfers to the host by name.
        writes: Transfers to the device by name, for which the host waits.
        uploads: Transfers to the device by name, for which it does not wait.
    """

    ops: Counter[str] = field(default_factory=Counter)
    reads: Counter[str] = field(default_factory=Counter)
    writes: Counter[str] = field(default_factory=Counter)
    uploads: Counter[str] = field(default_factory=Counter)

    def totals(self) -> tuple[int, ...]:
        """Return the numbers of ops, reads, writes and uploads."""
        return self.ops.total(), self.reads.total(), self.writes.total(), self.uploads.total()


@dataclass
class OpCounts:
    """The counts of one call of `generate`.

    Attributes:
        phases: Phase -> its counts.
        rounds: Number of rounds; 0 for ordinary decoding.
        tokens: Number of new tokens.
    """

    phases: dict[str, PhaseCounts] = field(default_factory=dict)
    rounds: int = 0
    tokens: int = 0

    def phase(self, name: str) -> PhaseCounts:
        """Return the counts of a phase, which are zero if it did not run."""
        return self.phases.setdefault(name, PhaseCounts())

    def per_round(self, name: str) -> tuple[float, ...]:
        """Return ops, reads, writes and uploads of a phase per round."""
        return tuple(count / max(1, self.rounds) for count in self.phase(name).totals())


class _Ops(TorchDispatchMode):
    def __init__(self, add: Callable[[str, str], None], on_host: bool):
        super().__init__()
        self._add = add
        self._on_host = on_host

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if not (func.is_view or name in NO_WORK):
            self._add("ops", name)
        kind = self._transfer(name, args, kwargs or {})
        if kind is not None:
            self._add(kind, name)
        return func(*args, **(kwargs or {}))

    def _transfer(self, name: str, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Return "reads", "writes" or "uploads", or `None` if nothing moves between host and device."""
        if name in READS:
            is_state = name == "aten::equal" and args[0].dtype == torch.uint8
            return "reads" if self._counts(args[0]) and not is_state else None
        if name == "aten::lift_fresh":
            return "writes" if self._counts(args[0]) else None
        if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
            return "reads" if self._counts(args[0]) and _has_mask(args) else None
        if name == "aten::_to_copy":
            return _direction(args[0].device, kwargs.get("device"), kwargs.get("non_blocking", False))
        if name == "aten::copy_":
            return _direction(args[1].device, args[0].device, args[2] if len(args) > 2 else False)
        return None

    def _counts(self, tensor: torch.Tensor) -> bool:
        return self._on_host or tensor.device.type != "cpu"


def _has_mask(args: tuple) -> bool:
    """Whether an index is a mask whose number of true entries the host must know."""
    masks = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return masks and (len(args) < 3 or args[2].numel() > 1)  # a single value is filled in


def _direction(source: torch.device, device: torch.device | str | None, goes_on: bool) -> str | None:
    if device is None or torch.device(device).type == source.type:
        return None
    if source.type != "cpu":
        return "reads"
    return "uploads" if goes_on else "writes"


def _fills(tensor: torch.Tensor, index: Any, value: Any) -> bool:
    """Whether a number is assigned to a part of a tensor that is a view of it."""
    parts = index if isinstance(index, tuple) else (index,)
    return isinstance(value, int | float) and all(part is ... or isinstance(part, int | slice) for part in parts)


class _HostCalls(TorchFunctionMode):
    """Sees calls that are no operators if the tensor is on the host already, and calls that are fused elsewhere."""

    def __init__(self, add: Callable[[str, str], None]):
        super().__init__()
        self._add = add

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _HOST_CALLS:
            self._add("reads", func.__name__)
        elif func is torch.Tensor.to and (kwargs or {}).get("non_blocking"):
            self._add("uploads", func.__name__)
        elif func in _FUSED:
            self._add("ops", _FUSED[func])
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        elif func is torch.Tensor.__setitem__ and _fills(*args):
            # A CPU makes a tensor of the number first. An accelerator gets it with the launch.
            self._add("ops", "aten::fill_")
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(device: torch.device) -> Iterator[OpCounts]:
    """Count what this thread runs inside the block, by the phases of our decoding loop.

    Args:
        device: Where the target is.
    """
    counts, thread, phase = OpCounts(), threading.get_ident(), [OUTSIDE]

    def add(kind: str, name: str) -> None:
        getattr(counts.phase(phase[-1]), kind)[name] += 1

    def within(method: Callable, name: str) -> Callable:
        def counted(self, *args, **kwargs):
            if threading.get_ident() != thread:
                return method(self, *args, **kwargs)
            counts.rounds += name == OTHER
            phase.append(name)
            try:
                return method(self, *args, **kwargs)
            finally:
                phase.pop()

        return counted

    originals = {name: getattr(SpeculativeDecoding, name) for name in (*PHASES, "_round")}
    try:
        for name, method in originals.items():
            setattr(SpeculativeDecoding, name, within(method, PHASES.get(name, OTHER)))
        if device.type == "cpu":
            with _HostCalls(add), _Ops(add, on_host=True):
                yield counts
        else:
            with _Ops(add, on_host=False):
                yield counts
    finally:
        for name, method in originals.items():
            setattr(SpeculativeDecoding, name, method)


def count_generate(target, inputs: dict[str, torch.Tensor], seed: int = 0, draft=None, **options: Any) -> OpCounts:
    """Return the counts of one call of `generate`.

    What a first call does only once (such as the test of what a target can verify) is counted in the first call.

    Args:
        target: The target model.
        inputs: `input_ids` and `attention_mask` of one prompt.
        seed: Seed of the call.
        draft: The draft head; `None` for ordinary decoding.
        options: Further arguments of `generate`.
    """
    torch.manual_seed(seed)
    arguments = {**inputs, **options} | ({} if draft is None else {"assistant_model": draft})
    with without_attachment(target), counting(target.device) as counts:
        output = target.generate(**arguments)
    counts.tokens = output.shape[1] - inputs["input_ids"].shape[1]
    return counts


def plain_step(target, inputs: dict[str, torch.Tensor], seed: int = 0, **options: Any) -> tuple[float, ...]:
    """Return ops, reads, writes and uploads of a step of ordinary decoding: the difference of two calls.

    Args:
        target, inputs, seed, options: See `count_generate`; `max_new_tokens` is the longer length.

    Raises:
        ValueError: the text has a single token, so that there is no step behind the prefill.
    """
    long = count_generate(target, inputs, seed, **options)
    short = count_generate(target, inputs, seed, **{**options, "max_new_tokens": max(1, long.tokens // 2)})
    steps = long.tokens - short.tokens
    if steps < 1:
        raise ValueError(f"the text ends after {long.tokens} token(s): count with another prompt or more new tokens")
    totals = zip(long.phase(OUTSIDE).totals(), short.phase(OUTSIDE).totals(), strict=True)
    return tuple((more - less) / steps for more, less in totals)


def counts_table(target, draft, inputs: dict[str, torch.Tensor], seed: int = 0, **options: Any) -> str:
    """Return a Markdown table: ops and transfers of a round by phase, of the prefill, and of a plain step.

    Args:
        target, draft, inputs, seed, options: See `count_generate`.
    """
    count_generate(target, inputs, seed, draft, **options)  # what is done only once
    counts = count_generate(target, inputs, seed, draft, **options)
    plain = plain_step(target, inputs, seed, **options)
    rounds = [counts.per_round(name) for name in ROUND_PHASES]
    rows = dict(zip(ROUND_PHASES, rounds, strict=True))
    rows["whole round"] = tuple(sum(column) for column in zip(*rounds, strict=True))
    rows["plain step"] = plain
    per_round = (counts.tokens - 1) / max(1, counts.rounds)
    lines = [
        f"{counts.rounds} rounds, {per_round:.2f} tokens a round, on {target.device}",
        "| a round | ops | reads | writes | uploads |\n|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {' | '.join(f'{count:.1f}' for count in row)} |" for name, row in rows.items()]
    prefill = counts.phase("prefill").totals()
    lines.append(f"| prefill (once) | {' | '.join(f'{count:.1f}' for count in prefill)} |")
    return "\n".join(lines)
