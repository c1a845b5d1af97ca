"""Draft heads for the tiny targets whose guesses are good, but not perfect: trees that accept and reject everywhere.

A new head accepts next to nothing, and one trained on a random target learns little that holds for another prompt. So
the tests' head is told the text that plain `generate` wrote, and at each level it favours the right token sometimes
above all others, sometimes as one of a few, sometimes not at all; with half a vocabulary, half of the tokens it cannot
say. Everything else is the real head: its layer, its cache, its growth, its vocabulary.

Besides: `observe` and `assert_same`, for all that a caller of `generate` can see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.acceptance import SpeculationStats
from eagle3_hf.decoding.target.runner import CACHE_KEY
from support.families import VOCAB_SIZE, prompt, tiny
from support.plain_runs import once, share


LAYERS = 4
NEW_TOKENS = 18
SAMPLED = {"do_sample": True, "top_k": 0, "temperature": 0.9}
MODES = pytest.mark.parametrize("mode", [{}, SAMPLED], ids=["greedy", "sampled"])
# Full layers, windows, both, and eager attention with sinks.
FOUR = pytest.mark.parametrize("family", ["llama", "mistral_sw", "gemma3", "gpt_oss"])
# Share of the levels at which the right token is the favourite, and of the rest at which it is one of the better few.
FAVOURITE, AMONG_FEW = 0.7, 0.7
TREES = {"paper": (59, 8, 10), "cpu": (15, 4, 4), "chain": (5, 5, 1)}


class ForetellingDraft(Eagle3DraftModel):
    """A head that is told the continuations (see the module); `foretell` before each call of `generate`.

    Rows of a batch get ahead of each other, and nobody tells a head how far each of them is. But the root of a row's
    tree follows the row's newest output, and what that was fed at says the place.
    """

    _continuations: list[list[int]] = []
    _is_prefix = False

    def foretell(
        self, continuation: Sequence | torch.Tensor, seed: int = 0, favourite: float = FAVOURITE
    ) -> "ForetellingDraft":
        """Set the text to favour, the first token behind the prompt first. The default generator is left alone.

        Args:
            continuation: of one row, or of each row of a batch.
            favourite: share of the levels at which the right token ranks first; 1.0 foretells everything.
        """
        told = torch.as_tensor(continuation)
        self._continuations = told.reshape(-1, told.shape[-1]).tolist() if told.numel() else []
        self._favourite = favourite
        self._chance = torch.Generator().manual_seed(seed)
        self._fed: tuple = ()  # outputs and positions of what was fed in this round
        self._is_prefix = False
        self._roots: list[tuple[torch.Tensor, int]] = []  # each row's newest output, and its position
        self._first: list[int] = []
        self._level = 0
        self.places_seen: list[list[int]] = []  # of each round, the place in the text at which each row stood
        return self

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        self._is_prefix, self._level = True, 0  # called once a round, before all passes
        return super().fuse(features)

    def run_layers(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, *args, **kwargs):
        output = super().run_layers(hidden, embeds, positions, *args, **kwargs)
        if self._is_prefix:
            self._fed, self._is_prefix = (output, positions.expand(output.shape[:2])), False
        return output

    def compute_logits(self, hidden: torch.Tensor, borrowed: Any = None) -> torch.Tensor:
        logits = super().compute_logits(hidden, borrowed)
        if self._continuations:
            if self._level == 0:
                self._find_roots(hidden)
            for row, (_, position) in enumerate(self._roots):
                self._guess(row, position - self._first[row] + 1 + self._level, logits[row])
            self._level += 1
        return logits

    def _find_roots(self, hidden: torch.Tensor) -> None:
        found = []
        for row in range(hidden.shape[0]):
            newest = hidden[row, 0]
            at = (self._fed[0][row] == newest).all(-1).nonzero().flatten().tolist()
            if at:
                found.append((newest.clone(), int(self._fed[1][row, at[-1]])))
            else:
                assert torch.equal(newest, self._roots[row][0]), "a row's root follows its newest output"
                found.append(self._roots[row])
        self._roots = found
        self._first = self._first or [position for _, position in found]
        self.places_seen.append([at - first for (_, at), first in zip(found, self._first, strict=True)])

    def _guess(self, row: int, place: int, logits: torch.Tensor) -> None:
        """Change the logits (R, D) of the token at a place of a row's text."""
        if place >= len(self._continuations[row]):
            return
        at = (self.draft_vocab_ids() == self._continuations[row][place]).nonzero().flatten()
        fate, rank = torch.rand(2, generator=self._chance).tolist()
        if fate < self._favourite:
            logits[..., at] = logits.amax(-1, keepdim=True) + 8.0
        elif rank < AMONG_FEW:
            logits[..., at] = logits.topk(2 + int(4 * rank), dim=-1).values[..., -1:]


def half_vocabulary() -> list[int]:
    """Every other token, the pad token included."""
    return list(range(0, VOCAB_SIZE, 2))


@cache
def target_of(family: str, **overrides) -> PreTrainedModel:
    """The tiny target of a family, one for the whole session: tests leave it as they found it."""
    return share(tiny(family, num_hidden_layers=LAYERS, **overrides))


@cache
def draft_of(family: str, half: bool = True) -> ForetellingDraft:
    """The foretelling head of `target_of(family)` with half a vocabulary or all of it, one for the whole session."""
    return new_draft(target_of(family), half)


def new_draft(target: PreTrainedModel, half: bool = True, **overrides) -> ForetellingDraft:
    """A foretelling head, the same weights every time; the generator's state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        vocabulary = half_vocabulary() if half else None
        return ForetellingDraft.from_target(target, draft_vocab=vocabulary, **overrides).eval()


def set_tree(draft: Eagle3DraftModel, tree: str | tuple[int, int, int]) -> Eagle3DraftModel:
    """Set nodes, depth and children, by numbers or by a name of `TREES`."""
    nodes, depth, top_k = TREES[tree] if isinstance(tree, str) else tree
    draft.generation_config.num_assistant_tokens = nodes
    draft.generation_config.assistant_tree_depth = depth
    draft.generation_config.assistant_tree_top_k = top_k
    return draft


def total(stats: Sequence[SpeculationStats]) -> SpeculationStats:
    """The sum of several calls' counters."""
    whole = SpeculationStats(rounds=sum(s.rounds for s in stats), emitted=sum(s.emitted for s in stats))
    for name in ("reached", "accepted"):
        columns = [getattr(s, name) for s in stats]
        deepest = max(map(len, columns), default=0)
        setattr(whole, name, [sum(c[d] for c in columns if d < len(c)) for d in range(deepest)])
    return whole


class Recorder(BaseStreamer):
    """A streamer that writes down what it gets, and raises at a given call if told to."""

    def __init__(self, raise_at: int | None = None, error: type[BaseException] = ValueError):
        self.calls: list[Any] = []
        self._raise_at, self._error = raise_at, error

    def put(self, value: torch.Tensor) -> None:
        self.calls.append((tuple(value.shape), value.flatten().tolist()))
        if len(self.calls) == self._raise_at:
            raise self._error("raised by the streamer")

    def end(self) -> None:
        self.calls.append("end")


@dataclass
class Observed:
    """Everything that a caller of `generate` can see of a call."""

    out: Any
    streamed: list[Any]
    generator: torch.Tensor

    @property
    def ids(self) -> list[int]:
        return self.out.sequences[0].tolist()

    @property
    def told(self) -> torch.Tensor:
        """(B, n) the new tokens."""
        return self.out.sequences[:, -len(self.streamed[1:-1]) :]


def observe(
    target: PreTrainedModel, inputs: Any, seed: int = 0, make: Callable[[], dict] = dict, **kwargs
) -> Observed:
    """One call of `generate` from a seed, with all that it can return. Plain ones are remembered (see `plain_runs`).

    Args:
        inputs: ids, or keyword arguments in their place.
        make: gives arguments that keep a state, such as processors, new for each call.
    """
    inputs = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    everything = dict.fromkeys(("output_scores", "output_logits", "output_hidden_states"), True)
    arguments = {**inputs, "return_dict_in_generate": True, **everything, **make(), **kwargs}

    def run() -> Observed:
        streamer = Recorder()
        torch.manual_seed(seed)
        out = target.generate(**{"streamer": streamer, **arguments})
        return Observed(out, streamer.calls, torch.get_rng_state())

    return once(target, arguments, seed, run)


def assert_same(ours: Observed, vanilla: Observed, tolerance: float = 1e-5) -> None:
    """Nothing that a caller can see tells the two calls apart, up to rounding (relative to the largest value)."""
    assert ours.out.sequences.tolist() == vanilla.out.sequences.tolist()
    assert ours.streamed == vanilla.streamed
    assert torch.equal(ours.generator, vanilla.generator), "the generator was left elsewhere"
    assert list(ours.out.keys()) == list(vanilla.out.keys())
    assert len(ours.out.to_tuple()) == len(vanilla.out.to_tuple())
    for name in ("scores", "logits"):
        mine, theirs = getattr(ours.out, name), getattr(vanilla.out, name)
        assert (mine is None) == (theirs is None), name
        assert_close(mine or (), theirs or (), tolerance)
    for name in ("hidden_states", "attentions"):
        mine, theirs = getattr(ours.out, name), getattr(vanilla.out, name)
        assert (mine is None) == (theirs is None), name
        assert len(mine or ()) == len(theirs or ()), name
        for my_token, their_token in zip(mine or (), theirs or (), strict=True):
            assert_close(my_token, their_token, tolerance)
    assert_same_cache(cache_of(ours.out), cache_of(vanilla.out), tolerance)


def cache_of(out: Any) -> Any:
    return getattr(out, CACHE_KEY)


def assert_same_cache(mine: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    """Two caches hold the same entries and states in layers of the same classes, lengths and flags."""
    assert [type(layer) for layer in mine.layers] == [type(layer) for layer in theirs.layers]
    for my_layer, their_layer in zip(mine.layers, theirs.layers, strict=True):
        assert_close(tensors_of(my_layer), tensors_of(their_layer), tolerance)
        for name in ("record_past", "cumulative_length", "cumulative_length_int", "sliding_window", *STATE_FLAGS):
            assert getattr(my_layer, name, None) == getattr(their_layer, name, None), name


STATE_FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")


def tensors_of(layer: Any) -> list[torch.Tensor]:
    """Everything that a cache layer holds."""
    parts = [getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")]
    flat = [piece for part in parts for piece in (part.values() if isinstance(part, dict) else [part])]
    return [piece for piece in flat if piece is not None]


def assert_close(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float) -> None:
    """Each tensor is the other's up to rounding, relative to its own largest value (but to no less than 1)."""
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
    if _all_close(mine, theirs, tolerance):
        return
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=_allowed(other[None], tolerance).item())


def _all_close(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float) -> bool:
    """The same at once for tensors of one kind, which is much faster than `torch.testing` for each; says nothing."""
    kinds: dict[Any, list[int]] = {}
    for i, other in enumerate(theirs):
        kinds.setdefault((other.shape, other.dtype, other.device), []).append(i)
    for places in kinds.values():
        ones, others = (torch.stack([side[i] for i in places]) for side in (mine, theirs))
        allowed = _allowed(others, tolerance).view(-1, *[1] * (others.dim() - 1))
        if not ((ones == others) | ((ones - others).abs() <= allowed)).all():
            return False
    return True


def _allowed(stacked: torch.Tensor, tolerance: float) -> torch.Tensor:
    """(n,) how far from each of n stacked tensors another may be."""
    step = max(tolerance, 2 * torch.finfo(stacked.dtype).eps)
    finite = torch.where(stacked.isfinite(), stacked, 0).abs().flatten(1)
    largest = finite.amax(1) if finite.shape[1] else finite.sum(1)
    return step * largest.double().clamp(min=1.0)


def assert_same_as_plain(target, draft, inputs, make=dict, seed: int = 0, accepts: bool = True, **kwargs):
    """A call with and without the draft, and the two must look the same; returns the draft's result and vanilla's.

    Args:
        accepts: whether the text is long enough for some draft to be accepted.
    """
    kwargs = {"max_new_tokens": NEW_TOKENS, **kwargs}
    vanilla = observe(target, inputs, seed, make, **kwargs)
    ours = observe(target, inputs, seed, make, assistant_model=draft.foretell(vanilla.told, seed), **kwargs)
    assert_same(ours, vanilla)
    assert ours.out.speculation.accepted or not accepts, "nothing was accepted, so little was tested"
    return ours, vanilla


def padded(lengths: Sequence[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left, with their attention mask."""
    longest = max(lengths)
    ids, mask = prompt(longest, seed, rows=len(lengths)), torch.ones(len(lengths), longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, : longest - length] = 0
        mask[row, : longest - length] = 0
    return {"inputs": ids, "attention_mask": mask}


def pair(family: str, tree: str = "cpu"):
    return target_of(family), set_tree(draft_of(family, half=False), tree)
