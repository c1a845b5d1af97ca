"""What happens when training begins: counters are set to zero, and a run of few steps gets a warning."""

from transformers import TrainerCallback

from ...utils.logging import get_logger
from ..arguments import Eagle3TrainingArguments
from ..metrics import StepSums


logger = get_logger(__name__)

FEW_STEPS = 500  # a quarter of what the first stage of the demo head took


class TrainBegin(TrainerCallback):
    """Prepares an [`Eagle3Trainer`] each time that it begins to train.

    With `auto_find_batch_size` this happens again for every batch size that is tried.

    Args:
        sums: Sums of training, which may hold a part of a step that did not fit into memory.
    """

    def __init__(self, sums: StepSums):
        self._sums = sums

    def on_train_begin(self, args, state, control, **kwargs):
        self._sums.reset()
        warning = warn_of_few_steps(args, state.max_steps)
        if warning is not None and state.is_world_process_zero:
            logger.warning(warning)


def warn_of_few_steps(args: Eagle3TrainingArguments, steps: float) -> str | None:
    """Return the warning for a run that is too short to teach a head much; `None` where `max_steps` was given."""
    if args.max_steps > 0 or steps >= FEW_STEPS:
        return None
    sequences = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    packed = f" of up to {args.max_length} tokens with several chats each" if args.packing else ""
    smaller = "per_device_train_batch_size or max_length" if args.packing else "per_device_train_batch_size"
    return (
        f"There are only {steps:,.0f} steps, with {sequences} sequences{packed} a step; a new head learns little in "
        f"fewer than {FEW_STEPS} steps. Lower {smaller}, raise num_train_epochs, or train on more chats."
    )
