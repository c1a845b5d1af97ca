"""`eagle3-hf check`: compares texts with and without a head under many arguments."""

import argparse
from typing import Any

from .heads import load_head
from .help import Defaults
from .placement import add_placement, load_target, load_tokenizer
from .values import amount, count, place


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "check",
        help="check that a head changes no text",
        description="Generate with and without the head under many arguments: greedy and sampled, short and long, "
        "single prompts and batches, with processors, criteria and caches. Each call is equal, a near-tie that "
        "rounding explains, or a bug. The exit status is 1 if there is a bug.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="TARGET", type=place, help="target: a local folder or a Hub id")
    parser.add_argument(
        "head",
        metavar="HEAD",
        type=place,
        help="draft head: a local folder or a Hub id, `random` for a new one, or `lookup` to draft by lookup alone",
    )
    parser.add_argument(
        "--prompts",
        type=place,
        help="what is asked, as for bench; `random` for random ids, which need no tokenizer (default: built-in "
        "questions)",
    )
    parser.add_argument("--questions", type=count, default=3, help="number of prompts")
    parser.add_argument(
        "--max_new_tokens", type=count, default=32, help="largest number of new tokens of a text; at least 2"
    )
    parser.add_argument("--seed", type=amount, default=0, help="seed of sampling and of the choice of prompts")
    parser.add_argument("--verbose", action="store_true", help="print every comparison, not only what differs")
    add_placement(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from ..evaluation.lossless import check_lossless
    from ..evaluation.lossless.judging import EQUAL
    from ..utils.devices import place_in_words

    target = load_target(arguments)
    draft = load_head(arguments.head, target)
    prompts = _prompts(arguments, draft)
    print(f"target {arguments.model} on {place_in_words(target)}")
    if arguments.head != "lookup":
        print(f"head {arguments.head} on {place_in_words(draft)}")

    def show(result: Any) -> None:
        if arguments.verbose and result.kind == EQUAL:
            print(result, flush=True)

    report = check_lossless(
        target, draft, prompts, max_new_tokens=arguments.max_new_tokens, seed=arguments.seed, show=show
    )
    print(report)
    if report.stats.rounds:
        print(f"with the draft as it is:\n{report.stats}")
    return 0 if report.is_lossless else 1


def _prompts(arguments: argparse.Namespace, draft: Any) -> list[list[int]] | None:
    """Return the ids of the prompts; `None` for random ones."""
    if arguments.prompts == "random":
        return None
    from ..evaluation.prompts import across_tasks, first_turn_ids, load_questions
    from ..model.vocab import check_tokenizer

    tokenizer = load_tokenizer(arguments)
    if hasattr(draft.config, "target_vocab_hash"):
        check_tokenizer(draft.config, tokenizer)
    questions = across_tasks(load_questions(arguments.prompts, None, arguments.seed), arguments.questions)
    return [first_turn_ids(tokenizer, question) for question in questions]
