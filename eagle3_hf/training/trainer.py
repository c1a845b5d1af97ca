"""`Eagle3Trainer`: transformers' Trainer with the training-time-test loss of EAGLE-3.

The draft is the only trained model: the target is frozen, never moved, never saved, and runs only far enough to give
features and teacher logits (or not at all, from stored features, but for its output layer).
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging

from ..acceptance import simulated_acceptance_length
from ..modeling_eagle3 import Eagle3DraftModel
from ..vocab import build_draft_vocab, coverage
from .data import Eagle3DataCollator, count_tokens, prepare_dataset, special_token_ids
from .store import StoredFeatures
from .teacher import Teacher


logger = logging.get_logger(__name__)


@dataclass
class Eagle3TrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults (AdamW 5e-5, betas 0.9/0.95, clip 0.5) and these fields.

    Args:
        ttt_steps: Steps of training-time test; a head drafts about as deep as it was trained.
        step_decay: Weight `decay^s` of step `s`.
        row_share: Share of the rows that the steps after the first train on, drawn anew for every batch; their loss is
            scaled up. 1.0 is the paper's; 0.33 trains about twice as fast.
        max_length: Tokens kept of a chat, when the trainer tokenises it.
    """

    ttt_steps: int = field(default=7, metadata={"help": "Steps of training-time test."})
    step_decay: float = field(default=0.8, metadata={"help": "Weight decay^s of step s of the loss."})
    row_share: float = field(default=1.0, metadata={"help": "Share of rows that steps after the first train on."})
    max_length: int = field(default=2048, metadata={"help": "Tokens kept of a chat, when the trainer tokenises it."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradient norm to clip at."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: stored features are columns."})

    def __post_init__(self):
        super().__post_init__()
        if self.ttt_steps < 1:
            raise ValueError(f"ttt_steps must be at least 1, got {self.ttt_steps}")
        if not 0 < self.row_share <= 1:
            raise ValueError(f"row_share must be above 0 and at most 1, got {self.row_share}")


class StepCounts:
    """Sums of hits and of supervised pairs per step, kept on the device until somebody asks."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self.reset()

    def reset(self) -> None:
        self._hits: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    def add(self, hits: torch.Tensor, counts: torch.Tensor) -> None:
        self._hits = hits.clone() if self._hits is None else self._hits + hits
        self._counts = counts.clone() if self._counts is None else self._counts + counts

    def metrics(self, accelerator, prefix: str = "") -> dict[str, float]:
        """Token-weighted accuracy of every step over all processes, and the chain it would draft; then resets."""
        if self._hits is None:
            return {}
        hits, counts = accelerator.reduce(torch.stack([self._hits, self._counts]).double(), "sum").tolist()
        self.reset()
        accuracies = [hit / max(count, 1.0) for hit, count in zip(hits, counts, strict=True)]
        named = {f"{prefix}accuracy_step_{step}": value for step, value in enumerate(accuracies)}
        return {**named, f"{prefix}simulated_acceptance_length": simulated_acceptance_length(accuracies)}


class Eagle3Trainer(Trainer):
    """Trains a draft head with transformers' Trainer.

    Args:
        model: The draft. A draft vocabulary of which only the size is known is built from the training data here.
        target_model: The frozen target, already where it should run.
        train_dataset, eval_dataset: Chats (`messages`), tokenised rows (`input_ids`, `labels`), or [`StoredFeatures`].
        processing_class: The target's tokenizer.

    Raises:
        ValueError: the head does not fit the target, or the data has nothing to learn from.
    """

    loss_is_scaled_for_ga = True  # divided by the global count of supervised tokens, not per micro-batch

    def __init__(
        self,
        model: Eagle3DraftModel,
        target_model: PreTrainedModel,
        args: Eagle3TrainingArguments | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        data_collator=None,
        **kwargs: Any,
    ):
        args = args or Eagle3TrainingArguments()
        self.target_model = target_model.eval().requires_grad_(False)
        model.bind(target_model)
        train_dataset = _tokenised(train_dataset, processing_class, args.max_length)
        eval_dataset = _tokenised(eval_dataset, processing_class, args.max_length)
        for stored in (train_dataset, eval_dataset):
            _check_stored(stored, model)
        if not model.has_draft_vocab:
            _build_vocabulary(model, target_model, train_dataset, processing_class)
        if data_collator is None:
            data_collator = Eagle3DataCollator(_pad_token_id(processing_class, target_model))
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        self.label_names = ["labels"]
        self._teacher = Teacher(target_model, model.config.target_layer_ids, model.draft_vocab_ids())
        self._train_counts, self._eval_counts = StepCounts(args.ttt_steps), StepCounts(args.ttt_steps)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = {
            "input_ids": inputs["input_ids"],
            "labels": inputs["labels"],
            "ttt_steps": self.args.ttt_steps,
            "step_decay": self.args.step_decay,
            "row_share": self.args.row_share if model.training else 1.0,
            **self._teacher(inputs),
        }
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        (self._train_counts if model.training else self._eval_counts).add(outputs.step_hits, outputs.step_counts)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # The metrics are sums kept by compute_loss; gathering logits of every row would only fill memory.
        return super().prediction_step(model, inputs, True, ignore_keys)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        self._eval_counts.reset()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        output.metrics.update(self._eval_counts.metrics(self.accelerator, f"{metric_key_prefix}_"))
        return output

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs:
            logs.update(self._train_counts.metrics(self.accelerator))
        super().log(logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset=None) -> Sampler | None:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if self.args.train_sampling_strategy == "group_by_length" and isinstance(dataset, StoredFeatures):
            batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthGroupedSampler(batch, dataset=dataset, lengths=dataset.lengths)  # reads no features
        return super()._get_train_sampler(train_dataset)


def _tokenised(dataset, tokenizer, max_length: int):
    """Chats become rows of ids and labels; rows and stored features stay as they are."""
    if dataset is None or isinstance(dataset, StoredFeatures):
        return dataset
    columns = getattr(dataset, "column_names", None) or (dataset[0].keys() if len(dataset) else ())
    if "input_ids" in columns:
        return dataset
    if tokenizer is None:
        raise ValueError("chats need a tokenizer to become tokens: pass processing_class=tokenizer of the target")
    return prepare_dataset(dataset, tokenizer, max_length=max_length)


def _check_stored(dataset, draft: Eagle3DraftModel) -> None:
    if isinstance(dataset, StoredFeatures) and dataset.index["layer_ids"] != draft.config.target_layer_ids:
        raise ValueError(
            f"{dataset.directory} stores hidden_states indices {dataset.index['layer_ids']}, but the draft reads "
            f"{draft.config.target_layer_ids}: store the features again, or create the draft with "
            f"target_layer_ids={dataset.index['layer_ids']}"
        )


def _build_vocabulary(draft: Eagle3DraftModel, target: PreTrainedModel, dataset, tokenizer) -> None:
    if dataset is None:
        raise ValueError("the draft vocabulary is not set and there is no train_dataset to build it from")
    rows = dataset.label_rows() if isinstance(dataset, StoredFeatures) else dataset
    counts = count_tokens(rows, draft.config.vocab_size)
    always = special_token_ids(tokenizer, target.generation_config) if tokenizer is not None else []
    ids = build_draft_vocab(counts, draft.config.draft_vocab_size, always)
    draft.set_draft_vocab(ids)
    logger.info(f"Draft vocabulary of {len(ids)} tokens covers {coverage(counts, ids):.2%} of the supervised tokens.")


def _pad_token_id(tokenizer, target: PreTrainedModel) -> int:
    """Any id does: padding stands right of every row that counts."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if pad is not None else getattr(target.generation_config, "pad_token_id", None) or 0
