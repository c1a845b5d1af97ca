"""Tokens as text, one piece for each, so that a text can be shown token by token.

Byte-level tokenizers split characters: some tokens are no text alone. The piece of such a token is empty, and that of
the token which completes the character has all of it.
"""

from collections.abc import Callable, Sequence


_UNKNOWN = "\ufffd"  # what a decoder puts for bytes that are no character
_CONTEXT = 8  # tokens before a piece with which it is decoded


def pieces(decode: Callable[[list[int]], str] | None, tokens: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds.

    Args:
        decode: Turns ids into text; `None` for the ids themselves.
        tokens: The tokens.
        context: What comes before them.
    """
    if decode is None:
        return [f" {token}" for token in tokens]
    found, ids = [], list(context)
    begin = max(0, len(ids) - _CONTEXT)  # from where the text is decoded
    shown = decode(ids[begin:]) if ids else ""  # of which this has been given out
    for token in tokens:
        ids.append(token)
        text = decode(ids[begin:])
        is_whole = not text.endswith(_UNKNOWN)
        if not is_whole:
            found.append("")
        elif text.startswith(shown):
            found.append(text[len(shown) :])
        else:  # the decoder has changed what came before, such as a space in front of a full stop
            found.append(decode([token]))
        if is_whole:
            begin = max(begin, len(ids) - _CONTEXT)
            shown = decode(ids[begin:])
    if found and decode(ids[begin:]).endswith(_UNKNOWN):
        found[-1] += _UNKNOWN  # the text ends within a character
    return found


def word(decode: Callable[[list[int]], str] | None, token: int) -> str:
    """Return a token alone as text; its id if there is no tokenizer, or it has no text of its own."""
    if decode is None:
        return str(token)
    text = decode([token])
    return f"#{token}" if not text or _UNKNOWN in text else text
