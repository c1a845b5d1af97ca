"""Tree visibility inside transformers' own mask functions.

Every attention mask of transformers is a function `visible(batch, head, q_slot, kv_slot)` handed to a mask interface
(`sdpa`, `eager`, `flex_attention`), where a slot is a place in the cache. While a tree is verified, the wrapped
interfaces hand on that same function with the slots of tree nodes replaced by the nodes' positions (past length plus
depth), and add that a node sees its ancestors only. Windows, chunks and image blocks then come out right.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function


MaskFunction = Callable[..., torch.Tensor]

# The attention implementations that take any mask.
INTERFACES = ("sdpa", "eager", "flex_attention")


class ActiveTree:
    """
    The tree that the forward passes of this thread verify.

    Attributes:
        used (`bool`): whether a mask interface has asked for the tree; false after a forward means that the model
            makes its masks elsewhere and has not seen the tree.
    """

    def __init__(self, ancestors: torch.Tensor, depths: torch.Tensor, past_length: int | torch.Tensor):
        self.used = False
        self._ancestors = ancestors
        if isinstance(past_length, torch.Tensor):
            # Sequences end at different slots, their nodes stand behind the longest one.
            self._first: int | torch.Tensor = past_length.max()
            self._ends: torch.Tensor | None = past_length.to(ancestors.device)
        else:
            self._first = past_length
            self._ends = None
        self._positions = depths + (past_length if self._ends is None else self._ends[:, None])

    def rewrite(
        self, mask_function: MaskFunction, kv_offset: int, kv_length: int, device: torch.device | str
    ) -> MaskFunction:
        """`mask_function` over tree positions and visible along the tree only, for keys at `kv_offset` and on."""
        self.used = True
        # Layers of one model may live on several devices; these are no copies where the device is the tree's own.
        positions = self._positions.to(device)
        first = self._first.to(device) if isinstance(self._first, torch.Tensor) else self._first
        visible, kv_positions = self._columns(positions, first, kv_offset, kv_length)
        last_query, last_column = visible.shape[1] - 1, kv_length - 1

        def tree_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            query = (q_idx - first).clamp(0, last_query)
            if kv_idx.dim() == 4:
                # All indices at once, broadcasting: the tables as they are, no lookup per pair.
                allowed, kv_position = visible[:, None], kv_positions[:, None, None]
            else:
                # One pair at a time (under vmap: flex, or masks with a user's overlay).
                column = (kv_idx - kv_offset).clamp(0, last_column)
                allowed, kv_position = visible[batch_idx, query, column], kv_positions[batch_idx, column]
            return allowed & mask_function(batch_idx, head_idx, positions[batch_idx, query], kv_position)

        return tree_mask

    def _columns(
        self, positions: torch.Tensor, first: int | torch.Tensor, kv_offset: int, kv_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Per slot of the keys: which nodes may see it `(B, N, L)`, and its position `(B, L)`."""
        ancestors = self._ancestors.to(positions.device)
        slots = torch.arange(kv_offset, kv_offset + kv_length, device=positions.device)
        place = slots - first
        node = place.clamp(0, ancestors.shape[-1] - 1)
        in_tree = place >= 0
        # Slots behind the tree (static caches have them) are seen by nobody, slots before it by all, unless the row
        # itself ended earlier.
        among_nodes = ancestors.index_select(2, node) & (place == node)
        in_past = ~in_tree if self._ends is None else (slots < self._ends.to(slots.device)[:, None])[:, None]
        return among_nodes | in_past, torch.where(in_tree, positions.index_select(1, node), slots)


class _Active(threading.local):
    tree: ActiveTree | None = None


_active = _Active()


@contextmanager
def tree_attention(
    tree_ancestors: torch.Tensor, depths: torch.Tensor, past_length: int | torch.Tensor
) -> Iterator[ActiveTree]:
    """
    Make the target forward inside the `with` block (same thread) attend along the tree.

    The queries of that forward are the nodes, in order; the wrapped interfaces must be installed (`install`). A 2D
    attention mask given to the model must cover past and nodes.

    Args:
        tree_ancestors (`torch.Tensor` of shape `(B, N, N)`, bool): `DraftTree.ancestors`.
        depths (`torch.Tensor` of shape `(B, N)`, int64): `DraftTree.depths`.
        past_length (`int` or `torch.Tensor` of shape `(B,)`): committed slots of the cache, per sequence if they
            differ; the nodes stand behind the longest one.

    Yields:
        `ActiveTree`, whose `used` tells after the forward whether the tree reached any mask.
    """
    before = _active.tree
    _active.tree = ActiveTree(tree_ancestors, depths, past_length)
    try:
        yield _active.tree
    finally:
        _active.tree = before


class _Lent:
    """Configs whose attention implementation is exchanged now, with how many forwards and what it was."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.configs: dict[int, tuple[Any, int, str]] = {}


_lent = _Lent()


@contextmanager
def maskable_attention(target: Any) -> Iterator[None]:
    """
    Let the forward inside the `with` block run with attention that takes any mask.

    Flash kernels and their like take none: their configs say `sdpa` (or `eager`, where a model has no sdpa) meanwhile.
    Configs are the model's and not the thread's: of several threads in here the last one out puts them back. A forward
    of another thread outside runs with the exchanged kernel, which computes the same.
    """
    configs = _unmaskable(target)
    if not configs:
        yield
        return
    stand_in = "sdpa" if getattr(target, "_supports_sdpa", False) else "eager"
    with _lent.lock:
        for config in configs:
            _, users, original = _lent.configs.get(id(config), (config, 0, config._attn_implementation_internal))
            _lent.configs[id(config)] = (config, users + 1, original)
            config._attn_implementation_internal = stand_in
    try:
        yield
    finally:
        with _lent.lock:
            for config in configs:
                _, users, original = _lent.configs.pop(id(config))
                if users > 1:
                    _lent.configs[id(config)] = (config, users - 1, original)
                else:
                    config._attn_implementation_internal = original


def _unmaskable(target: Any) -> list[Any]:
    """The configs of a model, each once, whose attention takes no mask or is exchanged for that reason."""
    if target.config.get_text_config()._attn_implementation in INTERFACES and not _lent.configs:
        return []
    found = {}
    for module in target.modules():
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation_internal", None)
        if kind is not None and (kind not in INTERFACES or id(config) in _lent.configs):
            found[id(config)] = config
    return list(found.values())


def _wrap(interface: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(interface)
    def with_tree(*args: Any, **kwargs: Any) -> Any:
        # First of all: tracing must see none of what follows, else a user's `fullgraph=True` compile breaks.
        if torch.compiler.is_compiling() or _active.tree is None:
            return interface(*args, **kwargs)
        tree, _active.tree = _active.tree, None  # a second wrapper of ours further down must not rewrite again
        try:
            kwargs["mask_function"] = tree.rewrite(
                kwargs.get("mask_function", causal_mask_function),
                kwargs.get("kv_offset", 0),
                kwargs["kv_length"],
                kwargs.get("device", "cpu"),
            )
            kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
            return interface(*args, **kwargs)
        finally:
            _active.tree = tree

    return with_tree


# name -> (what transformers had, what we put in its place)
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install() -> None:
    """Wrap the mask interfaces of transformers. Where our wrapper is already on top, nothing changes."""
    mapping: dict[str, Any] = AttentionMaskInterface._global_mapping
    for name in INTERFACES:
        original = mapping.get(name)
        if original is not None and (name not in _installed or _installed[name][1] is not original):
            mapping[name] = _wrap(original)
            _installed[name] = (original, mapping[name])


def uninstall() -> None:
    """
    Put the original interfaces back. Where someone has wrapped ours since, our wrapper stays below theirs and passes
    every call through, as it does whenever no tree is active.
    """
    mapping: dict[str, Any] = AttentionMaskInterface._global_mapping
    for name, (original, wrapper) in _installed.items():
        if mapping.get(name) is wrapper:
            mapping[name] = original
    _installed.clear()
