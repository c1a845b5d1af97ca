"""The options of `eagle3-hf bench` that measure without a clock: records, replays, and op counts."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .files import check_result_files, require_matplotlib
from .placement import load_target, load_tokenizer
from .values import check_output_folder, path, place


REPLAY_OPTIONS = ("record", "replay", "costs", "measured", "count_ops")


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    group = parser.add_argument_group("without a clock (see docs/replay.md)")
    group.add_argument(
        "--record", type=path, metavar="FILE", help="record the head's candidates at every position of the answers"
    )
    group.add_argument(
        "--replay",
        type=path,
        metavar="FILE",
        help="evaluate each --tree on a record, without models (MODEL and HEAD are left out)",
    )
    group.add_argument(
        "--costs",
        type=place,
        default="cpu",
        help="costs of a round in a replay: cpu, gpu-eager, gpu-graphs, or a JSON file (default: cpu)",
    )
    group.add_argument(
        "--measured",
        type=path,
        metavar="FILE",
        help="results of a benchmark (--json), whose fixed trees become dots beside the modelled curves of --replay "
        "with --html",
    )
    group.add_argument(
        "--count_ops",
        action="store_true",
        help="count aten ops and host transfers of a round of each --tree by phase, on the first question",
    )


def without_clock(arguments: argparse.Namespace, load_head: Callable[[str, Any], Any]) -> int | None:
    """Run what one of the options asks for.

    Args:
        arguments: The arguments of `bench`.
        load_head: Returns the head of a name for a target.

    Returns:
        The exit status; `None` if none of the options was given.

    Raises:
        ValueError: models are missing, or options exclude each other.
    """
    given = [name for name in ("record", "replay", "count_ops", "round_cost") if getattr(arguments, name)]
    if len(given) > 1:
        names = " and ".join(f"--{name}" for name in given)
        raise ValueError(f"{names} exclude each other: give one of them")
    if arguments.replay is None and arguments.head is None:
        raise ValueError("MODEL and HEAD are missing: only --replay does without them")
    if arguments.measured is not None and (arguments.replay is None or arguments.html is None):
        raise ValueError("--measured adds dots to the page of a replay: give --replay and --html too")
    if arguments.replay is not None:
        return _replay(arguments)
    if arguments.record is not None:
        return _record(arguments, load_head)
    return _count_ops(arguments, load_head) if arguments.count_ops else None


def _replay(arguments: argparse.Namespace) -> int:
    from ..evaluation.columns import parse_tree
    from ..evaluation.costs import costs_of
    from ..evaluation.record import Record
    from ..evaluation.replay import FixedTree, PlainSteps, Policy, Replay, markdown_table
    from ..model.tree_settings import CPU_TREE, PAPER_TREE

    if arguments.html is not None:
        check_result_files([arguments.html])
        require_matplotlib()
    trees = arguments.tree or ["/".join(map(str, tree.values())) for tree in (CPU_TREE, PAPER_TREE)]
    policies: dict[str, Policy] = {}
    for tree in trees:
        if "auto" in tree:
            raise ValueError(
                f"--tree {tree} is chosen by measured costs, which a record has not: give its three numbers"
            )
        policies[tree] = FixedTree(*parse_tree(tree).values())
    record = Record.load(arguments.replay)
    replay = Replay(record, costs_of(arguments.costs))
    print(f"{record.describe()}\ncosts {arguments.costs}: tau / modelled speed-up")
    results = {name: replay.by_task(policy) for name, policy in policies.items()}
    print(markdown_table(results | {"plain": replay.by_task(PlainSteps())}))
    if arguments.html is not None:
        _write_page(arguments, replay, [parse_tree(tree) for tree in trees], record.describe())
    return 0


def _write_page(arguments: argparse.Namespace, replay: Any, trees: Sequence[dict[str, int]], about: str) -> None:
    """Write a page with a curve for each depth and number of children among the trees."""
    from ..evaluation.replay_page import to_html
    from ..evaluation.tree_sizes import measured_sizes, modelled_sizes, sizes_up_to

    measured = {} if arguments.measured is None else measured_sizes(arguments.measured)
    families: dict[tuple[int, int], int] = {}
    for nodes, depth, top_k in (tree.values() for tree in trees):
        families[depth, top_k] = max(nodes, families.get((depth, top_k), 0))
    names = {family: f"depth {family[0]}, top_k {family[1]}" for family in families}
    page = to_html(
        f"Replay of {arguments.replay.name}",
        [about, f"costs: {arguments.costs}"],
        {names[own]: modelled_sizes(replay, *own, sizes_up_to(most)) for own, most in families.items()},
        {names[own]: points for own, points in measured.items() if own in names},
    )
    arguments.html.write_text(page, encoding="utf-8")
    print(f"written: {arguments.html}")


def _record(arguments: argparse.Namespace, load_head: Callable[[str, Any], Any]) -> int:
    from ..evaluation.record import Record
    from ..evaluation.recording import TextRecorder, write_record

    check_output_folder(arguments.record.absolute().parent)
    target, draft, prompts, options = _prepared(arguments, load_head)
    recorder = TextRecorder(target, draft, **options)
    names = Path(arguments.model).name, Path(arguments.head).name
    write_record(recorder, prompts, arguments.record, names, arguments.seed)
    print(Record.load(arguments.record).describe())
    print(f"eagle3-hf bench --replay {arguments.record} --tree 11/3/4 --costs cpu")
    return 0


def _count_ops(arguments: argparse.Namespace, load_head: Callable[[str, Any], Any]) -> int:
    import torch

    from ..evaluation.columns import parse_tree
    from ..evaluation.op_counts import counts_table
    from ..model.tree_settings import CPU_TREE, PAPER_TREE

    target, draft, prompts, options = _prepared(arguments, load_head)
    _, ids = prompts[0]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    trees = arguments.tree
    if not trees and draft.generation_config.num_assistant_tokens in (None, "auto"):
        # A tree whose size measured time decides has other counts in each run.
        trees = ["/".join(map(str, (CPU_TREE if target.device.type == "cpu" else PAPER_TREE).values()))]
    for tree in trees or [None]:
        for name, value in parse_tree(tree).items() if tree else ():
            setattr(draft.generation_config, name, value)
        print(f"tree {tree or 'of the head'}, {ids.shape[1]} tokens of prompt, {options}")
        print(counts_table(target, draft, inputs, arguments.seed, **options), flush=True)
    return 0


def _prepared(
    arguments: argparse.Namespace, load_head: Callable[[str, Any], Any]
) -> tuple[Any, Any, list[tuple[str, Any]], dict[str, Any]]:
    """Return target, head, task and ids (1, P) of each question's first turn, and the arguments of `generate`."""
    import torch

    from ..evaluation.bench import number_of_questions
    from ..evaluation.prompts import first_turn_ids, load_questions
    from ..model.vocab import check_tokenizer
    from ..utils.devices import place_in_words

    temperature = _single("--temperature", arguments.temperature)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    options["max_new_tokens"] = _single("--max_new_tokens", arguments.max_new_tokens)
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0}
    number = number_of_questions(arguments.prompts, arguments.questions)
    questions = load_questions(arguments.prompts, number, arguments.seed)
    target = load_target(arguments)
    draft = load_head(arguments.head, target)
    tokenizer = load_tokenizer(arguments)
    check_tokenizer(draft.config, tokenizer)
    print(f"target {arguments.model} on {place_in_words(target)}; head {arguments.head} on {place_in_words(draft)}")
    prompts = []
    for question in questions:
        ids = first_turn_ids(tokenizer, question, **(arguments.chat_template_kwargs or {}))
        prompts.append((question.task, torch.tensor([ids], device=target.device)))
    return target, draft, prompts, options


def _single(option: str, values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise ValueError(f"{option} takes one value here, got {' '.join(map(str, values))}")
    return values[0]
