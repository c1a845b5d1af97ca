"""Properties of the processors and stopping criteria of transformers, and the test of the criteria of a call."""

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


# Warpers that depend on a token's scores alone, so that they can be applied to the draft's logits as well.
_WARPER_NAMES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
)
# Processors that depend on each sequence's own ids and scores and keep no state, so that sequences may be at different
# steps. (They are called with whole batches all the same, since they may have arguments for each sequence.)
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
# Processors that make finite scores into scores that can be sampled from, whatever the ids.
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
# Criteria that do not depend on the scores.
_BLIND_CRITERIA = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria, StopStringCriteria)


def prefix_free_warpers(processors: LogitsProcessorList) -> list:
    return [processor for processor in processors if type(processor) in PREFIX_FREE_WARPERS]


class StopTest:
    """The stopping criteria of a call.

    Length and end of sequence are tested on the host as soon as a sequence has the token. All other criteria are
    called as in plain decoding, when the step is committed.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self._criteria = criteria
        self.is_simple = all(type(item) in (MaxLengthCriteria, EosTokenCriteria) for item in criteria)
        self.may_read_scores = any(type(item) not in _BLIND_CRITERIA for item in criteria)
        # The condition under which plain decoding lets a finished sequence go on with pad tokens.
        self.has_eos = any(hasattr(item, "eos_token_id") for item in criteria)
        self.max_length = min((item.max_length for item in criteria if type(item) is MaxLengthCriteria), default=None)
        eos = [item.eos_token_id.tolist() for item in criteria if type(item) is EosTokenCriteria]
        self._eos = {token for ids in eos for token in (ids if isinstance(ids, list) else [ids])}

    def after_token(self, token: int, length: int) -> bool:
        """Return whether a sequence of this length ends with this token, by length and end-of-sequence ids."""
        return token in self._eos or (self.max_length is not None and length >= self.max_length)

    def after_step(self, input_ids: torch.Tensor, scores: tuple | None) -> list[bool]:
        """Return which sequences are finished, from a call of all criteria as in plain decoding."""
        return self._criteria(input_ids, scores).tolist()
