"""Chats that cannot be used for training: why one is dropped, and how many were dropped for which reason."""

from collections.abc import Iterator
from dataclasses import dataclass, field


# Number of reasons that a report names, each with an example.
_SHOWN = 20


class OddChatError(ValueError):
    """One chat cannot be used, but its dataset can: the chat is dropped and counted under `reason`.

    Args:
        reason: what chats with the same problem have in common; they are counted under these words.
        detail: what is wrong with this chat; `None` if the reason says it all.
    """

    def __init__(self, reason: str, detail: str | None = None) -> None:
        super().__init__(_printable(detail or reason))
        self.reason = _printable(reason)

    def __reduce__(self) -> "tuple[type[OddChatError], tuple[str, str]]":  # datasets sends it between processes
        return OddChatError, (self.reason, str(self))


def _printable(text: str) -> str:
    """Escape halves of characters, so that a message which quotes a broken chat can be printed."""
    return text.encode("utf-8", "backslashreplace").decode()


@dataclass
class DroppedChats:
    """Number of dropped chats by reason, each with its first example.

    Attributes:
        counts: number of chats by reason.
        examples: index of the first chat with this reason (from 0, as `show-mask --first` takes it), and what is
            wrong with it.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, number: int, error: ValueError | str) -> None:
        reason = getattr(error, "reason", None) or str(error)
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.examples.setdefault(reason, (number, str(error)))

    def __len__(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """Return a line for every reason, the most frequent first."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for reason, count in sorted(self.counts.items(), key=lambda item: -item[1])[:_SHOWN]:
            number, detail = self.examples[reason]
            example = f"chat {number}" if detail == reason else f"chat {number}: {detail}"
            yield f"  {count} x {reason}; the first is {example}"
        if len(self.counts) > _SHOWN:
            yield f"  and {len(self.counts) - _SHOWN} more reasons"
