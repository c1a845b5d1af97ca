"""Attention under a mask without repeated keys, for the forwards of this package.

If a layer has fewer key heads than query heads and a mask, the `sdpa` attention of transformers repeats the keys and
values of the whole text, in each layer, and the kernel turns a boolean mask into numbers, in each layer too. The nodes
of a tree are few and the text is long. So here the query heads of a group become further queries of their key head,
`(B, Hkv, groups * N, d)`, with one mask of numbers per forward, whose rows are repeated for each of them. A row has
the same products and the same softmax as before; only kernels may add them up in another order.

The layers of a model find their attention in `ALL_ATTENTION_FUNCTIONS`, by the name in the config, when they run. The
function named `sdpa` is wrapped there (`install`). A name of our own in the config would be seen by everybody who
shares the model, and a mode of torch around `scaled_dot_product_attention` would only see keys that are repeated
already. The wrapper acts in the thread and the block that ask for it (`grouped_attention`). Otherwise, or where a
layer needs more than is computed here, it calls transformers' function with the arguments that it was given. A
function that somebody else has registered as `sdpa` is not wrapped, nor are other implementations.
"""

import functools
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


# On other devices transformers lets the kernel group the heads, also under a mask.
_DEVICES = ("cpu", "cuda")
# Kernels for accelerators read rows that begin at multiples of this number of entries, or else copy the mask.
_ALIGNMENT = 8
# At most the nodes of a large tree: their mask is small in any model.
_FEW_QUERIES = 256
# Masks that are kept at once: layers with and without a window, on a few devices.
_MOST_MASKS = 4

_KNOWN = {"module", "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "kwargs"}
# Arguments that change what is computed, those included that a later version may add.
_FURTHER = {"softcap", "s_aux", "position_bias", *inspect.signature(sdpa_attention_forward).parameters} - _KNOWN


class AdditiveMasks:
    """The masks of one forward as numbers, each made for the first layer that uses it.

    A mask is recognised by its identity, so one that a layer makes for itself is converted for this layer.
    """

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, tuple, torch.Tensor]] = []

    def get(self, mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `mask` for the queries of `groups` heads, one head after the other.

        Args:
            mask: (B or 1, 1, N, L) bool, `True` where a query attends to a key, or numbers to be added.
            groups: Query heads of a key head.
            dtype: Of the numbers.

        Returns:
            (B or 1, 1, groups * N, L) numbers to be added, -inf where a query does not attend.
        """
        # A hook may write into a mask. (In inference mode tensors do not count their changes.)
        kind = groups, dtype, 0 if mask.is_inference() else mask._version
        for known, known_kind, made in self._made:
            if known is mask and known_kind == kind:
                return made
        made = _additive(mask, groups, dtype)
        self._made = [*self._made[1 - _MOST_MASKS :], (mask, kind, made)]
        return made


def _additive(mask: torch.Tensor, groups: int, dtype: torch.dtype) -> torch.Tensor:
    batch, _, queries, keys = mask.shape
    room = -(-keys // _ALIGNMENT) * _ALIGNMENT
    made = torch.full((batch, 1, groups, queries, room), -torch.inf, dtype=dtype, device=mask.device)[..., :keys]
    if mask.dtype == torch.bool:
        made.masked_fill_(mask[:, :, None], 0.0)
    else:
        made.copy_(mask[:, :, None])
    return made.flatten(2, 3)


class _Active(threading.local):
    masks: AdditiveMasks | None = None


_active = _Active()


@contextmanager
def grouped_attention(masks: AdditiveMasks | None = None) -> Iterator[None]:
    """Group the heads in the attention of forwards inside the `with` block, in this thread.

    Args:
        masks: Masks to be used again in other blocks with the same ones; by default new ones.
    """
    before = _active.masks
    _active.masks = AdditiveMasks() if masks is None else masks
    try:
        yield
    finally:
        _active.masks = before


@functools.wraps(sdpa_attention_forward)
def _sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    # This comes first, so that a user's compile with `fullgraph=True` traces nothing of the rest.
    if torch.compiler.is_compiling() or _active.masks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    groups = getattr(module, "num_key_value_groups", 1)
    if attention_mask is None or args or not _is_enough(query, key, attention_mask, groups, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    mask = _active.masks.get(attention_mask, groups, query.dtype)
    return _attend(query, key, value, mask, groups, kwargs.get("scaling")), None


def _is_enough(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, groups: int, options: dict[str, Any]
) -> bool:
    """Return whether `_attend` computes what the layer asks for, and with less work than transformers' function."""
    if options.get("dropout") or options.get("output_attentions"):
        return False
    if any(options.get(name) is not None for name in _FURTHER):
        return False
    batch, heads, queries, width = query.shape
    # Masks that differ between heads (ALiBi) are left alone, and broadcast ones with another form.
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[1:] != (1, queries, key.shape[2]):
        return False
    if mask.dtype not in (torch.bool, query.dtype) or key.device.type not in _DEVICES:
        return False
    # A single token is computed as in plain decoding, to the last bit.
    if queries == 1 or key.shape[0] != batch or heads != groups * key.shape[1]:
        return False
    # In a long prompt the mask must not be larger than the repeated keys and values of one layer.
    return groups == 1 or queries <= _FEW_QUERIES or len(mask) * queries <= 2 * batch * key.shape[1] * width


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    groups: int,
    scale: float | None,
) -> torch.Tensor:
    """Return the outputs (B, N, H, width of the values).

    Args:
        query: (B, H, N, d).
        key, value: (B, Hkv, L, d) and (B, Hkv, L, width).
        mask: (B or 1, 1, groups * N, L), to be added.
        groups: H / Hkv; heads of a group follow each other.
        scale: Of the products; `None` for 1 / sqrt(d).
    """
    batch, heads, queries, width = query.shape
    together = query.reshape(batch, heads // groups, groups * queries, width)
    output = scaled_dot_product_attention(together, key, value, attn_mask=mask, scale=scale)
    output = output.view(batch, heads // groups, groups, queries, -1).permute(0, 3, 1, 2, 4)
    return output.contiguous().view(batch, queries, heads, -1)


def install() -> None:
    """Wrap transformers' `sdpa`, unless it is wrapped already, or somebody has registered another function."""
    mapping: dict[str, Any] = AttentionInterface._global_mapping
    if mapping.get("sdpa") is sdpa_attention_forward:
        mapping["sdpa"] = _sdpa


def uninstall() -> None:
    """Restore transformers' `sdpa`. Where other code has wrapped ours since, ours passes every call through."""
    mapping: dict[str, Any] = AttentionInterface._global_mapping
    if mapping.get("sdpa") is _sdpa:
        mapping["sdpa"] = sdpa_attention_forward
