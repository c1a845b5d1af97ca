"""`eagle3-hf bench`: measures speed-up and acceptance of a head, or the cost of a round."""

import argparse

from .help import Defaults
from .placement import add_placement, load_target
from .values import count, not_negative, path, place


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "bench",
        help="measure speed-up and acceptance of a head, or the cost of a round",
        description="Run ordinary and assisted decoding in turn on questions; with --round-cost, measure the median "
        "time of single rounds.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="MODEL", type=place, help="target: a local folder or a Hub id")
    parser.add_argument(
        "head", metavar="HEAD", type=place, help="draft head: a local folder or a Hub id, or `random` for a new one"
    )
    parser.add_argument(
        "--tasks", type=path, help="folder of JSONL files of questions with `turns`, one file per task"
    )
    parser.add_argument("--questions", type=count, default=10, help="number of questions per task")
    parser.add_argument("--max-new-tokens", type=count, default=128, help="length of the answers")
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=0.0,
        help="0 for greedy decoding; otherwise both sample from the same seeds",
    )
    parser.add_argument("--no-coupling", action="store_true", help="when sampling, draft without coupled sampling")
    parser.add_argument(
        "--tree",
        action="append",
        help="size of the tree as nodes/depth/top_k, such as 15/4/4; repeat to compare several",
    )
    parser.add_argument(
        "--round-cost", action="store_true", help="measure a round of each --tree against a step of ordinary decoding"
    )
    add_placement(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .. import Eagle3DraftModel
    from ..evaluation import report
    from ..evaluation.tasks import load_tasks
    from ..utils.devices import place_in_words

    trees = [report.parse_tree(tree) for tree in arguments.tree or []]
    if arguments.tasks is None and not arguments.round_cost:
        raise ValueError("there is nothing to measure: name a folder of questions with --tasks, or pass --round-cost")
    if not arguments.round_cost:
        load_tasks(arguments.tasks, arguments.questions)  # a broken file is found before the target is loaded
    logging.disable_progress_bar()
    target = load_target(arguments)
    if arguments.head == "random":
        ids = torch.randperm(target.config.get_text_config().vocab_size)[:8192].sort().values
        draft = Eagle3DraftModel.from_target(target, draft_vocab=ids, dtype=target.dtype)
        draft.init_weights()
    else:
        draft = Eagle3DraftModel.from_pretrained(arguments.head).to(target.device)
    print(f"target {arguments.model} on {place_in_words(target)}; head {arguments.head} on {place_in_words(draft)}")
    if arguments.round_cost:
        report.print_round_cost(target, draft, trees or [(59, 8, 10), (15, 4, 4)])
        return 0
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    options = {"do_sample": arguments.temperature > 0, "max_new_tokens": arguments.max_new_tokens}
    if arguments.temperature > 0:
        options |= {"temperature": arguments.temperature, "top_k": 0}
    chosen: list[report.Tree | None] = [*trees] or [None]
    for tree in chosen:
        report.print_tasks(
            target, draft, tokenizer, arguments.tasks, arguments.questions, tree, arguments.no_coupling, options
        )
    return 0
