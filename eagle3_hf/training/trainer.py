"""`Eagle3Trainer`: transformers' Trainer with the training-time-test loss of EAGLE-3.

The draft is the only trained model: the target is frozen, never moved, never saved, and runs only far enough to give
features and teacher logits (or not at all, from stored features, but for its output layer).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging

from ..acceptance import simulated_acceptance_length
from ..export.card import write_card
from ..modeling_eagle3 import Eagle3DraftModel, Eagle3DraftOutput
from ..ttt.loss import IGNORE_INDEX
from ..vocab import build_draft_vocab, coverage, record_tokenizer
from ..warm_start import special_ids
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
            scaled up. 1.0 is the paper's; less trains faster.
        max_length: Tokens kept of a chat, when the trainer tokenises it.
    """

    ttt_steps: int = field(default=7, metadata={"help": "Steps of training-time test."})
    step_decay: float = field(default=0.8, metadata={"help": "Weight decay^s of step s of the loss."})
    row_share: float = field(default=1.0, metadata={"help": "Share of rows that steps after the first train on."})
    max_length: int = field(default=2048, metadata={"help": "Tokens kept of a chat, when the trainer tokenises it."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradient norm to clip at."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Kept off: every parameter of a head takes part in every loss."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: stored features are columns."})

    def __post_init__(self):
        super().__post_init__()
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"  # torch would warn
        if self.ttt_steps < 1:
            raise ValueError(f"ttt_steps must be at least 1, got {self.ttt_steps}")
        if not 0 < self.row_share <= 1:
            raise ValueError(f"row_share must be above 0 and at most 1, got {self.row_share}")


class StepSums:
    """Loss, hits and number of supervised pairs of every step, summed on the device until somebody asks."""

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self.reset()

    def reset(self) -> None:
        self._sums = torch.zeros(3, self._num_steps)

    def add(self, output: Eagle3DraftOutput) -> None:
        sums: Any = output.step_losses, output.step_hits, output.step_counts
        new = torch.stack(sums).float()
        self._sums = self._sums.to(new.device) + new

    def collect(self, accelerator) -> list[list[float]]:
        """`[losses, hits, counts]`, S numbers each, over all processes; then starts anew."""
        sums = accelerator.reduce(self._sums.to(accelerator.device), "sum").tolist()
        self.reset()
        return sums


def step_metrics(hits: list[float], counts: list[float], prefix: str = "") -> dict[str, float]:
    """Token-weighted accuracy of every step, and what a chain with these accuracies would emit a round."""
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

    args: Eagle3TrainingArguments
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
        args._n_gpu = min(args.n_gpu, 1)  # DataParallel cannot split the teacher's rows; torchrun uses several GPUs
        self.target_model = target_model.eval().requires_grad_(False)
        model.bind(target_model)
        _settle_special_tokens(model, processing_class)
        if isinstance(processing_class, PreTrainedTokenizerBase):
            record_tokenizer(model.config, processing_class)
        train_dataset, eval_dataset = (
            _ready(dataset, model, target_model, processing_class, args.max_length)
            for dataset in (train_dataset, eval_dataset)
        )
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
        self._teacher = self._new_teacher()
        self._train_sums, self._eval_sums = StepSums(args.ttt_steps), StepSums(args.ttt_steps)

    def _new_teacher(self) -> Teacher:
        return Teacher(self.target_model, self.model.config.target_layer_ids, self.model.draft_vocab_ids())

    def create_model_card(self, *args, **kwargs) -> None:
        """The head's own card in place of transformers', which describes a fine-tuned model."""
        if self.is_world_process_zero():
            draft = self.accelerator.unwrap_model(self.model)
            write_card(self.args.output_dir, draft.config, draft.generation_config)

    def _load_from_checkpoint(self, *args, **kwargs):
        super()._load_from_checkpoint(*args, **kwargs)
        self._teacher = self._new_teacher()  # the checkpoint's vocabulary counts, whatever today's data would give

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
        if model.training:
            self._stop_unless_finite(loss, inputs["features"])
        (self._train_sums if model.training else self._eval_sums).add(outputs)
        return (loss, outputs) if return_outputs else loss

    def _stop_unless_finite(self, loss: torch.Tensor, features: torch.Tensor) -> None:
        """Before the update, so that the weights stay as they were; Trainer itself would go on with ruined ones."""
        if torch.isfinite(loss):
            return
        if torch.isfinite(features).all():
            cause = f"lower learning_rate (now {self.args.learning_rate}) or raise warmup_steps"
        else:
            cause = "the target's features are not finite either: run the target, or store its features, in bfloat16"
        raise RuntimeError(f"the loss is {loss.item()} at step {self.state.global_step + 1}: {cause}")

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # The metrics are sums kept by compute_loss; gathering logits of every row would only fill memory.
        return super().prediction_step(model, inputs, True, ignore_keys)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self._eval_sums.reset()
        output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        losses, hits, counts = self._eval_sums.collect(self.accelerator)
        # Trainer's own mean over batches would depend on how the rows were batched.
        total = sum(self.args.step_decay**step * loss for step, loss in enumerate(losses))
        output.metrics[f"{metric_key_prefix}_loss"] = total / max(counts[0], 1.0)
        output.metrics.update(step_metrics(hits, counts, f"{metric_key_prefix}_"))
        return output

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "loss" in logs:
            _, hits, counts = self._train_sums.collect(self.accelerator)
            logs.update(step_metrics(hits, counts))
        super().log(logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset=None) -> Sampler | None:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if self.args.train_sampling_strategy == "group_by_length" and isinstance(dataset, StoredFeatures):
            batch = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthGroupedSampler(batch, dataset=dataset, lengths=dataset.lengths)  # reads no features
        return super()._get_train_sampler(train_dataset)


def _settle_special_tokens(draft: Eagle3DraftModel, tokenizer) -> None:
    """The target's ids, else the tokenizer's, in both of the draft's configs: Trainer then finds nothing to align."""
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = getattr(draft.config, name)
        value = value if value is not None else getattr(tokenizer, name, None)
        setattr(draft.config, name, value)
        setattr(draft.generation_config, name, value)


def _ready(dataset, draft: Eagle3DraftModel, target: PreTrainedModel, tokenizer, max_length: int):
    """Chats become rows of ids and labels; rows and stored features are checked and stay as they are."""
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):  # Trainer takes several evaluation sets by name
        return {name: _ready(part, draft, target, tokenizer, max_length) for name, part in dataset.items()}
    if isinstance(dataset, StoredFeatures):
        dataset.check(target, draft.config.target_layer_ids)
    else:
        columns = getattr(dataset, "column_names", None) or list(next(iter(dataset), ()))
        if "input_ids" not in columns:
            if tokenizer is None:
                raise ValueError("chats need a tokenizer to become tokens: pass processing_class=tokenizer")
            return prepare_dataset(dataset, tokenizer, max_length=max_length)
        if "labels" not in columns:
            raise ValueError("rows with input_ids need labels too: the token where it is to be learnt, else -100")
    _check_supervised(dataset)
    return dataset


def _check_supervised(dataset) -> None:
    """Refuse data of which more than half has nothing to learn: the loss would only look good."""
    if not hasattr(dataset, "__len__"):
        return  # a stream can be read only once
    empty = sum(not bool((torch.as_tensor(row["labels"])[2:] != IGNORE_INDEX).any()) for row in _label_rows(dataset))
    if 2 * empty > len(dataset):
        raise ValueError(
            f"{empty} of {len(dataset)} rows have no token to learn (all labels from the third on are "
            f"{IGNORE_INDEX}): prepare the chats with eagle3_hf.training.data.prepare_dataset"
        )


def _label_rows(dataset):
    if isinstance(dataset, StoredFeatures):
        return dataset.label_rows()
    return dataset.select_columns("labels") if hasattr(dataset, "select_columns") else dataset


def _build_vocabulary(draft: Eagle3DraftModel, target: PreTrainedModel, dataset, tokenizer) -> None:
    if dataset is None:
        raise ValueError("the draft vocabulary is not set and there is no train_dataset to build it from")
    counts = count_tokens(_label_rows(dataset), draft.config.vocab_size)
    always = special_token_ids(tokenizer, target.generation_config) if tokenizer is not None else special_ids(target)
    ids = build_draft_vocab(counts, draft.config.draft_vocab_size, always)
    draft.set_draft_vocab(ids)
    logger.info(f"Draft vocabulary of {len(ids)} tokens covers {coverage(counts, ids):.2%} of the supervised tokens.")


def _pad_token_id(tokenizer, target: PreTrainedModel) -> int:
    """Any id does: padding stands right of every row that counts."""
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if pad is not None else getattr(target.generation_config, "pad_token_id", None) or 0
