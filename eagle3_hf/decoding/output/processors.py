"""What is known of the processors and stopping criteria of a call, and asking the criteria."""

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)


# Warpers that look at a token's scores and at nothing before it: safe to run on the draft's logits as well.
_WARPER_NAMES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
)
# Processors that look at each sequence's own ids and scores, and remember nothing: sequences may be at different
# steps. (All get whole batches, so that they may know their sequences.)
_STATELESS_NAMES = (
    *_WARPER_NAMES,
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)
# Of finite scores these leave something to draw from, whatever the ids.
_HARMLESS_NAMES = (
    *_WARPER_NAMES,
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "LogitNormalization",
)


def _known(names: Sequence[str]) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name) for name in names if hasattr(logits_process, name))


PREFIX_FREE_WARPERS = _known(_WARPER_NAMES)
STATELESS_PROCESSORS = _known(_STATELESS_NAMES)
HARMLESS_PROCESSORS = _known(_HARMLESS_NAMES)
# Criteria that ask nothing of the scores.
_BLIND_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)


def prefix_free_warpers(processors: LogitsProcessorList) -> list:
    return [processor for processor in processors if type(processor) in PREFIX_FREE_WARPERS]


class StopTest:
    """Plain decoding's stopping criteria.

    Length and end of sequence are tested on the host as soon as a sequence has the token; any other criterion gets the
    call that plain decoding would make, when the step is committed.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self._criteria = criteria
        self.is_simple = all(type(item) in (MaxLengthCriteria, EosTokenCriteria) for item in criteria)
        self.may_read_scores = any(type(item) not in _BLIND_CRITERIA for item in criteria)
        # What plain decoding asks before it lets a finished sequence write pad tokens.
        self.has_eos = any(hasattr(item, "eos_token_id") for item in criteria)
        self.max_length = min((item.max_length for item in criteria if type(item) is MaxLengthCriteria), default=None)
        eos = [item.eos_token_id.tolist() for item in criteria if type(item) is EosTokenCriteria]
        self._eos = {token for ids in eos for token in (ids if isinstance(ids, list) else [ids])}

    def after_token(self, token: int, length: int) -> bool:
        """Whether a sequence of this length with this last token is finished, by the criteria known to the host."""
        return token in self._eos or (self.max_length is not None and length >= self.max_length)

    def after_step(self, input_ids: torch.Tensor, scores: tuple | None) -> list[bool]:
        """Which sequences are finished, by plain decoding's call of all criteria."""
        return self._criteria(input_ids, scores).tolist()
