"""Tree attention through transformers' own mask functions.

Every attention mask of transformers is a function `visible(batch, head, q_slot, kv_slot)` that is passed to a mask
interface (`sdpa`, `eager`, `flex_attention`), where a slot is an index in the cache. While a tree is verified, the
wrapped interfaces pass on the same function with the slots of tree nodes replaced by their positions (past length plus
depth), combined with the condition that a node only attends to its ancestors. So windows, chunks and blocks of images
are correct without further code.
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
    """The tree that the forwards of this thread verify; for the arguments see [`tree_attention`].

    Attributes:
        used: Whether a mask interface was called. If not, the model makes its masks elsewhere, without the tree.
    """

    def __init__(self, ancestors: torch.Tensor, depths: torch.Tensor, past_length: int | torch.Tensor):
        self.used = False
        self._ancestors = ancestors
        if isinstance(past_length, torch.Tensor):
            # Sequences end at different slots, and the nodes are behind the longest one.
            self._first: int | torch.Tensor = past_length.max()
            self._ends: torch.Tensor | None = past_length.to(ancestors.device)
        else:
            self._first = past_length
            self._ends = None
        self._positions = depths + (past_length if self._ends is None else self._ends[:, None])

    def rewrite(
        self, mask_function: MaskFunction, kv_offset: int, kv_length: int, device: torch.device | str
    ) -> MaskFunction:
        """Return `mask_function` with the positions and the ancestors of the tree, for keys from `kv_offset` on."""
        self.used = True
        # Layers may be on several devices. On the tree's own device nothing is copied.
        positions = self._positions.to(device)
        first = self._first.to(device) if isinstance(self._first, torch.Tensor) else self._first
        visible, kv_positions = self._columns(positions, first, kv_offset, kv_length)
        last_query, last_column = visible.shape[1] - 1, kv_length - 1

        def tree_mask(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            query = (q_idx - first).clamp(0, last_query)
            if kv_idx.dim() == 4:
                # All indices at once, broadcast: the tables are used as they are.
                allowed, kv_position = visible[:, None], kv_positions[:, None, None]
            else:
                # One pair at a time, under vmap (flex, or masks with a user's overlay).
                column = (kv_idx - kv_offset).clamp(0, last_column)
                allowed, kv_position = visible[batch_idx, query, column], kv_positions[batch_idx, column]
            return allowed & mask_function(batch_idx, head_idx, positions[batch_idx, query], kv_position)

        return tree_mask

    def _columns(
        self, positions: torch.Tensor, first: int | torch.Tensor, kv_offset: int, kv_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, for each slot of the keys, which nodes may attend to it (B, N, L), and its position (B, L)."""
        ancestors = self._ancestors.to(positions.device)
        slots = torch.arange(kv_offset, kv_offset + kv_length, device=positions.device)
        index = slots - first
        node = index.clamp(0, ancestors.shape[-1] - 1)
        in_tree = index >= 0
        # Slots behind the tree (in static caches) are hidden from all nodes. Slots before it are visible to all nodes,
        # up to the end of their sequence.
        among_nodes = ancestors.index_select(2, node) & (index == node)
        in_past = ~in_tree if self._ends is None else (slots < self._ends.to(slots.device)[:, None])[:, None]
        return among_nodes | in_past, torch.where(in_tree, positions.index_select(1, node), slots)


class _Active(threading.local):
    tree: ActiveTree | None = None


_active = _Active()


@contextmanager
def tree_attention(
    tree_ancestors: torch.Tensor, depths: torch.Tensor, past_length: int | torch.Tensor
) -> Iterator[ActiveTree]:
    """Make the target's forward inside the `with` block (in this thread) attend along the tree.

    The queries of this forward must be the nodes, in order, and a 2D attention mask must cover past and nodes. The
    wrapped interfaces must be installed (`install`).

    Args:
        tree_ancestors: (B, N, N) bool, `DraftTree.ancestors`.
        depths: (B, N) int64, `DraftTree.depths`.
        past_length: Committed slots of the cache, (B,) if sequences differ. The nodes are behind the longest one.

    Yields:
        The active tree, whose `used` tells after the forward whether the tree reached any mask.
    """
    before = _active.tree
    _active.tree = ActiveTree(tree_ancestors, depths, past_length)
    try:
        yield _active.tree
    finally:
        _active.tree = before


# Configs whose attention implementation is replaced now: id -> (config, number of forwards, original implementation).
_replaced: dict[int, tuple[Any, int, str]] = {}
_lock = threading.Lock()


@contextmanager
def maskable_attention(target: Any) -> Iterator[None]:
    """Run the forward inside the `with` block with attention that takes any mask.

    Flash kernels and similar ones take none, so they are replaced by `sdpa` (or `eager`, if the model has no sdpa) in
    the configs. A config belongs to the model and not to a thread: if several threads are inside, the last one
    restores it. Meanwhile forwards of other threads also run with the replacement, which computes the same.
    """
    configs = _unmaskable(target)
    if not configs:
        yield
        return
    stand_in = "sdpa" if getattr(target, "_supports_sdpa", False) else "eager"
    with _lock:
        for config in configs:
            _, users, original = _replaced.get(id(config), (config, 0, config._attn_implementation_internal))
            _replaced[id(config)] = (config, users + 1, original)
            config._attn_implementation_internal = stand_in
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _, users, original = _replaced.pop(id(config))
                if users > 1:
                    _replaced[id(config)] = (config, users - 1, original)
                else:
                    config._attn_implementation_internal = original


def _unmaskable(target: Any) -> list[Any]:
    """Return the configs of a model, each once, whose attention takes no mask or is replaced for this reason."""
    if target.config.get_text_config()._attn_implementation in INTERFACES and not _replaced:
        return []
    found = {}
    for module in target.modules():
        config = getattr(module, "config", None)
        kind = getattr(config, "_attn_implementation_internal", None)
        if kind is not None and (kind not in INTERFACES or id(config) in _replaced):
            found[id(config)] = config
    return list(found.values())


def _wrap(interface: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(interface)
    def with_tree(*args: Any, **kwargs: Any) -> Any:
        # This comes first, so that a user's compile with `fullgraph=True` traces nothing of the rest.
        if torch.compiler.is_compiling() or _active.tree is None:
            return interface(*args, **kwargs)
        tree, _active.tree = _active.tree, None  # so that a second wrapper of ours below does not rewrite again
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
    """Wrap the mask interfaces of transformers, unless our wrapper is already on top."""
    mapping: dict[str, Any] = AttentionMaskInterface._global_mapping
    for name in INTERFACES:
        original = mapping.get(name)
        if original is not None and (name not in _installed or _installed[name][1] is not original):
            mapping[name] = _wrap(original)
            _installed[name] = (original, mapping[name])


def uninstall() -> None:
    """Restore the original interfaces.

    Where other code has wrapped ours since, our wrapper stays below it and passes every call through, as it does
    whenever no tree is active.
    """
    mapping: dict[str, Any] = AttentionMaskInterface._global_mapping
    for name, (original, wrapper) in _installed.items():
        if mapping.get(name) is wrapper:
            mapping[name] = original
    _installed.clear()
