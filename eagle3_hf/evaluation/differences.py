"""Where texts of two columns differ: the words, and whether rounding explains it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .check import near_tie_bound


EQUAL, NEAR_TIE, DIFFERENT = "equal", "near-tie", "different"
_SHOWN = 12  # tokens before and after the first difference


@dataclass(frozen=True)
class TextDifference:
    """The first difference between a column's answer and the one of ordinary decoding.

    Attributes:
        column: Name of the column.
        question: Task and id of the question.
        index: Index of the first new token that differs.
        kind: `"near-tie"` if rounding explains a greedy difference, otherwise `"different"`.
        before: The text before it.
        plain: How ordinary decoding continues.
        other: How the column continues.
        margin: How much higher ordinary decoding scored its own token. `None` if it was not judged: the texts were
            sampled, one is the beginning of the other, or ordinary decoding gave another text when it was repeated.
        bound: The largest margin that rounding explains.
    """

    column: str
    question: str
    index: int
    kind: str
    before: str
    plain: str
    other: str
    margin: float | None = None
    bound: float | None = None

    def __str__(self) -> str:
        judged = (
            "not judged by scores"
            if self.margin is None
            else f"scores {self.margin:.4g} apart, rounding explains {self.bound:.4g}"
        )
        return (
            f"{self.column}, {self.question}: {self.kind} at new token {self.index} ({judged}): "
            f"{self.before!r} then {self.plain!r} or {self.other!r}"
        )


def first_difference_index(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, or at which one text ends; `None` if they are equal."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def text_differences(
    target,
    tokenizer,
    inputs: Mapping[str, torch.Tensor],
    names: Sequence[str],
    answers: Mapping[str, Sequence[Sequence[int]]],
    plain: str,
    **options: Any,
) -> list[TextDifference]:
    """Compare the answers of columns with those of ordinary decoding.

    Where greedy texts differ, ordinary decoding is repeated up to the last first difference, for its scores.

    Args:
        target: The target model.
        tokenizer: Its tokenizer.
        inputs: The batch of prompts.
        names: Name of each question of the batch.
        answers: New tokens of each question, by column.
        plain: Name of the column of ordinary decoding.
        options: Arguments of `generate`.
    """
    told = answers[plain]
    found = [
        (column, place, index)
        for column, texts in answers.items()
        for place, text in enumerate(texts)
        if column != plain and (index := first_difference_index(told[place], text)) is not None
    ]
    if not found:
        return []
    scores, repeated = None, None
    if not options["do_sample"]:
        longest = max(index for _, _, index in found) + 1
        output = target.generate(
            **inputs, **{**options, "max_new_tokens": longest}, return_dict_in_generate=True, output_scores=True
        )
        scores, repeated = output.scores, output.sequences[:, inputs["input_ids"].shape[1] :].tolist()

    def judged(column: str, place: int, index: int) -> TextDifference:
        mine, theirs = list(told[place]), list(answers[column][place])
        margin = bound = None
        in_both = index < min(len(mine), len(theirs))
        if (
            scores is not None
            and repeated is not None
            and in_both
            and repeated[place][: index + 1] == mine[: index + 1]
        ):
            values = scores[index][place].float()
            margin = float(values[mine[index]] - values[theirs[index]])
            bound = near_tie_bound(values, target.dtype)
        near = margin is not None and bound is not None and margin <= bound

        def words(tokens: list[int]) -> str:
            return tokenizer.decode(tokens)

        return TextDifference(
            column,
            names[place],
            index,
            NEAR_TIE if near else DIFFERENT,
            words(mine[max(0, index - _SHOWN) : index]),
            words(mine[index : index + _SHOWN]),
            words(theirs[index : index + _SHOWN]),
            margin,
            bound,
        )

    return [judged(*each) for each in found]
