"""How chats become what a head trains on, as one object that travels from the options of a run to where it is used."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class EncodingOptions:
    """How chats are encoded and packed.

    Args:
        max_length: Tokens kept of each chat; `None` keeps all. With packing also the length of a packed sequence.
        template_kwargs: Extra variables for the chat template (`{"enable_thinking": False}`), as serving passes them.
        last_turn_only: Learn from the last answer of each chat only.
        mask_reasoning: Do not learn reasoning, nor the tags around it.
        num_proc: Number of processes that encode.
        packing: Put several chats into one sequence.
        seed: Seed of the order in which chats are packed.

    Raises:
        ValueError: `max_length` is below 1.
    """

    max_length: int | None = None
    template_kwargs: Mapping[str, Any] | None = None
    last_turn_only: bool = False
    mask_reasoning: bool = False
    num_proc: int | None = None
    packing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 1, or None for no limit")

    @property
    def choice(self) -> tuple[bool, bool]:
        """What is chosen among the turns of a chat: `(last_turn_only, mask_reasoning)`."""
        return self.last_turn_only, self.mask_reasoning

    def of_a_chat(self) -> "EncodingOptions":
        """Return only the options that decide what a single chat becomes: cached results depend on no others."""
        return replace(self, num_proc=None, packing=False, seed=0)
