"""`eagle3-hf bench`: measures how much sooner a head is, or the cost of a round."""

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

from .files import check_result_files, require_matplotlib
from .heads import load_head
from .help import Defaults
from .placement import add_placement, load_target, load_tokenizer
from .replaying import REPLAY_OPTIONS, add_replay_options, without_clock
from .values import amount, check_output_folder, count, json_object, not_negative, path, place


_FOLDER = "bench"  # of the answers, where no file is named
_ROUND_COST_TREES = ("59/8/10", "15/4/4")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure speed-up and acceptance of a head, or the cost of a round",
        description="Answer questions with ordinary decoding, prompt lookup and the head in turn, and print a table "
        "with 95% intervals. Answers are kept on disk as they come: Ctrl-C prints what there is, and the same "
        "command resumes. With --round_cost, measure the median time of single rounds.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="MODEL", type=place, nargs="?", help="target: a local folder or a Hub id")
    parser.add_argument(
        "head",
        metavar="HEAD",
        type=place,
        nargs="?",
        help="draft head: a local folder or a Hub id, `random` for a new one, or `lookup` to draft by lookup alone",
    )
    asked = parser.add_argument_group("questions")
    asked.add_argument(
        "--prompts",
        type=place,
        help="what is asked: a folder of JSONL files with `turns`, one per task; one such file; chats, in a file or "
        "on the Hub (default: a small set of questions of nine kinds)",
    )
    asked.add_argument(
        "--questions",
        type=amount,
        help="number of questions of each task; 0 for all (default: 10, and 2 of each kind of the built-in ones)",
    )
    asked.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        help='variables for the chat template, as JSON: {"enable_thinking": false}',
    )
    asked.add_argument(
        "--seed", type=amount, default=0, help="seed of the choice of questions, of their order and of sampling"
    )
    columns = parser.add_argument_group("what is compared, besides ordinary decoding")
    columns.add_argument(
        "--head",
        dest="more_heads",
        action="append",
        default=[],
        type=place,
        metavar="[NAME=]HEAD",
        help="HEAD, or another head; repeat for several",
    )
    columns.add_argument(
        "--tree",
        action="append",
        default=[],
        help="size of the tree as nodes/depth/top_k, such as 15/4/4, or auto for the size that pays; repeat to "
        "compare several (default: what the head sets, or auto)",
    )
    columns.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="NAME:FIELD=VALUE,...",
        help="any decoding settings: fields of the head's generation config or arguments of `generate`; head=NAME "
        "chooses the head, tree=15/4/4 a tree; repeat for several",
    )
    columns.add_argument("--no_prompt_lookup", action="store_true", help="leave out transformers' prompt lookup")
    lists = parser.add_argument_group("settings, each of which may be a list")
    lists.add_argument(
        "--temperature",
        type=not_negative,
        nargs="+",
        default=[0.0],
        help="0 for greedy decoding; otherwise all columns sample from the same seeds (default: 0)",
    )
    lists.add_argument(
        "--batch_size", type=count, nargs="+", default=[1], help="questions answered at once (default: 1)"
    )
    lists.add_argument(
        "--max_new_tokens", type=count, nargs="+", default=[128], help="length of the answers (default: 128)"
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--output",
        type=path,
        help=f"file in which answers are kept, and from which the same command resumes (default: a file in {_FOLDER}/ "
        "that is named after the options)",
    )
    results.add_argument("--restart", action="store_true", help="remove that file first, and measure anew")
    for name in ("json", "csv", "html"):
        results.add_argument(f"--{name}", type=path, metavar="FILE", help=f"write the results as {name.upper()} too")
    parser.add_argument(
        "--round_cost", action="store_true", help="measure a round of each --tree against a step of ordinary decoding"
    )
    add_replay_options(parser)
    add_placement(parser)
    parser.set_defaults(run=run, resumes=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from transformers.utils import logging

    from ..evaluation.bench import benchmark_columns, number_of_questions
    from ..evaluation.columns import column_fields, parse_tree
    from ..evaluation.prompts import load_questions
    from ..evaluation.runs import Benchmark

    for tree in arguments.tree:
        parse_tree(tree)
    for column in arguments.column:
        column_fields(column)
    if arguments.head is None and arguments.more_heads:  # by option alone
        arguments.head = arguments.more_heads.pop(0)
    arguments.resumes = not (arguments.record or arguments.replay or arguments.count_ops or arguments.round_cost)
    if arguments.head == "lookup" and (arguments.record or arguments.count_ops or arguments.round_cost):
        raise ValueError("HEAD is lookup, which has no weights: --record, --count_ops and --round_cost need a head")
    if (status := without_clock(arguments, load_head)) is not None:
        return status
    if arguments.round_cost:
        return _round_cost(arguments)
    files = _check_files(arguments)
    # Questions, names and settings are checked before the target is loaded.
    number = number_of_questions(arguments.prompts, arguments.questions)
    questions = load_questions(arguments.prompts, number, arguments.seed)
    names = _names_of_heads(arguments)
    logging.disable_progress_bar()
    target = load_target(arguments)
    heads = {name: load_head(where, target) for name, where in names.items()}
    tokenizer = load_tokenizer(arguments)
    columns = benchmark_columns(heads, arguments.tree, arguments.column, not arguments.no_prompt_lookup)
    output = arguments.output or _default_output(arguments)
    if arguments.restart:
        output.unlink(missing_ok=True)
    benchmark = Benchmark(
        target,
        heads,
        tokenizer,
        questions,
        columns,
        output,
        temperatures=arguments.temperature,
        batch_sizes=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
        seed=arguments.seed,
        template_kwargs=arguments.chat_template_kwargs,
    )
    _print_start(arguments, benchmark, names, output)
    try:
        benchmark.run()
    except KeyboardInterrupt:
        _report(benchmark, files)
        raise
    _report(benchmark, files)
    return 0


def _report(benchmark: Any, files: dict[str, Path]) -> None:
    """Print the table of what has been measured, and write the files."""
    from ..evaluation.report import to_csv, to_markdown

    result = benchmark.result()
    if not result.figures:
        print("nothing has been measured yet")
        return
    print(f"\n{to_markdown(result)}", flush=True)
    for kind, file in files.items():
        if kind == "json":
            text = json.dumps(result.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        elif kind == "csv":
            text = to_csv(result)
        else:
            from ..evaluation.page import to_html

            text = to_html(result)
        file.write_text(text, encoding="utf-8")
        print(f"written: {file}")


def _print_start(arguments: argparse.Namespace, benchmark: Any, names: dict[str, str], output: Path) -> None:
    from ..utils.devices import place_in_words

    print(f"target {arguments.model} on {place_in_words(benchmark.target)}")
    for name, where in names.items():
        if where != "lookup":
            print(f"{name}: {where} on {place_in_words(benchmark.heads[name])}")
    done = f", of which {benchmark.num_complete} have been measured" if benchmark.num_complete else ""
    print(f"{benchmark.num_cells} turns{done}; answers are kept in {output}")
    if done and benchmark.num_complete == benchmark.num_cells:
        print("these are the results of that run; --restart measures again")


def _check_files(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the files to write by kind, after a check that they can be written."""
    files = {name: file for name in ("json", "csv", "html") if (file := getattr(arguments, name)) is not None}
    answers = arguments.output or Path(_FOLDER) / "answers"
    if answers.is_dir():
        raise ValueError(f"{answers} is a folder: name a file")
    check_output_folder(answers.absolute().parent)  # which may be created
    check_result_files(files.values())
    if "html" in files:
        require_matplotlib()
    return files


def _names_of_heads(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the places of all heads by name: `head` for a single one, else what is given or the folder's name."""
    if not arguments.more_heads:
        return {"head": arguments.head}
    named = {Path(arguments.head).name: arguments.head}
    for text in arguments.more_heads:
        name, equals, where = text.rpartition("=")
        name = name if equals else Path(text).name
        if not name or not where:
            raise ValueError(f"--head {text}: expected NAME=HEAD, or the folder or Hub id of a head")
        if name in named:
            raise ValueError(f"two heads have the name {name}: name this one, --head NAME={where}")
        named[name] = where
    return named


def _default_output(arguments: argparse.Namespace) -> Path:
    """Return a file that is named after the options which change the figures, so that only the same ones share it."""
    apart = (
        "run",
        "resumes",
        "traceback",
        "command",
        "config",
        "output",
        "restart",
        "json",
        "csv",
        "html",
        "round_cost",
    )
    options = {name: value for name, value in vars(arguments).items() if name not in (*apart, *REPLAY_OPTIONS)}
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return Path(_FOLDER) / f"{Path(arguments.model).name}-{Path(arguments.head).name}-{digest}.jsonl"


def _round_cost(arguments: argparse.Namespace) -> int:
    from ..evaluation.columns import parse_tree
    from ..evaluation.round_cost import round_cost
    from ..utils.devices import place_in_words

    target = load_target(arguments)
    draft = load_head(arguments.head, target)
    print(f"target {arguments.model} on {place_in_words(target)}; head {arguments.head} on {place_in_words(draft)}")
    trees = arguments.tree or list(_ROUND_COST_TREES)
    plain, costs = round_cost(target, draft, [parse_tree(tree) for tree in trees])
    print(f"plain step {plain * 1e3:.1f} ms")
    for tree, cost in zip(trees, costs, strict=True):
        print(f"round {tree}: {cost * 1e3:.1f} ms = {cost / plain:.2f} plain steps")
    return 0
