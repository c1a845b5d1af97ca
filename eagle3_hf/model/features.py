"""Reading a target's features: its residual stream at a few layers.

A feature is the raw residual stream at a `hidden_states` index: 0 is the embedding output, `i` the output of block
`i - 1`, `L` the output of the last block before the final norm. Forward hooks on the decoder blocks give exactly these
on every transformers version, also where `hidden_states[L]` is already normed. Index -1 is that normed output, which
heads without `fc` read. Training and generation use the same reader, so that a head never sees other features than it
was trained on.
"""

import threading

import torch
from transformers import PreTrainedModel

from .target_modules import decoder_blocks, name_of, num_target_layers, require_own_tokens, text_backbone


class FeatureReader:
    """Collects the residual stream at `layer_ids` while the target runs, as a context manager.

    ```
    with FeatureReader(target, [2, 15, 27]) as reader:
        target(input_ids)
        features = reader.take()        # (B, T, 3 * Ht), low layer first
    ```

    Several forwards before a `take` (chunked prefill) are joined along T. Of a block that runs more than once in one
    forward (Dory loops over some), the last run counts. Hooks are removed on exit, also after an error.
    Only forwards of the thread that entered are read, since another thread may run the same target meanwhile.

    Args:
        target: The target.
        layer_ids: `hidden_states` indices, ascending.
        embeds: Collect the embeddings too that the text model was given, images in their places (`take_embeds`).
    """

    def __init__(self, target: PreTrainedModel, layer_ids: list[int], embeds: bool = False):
        require_own_tokens(target)
        count = num_target_layers(target)
        if layer_ids[-1] > count:
            raise ValueError(
                f"the draft reads hidden_states index {layer_ids[-1]}, but {name_of(target)} has {count} "
                f"layers (largest index {count}): the head was trained for another target"
            )
        self.layer_ids = list(layer_ids)
        self._backbone = text_backbone(target)
        self._blocks = [] if self.layer_ids == [-1] else list(decoder_blocks(target))
        self._captured: dict[int, list[torch.Tensor]] = {}
        self._name, self._width = type(target).__name__, target.config.get_text_config().hidden_size
        self._forward, self._read_in = 0, dict.fromkeys(self.layer_ids, 0)  # of the backbone, counted
        self._shape: tuple[int, ...] | None = None  # of the tokens of the newest forward: (B, T)
        self._collects_embeds = embeds
        self._embeds: list[torch.Tensor] = []
        self._handles: list = []

    def __enter__(self) -> "FeatureReader":
        self.clear()
        self._thread = threading.get_ident()
        for layer_id in self.layer_ids:
            if layer_id == -1:
                hook = self._backbone.register_forward_hook(self._capture_output(layer_id))
            elif layer_id == 0:
                hook = self._blocks[0].register_forward_pre_hook(self._capture_input, with_kwargs=True)
            else:
                hook = self._blocks[layer_id - 1].register_forward_hook(self._capture_output(layer_id))
            self._handles.append(hook)
        self._handles.append(self._backbone.register_forward_pre_hook(self._begin_forward, with_kwargs=True))
        return self

    def __exit__(self, *exc_info) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        self._captured = {layer_id: [] for layer_id in self.layer_ids}
        self._embeds = []

    def take_embeds(self) -> torch.Tensor | None:
        """(B, T, H) what the text model was given in place of ids since the last `clear` or `take`; `None` for ids.

        Call it before `take`.
        """
        return torch.cat(self._embeds, dim=1) if self._embeds else None

    def take(self, device: torch.device | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Features (B, T, A * Ht) of all forwards since the last `take`, moved once; forgets them.

        Raises:
            RuntimeError: a block did not run, so that its feature is missing.
        """
        missing = [layer_id for layer_id, parts in self._captured.items() if not parts]
        if missing:
            raise RuntimeError(f"the target's forward did not run the blocks behind hidden_states indices {missing}")
        joined = [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in self._captured.values()]
        self.clear()
        device = device or joined[-1].device
        return torch.cat([part.to(device=device, dtype=dtype or part.dtype) for part in joined], dim=-1)

    def _begin_forward(self, module, args, kwargs):
        if threading.get_ident() != self._thread:
            return
        self._forward += 1
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1])
        tokens = next((tensor for tensor in given if isinstance(tensor, torch.Tensor)), None)
        self._shape = None if tokens is None else tuple(tokens.shape[:2])
        if self._collects_embeds and kwargs.get("inputs_embeds") is not None:
            self._embeds.append(kwargs["inputs_embeds"])

    def _capture_output(self, layer_id: int):
        def hook(module, args, output):
            if threading.get_ident() == self._thread:
                self._keep(layer_id, output if isinstance(output, torch.Tensor) else output[0])

        return hook

    def _capture_input(self, module, args, kwargs):
        if threading.get_ident() == self._thread and (not self._captured[0] or self._read_in[0] != self._forward):
            self._keep(0, args[0] if args else kwargs["hidden_states"])

    def _keep(self, layer_id: int, feature: torch.Tensor) -> None:
        """Keep a block's output, in place of one from an earlier run in the same forward.

        Raises:
            ValueError: not one vector a token (several residual streams, prompts in front, time before the batch).
        """
        expected = (*(self._shape or feature.shape[:2]), self._width)
        if feature.shape != expected:
            raise ValueError(
                f"{self._name} gives features of shape {tuple(feature.shape)} at hidden_states index {layer_id}, "
                f"where {expected} was expected, one vector a token: a head cannot read them"
            )
        if self._captured[layer_id] and self._read_in[layer_id] == self._forward:
            self._captured[layer_id].pop()
        self._read_in[layer_id] = self._forward
        self._captured[layer_id].append(feature)
