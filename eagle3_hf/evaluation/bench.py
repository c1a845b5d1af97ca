"""Benchmarks in one call: `eagle3_hf.bench`, and what it has in common with the command."""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .columns import PLAIN, Column, check_names, column_of, head_columns, lookup_columns, parse_column
from .prompts import load_questions
from .results import BenchResult
from .runs import Benchmark


def bench(
    target,
    head: Any,
    tokenizer,
    prompts: Any = None,
    *,
    questions: int | None = None,
    trees: Sequence[str] = (),
    columns: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    prompt_lookup: bool = True,
    temperatures: Sequence[float] = (0.0,),
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: Sequence[int] = (128,),
    seed: int = 0,
    output: str | os.PathLike | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> BenchResult:
    """Measure a head against ordinary decoding and prompt lookup.

    Args:
        target: The target model.
        head: The head, or several by name.
        tokenizer: The target's tokenizer.
        prompts: See [`load_questions`]; `None` for the built-in questions.
        questions: Number of questions of each task, chosen by the seed; 0 for all, `None` for 2 of each kind of the
            built-in questions and 10 of each task of others.
        trees: Sizes of the tree, such as `"15/4/4"` or `"auto"` (the size that pays), each of which is a column for
            each head; without any, a head drafts as in `generate`: with the size that it sets, or the one that pays.
        columns: Further columns, such as `"narrow:assistant_window=64"`.
        prompt_lookup: Whether transformers' prompt lookup is a column.
        temperatures, batch_sizes, max_new_tokens, seed, template_kwargs: See [`Benchmark`].
        output: File of the answers, from which the same call resumes; `None` to keep none.
        progress: Whether to show a progress bar.

    Returns:
        Figures of every column under every setting, in all and by task.

    Raises:
        ValueError: an argument is invalid, or the output was written with others.
    """
    heads = dict(head) if isinstance(head, Mapping) else {"head": head}
    chosen = benchmark_columns(heads, trees, columns, prompt_lookup)
    asked = load_questions(prompts, number_of_questions(prompts, questions), seed)
    with _kept_in(output) as path:
        benchmark = Benchmark(
            target,
            heads,
            tokenizer,
            asked,
            chosen,
            path,
            temperatures=temperatures,
            batch_sizes=batch_sizes,
            max_new_tokens=max_new_tokens,
            seed=seed,
            template_kwargs=template_kwargs,
        )
        try:
            return benchmark.run(progress)
        finally:
            benchmark.store.close()


def number_of_questions(prompts: Any, given: int | None) -> int | None:
    """Return how many questions of each task are asked; `None` for all."""
    return (2 if prompts is None else 10) if given is None else given or None


def benchmark_columns(
    heads: Mapping[str, Any],
    trees: Sequence[str] = (),
    columns: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    prompt_lookup: bool = True,
) -> list[Column]:
    """Return ordinary decoding, prompt lookup, every head with every tree, and further columns; see [`bench`]."""
    if isinstance(columns, Mapping):
        further = [column_of(name, fields, heads) for name, fields in columns.items()]
    else:
        further = [parse_column(text, heads) for text in columns]
    chosen = [PLAIN, *(lookup_columns() if prompt_lookup else ()), *head_columns(list(heads), trees), *further]
    check_names(chosen)
    return chosen


@contextmanager
def _kept_in(output: str | os.PathLike | None) -> Iterator[Path]:
    """Yield the file of the answers; without a name, one that is removed again."""
    if output is not None:
        yield Path(output)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "answers.jsonl"
