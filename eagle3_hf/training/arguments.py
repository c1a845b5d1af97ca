"""What a training run is told: transformers' `TrainingArguments`, and the switches of EAGLE-3."""

import json
import re
from dataclasses import dataclass, field

from transformers import TrainingArguments

from ..model.configuration_eagle3 import FIELDS
from ..ttt.settings import ATTENTIONS, LOSS_TYPES, TTTSettings
from ..utils.logging import get_logger
from .data.options import EncodingOptions


logger = get_logger(__name__)

_DEMO_WIDTH, _DEMO_RATE = 576, 1e-3  # of the demo head
_EXPONENT = 1.5  # with it, heads of 4,096 get the reference code's 5e-5


def learning_rate_for(width: int) -> float:
    """The peak rate for a head of this width: 1e-3 up to 576, 1.5e-4 at 2,048, 5.3e-5 at 4,096.

    Two rates are known, at 576 and at about 4,096; the others lie on the line through these, in logarithms.
    """
    return float(f"{_DEMO_RATE * min(1.0, (_DEMO_WIDTH / width) ** _EXPONENT):.1e}")


def _fields(name: str, value: dict | str | None) -> dict | None:
    """Fields by name; JSON where they come from a command line."""
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
        learning_rate: Peak rate; where it is `None`, [`Eagle3Trainer`] sets that of `learning_rate_for`, by the head's
            width.
        ttt_steps: Steps of training-time test; a head drafts about as deep as it was trained.
        step_decay: Weight `decay^s` of step `s`.
        step_weights: A weight for each step, in place of the decay.
        row_share: Share of the rows that the steps after the first train on, drawn anew for every batch; their loss is
            scaled up. 1.0 is the paper's; less trains faster.
        loss_type: `"soft_cross_entropy"` (the paper's), `"kl"` or `"acceptance"`.
        feature_loss_weight: Weight of EAGLE-2's regression of the target's last feature; 0 leaves it out.
        ttt_attention: `"fused"`, or `"eager"`, its slow reference.
        checkpoint_ttt_steps: Run every step again in the backward pass: less memory, more time.
        loss_chunk: Rows of draft logits at a time, computed again in the backward pass; 0 keeps them all.
        packing: Several chats in a row of `max_length` tokens, each blind to the others.
        last_turn_only: Learn the last answer of a chat only.
        mask_reasoning: Do not learn what stands between thinking tags.
        max_length: Tokens kept of a chat, when the trainer tokenises it; with packing, of a row.
        chat_template_kwargs: Variables for the chat template, such as `{"enable_thinking": False}`; JSON on a command
            line.
        freeze_embeddings: Do not train a head's own input embedding; a borrowed one is never trained.
        dataset_num_proc: Processes to encode chats with.
        vocab_cache: Folder that keeps counted draft vocabularies between runs.
    """

    ttt_steps: int = field(default=7, metadata={"help": "Steps of training-time test."})
    step_decay: float = field(default=0.8, metadata={"help": "Weight decay^s of step s of the loss."})
    step_weights: list[float] | None = field(
        default=None, metadata={"help": "A weight for each step, in place of the decay."}
    )
    row_share: float = field(default=1.0, metadata={"help": "Share of rows that steps after the first train on."})
    loss_type: str = field(
        default="soft_cross_entropy", metadata={"help": "What a step learns by.", "choices": LOSS_TYPES}
    )
    feature_loss_weight: float = field(
        default=0.0, metadata={"help": "Weight of EAGLE-2's regression of the target's last feature."}
    )
    ttt_attention: str = field(
        default="fused", metadata={"help": "Attention of the unrolled steps.", "choices": ATTENTIONS}
    )
    checkpoint_ttt_steps: bool = field(
        default=False, metadata={"help": "Run every step again in the backward pass: less memory, more time."}
    )
    loss_chunk: int = field(
        default=512, metadata={"help": "Rows of draft logits at a time, made again in backward; 0 keeps them all."}
    )
    packing: bool = field(default=False, metadata={"help": "Several chats in a row of max_length tokens."})
    last_turn_only: bool = field(default=False, metadata={"help": "Learn the last answer of a chat only."})
    mask_reasoning: bool = field(default=False, metadata={"help": "Do not learn what stands between thinking tags."})
    max_length: int = field(default=2048, metadata={"help": "Tokens kept of a chat; with packing, of a row."})
    chat_template_kwargs: dict | str | None = field(
        default=None, metadata={"help": 'JSON of variables for the chat template: {"enable_thinking": false}.'}
    )
    freeze_embeddings: bool = field(
        default=False, metadata={"help": "Do not train a head's own input embedding; a borrowed one never is."}
    )
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes to encode chats with."})
    vocab_cache: str | None = field(
        default=None, metadata={"help": "Folder that keeps counted draft vocabularies between runs."}
    )
    logging_steps: float = field(default=10, metadata={"help": "Steps between two logs."})
    eval_steps: float | None = field(
        default=500, metadata={"help": "Steps between evaluations (eval_strategy steps)."}
    )
    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None,
        metadata={"help": "Peak learning rate (default: by the head's width; 1e-3 at 576, 5e-5 at 4096)."},
    )
    adam_beta2: float = field(default=0.95, metadata={"help": "Second beta of AdamW."})
    max_grad_norm: float = field(default=0.5, metadata={"help": "Gradient norm to clip at."})
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Kept off: it would wait for the device every batch, and a loss that is not finite stops."},
    )
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Kept off: every parameter of a head takes part in every loss."}
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Kept off: stored features are columns."})

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
        self.chat_template_kwargs = _fields("chat_template_kwargs", self.chat_template_kwargs)
        self.ttt_settings()  # refuses what means nothing
        self._refuse_what_heads_have_not()
        if self.max_length < 3:
            raise ValueError(f"max_length must be at least 3 (two tokens and one to learn), got {self.max_length}")

    def _refuse_what_heads_have_not(self) -> None:
        """Raise ValueError for switches that would have no effect, or another one than their name says."""
        no_predictions = "the evaluation of a head keeps no predictions, so that no compute_metrics could read them"
        reasons = {
            "gradient_checkpointing": "it is of whole models; for a head set checkpoint_ttt_steps",
            "label_smoothing_factor": "a head learns its target's distribution, not labels",
            "neftune_noise_alpha": "a head's input is its target's, without noise",
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
                f"length_column_name is {self.length_column_name!r}, but lengths are read off the rows: leave it out"
            )
        split = [f"{kind}_size" for kind in ("tp", "cp", "sp") if (_size(self.parallelism_config, kind) or 1) > 1]
        if split:
            raise ValueError(
                f"parallelism_config sets {', '.join(split)}, but a head is not split over tensors or the length of a "
                "text: train it with DDP, FSDP2 or DeepSpeed"
            )

    def settle_learning_rate(self, width: int) -> None:
        """Where no rate was given, set the one for a head of this width; the next trainer's head may be another."""
        if self.learning_rate is not None and self.learning_rate != self._derived_rate:
            return
        self.learning_rate = self._derived_rate = learning_rate_for(width)
        logger.info(f"learning_rate is {self.learning_rate:g}, the default for heads of width {width}")

    def encoding_options(self) -> EncodingOptions:
        """How chats are encoded and packed, as one object."""
        return EncodingOptions(
            max_length=self.max_length,
            template_kwargs=self.chat_template_kwargs,  # any JSON was read by __post_init__
            last_turn_only=self.last_turn_only,
            mask_reasoning=self.mask_reasoning,
            num_proc=self.dataset_num_proc,
            packing=self.packing,
            seed=self.seed if self.data_seed is None else self.data_seed,
        )

    def ttt_settings(self, training: bool = True) -> TTTSettings:
        """What the draft's forward is told; evaluation runs on every row.

        Raises:
            ValueError: a value that means nothing; the field is named.
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
            row_share=self.row_share if training else 1.0,
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
        target: Local folder or Hub id.
        head: A head to train further, of any published layout; without it a new one is made.
        draft_vocab_size: Tokens that a new head can propose; at most the target's.
        target_layer_ids: `hidden_states` indices that the head reads (default: those that `head` names, or the
            reference's rule).
        head_config: Other fields of a new head's config, as JSON: `{"num_hidden_layers": 2}`.
        warm_start: Copy from the target what fits; else a new head starts at random.
        dtype: Of the target.
        device_map: Of the target, such as `auto` to spread a large one over all GPUs of a single process; without it
            the target is where the head trains.
        attn_implementation: Of the target.
        target_adapter: LoRA adapters on the target, which then teach too.
        lora_r: Rank of adapters to train on `head` in place of all its weights; 0 trains all.
        lora_alpha, lora_dropout, lora_modules: Of these adapters.
    """

    target: str = field(metadata={"help": "Target: a local folder or a Hub id."})
    head: str | None = field(default=None, metadata={"help": "A head to train further (default: a new one)."})
    draft_vocab_size: int = field(default=32000, metadata={"help": "Tokens that a new head can propose."})
    target_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "hidden_states indices that the head reads."}
    )
    head_config: dict | str | None = field(
        default=None, metadata={"help": 'Other fields of a new head, as JSON: {"num_hidden_layers": 2}.'}
    )
    warm_start: bool = field(default=True, metadata={"help": "Copy from the target what fits."})
    dtype: str = field(default="auto", metadata={"help": "Of the target."})
    device_map: str | None = field(default=None, metadata={"help": "Of the target: auto spreads it over all GPUs."})
    attn_implementation: str | None = field(default=None, metadata={"help": "Of the target."})
    target_adapter: str | None = field(default=None, metadata={"help": "LoRA adapters on the target."})
    lora_r: int = field(default=0, metadata={"help": "Rank of adapters to train on the head; 0 trains all weights."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of these adapters, times 1/r."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before these adapters."})
    lora_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules with adapters (default: all linear ones but the output layer)."}
    )

    def __post_init__(self):
        self.head_config = _fields("head_config", self.head_config)
        unknown = sorted(set(self.head_config or ()) - set(FIELDS))
        if unknown:
            raise ValueError(f"head_config: {', '.join(unknown)} is no field of Eagle3DraftConfig")
        if self.head is not None and self.head_config:
            raise ValueError("head_config is of a new head, and head names one that exists: leave one of them out")
        if self.lora_r and self.head is None:
            raise ValueError("lora_r trains adapters on a head that exists: name it with head")


@dataclass
class DataArguments:
    """What is learnt, and what is held out.

    Args:
        train_data: File, folder or Hub id of chats (see `load_chats`), or a folder of stored features.
        train_split: Which split of it, where there are several.
        eval_data, eval_split: The same, to evaluate on.
        held_out: Without `eval_data`: this many chats are drawn from `train_data`, not trained on.
        max_train_samples: Use only the first so many chats.
        tau_prompts: This many of the held-out chats are decoded at every evaluation, which logs `eval_tau`.
        tau_new_tokens: Tokens decoded for each of them.
        dry_run: Stop before the first step, when data, head and sizes are known.
    """

    train_data: str = field(metadata={"help": "Chats (file, folder, Hub id), or a folder of stored features."})
    train_split: str | None = field(default=None, metadata={"help": "Split of train_data."})
    eval_data: str | None = field(default=None, metadata={"help": "Chats or stored features to evaluate on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split of eval_data."})
    held_out: int = field(
        default=128, metadata={"help": "Chats of train_data to evaluate on where eval_data is none."}
    )
    max_train_samples: int | None = field(default=None, metadata={"help": "Use only the first so many chats."})
    tau_prompts: int = field(default=0, metadata={"help": "Held-out chats to decode at every evaluation."})
    tau_new_tokens: int = field(default=64, metadata={"help": "Tokens decoded for each of them."})
    dry_run: bool = field(default=False, metadata={"help": "Stop before the first step, and say what would be done."})
