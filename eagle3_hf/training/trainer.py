"""`Eagle3Trainer`: transformers' Trainer with the training-time-test loss of EAGLE-3.

The draft is the only trained model. The target is frozen, never wrapped, moved or saved, and runs only as far as
features and teacher logits need it; with stored features only its output layer runs.
"""

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch.utils.data import Sampler
from transformers import PreTrainedModel, Trainer
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PredictionOutput, TrainOutput

from ..export.card import write_card
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..model.offload import require_resident
from ..model.target_modules import require_own_tokens
from ..ttt.loss import IGNORE_INDEX
from ..ttt.settings import TTTSettings
from ..utils.logging import get_logger
from .adapter_card import write_adapter_card
from .arguments import Eagle3TrainingArguments
from .callbacks import MeasureTau, NanGuard, TrainBegin
from .curves import write_curves
from .data.collator import Eagle3DataCollator, check_batch
from .data.encoding import as_tokenizer
from .data.packing import PackedDataset, token_lengths
from .data.prepare import pad_token_id, prepare, settle_tokenizer, settle_vocabulary
from .metrics import StepSums, step_metrics
from .resume import last_whole_checkpoint, require_whole, steps_of
from .targets.stored_features import StoredFeatures
from .targets.teacher import Teacher


logger = get_logger(__name__)


class Eagle3Trainer(Trainer):
    """Trains a draft head with transformers' Trainer.

    Args:
        model: The draft, or adapters on it (`peft.get_peft_model(draft, LoraConfig(...))`). If only the size of its
            draft vocabulary is known, the vocabulary is built from the training data here.
        target_model: The target, already on the device on which it should run. It is frozen here.
        args: Arguments of the run. Without a `learning_rate` it is set here, by the head's width.
        train_dataset, eval_dataset: Chats (`messages`), tokenised examples (`input_ids`, `labels`), or
            [`StoredFeatures`].
        processing_class: The target's tokenizer, or the processor that has it.
        data_collator: Makes batches with `input_ids` and `labels` that are padded on the right;
            [`Eagle3DataCollator`] when `None`.
        kwargs: Other arguments of Trainer: `callbacks`, `optimizers`, `optimizer_cls_and_kwargs`.

    Raises:
        ValueError: the head does not fit the target, the data has nothing to learn from, or an argument of Trainer has
            no meaning for a head.
        TypeError: model, target or arguments are of another type.
    """

    args: Eagle3TrainingArguments
    model: Eagle3DraftModel | PeftModel
    train_dataset: Any
    eval_dataset: Any
    loss_is_scaled_for_ga = True  # divided by the global count of supervised tokens, not per micro-batch

    def __init__(
        self,
        model: Eagle3DraftModel | PeftModel | None = None,
        target_model: PreTrainedModel | None = None,
        args: Eagle3TrainingArguments | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        data_collator=None,
        **kwargs: Any,
    ):
        _check_arguments(target_model, args, kwargs)
        assert target_model is not None
        if isinstance(train_dataset, Mapping):
            raise ValueError(f"train_dataset has the splits {', '.join(train_dataset)}: pass one of them")
        require_own_tokens(target_model)
        args = args or Eagle3TrainingArguments()
        args._n_gpu = min(args.n_gpu, 1)  # DataParallel cannot split the teacher's logits; torchrun uses several GPUs
        self.target_model = target_model.eval().requires_grad_(False)
        draft = _head_of(model)
        require_resident(draft, "training")
        draft.bind(target_model)
        args.settle_learning_rate(draft.config.hidden_size)
        if isinstance(model, PeftModel) and not draft.has_draft_vocab:
            raise ValueError(
                "the head under the adapters has no draft vocabulary yet, and adapters do not save one: call "
                "draft.set_draft_vocab(ids), save the head, and put the adapters on that"
            )
        args.ttt_settings().check_fits(draft.config)
        tokenizer = as_tokenizer(processing_class) if processing_class is not None else None
        settle_tokenizer(draft, tokenizer)
        with args.main_process_first(desc="preparing the data"):  # the others find its cache
            train_dataset, eval_dataset = (
                prepare(dataset, draft, target_model, tokenizer, args.encoding_options())
                for dataset in (train_dataset, eval_dataset)
            )
        self.vocab_coverage = settle_vocabulary(draft, target_model, train_dataset, tokenizer, args.vocab_cache)
        if args.freeze_embeddings and draft.config.own_embeddings:
            draft.embed_tokens.requires_grad_(False)
        if data_collator is None:
            streams = args.packing and train_dataset is not None and not hasattr(train_dataset, "__len__")
            data_collator = Eagle3DataCollator(
                pad_token_id(tokenizer, target_model), packing_length=args.max_length if streams else None
            )
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
        self._nan_guard = NanGuard(self)
        self.add_callback(self._nan_guard)
        self.add_callback(TrainBegin(self._train_sums))
        self._last_tau: tuple[int, float] | None = None
        self._resumed_at = 0  # steps of the checkpoint from which the last call of train resumed
        self._checked_batches: set[bool] = set()  # True once a batch of training was checked, False for evaluation

    @property
    def draft(self) -> Eagle3DraftModel:
        """The head without whatever wraps it."""
        return _head_of(self.accelerator.unwrap_model(self.model))

    def _new_teacher(self) -> Teacher:
        draft = self.draft
        return Teacher(
            self.target_model,
            draft.config.captured_layer_ids,
            draft.draft_vocab_ids(),
            last_features=self.args.feature_loss_weight > 0,
        )

    # ----- resuming, saving -----------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        """Train as Trainer does; `resume_from_checkpoint=True` takes the last complete checkpoint.

        If a checkpoint has had all the steps of the run already, it is loaded, and no step is made; the returned
        metrics are then empty, and the loss is NaN.

        Raises:
            ValueError: there is no such checkpoint, the given one is incomplete, or it holds weights alone.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"there is no complete checkpoint to resume from in {self.args.output_dir}")
        elif isinstance(resume_from_checkpoint, (str, os.PathLike)):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        if resume_from_checkpoint:
            require_whole(resume_from_checkpoint)
        self._resumed_at = steps_of(resume_from_checkpoint) if resume_from_checkpoint else 0
        result = super().train(resume_from_checkpoint, *args, **kwargs)
        if not resume_from_checkpoint or result.global_step > self._resumed_at:
            return result
        logger.warning(
            f"Nothing was trained: {resume_from_checkpoint} has had {result.global_step} steps, and no more were "
            "asked for. To go on, raise max_steps or num_train_epochs."
        )
        return TrainOutput(result.global_step, float("nan"), {})

    def _run_epoch(self, *args, **kwargs):
        """Run an epoch unless all steps are done: Trainer would make one more step from a finished checkpoint."""
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True

    def hyperparameter_search(self, *args, **kwargs):
        """Reject the search: it has no meaning for heads.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"hyperparameter_search makes a new model for each trial, with model_init: {_MODEL_INIT}")

    def _load_from_checkpoint(self, *args, **kwargs):
        super()._load_from_checkpoint(*args, **kwargs)
        self._teacher = self._new_teacher()  # with the vocabulary of the checkpoint, not one of today's data

    def create_model_card(self, *args, tags=(), **kwargs) -> None:
        """Write the card of the head or the adapters, since that of transformers describes a fine-tuned model."""
        if not self.is_world_process_zero():
            return
        tau = self._last_tau[1] if self._last_tau is not None else None
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel):
            write_adapter_card(self.args.output_dir, model, tau)
            return
        sequences = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        curves = write_curves(self.args.output_dir, self.state.log_history, sequences)
        write_card(
            self.args.output_dir,
            model.config,
            model.generation_config,
            coverage=self.vocab_coverage,
            curves=None if curves is None else curves.name,
            acceptance={"held-out prompts, greedy": {"tau": f"{tau:.2f}"}} if tau is not None else None,
            tags=[tags] if isinstance(tags, str) else tags or (),
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self.create_model_card()  # Trainer writes none before the end
        super()._push_from_checkpoint(checkpoint_folder)

    # ----- the loss -------------------------------------------------------------------------------------------------

    def draft_inputs(self, batch: dict[str, torch.Tensor], settings: TTTSettings | None = None) -> dict[str, Any]:
        """Return the arguments of the draft's forward for a collated batch: its tokens, and the teacher's outputs."""
        inputs: dict[str, Any] = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        if "position_ids" in batch:
            inputs["position_ids"] = batch["position_ids"]
        inputs["settings"] = settings or self.args.ttt_settings(training=False)
        return {**inputs, **self._teacher(batch)}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if (
            model.training not in self._checked_batches
        ):  # only the first batch of each kind, since this waits for the device
            check_batch(inputs, self._expected_columns() if model.training else ("input_ids", "labels"))
            self._checked_batches.add(model.training)
        taught = self.draft_inputs(inputs, self.args.ttt_settings(training=model.training))
        loss, outputs = super().compute_loss(model, taught, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if model.training:
            self._nan_guard.watch(loss, inputs)
        (self._train_sums if model.training else self._eval_sums).add(outputs)
        return (loss, outputs) if return_outputs else loss

    def _expected_columns(self) -> list[str]:
        packed = isinstance(self.train_dataset, PackedDataset)
        examples = self.train_dataset.dataset if packed else self.train_dataset
        stored = ["features"] if isinstance(examples, StoredFeatures) else []
        return ["input_ids", "labels", *stored, *(["position_ids"] if packed else [])]

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self._nan_guard.check()
        return super()._maybe_log_save_evaluate(*args, **kwargs)

    # ----- evaluation and logs --------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset=None, *args, **kwargs) -> dict[str, float]:
        """Evaluate as Trainer does; another dataset, or several by name, may consist of chats too."""
        if eval_dataset is not None and not isinstance(eval_dataset, str):  # a name stands for a prepared one
            eval_dataset = self._prepared(eval_dataset)
        return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset, *args, **kwargs) -> PredictionOutput:
        """Compute metrics as Trainer does; `predictions` is `None`. The dataset may consist of chats too."""
        if isinstance(test_dataset, Mapping):
            raise ValueError(f"test_dataset has the splits {', '.join(test_dataset)}: pass one of them")
        return super().predict(self._prepared(test_dataset), *args, **kwargs)

    def _prepared(self, dataset):
        tokenizer = as_tokenizer(self.processing_class) if self.processing_class is not None else None
        with self.args.main_process_first(desc="preparing the data"):
            return prepare(dataset, self.draft, self.target_model, tokenizer, self.args.encoding_options())

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        # The metrics are sums kept by compute_loss; gathering the logits of all positions would only fill memory.
        return super().prediction_step(model, self._without_repeats(inputs), True, ignore_keys)

    def _without_repeats(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Ignore what several processes repeat from the beginning to fill up their last batches."""
        state = self.accelerator.gradient_state
        # Where the collator packs, the sequences of a batch are no examples of the dataset.
        packs = getattr(self.data_collator, "packing_length", None) is not None
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder < 1 or packs:
            return inputs
        labels = inputs["labels"].clone()
        labels[max(0, state.remainder - self.args.process_index * self.args.eval_batch_size) :] = IGNORE_INDEX
        return {**inputs, "labels": labels}

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ):
        self._eval_sums.reset()
        output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        losses, hits, counts = self._eval_sums.collect(self.accelerator)
        # Trainer's own mean over batches would depend on how the examples were batched.
        total = sum(weight * loss for weight, loss in zip(self.args.ttt_settings().weights, losses, strict=True))
        assert output.metrics is not None  # Trainer has filled them
        output.metrics[f"{metric_key_prefix}_loss"] = total / max(counts[0], 1.0)
        output.metrics.update(step_metrics(hits, counts, f"{metric_key_prefix}_"))
        output.metrics.update(self._measured_tau(metric_key_prefix))
        if metric_key_prefix == "eval" and counts[0]:
            # What a decoded text is compared with, see `decoding.draft.trial`.
            self.draft.config.held_out_accuracy = [
                round(hit / count, 4) for hit, count in zip(hits, counts, strict=True) if count
            ]
        return output

    def _measured_tau(self, prefix: str) -> dict[str, float]:
        """Return `eval_tau`, also for evaluation sets with names: the prompts are the same, so measure once a step."""
        callback = next((c for c in self.callback_handler.callbacks if isinstance(c, MeasureTau)), None)
        if callback is None:
            return {}
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            logger.warning_once(
                "MeasureTau is skipped: with FSDP or DeepSpeed no process holds the whole head to decode with."
            )
            return {}
        if not self.is_in_train or self._last_tau is None or self._last_tau[0] != self.state.global_step:
            place = self.args.process_index, self.args.world_size
            counts = torch.tensor(callback.measure(self.draft, self.target_model, *place), device=self.args.device)
            emitted, rounds = self.accelerator.reduce(counts, "sum").tolist()
            self._last_tau = self.state.global_step, emitted / max(rounds, 1)
        return {"eval_tau" if prefix.startswith("eval") else f"{prefix}_tau": self._last_tau[1]}

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        if "train_loss" in logs and self.state.global_step == self._resumed_at:
            return  # a run without a step has no summary
        if "loss" in logs:
            _, hits, counts = self._train_sums.collect(self.accelerator)
            logs.update(step_metrics(hits, counts))
        super().log(logs, *args, **kwargs)

    def _get_train_sampler(self, train_dataset=None) -> Sampler | None:
        dataset = train_dataset if train_dataset is not None else self.train_dataset
        if self.args.train_sampling_strategy == "group_by_length" and hasattr(dataset, "__len__"):
            return _GroupedByLength(
                self.args.train_batch_size * self.args.gradient_accumulation_steps, dataset, self.args
            )
        return super()._get_train_sampler(train_dataset)

    def _get_eval_sampler(self, eval_dataset) -> Sampler | None:
        if self.args.train_sampling_strategy == "group_by_length" and hasattr(eval_dataset, "__len__"):
            return _GroupedByLength(self.args.eval_batch_size, eval_dataset, self.args)
        return super()._get_eval_sampler(eval_dataset)


class _GroupedByLength(LengthGroupedSampler):
    """Batches examples of similar length, without reading their features.

    Seed and epoch determine the order: it is the same in every process, and after a run is resumed.
    """

    def __init__(self, batch_size: int, dataset, args: Eagle3TrainingArguments):
        super().__init__(batch_size, lengths=token_lengths(dataset))
        self._seed = args.seed if args.data_seed is None else args.data_seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(self._seed + epoch)


_MODEL_INIT = (
    "a head's vocabulary, tokenizer and target are set when its trainer is made, so make a new Eagle3Trainer for "
    "each head, and pass it as model"
)
_NO_MEANING = {
    "model_init": _MODEL_INIT,
    "compute_loss_func": "a head learns by training-time test; its loss is chosen by args.loss_type",
    "compute_metrics": "the evaluation of a head keeps no predictions. Its metrics are sums over the supervised pairs "
    "(accuracies, simulated acceptance length); MeasureTau adds tau, and a callback's on_evaluate gets all of them",
    "preprocess_logits_for_metrics": "the evaluation of a head keeps no logits; see compute_metrics",
}


def _check_arguments(target, args, kwargs: dict[str, Any]) -> None:
    """Reject, before the data is read, arguments that Trainer would take but that have no meaning for a head.

    Raises:
        ValueError: an argument that has no meaning for heads.
        TypeError: arguments of another type, or unknown ones.
    """
    for name, reason in _NO_MEANING.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} has no meaning for Eagle3Trainer: {reason}")
    inspect.signature(Trainer).bind_partial(**kwargs)
    if not isinstance(target, torch.nn.Module):
        raise TypeError(f"target_model must be a model of transformers, got {type(target).__name__}")
    if args is not None and not isinstance(args, Eagle3TrainingArguments):
        raise TypeError(f"args must be Eagle3TrainingArguments, got {type(args).__name__}")


def _head_of(model) -> Eagle3DraftModel:
    """Return the head itself, without adapters.

    Raises:
        TypeError: there is none, or adapters were made for another kind of forward.
    """
    if isinstance(model, PeftModel):
        if type(model) is not PeftModel:
            raise TypeError(
                f"the adapters were made with a task_type ({type(model).__name__}), which changes the head's "
                "forward: leave task_type out of the LoraConfig"
            )
        model = model.get_base_model()
    if not isinstance(model, Eagle3DraftModel):
        raise TypeError(f"model must be an Eagle3DraftModel, or adapters on one, got {type(model).__name__}")
    return model
