"""Checks that a head changes no text: calls of many kinds, with and without it, compared in all that a caller sees.

Each call is made without a draft, with the draft as it is, and with trees that are *told* the text (`told.py`), so
that deep paths are accepted whatever the head is worth. A difference is a near-tie if rounding explains it, and a bug
otherwise (`judging.py`). Mistakes that cost acceptance but no text are found in the draft's own state (`state.py`).
"""

from .checking import LosslessError, assert_lossless, check_lossless
from .report import CaseResult, LosslessReport


__all__ = ["CaseResult", "LosslessError", "LosslessReport", "assert_lossless", "check_lossless"]
