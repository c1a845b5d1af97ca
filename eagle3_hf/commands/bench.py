"""`eagle3-hf bench`: speed-up and acceptance of a head, or the cost of a round."""

from __future__ import annotations

import argparse

from .help import Defaults
from .placement import add_placement, load_target
from .values import count, not_negative, path, place


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed-up and acceptance of a head, or the cost of a round",
        description="Plain and assisted decoding in turn on questions; with --round-cost, medians of single rounds.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="MODEL", type=place, help="target: a local folder or a Hub id")
    parser.add_argument(
        "head", metavar="HEAD", type=place, help="draft head: a local folder or a Hub id; `random` for a new one"
    )
    parser.add_argument("--tasks", type=path, help="folder of JSONL files of questions with `turns`, one file a task")
    parser.add_argument("--questions", type=count, default=10, help="of each task")
    parser.add_argument("--max-new-tokens", type=count, default=128)
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, help="0 is greedy; else sampled from equal seeds"
    )
    parser.add_argument(
        "--ignore-noise", action="store_true", help="when sampling, draft without the coupled sampling"
    )
    parser.add_argument("--tree", action="append", help="nodes/depth/top_k, such as 15/4/4; repeat for several")
    parser.add_argument("--round-cost", action="store_true", help="measure rounds of each --tree against plain steps")
    add_placement(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from .. import Eagle3DraftModel
    from ..evaluation import report
    from ..evaluation.tasks import load_tasks
    from ..utils.devices import place_in_words

    trees = [report.parse_tree(tree) for tree in arguments.tree or []]
    if arguments.tasks is None and not arguments.round_cost:
        raise ValueError("name a folder of questions with --tasks, or ask for --round-cost")
    if not arguments.round_cost:
        load_tasks(arguments.tasks, arguments.questions)  # a broken file shall not cost the loading of the target
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
            target, draft, tokenizer, arguments.tasks, arguments.questions, tree, arguments.ignore_noise, options
        )
    return 0
