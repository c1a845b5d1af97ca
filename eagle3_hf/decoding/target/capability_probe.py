"""The capability probe: finds what an unknown target can verify, by forwards over a few made-up tokens at first use.

Equal tokens prove little, since with ALiBi by cache slot a wrong tree often gives the right token. So logits are
compared: those of a tree of two branches with each path alone, and those of a chain, half of which is rejected, with
single steps. The steps are made as in plain decoding, with hooks and the model's own updates of its kwargs.
"""

import hashlib
import inspect
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import StaticLayer

from ...utils.logging import get_logger
from ..sequence import Batch
from ..tree import DraftTree
from .capability import TREE, Capability, VerifyMode, known_capability
from .compiled_code import uncompiled
from .custom_code import CustomCode, custom_code
from .hook_memory import Memory
from .recurrent_cache import has_states, state_difference
from .runner import CACHE_KEY, TargetRun


logger = get_logger(__name__)

_PROMPT = 6  # tokens
_BRANCH = 4  # nodes of each of the two branches below the root
_FILLING = 12  # other children of the root between the two, so that slots and positions are far apart
_LONGEST_WINDOW = 512  # the prompt is longer than windows up to this size
# Tolerance of rounding in any logit, relative to the largest.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
# In half precision the tolerance depends on the model. It is a multiple of the difference between two ways of plain
# decoding: the same tokens at once and one by one. The measure is the median over tokens of root mean squares, since a
# different choice of an expert changes a token's logits completely.
_HALF_FACTOR, _HALF_MOST = 3.0, 0.15
# Tolerance for recurrent states, relative to their norm: a lost state differs by much more, its logits may not.
_MOST_STATE = 0.1

# The largest tolerance if the family is known to verify trees, and only custom code in it is tested.
_HALF_MOST_KNOWN = 0.06

_MOST_VERDICTS = 64  # kept for a class; then the oldest is dropped


class _Verdicts:
    """Results for the targets of one class."""

    def __init__(self) -> None:
        self.capabilities: dict[Hashable, Capability] = {}
        # Names of values that custom code writes itself, which are therefore not part of its settings.
        self.written: dict[Hashable, frozenset[str]] = {}

    def settings(self, piece: CustomCode) -> tuple:
        return piece.identity, Memory(piece.code).settings(self.written.get(piece.identity, frozenset()))

    def keep(self, key: Hashable, capability: Capability) -> None:
        self.capabilities[key] = capability
        if len(self.capabilities) > _MOST_VERDICTS:
            del self.capabilities[next(iter(self.capabilities))]


_found: WeakKeyDictionary[type, _Verdicts] = WeakKeyDictionary()
_trials = threading.Lock()  # a hook that two threads call at once would seem to count its calls


def capability_of(
    target: PreTrainedModel, device: torch.device | None = None, cache: Any = None, batch_size: int = 1
) -> Capability:
    """Return what the target can verify: from its config, from an earlier probe, or from a probe now.

    If this is not a tree, a log line says why.

    Args:
        target: The target.
        device: Device of the inputs; by default the target's.
        cache: The cache of the call, which may restrict the result.
        batch_size: Number of sequences, for hooks that depend on it (such as a steering vector for each sequence).
    """
    capability, custom = known_capability(target), custom_code(target)
    if capability is None or (custom and capability.mode is not VerifyMode.PLAIN):
        with _trials:
            capability = _tried(target, device or target.device, batch_size if custom else 1, capability, custom)
    if capability.mode is VerifyMode.CHAIN and any(
        isinstance(layer, StaticLayer) for layer in getattr(cache, "layers", ())
    ):
        # Windows by slot would be measured from the end of a larger cache, and states could not be restored.
        capability = Capability(VerifyMode.PLAIN, f"{capability.reason}, and chains need a cache that grows")
    if capability.mode is VerifyMode.CHAIN:
        logger.warning_once(f"{capability.reason}: drafts are verified as chains, not as trees. The text is the same.")
    if capability.mode is VerifyMode.PLAIN:
        logger.warning_once(f"{capability.reason}: decoding goes on without the draft. The text is the same.")
    return capability


def _tried(
    target: PreTrainedModel,
    device: torch.device,
    batch_size: int,
    known: Capability | None,
    custom: Sequence[CustomCode],
) -> Capability:
    """Return the result of a probe, now or earlier, with the present custom code, whose memory is restored."""
    verdicts = _found.setdefault(type(target), _Verdicts())
    config = _key(target), batch_size
    key = config, *(verdicts.settings(piece) for piece in custom)
    if key in verdicts.capabilities:
        return verdicts.capabilities[key]
    memories = [Memory(piece.code) for piece in custom]
    try:
        capability = try_out(target, device, batch_size, known, custom)
    finally:
        counting = [piece.name for piece, memory in zip(custom, memories, strict=True) if memory.has_counted()]
        for piece, memory in zip(custom, memories, strict=True):
            before = verdicts.written.get(piece.identity, frozenset())
            verdicts.written[piece.identity] = before | memory.changed()
            memory.restore()
    if counting:
        capability = Capability(
            VerifyMode.PLAIN, f"{counting[0]} changes with each of its calls, and drafting calls it differently"
        )
    verdicts.keep((config, *(verdicts.settings(piece) for piece in custom)), capability)
    return capability


def _key(target: PreTrainedModel) -> str:
    config = target.config
    kinds = [config.get_text_config()._attn_implementation, str(target.dtype)]
    return hashlib.sha256("\n".join([config.to_json_string(use_diff=False), *kinds]).encode()).hexdigest()


def try_out(
    target: PreTrainedModel,
    device: torch.device,
    batch_size: int = 1,
    known: Capability | None = None,
    custom: Sequence[CustomCode] = (),
) -> Capability:
    """Probe a target.

    Args:
        target: The target.
        device: Device of the inputs.
        batch_size: Number of sequences.
        known: What the target can verify without custom code, if known, which is the most that it can with it.
        custom: Custom code, to be named in the reason.
    """
    name = " with ".join([type(target).__name__, *(piece.name for piece in custom[:1])])
    with _undisturbed(target):
        trial = _Trial(target, device, batch_size, _HALF_MOST if known is None else _HALF_MOST_KNOWN)
        if known is not None and known.mode is VerifyMode.CHAIN:
            why_no_tree = known.reason
        elif trial.restores:
            why_no_tree = f"{name} has recurrent or convolutional states, which follow one text only"
        elif not trial.takes_positions:
            why_no_tree = f"{name} takes no position_ids"
        else:
            fault = _fault(trial.tree)
            if fault is None:
                return TREE
            why_no_tree = f"{name} computes a tree otherwise than its paths ({fault})"
        fault = _fault(trial.chain)
        if fault is None:
            return Capability(VerifyMode.CHAIN, why_no_tree, trial.restores)
        return Capability(
            VerifyMode.PLAIN, f"{why_no_tree}, and several tokens at once otherwise than one by one ({fault})"
        )


def _fault(test) -> str | None:
    """Return what is wrong, for messages (a large difference, or an exception), or `None`."""
    try:
        return test()
    except Exception as error:  # any error of the model counts
        first_line = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {first_line}"[:200]


@contextmanager
def _undisturbed(target: PreTrainedModel) -> Iterator[None]:
    """Turn off dropout, gradients and compiled code inside the block; each module's mode is restored."""
    training = [module for module in target.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad(), uncompiled(target):
            yield
    finally:
        for module in training:
            module.training = True


class _Trial:
    """Forwards of a target over made-up ids, each with its own short cache.

    All sequences have the same ids; only hooks may treat them differently.

    Args:
        target: The target.
        device: Device of the inputs.
        batch_size: B.
        half_most: The largest tolerance in half precision.
    """

    def __init__(
        self, target: PreTrainedModel, device: torch.device, batch_size: int = 1, half_most: float = _HALF_MOST
    ):
        self._target: Any = target  # torch types attributes of a module as "Tensor or Module"
        self._device, self._batch_size, self._half_most = device, batch_size, half_most
        self._config = target.config.get_text_config()
        self._dtype = target.dtype  # some models give logits of half precision as float32
        self.restores = has_states(self._new_cache())
        self.takes_positions = "position_ids" in inspect.signature(target.forward).parameters
        ids = self._made_up_ids(self._prompt_length() + 1 + 2 * _BRANCH + _FILLING)
        own = len(ids) - 1 - 2 * _BRANCH - _FILLING
        self._prompt, (self._root, *rest) = ids[:own], ids[own:]
        self._left, self._filling, self._right = rest[:_BRANCH], rest[_BRANCH:-_BRANCH], rest[-_BRANCH:]

    def _prompt_length(self) -> int:
        sizes = [getattr(self._config, name, None) for name in ("sliding_window", "attention_window", "window_size")]
        windows = [size for size in sizes if isinstance(size, int) and size <= _LONGEST_WINDOW]
        return _PROMPT + max(windows, default=0)

    def _made_up_ids(self, count: int) -> list[int]:
        """Return ids of ordinary tokens: no placeholders of images, nor any other ids in the config."""
        configs = [vars(self._target.config), vars(self._config)]
        special = {value for fields in configs for name, value in fields.items() if "token" in name and _is_id(value)}
        ordinary = [token for token in range(self._config.vocab_size - 1, 0, -1) if token not in special]
        step = max(1, len(ordinary) // (count + 1))
        return [ordinary[step * i % len(ordinary)] for i in range(count)]

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._config)

    def tree(self) -> str | None:
        """Compare two branches in one forward with each path alone, the second of them step by step."""
        size, second = 1 + 2 * _BRANCH + _FILLING, 1 + _BRANCH + _FILLING
        parents = [-1, *range(_BRANCH), *[0] * _FILLING, 0, *range(second, size - 1)]
        tokens = self._ids([self._root, *self._left, *self._filling, *self._right])
        flat = DraftTree.chain(tokens)
        tree = DraftTree(tokens, self._ids(parents), flat.num_nodes, flat.scores, flat.log_probs)
        found = self._start(TREE)[0].verify(tree).logits[:, -size:]
        left, right = ([self._root, *branch] for branch in (self._left, self._right))
        fault = self._difference(found[:, second:], self._steps(right)[0][:, 1:], right)
        if fault is None and self._dtype in _ROUNDING:
            fault = self._difference(found[:, : 1 + _BRANCH], self._at_once(left), left)
        return fault

    def chain(self) -> str | None:
        """Compare chains, of which parts are rejected, with single steps."""
        text = [self._root, *self._left, *self._right]
        wrong = self._filling[:2]
        parts = [(text[:2] + wrong, 2), (text[2:4] + wrong, 2), (text[4:], len(text) - 4)]
        (found, cache), (steps, other) = self._in_parts(parts), self._steps(text)
        if self.restores:
            apart = state_difference(cache, other)
            if not apart <= _MOST_STATE:
                return f"states differ by {apart:.0%}"
        return self._difference(found, steps, text)

    def _difference(self, found: torch.Tensor, steps: torch.Tensor, path: list[int]) -> str | None:
        """Compare logits (B, n, V) of the last n tokens of a path with those of plain decoding."""
        at_once = None if self._dtype in _ROUNDING else self._at_once(path)[:, -steps.shape[1] :].flatten(0, 1)
        return _difference(self._dtype, found.flatten(0, 1), steps.flatten(0, 1), at_once, self._half_most)

    def _steps(self, path: list[int]) -> tuple[torch.Tensor, Any]:
        """Return logits (B, n, V) of plain decoding, with the model's own updates of kwargs, and the cache."""
        target, ids = self._target, self._ids(self._prompt)
        kwargs, logits = self._kwargs(ids, 1), []
        outputs = target._prefill(ids, GenerationConfig(), kwargs)
        for token in path:
            kwargs = target._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=False)
            ids = torch.cat([ids, self._ids([token])], dim=1)
            inputs = target.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs)
            outputs = target(**inputs, return_dict=True)
            logits.append(outputs.logits[:, -1:])
        return torch.cat(logits, dim=1), outputs[CACHE_KEY]

    def _in_parts(self, parts: Sequence[tuple[list[int], int]]) -> tuple[torch.Tensor, Any]:
        """Return logits (B, n, V) of the kept tokens of each part, from one forward per part, and the cache."""
        capability = Capability(VerifyMode.CHAIN, restores=self.restores)
        (run, batch), logits = self._start(capability), []
        for sequence in batch:
            for tokens, kept in parts:
                for token in tokens[:kept]:
                    sequence.append(token)
        for tokens, kept in parts:
            outputs = run.verify(DraftTree.chain(self._ids(tokens)))
            logits.append(outputs.logits[:, -len(tokens) :][:, :kept])
            run.keep([list(range(kept))] * self._batch_size, len(tokens), [end + kept for end in batch.cache_lens], 0)
        return torch.cat(logits, dim=1), run.cache

    def _at_once(self, path: list[int]) -> torch.Tensor:
        """Return logits (B, n, V) along one path after the prompt, from one forward with an empty cache."""
        ids, capability = self._ids([*self._prompt, *path]), Capability(VerifyMode.CHAIN, restores=self.restores)
        run = TargetRun(self._target, GenerationConfig(), self._kwargs(ids, len(path)), Batch(ids), capability)
        return run.prefill(ids).logits[:, -len(path) :]

    def _start(self, capability: Capability) -> tuple[TargetRun, Batch]:
        """Return a run after its prefill, and its sequences."""
        ids = self._ids(self._prompt)
        batch = Batch(ids)
        run = TargetRun(self._target, GenerationConfig(), self._kwargs(ids, 1), batch, capability)
        run.prefill(ids)
        return run, batch

    def _kwargs(self, ids: torch.Tensor, logits: int) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"use_cache": True, CACHE_KEY: self._new_cache()}
        if self.takes_positions:
            positions = getattr(self._target, "_prepare_position_ids_for_generation", _counted)
            position_ids = positions(ids, kwargs)
            kwargs["position_ids"] = position_ids.expand(*position_ids.shape[:-2], len(ids), -1)
        if self._target._supports_logits_to_keep():
            kwargs["logits_to_keep"] = logits
        return kwargs

    def _ids(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor([ids], device=self._device).repeat(self._batch_size, 1)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _counted(ids: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    return torch.arange(ids.shape[1], device=ids.device)[None]


def _difference(
    dtype: torch.dtype,
    found: torch.Tensor,
    right: torch.Tensor,
    other: torch.Tensor | None = None,
    half_most: float = _HALF_MOST,
) -> str | None:
    """Return the difference of logits (n, V), for messages, or `None` if rounding explains it.

    Args:
        dtype: Data type in which the target computes.
        found: The logits to test.
        right: Those of plain decoding.
        other: In half precision, those of plain decoding computed in another way.
        half_most: The largest tolerance in half precision, whatever `other` says.
    """
    found, right = _wide(found), _wide(right)
    if other is None:
        apart, scale = (found - right).abs().max().item(), right.abs().max().item()
        allowed, what = _ROUNDING[dtype] * scale, "the largest is"
    else:
        apart, scale = _typical(found - right), _typical(right - right.mean(-1, keepdim=True))
        rounding = _HALF_FACTOR * _typical(_wide(other) - right) + 4 * torch.finfo(dtype).eps * scale
        allowed, what = min(rounding, half_most * scale), "they vary by"
    if apart <= allowed:  # false for NaN
        return None
    return f"logits differ by {apart:.2g}, where {what} {scale:.2g}"


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Convert to float32 or wider. Not always to float64, which some devices (MPS) lack."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _typical(logits: torch.Tensor) -> float:
    """Return the median over tokens of the root mean square."""
    return logits.square().mean(-1).sqrt().median().item()
