"""The teacher: the target's logits over the draft vocabulary, and its first choices, for supervised tokens.

Online, the target runs in the training process; with stored features, only its output layer does.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from ...model.features import FeatureReader
from ...model.target_modules import num_target_layers
from ...ttt.loss import supervised_mask
from ...utils.logging import get_logger
from .output_layer import OutputLayer


logger = get_logger(__name__)


class Teacher:
    """Turns a batch of tokens (and stored features, if any) into the inputs of the draft's training forward.

    The target reads every document alone, also those of packed sequences (`position_ids`), so that no document can
    influence another, whatever the target. Its logits over the whole vocabulary never exist for all positions at once.

    Args:
        target: The target, frozen and in eval mode; it runs under `no_grad` and is never moved or changed.
        layer_ids: `hidden_states` indices that the draft reads.
        draft_ids: (D,) target ids of the draft vocabulary.
        last_features: Whether to return the target's last feature too, for `feature_loss_weight`.
    """

    def __init__(
        self, target: PreTrainedModel, layer_ids: list[int], draft_ids: torch.Tensor, last_features: bool = False
    ):
        self.target, self.layer_ids, self.last_features = target, list(layer_ids), last_features
        self._last_layer = num_target_layers(target)
        self._output = OutputLayer(target, draft_ids)
        self._fits: bool | None = None  # compared with the target's own logits on the first batch

    @torch.no_grad()
    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Compute `features`, `teacher_logits` (n, D) and `teacher_in_vocab` (n,) for n supervised pairs of a batch.

        With `last_features` there is also `teacher_features` (n, Ht): the target's last feature, one token ahead of
        the position of a pair.

        Raises:
            ValueError: the batch has stored features, but the target's logits cannot be computed from them.
        """
        with torch.autocast(batch["input_ids"].device.type, enabled=False):  # in its own dtype, as when generating
            if self._fits is None:
                self._fits = self._compare(batch)
            return self._teach(batch)

    def _compare(self, batch: dict[str, torch.Tensor], tokens: int = 32) -> bool:
        fits = self._output.fits(batch["input_ids"][:1, :tokens])
        name = type(self.target).__name__
        if not fits and "features" in batch:
            raise ValueError(
                f"the logits of {name} cannot be computed from its last hidden state alone, which is what stored "
                "features have: train it online, pass the tokenised data itself to Eagle3Trainer"
            )
        if not fits:
            logger.warning(
                f"The output layer of {name} cannot be run on the supervised tokens alone (compared with its own "
                "logits): it runs on one whole sequence at a time, which takes longer and more memory."
            )
        return fits

    def _teach(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sequences, positions = supervised_mask(batch["labels"], batch.get("position_ids")).nonzero(as_tuple=True)
        taught = sequences, positions + 1  # there the target predicts the token two ahead of a pair's position
        if "features" in batch:
            features = batch["features"]
            logits, top1 = self._output.logits(batch["last_hidden"][taught]), batch["top1"][taught]
            last = self._stored_last(features) if self.last_features else None
        else:
            features, last, logits, top1 = self._run(batch, taught)
        in_vocab = torch.isin(top1, self._output.draft_ids.to(top1.device))
        given = {"features": features, "teacher_logits": logits, "teacher_in_vocab": in_vocab}
        return given if last is None else {**given, "teacher_features": last[taught]}

    def _stored_last(self, features: torch.Tensor) -> torch.Tensor:
        if self.layer_ids[-1] != self._last_layer:
            raise ValueError(
                f"feature_loss_weight needs the target's last feature, hidden_states index {self._last_layer}, but "
                f"indices {self.layer_ids} were stored: train online, or store and read target_layer_ids that end in "
                f"{self._last_layer}"
            )
        return features[..., -(features.shape[-1] // len(self.layer_ids)) :]

    # ----- the target runs ------------------------------------------------------------------------------------------

    def _run(self, batch, taught) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Return features (B, T, A * Ht), last features (B, T, Ht) or `None`, logits (n, D), first choices (n,)."""
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        extra = self.last_features and self.layer_ids[-1] != self._last_layer
        run = self._run_packed if batch.get("position_ids") is not None else self._run_batch
        with FeatureReader(self.target, [*self.layer_ids, self._last_layer] if extra else self.layer_ids) as reader:
            features, logits, top1 = run(reader, ids, mask, taught, batch.get("position_ids"))
        width = features.shape[-1] // len(reader.layer_ids)
        last = features[..., -width:] if self.last_features else None
        return features[..., :-width] if extra else features, last, logits, top1

    def _run_batch(self, reader, ids, mask, taught, position_ids=None):
        """Run the target once over sequences (B, T) of one document each, padded on the right."""
        if not self._fits:
            return self._run_whole(reader, ids, mask, taught)
        logits, top1 = self._output.read(taught, input_ids=ids, attention_mask=mask)
        return reader.take(device=ids.device), logits.to(ids.device), top1.to(ids.device)

    def _run_whole(self, reader, ids, mask, taught):
        """Take the target's own logits, one sequence at a time."""
        parts: list[tuple[torch.Tensor, ...]] = []
        sequences, positions = taught
        for i in range(len(ids)):
            one = slice(i, i + 1)
            output = self.target(
                input_ids=ids[one], attention_mask=mask if mask is None else mask[one], use_cache=False
            )
            full = output.logits.to(ids.device)[0, positions[sequences == i]]
            columns = full[:, self._output.draft_ids.to(ids.device)]
            parts.append((reader.take(device=ids.device), columns, full.max(-1).indices))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def _run_packed(self, reader, ids, mask, taught, position_ids):
        """Run the target over the documents of packed sequences, and put what it gives back in their places.

        Documents of similar length share a forward pass.
        """
        flat, found = taught[0] * ids.shape[1] + taught[1], len(taught[0])
        entry = torch.full((ids.numel(),), -1, device=ids.device)
        entry[flat] = torch.arange(found, device=ids.device)
        features: Any = None
        for places in document_batches(position_ids, mask):
            inside = places >= 0
            there = (entry[places.clamp(min=0)] >= 0) & inside
            own = there.nonzero(as_tuple=True)
            texts = ids.flatten()[places.clamp(min=0)].masked_fill(~inside, 0)
            run, columns, first = self._run_batch(reader, texts, inside.to(torch.int64), own)
            if features is None:
                features = run.new_zeros(ids.numel(), run.shape[-1])
                logits, top1 = columns.new_zeros(found, columns.shape[-1]), first.new_zeros(found)
            features[places[inside]] = run[inside]
            logits[entry[places[own]]], top1[entry[places[own]]] = columns, first
        return features.view(*ids.shape, -1), logits, top1


def document_batches(position_ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Arrange the documents of packed sequences (B, T), shortest first, in batches of about the same size.

    Args:
        position_ids: (B, T), 0 at the start of each document.
        mask: (B, T), 0 at padding, which is left out; at least one document remains.

    Returns:
        Batches (d, L) of indices of the documents' tokens into the flattened sequences, -1 behind shorter documents.
    """
    starts = position_ids == 0
    starts[:, 0] = True
    first = starts.flatten().nonzero()[:, 0]
    lengths = torch.diff(first, append=first.new_tensor([position_ids.numel()]))
    if mask is not None:
        real = mask.flatten()[first] != 0
        real[0] = True
        first, lengths = first[real], lengths[real]
    sizes = lengths.tolist()
    groups = _similar(sizes, position_ids.numel())
    steps = torch.arange(max(sizes), device=first.device)
    batches = []
    for group in groups:
        within = steps[: sizes[group[-1]]]
        batches.append(torch.where(within < lengths[group, None], first[group, None] + within, -1))
    return batches


def _similar(sizes: list[int], limit: int) -> list[list[int]]:
    """Group indices by ascending size; a group has at most `limit` tokens and, unless small, a fifth of padding."""
    groups: list[list[int]] = []
    tokens = 0
    for i in sorted(range(len(sizes)), key=sizes.__getitem__):
        padded = (len(groups[-1]) + 1) * sizes[i] if groups else limit + 1
        tokens += sizes[i]
        if padded <= limit and (padded <= 512 or padded <= 1.25 * tokens):
            groups[-1].append(i)
        else:
            groups.append([i])
            tokens = sizes[i]
    return groups
