"""A guard that stops a run at a loss or gradient that is not finite, names its examples, and protects the weights.

The guard never waits for the device during a step. The device itself sets the gradients of a bad step to zero, and the
flag of the step is read one step later, or before anything is logged, evaluated or saved.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainerCallback

from ...ttt.loss import IGNORE_INDEX
from ..data.packing import PackedDataset
from ..targets.stored_features import StoredFeatures


_SHOWN = 3  # examples named in a message
_KEPT = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass
class _Step:
    """The micro-batches of one optimizer step and, once it is closed, whether all of it was finite."""

    number: int = 0
    batches: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    bad: torch.Tensor | None = None  # () bool on the host, filled when `ready` says so
    ready: Any = None

    def close(self, bad: torch.Tensor, number: int) -> None:
        self.number = number
        try:
            self.ready = None if bad.device.type == "cpu" else torch.Event(bad.device)
        except RuntimeError:  # the backend has no events, so wait for it
            bad = bad.cpu()
        self.bad = bad.to("cpu", non_blocking=True)
        if self.ready is not None:
            self.ready.record()

    def is_bad(self) -> bool:
        if self.ready is not None:
            self.ready.synchronize()
        return bool(self.bad)


class NanGuard(TrainerCallback):
    """Watches the losses and gradients of an [`Eagle3Trainer`] for values that are not finite.

    Args:
        trainer: The trainer, which is asked for examples and their losses when one of them is to be named.
    """

    def __init__(self, trainer):
        self.trainer = trainer
        self._open, self._closed = _Step(), _Step()

    def watch(self, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Note the loss of a micro-batch, and keep the ids of the batch."""
        self._open.losses.append(loss.detach())
        self._open.batches.append({name: batch[name] for name in _KEPT if name in batch})

    def on_train_begin(self, args, state, control, **kwargs):
        self._open, self._closed = _Step(), _Step()

    @torch.no_grad()
    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.check()
        step, self._open = self._open, _Step()
        if not step.losses:
            return
        bad = ~torch.stack(step.losses).isfinite().all()
        # A gradient scaler (fp16) looks for overflows itself, and skips such steps as a matter of course.
        gradients = local_gradients(optimizer) if self.trainer.accelerator.scaler is None else []
        if gradients:
            bad = bad | ~torch.stack([norm.to(bad.device).isfinite() for norm in torch._foreach_norm(gradients)]).all()
        if args.world_size > 1:
            bad = self.trainer.accelerator.reduce(bad.float(), "sum") > 0
        for gradient in gradients:
            gradient.masked_fill_(bad.to(gradient.device), 0)
        step.close(bad, state.global_step + 1)
        self._closed = step

    def on_train_end(self, args, state, control, **kwargs):
        self.check()

    def check(self) -> None:
        """Read the flag of the last closed step.

        Raises:
            RuntimeError: the step was not finite; the message names its examples.
        """
        step, self._closed = self._closed, _Step()
        if step.bad is not None and step.is_bad():
            raise RuntimeError(
                f"the loss or a gradient of step {step.number} is not finite: {_cause(self.trainer, step)}. Its "
                "gradients were not used: the weights are intact, and no checkpoint contains that step"
            )


def local_gradients(optimizer) -> list[torch.Tensor]:
    """Return this process's part of all gradients."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]


# ----- which example it was: slow, and only when the run is lost anyway ----------------------------------------------


@dataclass
class _Sample:
    """One chat of a bad batch."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    index: int | None = None
    problem: str = ""


def _cause(trainer, step: _Step) -> str:
    losses = [float(loss) for loss in step.losses]
    bad = [batch for batch, loss in zip(step.batches, losses, strict=True) if not _is_finite(loss)]
    samples = [sample for batch in bad or step.batches for sample in samples_of(batch)]
    rates = f"lower learning_rate (now {trainer.args.learning_rate}) or raise warmup_steps"
    if not bad and trainer.args.world_size > 1:
        return f"the losses of this process are finite, look at the others' messages; if none names a sample, {rates}"
    packed = isinstance(trainer.train_dataset, PackedDataset)
    chats = trainer.train_dataset.dataset if packed else trainer.train_dataset
    _find(chats, samples)
    for sample in samples:
        sample.problem = _problem(trainer, chats, sample)
    guilty = [sample for sample in samples if sample.problem]
    named = "; ".join(_name(trainer, sample) for sample in (guilty or samples)[:_SHOWN])
    rest = len(guilty or samples) - _SHOWN
    named += f"; and {rest} more" if rest > 0 else ""
    if any("features" in sample.problem for sample in guilty):
        return f"{named}. Run the target, or store its features, in bfloat16"
    if guilty and len(guilty) < len(samples):
        return f"{named}. Leave it out, or {rates}"
    if not guilty:
        return f"no chat of the batch is the cause alone, {rates}. The batch was: {named}"
    return f"every chat of the batch gives it, so the weights do, {rates}. The batch was: {named}"


def _is_finite(value: float) -> bool:
    return value - value == 0


def samples_of(batch: dict[str, torch.Tensor]) -> Iterator[_Sample]:
    """Yield the chats of a batch without padding; a packed sequence yields each of its chats."""
    ids, labels = batch["input_ids"].cpu(), batch["labels"].cpu()
    mask = batch.get("attention_mask", torch.ones_like(ids)).cpu()
    positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids)).cpu()
    for i in range(len(ids)):
        starts = (positions[i] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
            kept = mask[i, start:end].bool()
            if kept.any():
                yield _Sample(ids[i, start:end][kept], labels[i, start:end][kept])


def _find(dataset, samples: list[_Sample]) -> None:
    """Give every chat its index in the dataset, where its ids can be found there."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return
    examples: Any = dataset
    if isinstance(dataset, StoredFeatures):
        examples = dataset.iter_column("input_ids")
    elif hasattr(dataset, "select_columns"):
        examples = dataset.select_columns("input_ids")
    wanted = {tuple(sample.input_ids.tolist()): sample for sample in samples}
    for index, example in enumerate(examples):
        found = wanted.pop(tuple(torch.as_tensor(example["input_ids"]).tolist()), None)
        if found is not None:
            found.index = index
        if not wanted:
            return


@torch.no_grad()
def _problem(trainer, chats, sample: _Sample) -> str:
    """Say what is not finite when this chat is a batch of its own; empty where everything is finite."""
    example: Any = {"input_ids": sample.input_ids.tolist(), "labels": sample.labels.tolist()}
    if sample.index is not None:
        example = chats[sample.index]
    batch = trainer._prepare_inputs(trainer.data_collator([example]))
    if not bool((batch["labels"] != IGNORE_INDEX).any()):
        return ""
    inputs = trainer.draft_inputs(batch)
    if not inputs["features"].isfinite().all():
        return "the target's features are not finite"
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return ""  # the draft is spread over the processes, and the others do not take part
    loss = trainer.accelerator.unwrap_model(trainer.model)(**inputs).loss
    return "" if loss.isfinite() else f"its loss is {loss.item()}"


def _name(trainer, sample: _Sample) -> str:
    place = f"example {sample.index} of train_dataset" if sample.index is not None else "a chat"
    ids = sample.input_ids[:40].tolist()
    decode = getattr(trainer.processing_class, "decode", None)
    text = repr(str(decode(ids))[:100]) if decode is not None else f"input_ids {ids[:8]}..."
    return f"{place} ({text})" + (f": {sample.problem}" if sample.problem else "")
