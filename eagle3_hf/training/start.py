"""What happens when training begins: counters start at zero, and a run of few steps is warned of."""

from transformers import TrainerCallback

from ..utils.logging import get_logger
from .arguments import Eagle3TrainingArguments
from .metrics import StepSums


logger = get_logger(__name__)

FEW_STEPS = 500  # a quarter of what the first stage of the demo head took


class AtTheStart(TrainerCallback):
    """For an [`Eagle3Trainer`]; a run starts again where `auto_find_batch_size` looks for a batch that fits.

    Args:
        sums: Of training, which may hold a part of a step that did not fit.
    """

    def __init__(self, sums: StepSums):
        self._sums = sums

    def on_train_begin(self, args, state, control, **kwargs):
        self._sums.reset()
        warning = warn_of_few_steps(args, state.max_steps)
        if warning is not None and state.is_world_process_zero:
            logger.warning(warning)


def warn_of_few_steps(args: Eagle3TrainingArguments, steps: float) -> str | None:
    """What to say of a run that is too short to teach a head much; nothing where `max_steps` was asked for."""
    if args.max_steps > 0 or steps >= FEW_STEPS:
        return None
    rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    packed = f" of up to {args.max_length} tokens, many chats each" if args.packing else ""
    smaller = "per_device_train_batch_size or max_length" if args.packing else "per_device_train_batch_size"
    return (
        f"There are only {steps:,.0f} steps, of {rows} rows{packed}; a new head learns little in fewer than "
        f"{FEW_STEPS}. Lower {smaller}, raise num_train_epochs, or train on more chats."
    )
