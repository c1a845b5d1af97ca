"""What the target says about supervised tokens: its logits over the draft vocabulary and its own first choices.

Online, the target runs in the training process; from stored features, only its output layer does.
"""

import torch
from torch import nn

from ..features import FeatureReader
from ..ttt.loss import supervised_mask


class Teacher:
    """Turns a batch of tokens (and stored features, if any) into the inputs of the draft's training forward.

    Args:
        target: Frozen, on eval; run under `no_grad`, never moved or changed.
        layer_ids: `hidden_states` indices that the draft reads.
        draft_ids: (D,) target ids of the draft vocabulary.
    """

    def __init__(self, target: nn.Module, layer_ids: list[int], draft_ids: torch.Tensor):
        self.target = target
        self.layer_ids = layer_ids
        self.draft_ids = draft_ids
        self._in_vocab = torch.zeros(target.get_input_embeddings().num_embeddings, dtype=torch.bool)
        self._in_vocab[draft_ids.cpu()] = True
        self._head_rows: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @torch.no_grad()
    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """`features`, `teacher_logits` (n, D) and `teacher_in_vocab` (n,) for the batch's n supervised pairs."""
        with torch.autocast(batch["input_ids"].device.type, enabled=False):  # in its own dtype, as when generating
            return self._teach(batch)

    def _teach(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows, positions = supervised_mask(batch["labels"]).nonzero(as_tuple=True)
        taught = rows, positions + 1  # the target's output there predicts the token two ahead of the pair's row
        if "features" in batch:
            features = batch["features"]
            logits = self._draft_logits(batch["last_hidden"][taught])
            top1 = batch["top1"][taught]
        else:
            features, full = self._run_target(batch)
            full = full[taught]
            top1 = full.max(-1).indices
            logits = full[:, self.draft_ids.to(full.device)]
        in_vocab = self._in_vocab.to(top1.device)[top1]
        return {"features": features, "teacher_logits": logits, "teacher_in_vocab": in_vocab}

    def _run_target(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with FeatureReader(self.target, self.layer_ids) as reader:
            output = self.target(
                input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask"), use_cache=False
            )
            return reader.take(device=batch["input_ids"].device), output.logits.to(batch["input_ids"].device)

    def _draft_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, D) from the input (n, Ht) of the target's output layer."""
        head = self.target.get_output_embeddings()
        if type(head) is not nn.Linear or not head.weight.is_floating_point() or head.weight.device.type == "meta":
            return head(hidden.to(self.target.dtype))[:, self.draft_ids.to(hidden.device)]
        if self._head_rows is None:
            ids = self.draft_ids.to(head.weight.device)
            self._head_rows = head.weight[ids], head.bias[ids] if head.bias is not None else None
        weight, bias = self._head_rows
        return nn.functional.linear(hidden.to(weight.dtype), weight, bias)
