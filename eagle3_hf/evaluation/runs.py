"""Measures how much sooner a head is: all columns in turn on the same questions, in one process.

On a noisy machine the ratio of two times that were measured next to each other is reliable where single times are not.
So every turn of every question is a cell, in which all columns run one after the other in random order; ratios are
formed of the sums over the same cells. Columns answer the same prompts: the answers before a turn are those of
ordinary decoding. Times include the prefill.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from tqdm.auto import tqdm

from ..decoding.attachments import without_attachment
from ..model.modeling_eagle3 import Eagle3DraftModel
from ..model.vocab import check_tokenizer
from ..utils.logging import get_logger
from .cells import Cell, Conversation, Setting, plan
from .columns import PLAIN, Column, check_names, tree_in_words
from .differences import text_differences
from .fingerprints import model_fingerprint, name_of
from .machine import OthersLoad, describe_machine
from .measure import left_padded, measure, pad_token_id
from .prompts import Question, fingerprint
from .results import BenchResult
from .store import Store
from .summary import MeasuredCell, running, summarize


logger = get_logger(__name__)

_WARM_UP_TOKENS = 16
_PROBE_TOKENS = 16


class Benchmark:
    """All that is to be measured, and where the answers are kept.

    Args:
        target: The target model.
        heads: Heads by name; any assistant that `generate` accepts.
        tokenizer: The target's tokenizer.
        questions: What is asked.
        columns: What is compared; ordinary decoding is added if it is not among them.
        output: File of the answers; a run with the same settings resumes from it.
        temperatures: 0 for greedy decoding; at others all columns sample from the same seeds.
        batch_sizes: Numbers of questions that are answered at once.
        max_new_tokens: Lengths of the answers.
        seed: Seed of the order, of sampling and of the intervals.
        template_kwargs: Variables for the chat template.
        clock: Returns seconds.

    Raises:
        ValueError: a setting is invalid, the tokenizer is not the one of a head, or the output has other settings.
    """

    def __init__(
        self,
        target,
        heads: Mapping[str, Any],
        tokenizer,
        questions: Sequence[Question],
        columns: Sequence[Column],
        output: str | os.PathLike,
        *,
        temperatures: Sequence[float] = (0.0,),
        batch_sizes: Sequence[int] = (1,),
        max_new_tokens: Sequence[int] = (128,),
        seed: int = 0,
        template_kwargs: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = perf_counter,
    ):
        self.target, self.heads, self.tokenizer = target, dict(heads), tokenizer
        self.columns = [*([] if PLAIN in columns else [PLAIN]), *columns]
        check_names(self.columns)
        self.seed = seed
        self._template_kwargs = dict(template_kwargs or {})
        self._clock = clock
        for head in self.heads.values():
            if isinstance(head, Eagle3DraftModel):
                check_tokenizer(head.config, tokenizer)
        trees = {column.name: tree_in_words(column, self.heads, target) for column in self.columns}
        self.trees = {name: tree for name, (tree, _) in trees.items() if tree}
        self.chains = [name for name, (_, is_chain) in trees.items() if is_chain]
        self._plan = plan(questions, temperatures, batch_sizes, max_new_tokens, seed)
        self._fitting: dict[str, int] = {}  # turns of a conversation that the target has positions for
        self._probed: list[list[int]] = []  # the prompt of the work that is repeated
        self.header = {
            "machine": describe_machine(target),
            "settings": {
                "questions": f"{len(questions)} with the hash {fingerprint(questions)}",
                "temperatures": [float(value) for value in temperatures],
                "batch_sizes": list(batch_sizes),
                "max_new_tokens": list(max_new_tokens),
                "columns": {column.name: column.as_dict() for column in self.columns},
                "trees": self.trees,
                "seed": seed,
                "template_kwargs": self._template_kwargs,
                "target": model_fingerprint(target),
                "heads": {name: model_fingerprint(head) for name, head in self.heads.items()},
            },
        }
        self.store = Store(output, self.header)

    @property
    def num_cells(self) -> int:
        """Number of cells, as far as is known: answers decide whether a later turn still fits the target."""
        return sum(self._fitting.get(each.key, each.num_turns) for each in self._plan)

    @property
    def num_complete(self) -> int:
        """Number of cells that have been measured."""
        return sum(self.store.is_complete(cell.key) for each in self._plan for cell in self._cells(each))

    def run(self, progress: bool = True) -> BenchResult:
        """Measure what has not been measured, and return all results.

        Args:
            progress: Whether to show a progress bar with the figures so far.
        """
        left = [each for each in self._plan if not self._is_complete(each)]
        device = self.target.device
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with without_attachment(self.target), forked:
            self._measure_all(left, progress)
        return self.result()

    def _measure_all(self, conversations: Sequence[Conversation], progress: bool) -> None:
        if not conversations:
            return
        self._warm_up(conversations)
        others = OthersLoad()
        done, every = self.num_complete, self.num_cells
        with tqdm(total=every, initial=done, desc="Measuring", unit="turn", disable=not progress) as bar:
            for conversation in conversations:
                self._probe(others)
                for _ in self._measure(conversation):
                    bar.update()
                    if progress:
                        bar.set_postfix_str(running(self._measured(), self.columns))
                bar.total = self.num_cells

    def result(self) -> BenchResult:
        """Return the results of all that has been measured so far."""
        return summarize(
            self._measured(),
            self.columns,
            header=self.header,
            models={"target": name_of(self.target), **{name: name_of(head) for name, head in self.heads.items()}},
            chains=self.chains,
            probes=self.store.probes,
            progress=(self.num_complete, self.num_cells),
            seed=self.seed,
        )

    def _measured(self) -> list[MeasuredCell]:
        """Return the cells that have answers."""
        cells = (cell for conversation in self._plan for cell in self._cells(conversation))
        return [
            MeasuredCell(cell, self.store.answers[cell.key], self.store.differences.get(cell.key))
            for cell in cells
            if cell.key in self.store.answers
        ]

    # ----- a conversation -------------------------------------------------------------------------------------------

    def _cells(self, conversation: Conversation) -> list[Cell]:
        return [Cell(conversation, turn) for turn in range(conversation.num_turns)]

    def _is_complete(self, conversation: Conversation) -> bool:
        turns = self._turns_that_fit(conversation)
        return all(self.store.is_complete(cell.key) for cell in self._cells(conversation)[:turns])

    def _measure(self, conversation: Conversation) -> Iterator[Cell]:
        """Measure the turns of a conversation that are missing, and yield each."""
        for cell in self._cells(conversation):
            if cell.turn >= self._turns_that_fit(conversation):
                return
            if not self.store.is_complete(cell.key):
                self._measure_cell(cell)
                yield cell

    def _measure_cell(self, cell: Cell) -> None:
        setting, prompts = cell.conversation.setting, self._prompts(cell)
        self.store.begin(cell.key)
        columns = [column for column in self.columns if column.supports(setting.batch_size)]
        for column in cell.shuffled(columns, self.seed):
            answer = measure(
                self.target, self.heads, column, prompts, cell.seed(self.seed), self._clock, **setting.options
            )
            self.store.put(cell.key, column.name, answer)
        answers = {name: answer.tokens for name, answer in self.store.answers[cell.key].items()}
        names = [f"{question.task}/{question.id}" for question in cell.conversation.questions]
        if cell.conversation.num_turns > 1:
            names = [f"{name}, turn {cell.turn + 1}" for name in names]
        inputs = left_padded(prompts, pad_token_id(self.target), self.target.device)
        self.store.finish(
            cell.key,
            text_differences(self.target, self.tokenizer, inputs, names, answers, PLAIN.name, **setting.options),
        )

    def _prompts(self, cell: Cell) -> list[list[int]]:
        """Return the token ids of each question's turn, behind earlier turns as ordinary decoding answered them."""
        told = [self.store.answers[Cell(cell.conversation, turn).key][PLAIN.name].tokens for turn in range(cell.turn)]
        return [
            self._encoded(question, cell.turn, [answers[place] for answers in told])
            for place, question in enumerate(cell.conversation.questions)
        ]

    def _encoded(self, question: Question, turn: int, answers: Sequence[Sequence[int]]) -> list[int]:
        texts = [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        messages = [] if question.system is None else [{"role": "system", "content": question.system}]
        for asked, told in zip(question.turns, texts, strict=False):
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        messages.append({"role": "user", "content": question.turns[turn]})
        if self.tokenizer.chat_template is None:
            return self.tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self._template_kwargs
        )["input_ids"]

    def _turns_that_fit(self, conversation: Conversation) -> int:
        """Return how many turns the target has positions for, as far as their prompts are known."""
        if conversation.key in self._fitting:
            return self._fitting[conversation.key]
        limit = getattr(self.target.config.get_text_config(), "max_position_embeddings", None)
        if limit is None:
            return conversation.num_turns
        for cell in self._cells(conversation):
            longest = max(map(len, self._prompts(cell)))
            if longest + conversation.setting.max_new_tokens > limit:
                self._fitting[conversation.key] = cell.turn
                logger.warning_once(
                    f"Turn {cell.turn + 1} of {conversation.task}/{conversation.questions[0].id} has a prompt of "
                    f"{longest} tokens, and with {conversation.setting.max_new_tokens} new ones it exceeds the "
                    f"target's {limit} positions: it is left out, as are others that are too long."
                )
                return cell.turn
            if cell.key not in self.store.answers or not self.store.is_complete(cell.key):
                break
        return conversation.num_turns

    # ----- around the measurements ----------------------------------------------------------------------------------

    def _warm_up(self, conversations: Sequence[Conversation]) -> None:
        """Let each column decode a few tokens in each setting, so that no first call is measured."""
        first: dict[Setting, Conversation] = {}
        for conversation in conversations:
            if self._turns_that_fit(conversation):
                first.setdefault(conversation.setting, conversation)
        for setting, conversation in first.items():
            prompts = self._prompts(Cell(conversation, 0))
            options = {**setting.options, "max_new_tokens": min(_WARM_UP_TOKENS, setting.max_new_tokens)}
            for column in self.columns:
                if column.supports(setting.batch_size):
                    measure(self.target, self.heads, column, prompts, self.seed, **options)
        shortest = min(conversations, key=lambda each: len(each.questions[0].turns[0]))
        self._probed = [self._encoded(shortest.questions[0], 0, [])]

    def _probe(self, others: OthersLoad) -> None:
        """Measure the same work again: how its times differ tells how quiet the machine is."""
        options = {"do_sample": False, "max_new_tokens": _PROBE_TOKENS, "eos_token_id": None}
        answer = measure(self.target, self.heads, PLAIN, self._probed, self.seed, self._clock, **options)
        self.store.put_probe(answer.seconds, others.since_last())
