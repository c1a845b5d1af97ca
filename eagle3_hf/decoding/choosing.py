"""What vanilla `generate` does with one token's logits: process, record, choose, stop, stream; in its order.

The decoding loop only decides which logits come next; everything that a user can observe of a token happens here, once
per emitted token, so that processors, criteria, streamers and random numbers see what they would see without a draft.
"""

import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .noise import Noise


# Warpers that look at one row of scores and at nothing before it: safe to run on the draft's logits as well.
_WARPER_NAMES = (
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
)
PREFIX_FREE_WARPERS = tuple(getattr(logits_process, name) for name in _WARPER_NAMES if hasattr(logits_process, name))


def prefix_free_warpers(processors: LogitsProcessorList) -> list:
    return [processor for processor in processors if type(processor) in PREFIX_FREE_WARPERS]


class StopTest:
    """Vanilla's stopping criteria after one token.

    Length and end of sequence are tested on the host, where the token already is; any other criterion gets the call
    that vanilla would make.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self._criteria = criteria
        self._simple = all(type(item) in (MaxLengthCriteria, EosTokenCriteria) for item in criteria)
        self._max_length = min(
            (item.max_length for item in criteria if isinstance(item, MaxLengthCriteria)), default=None
        )
        eos = [item.eos_token_id.tolist() for item in criteria if isinstance(item, EosTokenCriteria)]
        self._eos = {token for ids in eos for token in (ids if isinstance(ids, list) else [ids])}

    def __call__(self, input_ids: torch.Tensor, token: int, scores: tuple | None) -> bool:
        if not self._simple:
            return bool(self._criteria(input_ids, scores).all())
        return token in self._eos or (self._max_length is not None and input_ids.shape[1] >= self._max_length)


class TokenEmitter:
    """Turns the logits at committed positions into emitted tokens, one at a time (batch 1).

    Attributes:
        input_ids: (1, T) prompt and emitted tokens.
        done: A criterion said stop.
        scores, logits: Per emitted token (1, V) float32, when asked for.
        noise: The coming random numbers when sampling, from the first logits on; `None` for greedy decoding.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        streamer,
        do_sample: bool,
        keep_scores: bool,
        keep_logits: bool,
    ):
        self.input_ids = input_ids
        self.done = False
        self.scores: tuple | None = () if keep_scores else None
        self.logits: tuple | None = () if keep_logits else None
        self.noise: Noise | None = None
        self._processors = processors
        self._stop = StopTest(criteria)
        self._streamer = streamer
        self._do_sample = do_sample

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the argmax is needed of the logits."""
        return not self._do_sample and not self._processors and self.scores is None and self.logits is None

    def emit(self, logits: torch.Tensor) -> int:
        """Process and choose the next token from raw logits (1, V) at the last token of `input_ids`."""
        raw = logits.to(copy=True, dtype=torch.float32, device=self.input_ids.device)
        scores = self._processors(self.input_ids, raw)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        chosen = self._sample(scores) if self._do_sample else scores.argmax(-1)
        return self._append(chosen, int(chosen))

    def emit_token(self, token: int) -> int:
        """Emit a plain greedy choice that is on the host already."""
        return self._append(self.input_ids.new_tensor([token]), token)

    def _sample(self, scores: torch.Tensor) -> torch.Tensor:
        probs = nn.functional.softmax(scores, dim=-1)
        if self.noise is None or not self.noise.fits(probs):
            self.noise = Noise(probs.shape[0], probs.shape[1], probs.device, probs.dtype)
        return self.noise.choose(probs)

    def _append(self, chosen: torch.Tensor, token: int) -> int:
        self.input_ids = torch.cat([self.input_ids, chosen[:, None]], dim=-1)
        self.done = self._stop(self.input_ids, token, self.scores)
        if self._streamer is not None:
            self._streamer.put(chosen.cpu())
        return token

    def end_round(self, accepted: int) -> None:
        """Tell a streamer that asks (by having `end_round`): the last tokens were `accepted` drafts and one more."""
        if self._streamer is not None and hasattr(self._streamer, "end_round"):
            self._streamer.end_round(accepted)

    def finish(self) -> None:
        if self._streamer is not None:
            self._streamer.end()
