"""What a training step costs: peak memory against length, and time by parts, beside the eager formulation.

    python examples/benchmarks/training_cost.py                                        # memory, on a small model
    python examples/benchmarks/training_cost.py HuggingFaceTB/SmolLM2-135M-Instruct    # time

The eager formulation is that of published training code: scores of every position with every key, the target's logits
over its whole vocabulary taken anew at every step, and a loss at all positions of which a mask then keeps some. It
gives the same loss (tested), so that the two differ in cost alone.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.commands.errors import in_words
from eagle3_hf.commands.help import Defaults
from eagle3_hf.commands.parser import Parser
from eagle3_hf.commands.placement import add_placement, load_target
from eagle3_hf.commands.values import amount, count, place
from eagle3_hf.model.features import FeatureReader
from eagle3_hf.training.targets.teacher import Teacher
from eagle3_hf.ttt.attention import TTTAttention
from eagle3_hf.ttt.loss import IGNORE_INDEX, supervised_mask
from eagle3_hf.ttt.settings import TTTSettings
from eagle3_hf.utils.devices import own_device, place_in_words


Batch = dict[str, torch.Tensor]


# ----- the steps to compare ------------------------------------------------------------------------------------------


def made_up_batch(length: int, document: int, vocab_size: int, supervised: float = 0.7) -> Batch:
    """Make (1, T) random tokens in documents of `document` tokens, the last share of each an answer."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (1, length), generator=generator)
    position_ids = torch.arange(length)[None] % document
    answered = position_ids >= max(2, round((1 - supervised) * document))
    labels = torch.where(answered, ids, IGNORE_INDEX)
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids, "attention_mask": torch.ones_like(ids)}


def stored(target: PreTrainedModel, teacher: Teacher, batch: Batch) -> Batch:
    """Return the batch as it comes from stored features: random ones, of the right shapes and dtype."""
    (size, length), width = batch["input_ids"].shape, target.get_output_embeddings().in_features
    like: dict[str, Any] = {"dtype": target.dtype, "device": batch["input_ids"].device}
    features = torch.randn(size, length, len(teacher.layer_ids) * width, **like)
    return {**batch, "features": features, "last_hidden": features[..., :width], "top1": batch["input_ids"]}


def our_loss(draft: Eagle3DraftModel, batch: Batch, taught: Batch, settings: TTTSettings) -> torch.Tensor:
    """The loss of one training step, from the teacher's output."""
    inputs = {name: batch[name] for name in ("input_ids", "labels", "position_ids")}
    return draft(**inputs, **taught, settings=settings).loss


@torch.no_grad()
def eager_teacher(target: PreTrainedModel, layer_ids: list[int], batch: Batch) -> Batch:
    """Features, and logits over the whole vocabulary at all positions; the documents have one length."""
    document = int(batch["position_ids"].max()) + 1
    with FeatureReader(target, layer_ids) as reader:
        logits = target(batch["input_ids"].view(-1, document), use_cache=False).logits
        features = reader.take()
    return {"features": features.view(1, -1, features.shape[-1]), "logits": logits.view(1, -1, logits.shape[-1])}


def eager_loss(draft: Eagle3DraftModel, batch: Batch, taught: Batch, settings: TTTSettings) -> torch.Tensor:
    """The eager formulation of the same loss (soft cross-entropy)."""
    borrowed, ids = draft.borrow(), draft.draft_vocab_ids()
    mask, positions = supervised_mask(batch["labels"]), batch["position_ids"]
    indices = torch.arange(mask.shape[1], device=mask.device)[None].expand_as(mask)
    attend, hidden, total = (
        TTTAttention(indices, positions, "eager"),
        draft.fuse(taught["features"]),
        torch.tensor(0.0),
    )
    for step, weight in enumerate(settings.weights):
        attend.step = step
        embeds = borrowed.embed(_ahead(batch["input_ids"], step + 1))
        hidden = draft.run_layers(hidden, embeds, positions + step, attend)
        scores = draft.compute_logits(hidden, borrowed).float().log_softmax(-1)
        with torch.no_grad():
            full = _ahead(taught["logits"], step + 1)
            known = torch.isin(full.argmax(-1), ids)
            teacher = full[..., ids].float().softmax(-1)
            inside = _ahead(mask, step) & (_ahead(positions, step) == positions + step)
        losses = -(teacher * scores).sum(-1)
        total = total + weight * (losses * (inside & known)).sum()
        hidden = draft.feedback(hidden)
    return total / mask.sum()


def _ahead(states: torch.Tensor, count: int) -> torch.Tensor:
    """Move (B, T, ...) `count` positions down along T, with zeros behind."""
    return torch.cat([states[:, count:], torch.zeros_like(states[:, :count])], dim=1)


# ----- memory --------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most memory that `run` held at once, above what was held before it."""
    if device.type != "cpu":
        memory: Any = getattr(torch, device.type)  # torch.accelerator has these counters in new versions only
        if not hasattr(memory, "max_memory_allocated"):
            raise ValueError(f"torch does not count the peak memory of {device.type}: take --device cpu")
        memory.reset_peak_memory_stats(device)
        before = memory.memory_allocated(device)
        run()
        return memory.max_memory_allocated(device) - before
    # The profiler hears of every allocation, also inside kernels, where no hook of torch's dispatcher sees it.
    recorded = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with _silent_stderr():
        recorded.start()
    run()
    with _silent_stderr():
        recorded.stop()
    results: Any = recorded.profiler.kineto_results  # type: ignore[union-attr]
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    held = torch.tensor([size for _, size in sorted(changes, key=lambda change: change[0])]).cumsum(0)
    return max(0, int(held.max())) if len(held) else 0


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """torch's profiler writes a line there, past Python, when it starts and when it stops."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def small_target(vocab_size: int = 128_256, hidden_size: int = 256) -> LlamaForCausalLM:
    """An untrained target with the vocabulary of a large one."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=4,
        num_attention_heads=max(1, hidden_size // 64),
        num_key_value_heads=max(1, hidden_size // 128),
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


@dataclass
class Steps:
    """Whole training steps of a head for a target, in both formulations.

    Attributes:
        autocast: Compute in bfloat16, or in float16 where the target is in it (weights stay as they are).
    """

    target: PreTrainedModel
    draft: Eagle3DraftModel
    settings: TTTSettings
    autocast: bool = True

    def __post_init__(self) -> None:
        self.target.eval().requires_grad_(False)
        self.device = self.draft.device
        self.teacher = Teacher(self.target, self.draft.config.captured_layer_ids, self.draft.draft_vocab_ids())

    def batch(self, length: int, document: int | None = None) -> Batch:
        made = made_up_batch(length, document or length, int(self.target.config.get_text_config().vocab_size))
        return {name: tensor.to(self.device) for name, tensor in made.items()}

    def ours(self, batch: Batch, clock: "Clock | None" = None, **settings) -> None:
        """Forward and backward as `Eagle3Trainer` runs them."""
        self._step(lambda: self.teacher(batch), our_loss, batch, replace(self.settings, **settings), clock)

    def eager(self, batch: Batch, clock: "Clock | None" = None) -> None:
        """Forward and backward of the eager formulation."""
        layer_ids = self.teacher.layer_ids
        self._step(lambda: eager_teacher(self.target, layer_ids, batch), eager_loss, batch, self.settings, clock)

    def _step(self, teach, loss_of, batch: Batch, settings: TTTSettings, clock: "Clock | None") -> None:
        clock = clock or Clock(self.device)
        self.draft.zero_grad(set_to_none=True)
        with clock.part("target and teacher"):
            taught = teach()
        dtype = torch.float16 if self.target.dtype == torch.float16 else torch.bfloat16
        with clock.part("draft forward"), torch.autocast(self.device.type, dtype, enabled=self.autocast):
            loss = loss_of(self.draft, batch, taught, settings)
        with clock.part("draft backward"):
            loss.backward()


class Peaks(NamedTuple):
    """Peak bytes of a step over T tokens; the eager one `None` where it was not run."""

    length: int
    ours: int
    checkpointed: int
    eager: int | None


def memory_table(steps: Steps, lengths: list[int], eager_up_to: int = 2048) -> Iterator[Peaks]:
    """For each length; the eager formulation, which grows with its square, up to `eager_up_to` only."""
    steps.ours(steps.batch(min(lengths)))  # what is made once is not a step's
    for length in lengths:
        batch = steps.batch(length)
        yield Peaks(
            length,
            _peak_of_step(steps, lambda: steps.ours(batch)),  # noqa: B023  (run at once)
            _peak_of_step(steps, lambda: steps.ours(batch, checkpoint_steps=True)),  # noqa: B023
            _peak_of_step(steps, lambda: steps.eager(batch)) if length <= eager_up_to else None,  # noqa: B023
        )


def _peak_of_step(steps: Steps, run: Callable[[], object]) -> int:
    steps.draft.zero_grad(set_to_none=True)
    return peak_bytes(run, steps.device)


# ----- time ----------------------------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds of named parts, summed over their runs; waits for the device at both ends of a part."""

    device: torch.device
    now: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._read()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._read() - start

    def _read(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return self.now()


PARTS = ("target and teacher", "of it target", "draft forward", "draft backward", "optimizer")


def time_table(
    steps: Steps, length: int, document: int, repeats: int, now: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Median seconds of each part of a step, for ours (online, from stored features) and eager ones in turn."""
    online = steps.batch(length, document)
    kept = stored(steps.target, steps.teacher, online)
    optimizer = torch.optim.AdamW(steps.draft.parameters(), lr=1e-5)
    forms: dict[str, Callable[[Clock], None]] = {
        "online": lambda clock: steps.ours(online, clock),
        "from stored features": lambda clock: steps.ours(kept, clock),
        "all logits kept": lambda clock: steps.ours(online, clock, loss_chunk=None),
        "checkpointed": lambda clock: steps.ours(online, clock, checkpoint_steps=True),
        "eager attention only": lambda clock: steps.ours(online, clock, attention="eager"),
        "eager formulation": lambda clock: steps.eager(online, clock),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    for repeat in range(repeats + 1):
        for name, run in forms.items():
            clock = Clock(steps.device, now)
            with _watched(steps.target, clock):
                run(clock)
            with clock.part("optimizer"):
                optimizer.step()
            if repeat:  # the first warms up
                runs[name].append(clock.seconds)
    return {name: {part: median(one.get(part, 0.0) for one in seen) for part in PARTS} for name, seen in runs.items()}


@contextmanager
def _watched(target: PreTrainedModel, clock: Clock) -> Iterator[None]:
    """The clock's part "of it target": the target's layers, without its output layer."""
    body: nn.Module = target.get_decoder()
    running = ExitStack()

    def start(*_: Any) -> None:
        running.enter_context(clock.part("of it target"))

    def stop(*_: Any) -> None:
        running.close()

    handles = [body.register_forward_pre_hook(start), body.register_forward_hook(stop)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ----- the command line ----------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Measure the peak memory of a training step against its length, on a small model with a large "
        "vocabulary; or, with MODEL, the time of a step on a packed sequence. Both stand beside the eager formulation "
        "of the same loss.",
        formatter_class=Defaults,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", type=place, help="target to time: a local folder or a Hub id"
    )
    parser.add_argument("--steps", type=count, default=7, help="steps of training-time test")
    parser.add_argument("--draft_vocab_size", type=count, default=8192, help="tokens that the head can propose")
    parser.add_argument("--lengths", type=count, nargs="+", default=[512, 1024, 2048, 4096], help="memory: tokens")
    parser.add_argument(
        "--eager_up_to", type=amount, default=2048, help="memory: longest sequence for the eager formulation"
    )
    parser.add_argument("--vocab_size", type=count, default=128_256, help="memory: vocabulary of the small model")
    parser.add_argument("--hidden_size", type=count, default=256, help="memory: width of the small model")
    parser.add_argument("--length", type=count, default=2048, help="time: tokens of the packed sequence")
    parser.add_argument("--document", type=count, default=256, help="time: tokens of each document in it")
    parser.add_argument("--repeats", type=count, default=3, help="time: runs of each form, whose median is shown")
    parser.add_argument(
        "--processor_time", action="store_true", help="time: the processor time of this process, not the wall clock"
    )
    add_placement(parser, dtype="bfloat16")
    arguments = parser.parse_args(argv)
    if arguments.length % arguments.document:
        parser.error(f"--length {arguments.length} is no multiple of --document {arguments.document}")
    if arguments.model is None and arguments.device_map is not None:
        parser.error("--device_map spreads MODEL, and none is named")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        steps = steps_for(arguments)
    except (OSError, ValueError) as error:
        print(f"training_cost: {in_words(error, [arguments.model or ''])}", file=sys.stderr)
        return 1
    print(f"{arguments.model or 'a small target'} on {place_in_words(steps.target)}; head in float32\n")
    if arguments.model is None:
        print_memory(steps, arguments)
    else:
        print_time(steps, arguments)
    return 0


def steps_for(arguments: argparse.Namespace) -> Steps:
    """Load or make the target, and a new head for it."""
    target: Any
    if arguments.model is None:
        target = small_target(arguments.vocab_size, arguments.hidden_size)
        dtype = torch.bfloat16 if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        target = target.to(arguments.device or own_device(), dtype)
    else:
        target = load_target(arguments)
    ids = torch.randperm(target.config.get_text_config().vocab_size)[: arguments.draft_vocab_size].sort().values
    draft = Eagle3DraftModel.from_target(target, draft_vocab=ids).to(target.device)
    return Steps(target, draft, TTTSettings(num_steps=arguments.steps), autocast=target.dtype != torch.float32)


def print_memory(steps: Steps, arguments: argparse.Namespace) -> None:
    print("Peak MiB of a training step (target, teacher, forward, backward) above models and optimizer.\n")
    print("| T | ours | checkpointed | eager | eager / ours |\n|---|---|---|---|---|", flush=True)
    for length, ours, checkpointed, eager in memory_table(steps, arguments.lengths, arguments.eager_up_to):
        cells = f"{length} | {ours / 2**20:,.0f} | {checkpointed / 2**20:,.0f}"
        compared = "- | -" if eager is None else f"{eager / 2**20:,.0f} | {eager / ours:.1f}"
        print(f"| {cells} | {compared} |", flush=True)


def print_time(steps: Steps, arguments: argparse.Namespace) -> None:
    now = time.process_time if arguments.processor_time else time.perf_counter
    table = time_table(steps, arguments.length, arguments.document, arguments.repeats, now)
    print(
        f"Seconds of a step, {arguments.length} tokens in documents of {arguments.document}, {arguments.steps} "
        f"steps, {torch.get_num_threads()} threads{', processor time' if arguments.processor_time else ''}.\n"
    )
    print(f"| | {' | '.join(PARTS)} | whole |\n|{'---|' * (len(PARTS) + 2)}")
    for name, parts in table.items():
        whole = sum(seconds for part, seconds in parts.items() if part != "of it target")
        print(f"| {name} | {' | '.join(f'{parts[part]:.2f}' for part in PARTS)} | {whole:.2f} |")
    ours, eager = (
        table[name]["draft forward"] + table[name]["draft backward"] for name in ("online", "eager formulation")
    )
    print(f"\nDraft forward and backward: {ours:.2f} s, eager {eager:.2f} s, {eager / ours:.1f} times as long.")


if __name__ == "__main__":
    sys.exit(main())
