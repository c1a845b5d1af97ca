"""A whole training run, from data to a saved head with its card; started again, it resumes where it stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

from ..model.modeling_eagle3 import Eagle3DraftModel
from ..model.target_modules import target_vocab_size
from ..ttt.loss import IGNORE_INDEX
from ..utils.devices import place_in_words, warn_if_slow
from ..utils.logging import get_logger
from .arguments import DataArguments, Eagle3TrainingArguments, ModelArguments
from .callbacks import MeasureTau, sample_prompts, warn_of_few_steps
from .data.packing import PackedDataset, only_labels
from .data.sources import load_chats
from .resume import (
    MERGED,
    EarlierRun,
    find_earlier_run,
    forbid_overwriting,
    last_whole_checkpoint,
    require_same_head,
)
from .targets.stored_features import StoredFeatures
from .trainer import Eagle3Trainer


logger = get_logger(__name__)


def train_head(
    model: ModelArguments, data: DataArguments, args: Eagle3TrainingArguments, say: Callable[[str], None] = logger.info
) -> Eagle3Trainer | None:
    """Prepare the data, load the target, make or load the head, train, evaluate, save with a card, push on request.

    `args.output_dir` holds the checkpoints and in the end the head (with `lora_r` the adapters, and the head with them
    merged in, in `merged`). If it has checkpoints, the run resumes from the last complete one; if the run is finished,
    nothing is loaded and nothing is changed.

    Args:
        model: Target and head.
        data: Data to train on and to evaluate on.
        args: Arguments of the run.
        say: Is called in the first process with what is about to be done.

    Returns:
        The trainer after training, or before its first step with `data.dry_run`; `None` for a run that was finished.

    Raises:
        ValueError: arguments contradict each other, the data has nothing to learn, or the head does not fit.
    """
    if model.device_map is not None and args.world_size > 1:
        raise ValueError(
            f"device_map={model.device_map} spreads the target over all GPUs of one process, but there are "
            f"{args.world_size} processes: start one, or leave device_map out"
        )
    if args.metric_for_best_model in ("eval_tau", "tau") and not data.tau_prompts:
        raise ValueError(
            "metric_for_best_model is eval_tau, but nothing measures it: set tau_prompts, for example to 16"
        )
    earlier = find_earlier_run(args.output_dir, adapters=bool(model.lora_r))
    if earlier is not None and earlier.has_all(args) and earlier.is_of(model):
        if args.process_index == 0:
            say(earlier.in_words())
        return None
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(model.target, **model.source)
    train, evaluation = load_data(data, args.seed if args.data_seed is None else args.data_seed)
    target = load_target(model, args)
    draft = make_head(model, target)
    trainer = Eagle3Trainer(
        model=with_adapters(draft, model),
        target_model=target,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer,
    )
    if data.tau_prompts:
        held_out = trainer.eval_dataset if trainer.eval_dataset is not None else trainer.train_dataset
        chats = held_out.dataset if isinstance(held_out, PackedDataset) else held_out
        chosen = [chats[i] for i in sample_prompts(_taught(chats), data.tau_prompts, args.seed)]
        prompts = [prompt_of_example(example) for example in chosen]
        trainer.add_callback(MeasureTau(prompts, max_new_tokens=data.tau_new_tokens))
    if trainer.is_world_process_zero():
        say("\n".join(plan(trainer)))
        warning = warn_of_few_steps(args, planned_steps(trainer))
        if data.dry_run and warning is not None:  # otherwise training shows it
            say(warning)
    if not data.dry_run:
        _train_and_save(trainer, model, earlier, say)
    return trainer


def _train_and_save(
    trainer: Eagle3Trainer, model: ModelArguments, earlier: EarlierRun | None, say: Callable[[str], None]
) -> None:
    args = trainer.args
    checkpoint = _checkpoint(args)
    if earlier is not None and checkpoint is None:
        forbid_overwriting(earlier)
    if checkpoint is not None:
        require_same_head(checkpoint, trainer.model.config)
        if trainer.is_world_process_zero():
            say(f"resumes from {checkpoint}; for a new run take another output_dir")
    result = trainer.train(checkpoint)
    if result.metrics:  # none if the run had been stopped between its last step and its end
        trainer.save_metrics("train", result.metrics)
    if trainer.eval_dataset is not None:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    trainer.save_model(_internal_call=True)
    trainer.save_state()
    if model.lora_r and trainer.is_world_process_zero():
        saved = PeftModel.from_pretrained(make_head(model, trainer.target_model), args.output_dir)
        saved.merge_and_unload().save_pretrained(Path(args.output_dir) / MERGED)
    trainer.create_model_card()
    if args.push_to_hub:
        trainer.push_to_hub()


def _checkpoint(args: Eagle3TrainingArguments) -> str | None:
    """Return the requested checkpoint, else the last complete one; from a command line `True` is a text."""
    asked = args.resume_from_checkpoint
    return asked if asked and str(asked).lower() not in ("true", "false") else last_whole_checkpoint(args.output_dir)


# ----- parts of a run ------------------------------------------------------------------------------------------------


def load_data(data: DataArguments, seed: int) -> tuple:
    """Load chats or stored features to train on, and to evaluate on (or `None`)."""
    examples = _load(data.train_data, data.train_split)
    if data.max_train_samples is not None:
        examples = examples.select(range(min(data.max_train_samples, len(examples))))
    if data.eval_data is not None:
        return examples, _load(data.eval_data, data.eval_split)
    if data.held_out < 0:
        raise ValueError(f"held_out is {data.held_out}: expected the number of chats to evaluate on, or 0 for none")
    if data.held_out == 0:
        return examples, None
    if data.held_out >= len(examples):
        raise ValueError(
            f"held_out is {data.held_out}, but {data.train_data} has {len(examples)} chats: hold fewer out "
            f"(--held_out {len(examples) // 10}), or name other chats with eval_data (--eval_data)"
        )
    parts = examples.train_test_split(test_size=data.held_out, seed=seed)
    return parts["train"], parts["test"]


def _load(source: str, split: str | None) -> Any:
    return StoredFeatures(source) if (Path(source) / "index.json").is_file() else load_chats(source, split=split)


def load_target(model: ModelArguments, args: Eagle3TrainingArguments) -> PreTrainedModel:
    """Load the target, on the devices of `device_map` or on the device on which the head trains."""
    target: Any = AutoModelForCausalLM.from_pretrained(
        model.target,
        dtype=model.dtype,
        device_map=model.device_map or {"": args.device},
        attn_implementation=model.attn_implementation,
        **model.source,
        **model.quantization,
    )
    warn_if_slow(target, model.target)
    if model.target_adapter is not None:
        target = PeftModel.from_pretrained(target, model.target_adapter)
    return target


def make_head(model: ModelArguments, target: PreTrainedModel) -> Eagle3DraftModel:
    """Load the head to train further, in float32, or make a new one."""
    if model.head is not None:
        given = {} if model.target_layer_ids is None else {"target_layer_ids": model.target_layer_ids}
        return Eagle3DraftModel.from_pretrained(model.head, dtype=torch.float32, **given)
    overrides: dict[str, Any] = {"target_name_or_path": model.target, **(model.head_config or {})}  # type: ignore[dict-item]
    if model.target_layer_ids is not None:
        overrides["target_layer_ids"] = model.target_layer_ids
    vocab_size = target_vocab_size(target)
    size = model.draft_vocab_size if model.draft_vocab_size < vocab_size else None
    return Eagle3DraftModel.from_target(target, draft_vocab_size=size, warm_start=model.warm_start, **overrides)


def with_adapters(draft: Eagle3DraftModel, model: ModelArguments) -> Eagle3DraftModel | PeftModel:
    if not model.lora_r:
        return draft
    config = LoraConfig(
        r=model.lora_r,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        target_modules=model.lora_modules or "all-linear",
    )
    adapted: Any = get_peft_model(draft, config)
    return adapted


def _taught(chats: Any) -> list[int]:
    """Return the indices of the examples that have an answer to learn; data that was tokens at first may have none."""
    labels = enumerate(only_labels(chats))
    return [i for i, example in labels if bool((torch.as_tensor(example["labels"]) != IGNORE_INDEX).any())]


def prompt_of_example(example: Any) -> torch.Tensor:
    """Return the ids (T,) of a tokenised chat up to its last learnt answer; labels omit an answer's first token."""
    learnt = (torch.as_tensor(example["labels"]) != IGNORE_INDEX).nonzero()[:, 0]
    breaks = (learnt[1:] - learnt[:-1] > 1).nonzero()[:, 0]
    first = learnt[breaks[-1] + 1] if len(breaks) else learnt[0]
    return torch.as_tensor(example["input_ids"])[: max(1, int(first) - 1)].long()


def planned_steps(trainer: Eagle3Trainer) -> float:
    """Return the number of optimizer steps of the whole run."""
    args = trainer.args
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return args.max_steps if args.max_steps > 0 else -(-len(trainer.train_dataset) // batch) * args.num_train_epochs


def plan(trainer: Eagle3Trainer) -> list[str]:
    """Describe what a run is going to do: devices, data, head, and the memory that the head's training keeps."""
    args = trainer.args
    parameters: list[torch.Tensor] = list(trainer.model.parameters())
    head = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    target = trainer.target_model.get_memory_footprint()
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    # Weights, gradient and AdamW's two moments, all in the head's dtype.
    size = sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in parameters)
    return [
        f"target on {place_in_words(trainer.target_model)}; head on {place_in_words(trainer.model)}",
        f"{len(trainer.train_dataset):,} sequences, {batch} a step on {args.world_size} process(es), "
        f"{planned_steps(trainer):,.0f} steps of {args.ttt_steps} levels, peak learning rate {args.learning_rate:g}",
        f"head: {head / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained; {size / 1e9:.2f} GB with gradients "
        f"and AdamW's moments, in addition to the target's {target / 1e9:.2f} GB and the memory of a batch",
    ]
