"""Arguments of a training run: transformers' `TrainingArguments` with the options of EAGLE-3, model and data."""

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import BitsAndBytesConfig, TrainingArguments

from ..model.configuration_eagle3 import FIELDS
from ..ttt.settings import ATTENTIONS, LOSS_TYPES, TTTSettings
from ..utils.logging import get_logger
from .data.options import EncodingOptions


logger = get_logger(__name__)

_DEMO_WIDTH, _DEMO_RATE = 576, 1e-3  # of the demo head
_EXPONENT = 1.5  # with it, heads of 4,096 get the reference code's 5e-5


def learning_rate_for(width: int) -> float:
    """Return the peak rate for a head of this width: 1e-3 up to 576, 1.5e-4 at 2,048, 5.3e-5 at 4,096.

    Two rates are known, at 576 and at about 4,096; the others are interpolated in logarithms.
    """
    return float(f"{_DEMO_RATE * min(1.0, (_DEMO_WIDTH / width) ** _EXPONENT):.1e}")


def _read_object(name: str, value: dict | str | None) -> dict | None:
    """Return a dict, which a command line gives as JSON."""
    problem = ""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            problem = f" ({error})"
    if value is not None and not isinstance(value, dict):
        raise ValueError(f'{name} is {value!r}, not a JSON object such as {{"name": 2}}{problem}')
    return value


@dataclass
class Eagle3TrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults (AdamW, betas 0.9/0.95, clip 0.5) and these fields.

    Args:
        learning_rate: Peak learning rate. With `None`, [`Eagle3Trainer`] takes that of `learning_rate_for`, which
            depends on the head's width.
        ttt_steps: Number of steps of training-time test; a head drafts about as deep as it was trained.
        step_decay: Step `s` of the loss has the weight `decay^s`.
        step_weights: A weight for each step, in place of the decay.
        position_share: Share of the positions that the steps after the first train on, drawn anew for every batch;
            their loss is scaled up. 1.0 is the paper's choice; less trains faster.
        loss_type: `"soft_cross_entropy"` (the paper's), `"kl"` or `"acceptance"`.
        feature_loss_weight: Weight of EAGLE-2's regression of the target's last feature; 0 leaves it out.
        ttt_attention: `"fused"`, or `"eager"`, its slow reference.
        checkpoint_ttt_steps: Run every step again in the backward pass, which takes less memory and more time.
        loss_chunk: Number of positions whose draft logits exist at a time; they are computed again in the backward
            pass. 0 keeps the logits of all positions.
        packing: Put several chats into one sequence of `max_length` tokens; none of them attends to another.
        last_turn_only: Learn from the last answer of each chat only.
        mask_reasoning: Do not learn reasoning, nor the tags around it.
        max_length: Tokens kept of each chat that the trainer tokenises; with packing, the length of a sequence.
        chat_template_kwargs: Extra variables for the chat template, such as `{"enable_thinking": False}`; JSON on a
            command line.
        freeze_embeddings: Do not train a head's own input embedding; a borrowed one is never trained.
        dataset_num_proc: Number of processes that encode chats.
        vocab_cache: Folder that keeps counted draft vocabularies between runs.
    """

    if TYPE_CHECKING:  # TrainingArguments fills it in where none was given
        output_dir: str = ""

    ttt_steps: int = field(default=7, metadata={"help": "Number of steps of training-time test."})
    step_decay: float = field(default=0.8, metadata={"help": "Step s of the loss has the weight step_decay^s."})
    step_weights: list[float] | None = field(
        default=None, metadata={"help": "A weight for each step, in place of the decay."}
    )
    position_share: float = field(
        default=1.0, metadata={"help": "Share of the positions that the steps after the first train on."}
    )
    loss_type: str = field(default="soft_cross_entropy", metadata={"help": "Loss of a step.", "choices": LOSS_TYPES})
    feature_loss_weight: float = field(
        default=0.0, metadata={"help": "Weight of EAGLE-2's regression of the target's last feature."}
    )
    ttt_attention: str = field(
        default="fused",
        metadata={"help": "Implementation of the attention of training-time test.", "choices": ATTENTIONS},
    )
    checkpoint_ttt_steps: bool = field(
        default=False,
        metadata={"help": "Run every step again in the backward pass, which takes less memory and more time."},
    )
    loss_chunk: int = field(
        default=512, metadata={"help": "Positions whose draft logits exist at a time; 0 keeps the logits of all."}
    )
    packing: bool = field(
        default=False, metadata={"help": "Put several chats into one sequence of max_length tokens."}
    )
    last_turn_only: bool = field(default=False, metadata={"help": "Learn from the last answer of each chat only."})
    mask_reasoning: bool = field(default=False, metadata={"help": "Do not learn reasoning, nor the tags around it."})
    max_length: int = field(
        default=2048, metadata={"help": "Tokens kept of each chat; with packing, the length of a sequence."}
    )
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": 'Extra variables for the chat template, as JSON: {"enable_thinking": false}.'}
    )
    freeze_embeddings: bool = field(
        default=False, metadata={"help": "Do not train a head's own input embedding; a borrowed one never is."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Number of processes that encode chats."})
    vocab_cache: str | None = field(
        default=None, metadata={"help": "Folder that keeps counted draft vocabularies between runs."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Number of steps between two logs."})
    eval_steps: float | None = field(
        default=500, metadata={"help": "Number of steps between evaluations (with eval_strategy steps)."}
    )
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Peak learning rate (default: by the head's width; 1e-3 at 576, 5e-5 at 4096)."},
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradients are clipped to this norm."})
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={
            "help": "Leave it off: it waits for the device at every batch; a loss that is not finite stops the run."
        },
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Leave it off: every parameter of a head takes part in every loss."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Leave it off: stored features are columns."})

    def __post_init__(self):
        self._derived_rate: float | None = None
        super().__post_init__()
        deepspeed = getattr(self, "hf_deepspeed_config", None)
        if self.learning_rate is None and deepspeed and deepspeed.get_value("optimizer.params.lr", "none") is None:
            raise ValueError(
                "the DeepSpeed config has an optimizer whose lr is auto, and it is read before the head, whose width "
                "gives the default, is known: set learning_rate"
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type != "cpu"  # torch would warn
        self.chat_template_kwargs = _read_object("chat_template_kwargs", self.chat_template_kwargs)
        self.ttt_settings()  # raises for values without a meaning
        self._reject_what_heads_do_not_have()
        if self.max_length < 3:
            raise ValueError(f"max_length must be at least 3 (two tokens and one to learn), got {self.max_length}")

    def _reject_what_heads_do_not_have(self) -> None:
        """Raise ValueError for options that would have no effect, or another effect than their name says."""
        no_predictions = "the evaluation of a head keeps no predictions, so that no compute_metrics could read them"
        reasons = {
            "gradient_checkpointing": "it is for whole models; for a head set checkpoint_ttt_steps",
            "label_smoothing_factor": "a head learns its target's distribution, not labels",
            "neftune_noise_alpha": "a head gets its target's input, without noise",
            "use_liger_kernel": "Liger has no kernels for heads; ttt_attention and loss_chunk save memory",
            "remove_unused_columns": "stored features are columns, which it would remove: leave it off",
            "include_for_metrics": no_predictions,
            "batch_eval_metrics": no_predictions,
        }
        for name, reason in reasons.items():
            if getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)}, but {reason}")
        if self.label_names not in (None, [], ["labels"]):
            raise ValueError(f"label_names is {self.label_names}, but a head's labels are in the column labels alone")
        if self.length_column_name != "length":
            raise ValueError(
                f"length_column_name is {self.length_column_name!r}, but lengths are read from the examples: "
                "leave it out"
            )
        split = [f"{kind}_size" for kind in ("tp", "cp", "sp") if (_size(self.parallelism_config, kind) or 1) > 1]
        if split:
            raise ValueError(
                f"parallelism_config sets {', '.join(split)}, but a head is not split by tensors or by sequence "
                "length: train it with DDP, FSDP2 or DeepSpeed"
            )

    def settle_learning_rate(self, width: int) -> None:
        """Set the learning rate for a head of this width, unless one was given. Each trainer may have another head."""
        if self.learning_rate is not None and self.learning_rate != self._derived_rate:
            return
        self.learning_rate = self._derived_rate = learning_rate_for(width)
        logger.info(f"learning_rate is {self.learning_rate:g}, the default for heads of width {width}")

    def encoding_options(self) -> EncodingOptions:
        """How chats are encoded and packed, as one object."""
        return EncodingOptions(
            max_length=self.max_length,
            template_kwargs=_read_object("chat_template_kwargs", self.chat_template_kwargs),
            last_turn_only=self.last_turn_only,
            mask_reasoning=self.mask_reasoning,
            num_proc=self.dataset_num_proc,
            packing=self.packing,
            seed=self.seed if self.data_seed is None else self.data_seed,
        )

    def ttt_settings(self, training: bool = True) -> TTTSettings:
        """Return the settings for the draft's forward; evaluation runs on every position.

        Raises:
            ValueError: a value has no meaning; the message names the field.
        """
        try:
            return self._ttt_settings(training)
        except ValueError as error:  # which names the fields of TTTSettings
            raise ValueError(re.sub(r"^(?:num_)?(steps|attention) ", r"ttt_\1 ", str(error))) from None

    def _ttt_settings(self, training: bool) -> TTTSettings:
        return TTTSettings(
            num_steps=self.ttt_steps,
            step_decay=self.step_decay,
            step_weights=tuple(self.step_weights) if self.step_weights is not None else None,
            position_share=self.position_share if training else 1.0,
            loss_type=self.loss_type,
            feature_loss_weight=self.feature_loss_weight,
            attention=self.ttt_attention,
            checkpoint_steps=self.checkpoint_ttt_steps,
            loss_chunk=self.loss_chunk or None,
        )


def _size(parallelism, kind: str) -> int | None:
    return getattr(parallelism, f"{kind}_size", None)


@dataclass
class ModelArguments:
    """The target, and the head that is trained for it.

    Args:
        target: Target: a local folder or a Hub id.
        head: Head to train further, in any published format; without it a new head is made.
        draft_vocab_size: Number of tokens that a new head can propose; at most the target's.
        target_layer_ids: `hidden_states` indices that the head reads (default: those that `head` names, or the
            reference's rule).
        head_config: Other fields of a new head's config, as JSON: `{"num_hidden_layers": 2}`.
        warm_start: Copy those weights from the target that fit; otherwise a new head starts with random weights.
        dtype: Data type in which the target is loaded.
        device_map: Device map of the target, such as `auto` to spread a large one over all GPUs of a single process;
            without it the target is on the device on which the head trains.
        attn_implementation: Attention implementation of the target.
        revision: Branch, tag or commit of the target on the Hub.
        trust_remote_code: Run the code in the target's repository; that of a head is never run.
        load_in_4bit, load_in_8bit: Quantize the target, which needs bitsandbytes.
        target_adapter: LoRA adapters that are loaded on the target.
        lora_r: Rank of adapters that are trained on `head` in place of all its weights; 0 trains all weights.
        lora_alpha, lora_dropout, lora_modules: Scale, dropout and modules of these adapters.
    """

    target: str = field(metadata={"help": "Target: a local folder or a Hub id."})
    head: str | None = field(default=None, metadata={"help": "Head to train further (default: a new one)."})
    draft_vocab_size: int = field(default=32000, metadata={"help": "Number of tokens that a new head can propose."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "Indices of the target's hidden_states that the head reads."}
    )
    head_config: dict | str | None = field(
        default=None, metadata={"help": 'Other fields of a new head, as JSON: {"num_hidden_layers": 2}.'}
    )
    warm_start: bool = field(default=True, metadata={"help": "Copy those weights from the target that fit."})
    dtype: str = field(default="auto", metadata={"help": "Data type in which the target is loaded."})
    device_map: str | None = field(
        default=None, metadata={"help": "Device map of the target: auto spreads it over all GPUs."}
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "Attention of the target."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the target on the Hub."})
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code in the target's repository; that of a head is never run."}
    )
    load_in_4bit: bool = field(default=False, metadata={"help": "Quantize the target (needs bitsandbytes)."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Quantize the target (needs bitsandbytes)."})
    target_adapter: str | None = field(default=None, metadata={"help": "LoRA adapters to load on the target."})
    lora_r: int = field(default=0, metadata={"help": "Rank of adapters to train on the head; 0 trains all weights."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of these adapters: lora_alpha / lora_r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before these adapters."})
    lora_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules with adapters (default: all linear ones but the output layer)."}
    )

    def __post_init__(self):
        self.head_config = _read_object("head_config", self.head_config)
        unknown = sorted(set(self.head_config or ()) - set(FIELDS))
        if unknown:
            raise ValueError(f"head_config: {', '.join(unknown)} is not a field of Eagle3DraftConfig")
        if self.head is not None and self.head_config:
            raise ValueError("head_config describes a new head, but head names an existing one: leave one of them out")
        if self.load_in_4bit and self.load_in_8bit:
            raise ValueError("load_in_4bit and load_in_8bit exclude each other: set one of them")
        if self.lora_r and self.head is None:
            raise ValueError("lora_r trains adapters on an existing head: name that head with head")

    @property
    def source(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` for what is loaded of the target."""
        given = {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        return {name: value for name, value in given.items() if value}

    @property
    def quantization(self) -> dict[str, Any]:
        """The arguments of `from_pretrained` that quantize the target."""
        bits = [name for name in ("load_in_4bit", "load_in_8bit") if getattr(self, name)]
        return {"quantization_config": BitsAndBytesConfig(**{bits[0]: True})} if bits else {}


@dataclass
class DataArguments:
    """Which data is learnt, and which is held out.

    Args:
        train_data: File, folder or Hub id of chats (see `load_chats`), or a folder of stored features.
        train_split: Split of `train_data`, if it has several.
        eval_data, eval_split: The same for the data to evaluate on.
        held_out: Number of chats that are drawn from `train_data` to evaluate on, if there is no `eval_data`.
        max_train_samples: Use only this many chats of `train_data`, from its beginning.
        tau_prompts: Number of held-out chats that are decoded at every evaluation, which logs the mean acceptance
            length (tau) as `eval_tau`.
        tau_new_tokens: Number of tokens that are decoded for each of them.
        dry_run: Stop before the first step, when data, head and sizes are known.
    """

    train_data: str = field(metadata={"help": "Chats (file, folder, Hub id), or a folder of stored features."})
    train_split: str | None = field(default=None, metadata={"help": "Split of train_data."})
    eval_data: str | None = field(default=None, metadata={"help": "Chats or stored features to evaluate on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split of eval_data."})
    held_out: int = field(
        default=128, metadata={"help": "Number of chats of train_data to evaluate on, without eval_data."}
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Use only the first chats of train_data, this many."}
    )
    tau_prompts: int = field(
        default=0, metadata={"help": "Number of held-out chats to decode at every evaluation, for eval_tau."}
    )
    tau_new_tokens: int = field(default=64, metadata={"help": "Number of tokens decoded for each of them."})
    dry_run: bool = field(default=False, metadata={"help": "Say what would be done, and stop before the first step."})
