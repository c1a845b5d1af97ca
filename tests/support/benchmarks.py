"""Questions for benchmarks of tiny models, and calls of `generate` that are only pretended."""

import random

from eagle3_hf import SpeculationStats
from eagle3_hf.evaluation.measure import Answer
from eagle3_hf.evaluation.prompts import Question


QUESTIONS = [
    Question("a", "poems", ("Write a poem about the sea.", "Sing.")),
    Question("b", "poems", ("Write a poem.", "Let me think.")),
    Question("c", "facts", ("What is the capital of France?",)),
    Question("d", "facts", ("What is the answer?",)),
    Question("e", "facts", ("What is the sea?",)),
]


class Pretended:
    """Takes the place of `measure`: answers and times that depend on nothing but the call.

    Attributes:
        calls: Column, prompts, seed and options of each call, warming up included.
        interrupt_at: Number of the call that is interrupted, from 1 on.
    """

    def __init__(self):
        self.calls = []
        self.interrupt_at = None

    def __call__(self, target, heads, column, prompts, seed, clock=None, **options):
        self.calls.append((column.name, prompts, seed, options))
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        chance = random.Random(f"{column.name} {prompts} {seed} {options}")
        same = random.Random(f"{prompts} {seed} {options}")
        length = options["max_new_tokens"] - same.randrange(3)
        tokens = [[same.randrange(5, 300) for _ in range(length)] for _ in prompts]
        if column.name == "other" and chance.random() < 0.5:
            tokens[0][-1] = 4
        seconds = length * (1 + chance.random()) / (2 if column.head else 1)
        stats = None
        if column.head is not None:
            stats = SpeculationStats()
            for _ in prompts:
                emitted = 1
                while emitted < length:
                    accepted = min(chance.randrange(3), length - emitted - 1)
                    stats.record(accepted, max(2, accepted), accepted + 1)
                    emitted += accepted + 1
            stats.draft_seconds, stats.verify_seconds = seconds * 0.2, seconds * 0.6
        passes = length - 1 if "prompt_lookup_num_tokens" in column.call_settings else None
        return Answer(tokens, seconds, seconds * 0.1, passes, stats, 1000 + chance.randrange(9))

    def measured(self, max_new_tokens: int):
        """The calls that were not for warming up or for a probe."""
        return [call for call in self.calls if call[3]["max_new_tokens"] == max_new_tokens]
