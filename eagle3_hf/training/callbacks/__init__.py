"""Callbacks of a training run: tau measured by decoding, a guard against NaN, and what happens when a run begins."""

from .measure_tau import MeasureTau, prompt_ids, sample_prompts
from .nan_guard import NanGuard
from .train_begin import TrainBegin, warn_of_few_steps


__all__ = ["MeasureTau", "NanGuard", "TrainBegin", "prompt_ids", "sample_prompts", "warn_of_few_steps"]
