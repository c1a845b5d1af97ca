"""A trace as one HTML page that needs no other file: it steps through the rounds, on a phone, light and dark.

The page carries the trace as JSON, and `page.js` builds everything from it with text nodes, so that no token is ever
read as markup. A policy in the page's head forbids every request.
"""

import json
from html import escape
from pathlib import Path
from typing import Any

from ..misses import Cause
from .rounds import Trace, TracedRound
from .words import pieces, word


_FOLDER = Path(__file__).parent
_SHOWN_PROMPT = 400  # tokens of the prompt on the page, the last ones
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def to_html(trace: Trace) -> str:
    """Return the page."""
    title = f"{_last_part(trace.head)} for {_last_part(trace.target)}, round by round"
    data = json.dumps(page_data(trace), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_asset('page.css')}</style>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="summary">{escape(_summary(trace))}</p>',
            "<noscript>This page needs JavaScript.</noscript>",
            '<main id="trace"></main>',
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>\n{_asset('page.js')}</script>",
            "</html>",
            "",
        ]
    )


def page_data(trace: Trace) -> dict[str, Any]:
    """Return what the page shows, as JSON values."""
    prompt = list(trace.prompt[-_SHOWN_PROMPT:])
    decode = trace.decode
    known = {token for each in trace.rounds for token in (*each.emitted, *(node.token for node in each.nodes))}
    return {
        "prompt": [list(pair) for pair in zip(prompt, pieces(decode, prompt), strict=True)],
        "left_out": len(trace.prompt) - len(prompt),
        "text": [
            list(pair) for pair in zip(trace.tokens, pieces(decode, list(trace.tokens), trace.prompt), strict=True)
        ],
        "words": {str(token): word(decode, token) for token in sorted(known)},
        "causes": {cause.value: cause.words for cause in Cause},
        "rounds": [_round(each) for each in trace.rounds],
    }


def _round(each: TracedRound) -> dict[str, Any]:
    return {
        "start": each.start,
        "emitted": list(each.emitted),
        "accepted": each.num_accepted,
        "choice": _number(each.choice_probability),
        "cause": None if each.cause is None else each.cause.value,
        "pruned": _number(each.pruned_value),
        "candidates": each.num_candidates,
        "levels": each.levels,
        "ms": [_number(1e3 * seconds) for seconds in (each.draft_seconds, each.verify_seconds, each.other_seconds)],
        # token, parent, source, chance, head's probability, target's probability, accepted
        "nodes": [
            [
                node.token,
                node.parent,
                node.source,
                _number(node.value),
                _number(node.head_probability),
                _number(node.target_probability),
                int(node.is_accepted),
            ]
            for node in each.nodes
        ],
    }


def _number(value: float | None) -> float | None:
    """Return a number in four digits; `None` for none, and for what JSON has no number for."""
    if value is None or value != value or abs(value) == float("inf"):
        return None
    return float(f"{value:.4g}")


def _summary(trace: Trace) -> str:
    stats = trace.stats
    seconds = stats.prefill_seconds + stats.draft_seconds + stats.verify_seconds + stats.other_seconds
    options = ", ".join(f"{name}={value}" for name, value in trace.options.items())
    return (
        f"{len(trace.tokens)} tokens in {len(trace.rounds)} rounds, mean acceptance length (tau) {stats.tau:.2f}, "
        f"{seconds:.2f} s" + (f"; {options}" if options else "")
    )


def _last_part(name: str) -> str:
    return Path(name).name or name


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
