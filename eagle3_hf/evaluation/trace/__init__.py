"""A look inside: the rounds of one call of `generate`, as data, as text and as a page.

`tracing.py` watches a call, `rounds.py` has the types, `words.py` turns tokens into text, and `page.py` writes a page
that steps through the rounds.
"""

from .rounds import Trace, TracedNode, TracedRound
from .tracing import trace


__all__ = ["Trace", "TracedNode", "TracedRound", "trace"]
