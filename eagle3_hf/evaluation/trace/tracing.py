"""Watches one call of `generate` and records its rounds.

While a round runs only references are kept; they are read when the round has ended, so that the times of its phases
are those of a call that nobody watches.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ...acceptance import SpeculationStats
from ...decoding.draft.growth import CandidatePool, TreeGrower
from ...decoding.draft.lookup import LONGEST_MATCH
from ...decoding.draft.mixture import BOTH as FROM_BOTH
from ...decoding.draft.mixture import HEAD as FROM_HEAD
from ...decoding.draft.mixture import LOOKUP as FROM_LOOKUP
from ...decoding.loop import SpeculativeDecoding
from ...decoding.tree import DraftTree, HostTree
from ...decoding.verification import Walk
from ..misses import Cause, cause_of_miss
from ..watching import wrapped
from .rounds import BOTH, HEAD, LOOKUP, ROOT, Trace, TracedNode, TracedRound


_SOURCES = {FROM_HEAD: HEAD, FROM_LOOKUP: LOOKUP, FROM_BOTH: BOTH}


def trace(
    target: Any,
    draft: Any,
    inputs: Mapping[str, torch.Tensor] | torch.Tensor,
    tokenizer: Any = None,
    *,
    seed: int = 0,
    **options: Any,
) -> Trace:
    """Generate a text with a draft, and return what happened in each round.

    ```python
    found = eagle3_hf.trace(target, draft, tokenizer("The sea", return_tensors="pt"), tokenizer, max_new_tokens=40)
    print(found)
    found.save("trace.html")
    ```

    Args:
        target: The target model.
        draft: The draft head, or a `LookupDraft`.
        inputs: Ids (1, P) of one prompt, or what a tokenizer returns for it.
        tokenizer: Turns tokens into text on the page; `None` shows ids.
        seed: Seed of the call. The default generator is moved as `generate` moves it.
        options: Further arguments of `generate`.

    Raises:
        ValueError: there are several prompts or texts, of which a page could show one.
    """
    arguments = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    ids = arguments.get("input_ids")
    if ids is None or ids.dim() != 2 or len(ids) != 1:
        shape = None if ids is None else tuple(ids.shape)
        raise ValueError(f"a trace takes one prompt, input_ids of shape (1, P), got {shape}")
    arguments = {name: value.to(target.device) for name, value in arguments.items()}
    arguments.setdefault("attention_mask", torch.ones_like(arguments["input_ids"]))
    watcher = _Watcher(draft)
    torch.manual_seed(seed)
    with watcher.watching():
        output = target.generate(**arguments, assistant_model=draft, **options)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    stats: SpeculationStats = draft.stats
    stats.other_seconds = max(0.0, stats.other_seconds - watcher.own_seconds)
    return Trace(
        target=target.name_or_path or type(target).__name__,
        head=getattr(draft, "name_or_path", "") or type(draft).__name__,
        prompt=tuple(ids[0].tolist()),
        tokens=tuple(sequences[0, ids.shape[1] :].tolist()),
        rounds=tuple(watcher.rounds),
        stats=stats,
        options=options,
        decode=None if tokenizer is None else lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False),
    )


@dataclass
class _Seen:
    """References to what a round has made."""

    tree: DraftTree | None = None
    pool: CandidatePool | None = None
    logits: torch.Tensor | None = None  # (1, N, V) at the nodes
    walk: Walk | None = None


class _Watcher:
    """Records the rounds of a call.

    Args:
        draft: The draft of the call.

    Attributes:
        rounds: The rounds so far.
        own_seconds: Time that was spent on recording.
    """

    def __init__(self, draft: Any):
        self.rounds: list[TracedRound] = []
        self.own_seconds = 0.0
        self._seen = _Seen()
        ids = draft.draft_vocab_ids().tolist() if hasattr(draft, "draft_vocab_ids") else None
        self._vocabulary = None if ids is None else frozenset(ids)

    def watching(self) -> ExitStack:
        """Return a context in which the calls of this thread are recorded."""
        stack = ExitStack()
        for owner, name, wrapper in (
            (SpeculativeDecoding, "_round", self._round),
            (SpeculativeDecoding, "_propose", self._propose),
            (SpeculativeDecoding, "_verify", self._verify),
            (SpeculativeDecoding, "_accept", self._accept),
            (TreeGrower, "grow_pool", self._grow_pool),
        ):
            stack.enter_context(wrapped(owner, name, wrapper))
        return stack

    def _round(self, original: Any, loop: SpeculativeDecoding) -> None:
        if len(loop.batch) != 1:
            raise ValueError(f"a trace shows one text, got {len(loop.batch)}: leave num_return_sequences out")
        self._seen = _Seen()
        sequence, stats = loop.batch[0], loop.stats
        start, before = len(sequence.token_ids), (stats.draft_seconds, stats.verify_seconds)
        began = perf_counter()
        original(loop)
        ended = perf_counter()
        draft, verify = stats.draft_seconds - before[0], stats.verify_seconds - before[1]
        times = draft, verify, max(0.0, ended - began - draft - verify)
        self.rounds.append(self._recorded(loop, start, times))
        self.own_seconds += perf_counter() - ended

    def _propose(self, original: Any, loop: SpeculativeDecoding, active: list[int]) -> Any:
        proposed = original(loop, active)
        self._seen.tree = proposed[0]
        return proposed

    def _verify(self, original: Any, loop: SpeculativeDecoding, tree: DraftTree) -> Any:
        verified = original(loop, tree)
        self._seen.logits = verified[0].logits[:, -tree.tokens.shape[1] :]
        return verified

    def _accept(self, original: Any, loop: SpeculativeDecoding, *args: Any) -> Walk:
        self._seen.walk = original(loop, *args)
        return self._seen.walk

    def _grow_pool(self, original: Any, grower: TreeGrower, *args: Any, **kwargs: Any) -> CandidatePool:
        self._seen.pool = original(grower, *args, **kwargs)
        return self._seen.pool

    def _recorded(self, loop: SpeculativeDecoding, start: int, times: tuple[float, float, float]) -> TracedRound:
        """Return the round that has ended, from what was seen of it."""
        seen = self._seen
        assert seen.tree is not None
        assert seen.walk is not None
        assert seen.logits is not None
        tree, emitted = seen.tree.host()[0], tuple(loop.batch[0].token_ids[start:])
        path = _accepted_path(tree, seen.walk.paths[0], emitted)
        head = _head_candidates(seen.pool)
        candidates = {**_guesses(loop, tree, seen, start), **head}
        log_probs = seen.logits[0].float().log_softmax(-1)
        levels = seen.pool.num_levels if seen.pool is not None else 0
        accepted = len(path) - 1
        cause = None
        if len(emitted) > accepted and len(tree.tokens) > 1:
            cause = self._cause(candidates, tree, path, emitted[-1], levels)
        missed = (*(tree.tokens[node] for node in path[1:]), emitted[-1]) if emitted else ()
        return TracedRound(
            start=start,
            nodes=tuple(_nodes(loop, tree, seen.tree, path, head, log_probs)),
            emitted=emitted,
            num_accepted=accepted,
            choice_probability=float(log_probs[path[len(emitted) - 1], emitted[-1]].exp()) if emitted else 0.0,
            cause=cause,
            pruned_value=candidates[missed].value if cause is Cause.PRUNED else None,
            num_candidates=len(candidates),
            levels=levels,
            draft_seconds=times[0],
            verify_seconds=times[1],
            other_seconds=times[2],
        )

    def _cause(
        self, candidates: "_Candidates", tree: HostTree, path: list[int], token: int, levels: int
    ) -> Cause | None:
        """Return why a token was not drafted; `None` if neither source has guessed anything at its place."""
        before, depth = tuple(tree.tokens[node] for node in path[1:]), len(path)
        if depth > levels and not any(each[:-1] == before for each in candidates):
            return None
        vocabulary = self._vocabulary if depth <= levels else None
        return cause_of_miss(_pool_of(candidates), tree, path, token, vocabulary, depth)


class _Candidate(NamedTuple):
    value: float  # the chance that it is accepted with its ancestors
    probability: float | None  # the head's, behind its parent


# The candidates of a round by the tokens on the path to each, from the root's child on.
_Candidates = dict[tuple[int, ...], _Candidate]


class _Pool(NamedTuple):
    tokens: list[int]
    parents: list[int]


def _accepted_path(tree: HostTree, visited: Sequence[int], emitted: Sequence[int]) -> list[int]:
    """Return the root and the accepted nodes: those that were visited, and a last one at which the text ended."""
    path = list(visited[: len(emitted)])
    for child in range(1, len(tree.tokens)):
        if path and tree.parents[child] == path[-1] and tree.tokens[child] == emitted[-1]:
            return [*path, child]
    return path or [0]


def _head_candidates(pool: CandidatePool | None) -> _Candidates:
    """Return the candidates of the head that can be kept."""
    if pool is None:
        return {}
    tokens, parents, scores, log_probs = (part[0].tolist() for part in pool.joined())
    paths: list[tuple[int, ...]] = []
    found: _Candidates = {}
    for token, parent, score, log_prob in zip(tokens, parents, scores, log_probs, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        if math.isfinite(score):
            above = log_probs[parent] if parent >= 0 else 0.0
            found[paths[-1]] = _Candidate(math.exp(score), math.exp(log_prob - above))
    return found


def _guesses(loop: SpeculativeDecoding, tree: HostTree, seen: _Seen, start: int) -> _Candidates:
    """Return the candidates of the lookup source: its guesses behind each node of the tree.

    They are asked for once more, since asking changes nothing until the source learns of the round's tokens.
    """
    lookup = loop._proposer._lookup
    if lookup is None or len(tree.tokens) == 1 or seen.tree is None:
        return {}
    values = seen.tree.scores[0].exp().tolist()
    text, found = lookup.indices[0].tail, {}
    paths: list[tuple[int, ...]] = []
    for node in range(len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]) if node else ())
        if len(paths[node]) < loop.settings.reach:
            for token, right in lookup.guesses(0, (text + paths[node])[-LONGEST_MATCH:]):
                path = (*paths[node], token)
                found[path] = _Candidate(values[node] * right, None)
    return found


def _pool_of(candidates: _Candidates) -> _Pool:
    """Return the candidates as a pool. Where a path leads through a node of another source, it is added."""
    places: dict[tuple[int, ...], int] = {(): -1}
    pool = _Pool([], [])
    for path in candidates:
        for end in range(1, len(path) + 1):
            if path[:end] not in places:
                places[path[:end]] = len(pool.tokens)
                pool.tokens.append(path[end - 1])
                pool.parents.append(places[path[: end - 1]])
    return pool


def _nodes(
    loop: SpeculativeDecoding,
    tree: HostTree,
    drafted: DraftTree,
    path: Sequence[int],
    head: _Candidates,
    log_probs: torch.Tensor,
) -> list[TracedNode]:
    """Return the nodes of a tree.

    Args:
        loop: The call.
        tree, drafted: The tree, on the host and as it was verified.
        path: The root and the accepted nodes.
        head: The candidates of the head.
        log_probs: (N, V) the target's log-probabilities at the nodes.
    """
    values = drafted.scores[0].exp().tolist()
    own = loop._proposer.proposal.candidates.get(0)
    parents = torch.tensor(tree.parents[1:], device=log_probs.device, dtype=torch.int64)
    tokens = torch.tensor(tree.tokens[1:], device=log_probs.device, dtype=torch.int64)
    chances = [1.0, *log_probs[parents, tokens].exp().tolist()]
    paths: list[tuple[int, ...]] = [()]
    found = [TracedNode(tree.tokens[0], -1, 0, ROOT, 1.0, None, 1.0, True)]
    for node in range(1, len(tree.tokens)):
        paths.append((*paths[tree.parents[node]], tree.tokens[node]))
        known = head.get(paths[node])
        found.append(
            TracedNode(
                token=tree.tokens[node],
                parent=tree.parents[node],
                depth=len(paths[node]),
                source=HEAD if own is None else _SOURCES[own.sources[node - 1]],
                value=values[node],
                head_probability=None if known is None else known.probability,
                target_probability=chances[node],
                is_accepted=node in path,
            )
        )
    return found
