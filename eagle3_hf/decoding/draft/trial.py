"""The first rounds of a head, watched for an acceptance that is lower than a working head's."""

from dataclasses import dataclass
from typing import Any

from ...model.modeling_eagle3 import Eagle3DraftModel
from ...utils.logging import get_logger


logger = get_logger(__name__)

ROUNDS = 64
_FEWEST_ACCEPTED = 0.1  # drafts of a round
# Of the accuracy that the head records. Other texts than those of its training cost some of it, and a tree gains some.
_KEPT = 0.5


@dataclass
class Trial:
    """Counts of a head's first rounds, over all calls of `generate`. In a batch, a round counts once per sequence.

    Attributes:
        rounds: Rounds in which the head drafted.
        accepted: Drafts of the head that were accepted.
        hits: Rounds in which one was accepted.
        is_greedy: Whether all of these rounds decoded greedily.
    """

    rounds: int = 0
    accepted: int = 0
    hits: int = 0
    is_greedy: bool = True


def watch(draft: Eagle3DraftModel, accepted: int, is_greedy: bool) -> None:
    """Count a round of one sequence, and warn once if the first rounds accept too little.

    Args:
        draft: The head.
        accepted: Number of its drafts that the sequence accepted.
        is_greedy: Whether the call decodes greedily.
    """
    trial = draft._trial = draft._trial or Trial()
    if trial.rounds >= ROUNDS:
        return
    trial.rounds += 1
    trial.accepted += accepted
    trial.hits += accepted > 0
    trial.is_greedy &= is_greedy
    if trial.rounds == ROUNDS and (reason := _too_low(trial, draft.config.held_out_accuracy)):
        logger.warning(
            f"{reason} Output is unaffected, but there is little or no speed-up. To find out why, run `eagle3-hf "
            f"diagnose {_name(draft.config.target_name_or_path, 'TARGET')} {_name(draft.name_or_path, 'HEAD')} --data "
            f"CHATS`. Likely causes: wrong target_layer_ids (now {draft.config.target_layer_ids}), wrong "
            f"rope_parameters (now {draft.config.rope_parameters}), or a head for another target."
        )


def _too_low(trial: Trial, recorded: Any) -> str | None:
    """Return what was seen and expected, or `None` for a head that works."""
    if trial.accepted < _FEWEST_ACCEPTED * trial.rounds:
        return f"The draft head had {trial.accepted} drafts accepted in its first {trial.rounds} rounds."
    share = trial.hits / trial.rounds
    # In sampling less is accepted than the first choice's accuracy, which is all that is recorded.
    if recorded and trial.is_greedy and share < _KEPT * recorded[0]:
        return (
            f"The draft head had a draft accepted in {share:.0%} of its first {trial.rounds} rounds, but records that "
            f"its first choice was right at {recorded[0]:.0%} of the positions of held-out chats."
        )
    return None


def _name(known: str | None, otherwise: str) -> str:
    return known or otherwise
