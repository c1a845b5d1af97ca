"""Which layers of a target the draft reads, and reading them.

A feature is the raw residual stream at a `hidden_states` index: 0 is the embedding output, `i` the output of block
`i - 1`, `L` the output of the last block before the final norm. Forward hooks on the decoder blocks give exactly these
on every transformers version, also where `hidden_states[L]` is already normed. Training and generation use the same
reader, so that a head never sees other features than it was trained on.
"""

import torch
from torch import nn


def default_layer_ids(num_layers: int) -> list[int]:
    """The reference's `[2, L // 2, L - 3]`; for targets with fewer than 7 layers, low/middle/high spread out."""
    if num_layers >= 7:
        return [2, num_layers // 2, num_layers - 3]
    if num_layers >= 4:
        return [1, num_layers // 2, num_layers - 1]
    return list(range(max(0, num_layers - 2), num_layers + 1))


def num_target_layers(target: nn.Module) -> int:
    return target.config.get_text_config().num_hidden_layers


def decoder_blocks(target: nn.Module) -> nn.ModuleList:
    """The target's list of decoder blocks, found by its length under the text backbone.

    Raises:
        ValueError: no module list of `num_hidden_layers` entries exists.
    """
    count = num_target_layers(target)
    backbone = target.get_decoder() if hasattr(target, "get_decoder") else target
    for module in (backbone or target).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and not isinstance(module[0], nn.ModuleList):
            return module
    raise ValueError(
        f"{type(target).__name__} has no list of {count} decoder blocks (num_hidden_layers), so its features cannot "
        "be read"
    )


class FeatureReader:
    """Collects the residual stream at `layer_ids` while the target runs, as a context manager.

    ```
    with FeatureReader(target, [2, 15, 27]) as reader:
        target(input_ids)
        features = reader.take()        # (B, T, 3 * Ht), low layer first
    ```

    Several forwards before a `take` (chunked prefill) are joined along T. Hooks are removed on exit, whatever happens.
    """

    def __init__(self, target: nn.Module, layer_ids: list[int]):
        count = num_target_layers(target)
        if layer_ids[-1] > count:
            raise ValueError(
                f"the draft reads hidden_states index {layer_ids[-1]}, but {type(target).__name__} has {count} "
                f"layers (largest index {count}): the head was trained for another target"
            )
        self.layer_ids = list(layer_ids)
        self._blocks = decoder_blocks(target)
        self._captured: dict[int, list[torch.Tensor]] = {}
        self._handles: list = []

    def __enter__(self) -> "FeatureReader":
        self.clear()
        for layer_id in self.layer_ids:
            if layer_id == 0:
                hook = self._blocks[0].register_forward_pre_hook(self._capture_input, with_kwargs=True)
            else:
                hook = self._blocks[layer_id - 1].register_forward_hook(self._capture_output(layer_id))
            self._handles.append(hook)
        return self

    def __exit__(self, *exc_info) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        self._captured = {layer_id: [] for layer_id in self.layer_ids}

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

    def _capture_output(self, layer_id: int):
        def hook(module, args, output):
            self._captured[layer_id].append(output[0] if isinstance(output, tuple) else output)

        return hook

    def _capture_input(self, module, args, kwargs):
        self._captured[0].append(args[0] if args else kwargs["hidden_states"])
