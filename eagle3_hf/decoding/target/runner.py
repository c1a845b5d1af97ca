"""The target's side of a call: its prefill, its forwards over draft trees, and its cache.

Sequences begin at the same *slot* of the cache and end at different ones. The nodes of all trees are behind the
longest sequence, and the entries of the accepted paths are then moved to the end of their sequences. Committed entries
never move, the cache grows with the longest sequence, and a slot is a column of the ids.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from ...model.grouped_attention import grouped_attention
from ..output.outputs import KeyColumns
from ..sequence import Batch
from ..transfers import upload
from ..tree import DraftTree
from . import kv_cache
from .capability import TREE, Capability, VerifyMode
from .recurrent_cache import Snapshot, has_entries, require_restorable
from .static_cache import text_capacity
from .synced_gpus import SyncedGpus
from .tree_attention import maskable_attention, tree_attention


# The most accepted tokens that a restored cache may lack. They are fed with every chain until all of one is accepted.
_MOST_FED_AGAIN = 16
_FREE_SLOTS = 64  # columns of positions and masks that are made ahead
# Renamed in transformers 5.24, in forward, in model kwargs and in outputs alike.
CACHE_KEY = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
# In earlier versions of transformers, any cache may be the user's.
_BROUGHT_CACHES_ARE_MARKED = "_is_user_defined" in inspect.getsource(GenerationMixin._prepare_cache_for_generation)


class TargetRun:
    """The target in one call.

    Args:
        target: The model, which is left as it was.
        config: The call's generation config.
        model_kwargs: The model kwargs that `generate` passes to a decoding method.
        batch: The sequences, whose `cache_len` is set here.
        capability: What the target can verify. If these are chains, all sequences keep the same number of nodes.
        synced: Other processes that take part in every forward.

    Attributes:
        capacity: The number of slots that the text can fill, if the cache is static.
        forgets: Whether the model decodes without its past. In earlier versions of transformers, a model may replace
            the call's cache by an empty one (Phi-3, when its frequencies change) or not fill it (gradient
            checkpointing in training mode). Plain decoding goes on like that, so decoding goes on token by token.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        batch: Batch,
        capability: Capability = TREE,
        synced: SyncedGpus | None = None,
    ):
        self.target: Any = target  # torch types attributes of a module as "Tensor or Module"
        self.synced = synced
        self.capability = capability
        self.capacity: int | None = None
        self.forgets = False
        self._batch = batch
        self._first_len = 0  # number of slots after the prefill
        self._new_tokens = 0  # the call's largest number of new tokens
        self._config = config
        self._kwargs = model_kwargs
        # Positions behind the prefill, and the prompt's mask with ones behind it: made ahead, and sliced each round.
        self._positions: torch.Tensor | None = None
        self._open_mask: torch.Tensor | None = None
        self._prompt_columns = 0
        self._snapshot: Snapshot | None = None  # of the cache with `_cached` slots
        self._cached = 0  # less than `cache_len` while a restored cache lacks accepted tokens
        self._prepared: list[Cache] = []  # caches to be restored by `finish`

    @property
    def cache(self):
        return self._kwargs[CACHE_KEY]

    def prefill(self, prompt: torch.Tensor, text_slots: int = 0, tree_slots: int = 0):
        """Run the prompt, and return the outputs of the forward.

        Args:
            prompt: (B, P) ids.
            text_slots: The number of slots that the text may fill behind the prompt, if the cache has them.
            tree_slots: The number of slots that trees may fill behind the text.
        """
        given = self._kwargs.get(CACHE_KEY)
        with every_prompt_token(self.target, self._kwargs):
            outputs = self.target._prefill(prompt, self._config, self._kwargs)
        cache = outputs[CACHE_KEY]
        self._kwargs = self.target._update_model_kwargs_for_generation(outputs, self._kwargs, is_encoder_decoder=False)
        seen = self._tokens_seen(prompt)
        self._first_len = self._cached = int(cache.get_seq_length()) if has_entries(cache) else seen
        self._new_tokens = self._config.max_length - prompt.shape[1] if self._config.max_length else 0
        exchanged = given is not None and cache is not given
        self.forgets = self._first_len < seen and (exchanged or not self._first_len)
        self._find_root_positions(outputs.logits.device)
        if self.capability.restores:
            require_restorable(cache)
        else:
            kv_cache.require_supported(cache)
            self.capacity = text_capacity(cache)
            if self.capacity is not None:
                text_slots = min(text_slots, self.capacity - self._first_len)
            self._prepare(cache, text_slots + tree_slots)
        return outputs

    def _tokens_seen(self, prompt: torch.Tensor) -> int:
        """Return the number of cached tokens, for caches of states alone, which do not count them."""
        mask = self._kwargs.get("attention_mask")
        if mask is not None:
            return mask.shape[1] - 1
        return prompt.shape[1] or self._kwargs["inputs_embeds"].shape[1]

    def _find_root_positions(self, device: torch.device) -> None:
        """Find the positions (..., B, 1) of the first roots, by counting if the model takes no positions."""
        positions, mask = self._kwargs.get("position_ids"), self._kwargs.get("attention_mask")
        if positions is not None:
            self._root_positions = positions[..., -1:]
        elif mask is not None:
            self._root_positions = mask.sum(-1, keepdim=True) - 1
        else:
            self._root_positions = torch.full((len(self._batch), 1), self._first_len, device=device)
        # They are copied to the host once, since every round needs them there.
        largest = self._root_positions.reshape(-1, *self._root_positions.shape[-2:]).amax((0, -1))
        for sequence, position in zip(self._batch, largest.expand(len(self._batch)).tolist(), strict=True):
            sequence.start(self._first_len, position)

    def _prepare(self, cache: Cache, free_slots: int = 0) -> None:
        """Prepare a cache for trees or chains, unless the model has lost its past and gets neither."""
        if not self.forgets:
            self._prepared.append(cache)
            kv_cache.prepare(cache, free_slots)

    def finish(self) -> None:
        """Restore all prepared caches to caches that no tree has entered."""
        while self._prepared:
            cache = self._prepared.pop()
            kv_cache.finish(cache, bool(self._config.return_dict_in_generate) or _is_brought(cache))

    @property
    def cache_is_seen(self) -> bool:
        """Whether the caller can see the cache after the call, because it is returned or was passed in."""
        return bool(self._config.return_dict_in_generate) or self.cache_is_brought

    @property
    def cache_is_brought(self) -> bool:
        """Whether the caller has passed the cache in, and so sees it even after an exception."""
        return _is_brought(self.cache)

    def key_columns(self) -> list[KeyColumns]:
        """Return the keys of each layer for which plain decoding returns attention weights."""
        return kv_cache.key_columns(self.cache, getattr(self.target.config.get_text_config(), "layer_types", None))

    # ----- forwards -------------------------------------------------------------------------------------------------

    def verify(self, tree: DraftTree):
        """Run the nodes (B, N) of the trees, which attend to their sequence's past and their own ancestors."""
        committed = self._batch.cached_ids()
        if self.capability.mode is not VerifyMode.TREE:
            return self._verify_chain(tree.tokens, committed)
        tokens = tree.tokens.to(committed.device)
        ends = None if self._batch.is_aligned else upload(self._batch.cache_lens, committed.device)
        kwargs = self._tree_kwargs(tree.depths, ends)
        ids = torch.cat([committed, tokens], dim=1)
        if tokens.shape[1] == 1 and self._batch.is_aligned:
            return self._forward(ids, 1, kwargs)
        past = self._batch.longest if ends is None else ends.to(tree.tokens.device)
        with maskable_attention(self.target), tree_attention(tree.ancestors, tree.depths, past) as active:
            outputs = self._forward(ids, tokens.shape[1], kwargs)
        if not active.used:
            raise ValueError(
                f"{type(self.target).__name__} makes its attention masks outside transformers' mask functions, so "
                "it cannot verify a draft tree: generate without assistant_model"
            )
        return outputs

    def _verify_chain(self, tokens: torch.Tensor, committed: torch.Tensor):
        """Run the tokens (B, N) of chains, and before them the committed tokens that a restored cache lacks."""
        if self._batch.longest - self._cached > _MOST_FED_AGAIN:
            self.catch_up(committed)
        if self.capability.restores and self._snapshot is None:
            self._snapshot = Snapshot(self.cache)
        count = tokens.shape[1]
        outputs = self._forward_chain(torch.cat([committed, tokens.to(committed.device)], dim=1), count)
        if outputs.get("hidden_states") is not None:
            outputs.hidden_states = tuple(state[:, -count:] for state in outputs.hidden_states)
        return outputs

    def _forward_chain(self, ids: torch.Tensor, count: int):
        """Run all of `ids` (B, T) that the cache lacks, the last `count` of which are not committed."""
        depths = torch.arange(count, device=ids.device).expand(len(self._batch), -1)
        again = self._batch.longest - self._cached
        return self._forward(ids, again + count, self._tree_kwargs(depths), logits=max(1, count))

    def catch_up(self, committed: torch.Tensor) -> None:
        """Run those of the committed tokens (B, T) that a restored cache lacks."""
        if self.capability.restores and self._cached < self._batch.longest:
            self._forward_chain(committed, 0)
            self._cached, self._snapshot = self._batch.longest, None

    # ----- the cache ------------------------------------------------------------------------------------------------

    def keep(self, paths: list[list[int]], num_nodes: int, new_lens: list[int], needed_from: int) -> None:
        """Keep the entries of each sequence's path, and drop those of the other nodes.

        Args:
            paths: Accepted nodes of each sequence, the root first.
            num_nodes: The number of nodes of the trees, padding included.
            new_lens: The new `cache_len` of each sequence, which may be smaller than before.
            needed_from: Sliding windows may drop entries to which no slot from here on attends.
        """
        if self.forgets:
            self._cached, self._snapshot = new_lens[0], None  # a single token was run, and it is accepted
        elif self.capability.mode is not VerifyMode.TREE:
            self._keep_chain(num_nodes, new_lens)
        else:
            kv_cache.keep_paths(self.cache, self._batch.cache_lens, paths, num_nodes, new_lens, needed_from)
        self._set_lens(new_lens)

    def _keep_chain(self, num_nodes: int, new_lens: list[int]) -> None:
        if min(new_lens) != max(new_lens):
            raise ValueError(f"sequences that verify chains must end at the same slot, got {new_lens}")
        old, new = self._batch.longest, new_lens[0]
        if new < old:
            raise ValueError(f"chains cannot remove committed tokens, but would shrink from {old} to {new} slots")
        if not self.capability.restores:
            nodes = [list(range(new - old))] * len(new_lens)
            kv_cache.keep_paths(self.cache, self._batch.cache_lens, nodes, num_nodes, new_lens, new)
            self._cached = new
        elif new - old == num_nodes:
            self._cached, self._snapshot = new, None
        elif self._snapshot is not None:
            self._snapshot.restore(self.cache)

    def cut(self, end: int) -> None:
        """Cut the cache to `end` slots in every sequence."""
        if self._batch.longest > end and not self.forgets:
            kv_cache.cut(self.cache, self._batch.longest - end)
        self._set_lens([end] * len(self._batch))

    def _set_lens(self, lens: list[int]) -> None:
        for sequence, length in zip(self._batch, lens, strict=True):
            sequence.cache_len = length

    def _forward(self, ids: torch.Tensor, num_nodes: int, kwargs: dict[str, Any], logits: int | None = None):
        inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=num_nodes, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_nodes if logits is None else logits
        if self.synced is not None:
            self.synced.announce()
        try:
            with grouped_attention():
                outputs = self.target(**inputs, return_dict=True)
        except BaseException:
            self._undo_forward()
            raise
        self._take_cache(outputs[CACHE_KEY], num_nodes)
        return outputs

    def _undo_forward(self) -> None:
        """Restore the cache after a forward that was interrupted when some layers had run."""
        if self._snapshot is not None:
            self._snapshot.restore(self.cache)
        elif self._prepared:
            kv_cache.drop_unfinished(self.cache, self._batch.longest)

    def overflow(self, committed: torch.Tensor) -> NoReturn:
        """Raise the error of a text that exceeds its static cache, as plain decoding does. Call `finish` before.

        Args:
            committed: (B, T) ids of all columns.

        Raises:
            IndexError: always.
        """
        message = (
            f"the text is longer than the {self.capacity} slots of the static cache: pass a cache with a "
            f"max_cache_len of at least {self._first_len + self._new_tokens - 1}, or a smaller max_new_tokens"
        )
        if self.target.device.type == "cpu":  # on an accelerator, the write would make the device unusable
            try:
                first = torch.zeros(len(self._batch), 1, dtype=torch.int64, device=committed.device)
                self._forward(committed, 1, self._tree_kwargs(first))
            except IndexError as error:
                raise IndexError(message) from error
        raise IndexError(message)

    def _take_cache(self, used: Cache, num_nodes: int) -> None:
        """Use the cache that the forward has filled, a new one if it has run the whole text (`rope_limits`)."""
        if used is self.cache:
            return
        self.finish()
        self._kwargs[CACHE_KEY] = used
        self.forgets = int(used.get_seq_length()) < self._batch.longest + num_nodes
        self._prepare(used)

    def _tree_kwargs(self, depths: torch.Tensor, ends: torch.Tensor | None = None) -> dict[str, Any]:
        """Return the model kwargs of a verification, with positions, masks and token types of the nodes.

        Args:
            depths: (B, N) depths of the nodes.
            ends: (B,) the `cache_len` of each sequence if they differ, else `None`.
        """
        kwargs, num_nodes = dict(self._kwargs), depths.shape[1]
        roots, since = self._root_positions, self._positions_since(self._batch.new_slots + 1)
        # Positions of the past are needed by a model that runs the whole text again.
        since, root = since[..., :-1], since[..., -1:]
        if ends is not None:
            root = roots + (ends.to(roots.device, roots.dtype) - self._first_len)[:, None]
        if kwargs.get("position_ids") is not None:
            nodes = root + depths.to(roots.device, roots.dtype)
            kwargs["position_ids"] = torch.cat([kwargs["position_ids"][..., :-1], since, nodes], dim=-1)
        mask = kwargs.get("attention_mask")
        if mask is not None or ends is not None:
            kwargs["attention_mask"] = self._mask(mask, num_nodes, ends)
        grown = self._batch.new_slots + num_nodes - 1
        for name in ("token_type_ids", "mm_token_type_ids"):
            types = kwargs.get(name)
            if types is not None:
                more = (
                    types[:, -1:].expand(-1, grown) if name == "token_type_ids" else types.new_zeros(len(types), grown)
                )
                kwargs[name] = torch.cat([types, more], dim=-1)
        return kwargs

    def _positions_since(self, count: int) -> torch.Tensor:
        """Return (..., B, count) positions of the tokens behind the prefill, of sequences as long as the longest."""
        if self._positions is None or self._positions.shape[-1] < count:
            roots = self._root_positions
            self._positions = roots + torch.arange(2 * count + _FREE_SLOTS, device=roots.device, dtype=roots.dtype)
        return self._positions[..., :count]

    def _mask(self, given: torch.Tensor | None, num_nodes: int, ends: torch.Tensor | None) -> torch.Tensor:
        """Return the mask (B, slots + nodes), which hides the slots between the end of a sequence and the nodes.

        Args:
            given: The mask that the call has had since the prefill; `None` for all ones.
            num_nodes: N.
            ends: See [`_tree_kwargs`].
        """
        since = self._batch.longest - self._first_len
        if self._open_mask is None or self._open_mask.shape[1] - self._prompt_columns < since + num_nodes:
            self._open_mask = self._new_mask(given, 2 * (since + num_nodes) + _FREE_SLOTS)
        width = self._prompt_columns + since + num_nodes
        if ends is None:
            return self._open_mask[:, :width].contiguous()
        mask = self._open_mask
        slots = torch.arange(self._first_len, self._batch.longest, device=mask.device)
        own = slots < ends.to(mask.device)[:, None]
        prompt, nodes = mask[:, : self._prompt_columns], mask[:, width - num_nodes : width]
        return torch.cat([prompt, own.to(mask.dtype), nodes], dim=-1)

    def _new_mask(self, given: torch.Tensor | None, free: int) -> torch.Tensor:
        """Return the mask of the prompt with `free` columns of ones behind it."""
        if given is None:
            self._prompt_columns = self._first_len
            ones = (len(self._batch), self._first_len + free)
            return torch.ones(ones, dtype=torch.int64, device=self._root_positions.device)
        self._prompt_columns = given.shape[1] - 1
        prompt = given[:, : self._prompt_columns]
        return torch.cat([prompt, prompt.new_ones(len(prompt), free)], dim=1)


def _is_brought(cache: Cache) -> bool:
    return getattr(cache, "_is_user_defined", not _BROUGHT_CACHES_ARE_MARKED)


def rope_limits(target: PreTrainedModel) -> list[tuple[int, bool]]:
    """Return the lengths at which the target's rotary frequencies change, and whether they are constant behind it.

    `dynamic` and `longrope` frequencies depend on the largest position of a forward, and the nodes of a tree have
    positions that plain decoding has not reached. So a tree must end before the change. (At the change, Phi-3 also
    runs the whole text again, without its cache.)
    """
    text_config = target.config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    limits = []
    for parameters in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        kind = parameters.get("rope_type") or ""
        if kind == "longrope":
            original = parameters.get("original_max_position_embeddings") or text_config.max_position_embeddings
            limits.append((original, True))
        elif "dynamic" in kind:
            limits.append((text_config.max_position_embeddings, False))
    return limits


@contextmanager
def every_prompt_token(target: PreTrainedModel, model_kwargs: dict[str, Any]) -> Iterator[None]:
    """Make the prefill run every prompt token through all layers.

    Layers that share keys may skip all prompt tokens but the last (Gemma 4), unless a hidden state is requested.
    """
    asked = model_kwargs.get("output_hidden_states")
    if asked or not getattr(target.config.get_text_config(), "num_kv_shared_layers", 0):
        yield
        return
    model_kwargs["output_hidden_states"] = [1]
    try:
        yield
    finally:
        del model_kwargs["output_hidden_states"]
        if asked is not None:
            model_kwargs["output_hidden_states"] = asked
