"""`eagle3-hf trace`: shows the rounds of one text, as a summary and as a page."""

import argparse
from typing import Any

from .heads import load_head
from .help import Defaults
from .placement import add_placement, load_target, load_tokenizer
from .values import amount, check_output_folder, count, not_negative, path, place, words


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "trace",
        help="look inside: the trees of one text, what was accepted, and why guesses missed",
        description="Generate one text with the head, and write a page that steps through its rounds: the tree with "
        "probabilities and sources, the accepted path, the target's choice, and why it was not drafted.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="TARGET", type=place, help="target: a local folder or a Hub id")
    parser.add_argument(
        "head",
        metavar="HEAD",
        type=place,
        help="draft head: a local folder or a Hub id, `random` for a new one, or `lookup` to draft by lookup alone",
    )
    parser.add_argument("--html", type=path, metavar="FILE", help="write the page")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--prompt", type=words, help="a question, asked as the first turn of a chat (default: a built-in one)"
    )
    asked.add_argument("--text", type=words, help="a text to continue, without a chat template")
    parser.add_argument("--max_new_tokens", type=count, default=128, help="largest number of new tokens")
    parser.add_argument("--temperature", type=not_negative, default=0.0, help="0 for greedy decoding")
    parser.add_argument("--seed", type=amount, default=0, help="seed of sampling")
    parser.add_argument(
        "--tree",
        help="size of the tree as nodes/depth/top_k, such as 15/4/4, or auto for the size that pays (default: what "
        "the head sets, or auto)",
    )
    parser.add_argument("--no_lookup", action="store_true", help="let the head draft alone")
    add_placement(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    import torch

    from ..evaluation.columns import parse_tree
    from ..evaluation.trace import trace
    from ..utils.devices import place_in_words

    tree = parse_tree(arguments.tree) if arguments.tree is not None else {}
    if arguments.html is not None:
        if arguments.html.is_dir():
            raise ValueError(f"{arguments.html} is a folder: name a file")
        check_output_folder(arguments.html.absolute().parent)
    target = load_target(arguments)
    draft = load_head(arguments.head, target)
    for name, value in tree.items():
        setattr(draft.generation_config, name, value)
    tokenizer: Any = load_tokenizer(arguments)
    print(f"target {arguments.model} on {place_in_words(target)}")
    if arguments.head != "lookup":
        print(f"head {arguments.head} on {place_in_words(draft)}")
    ids = torch.tensor([_ids(arguments, tokenizer)], device=target.device)
    found = trace(target, draft, ids, tokenizer, seed=arguments.seed, **_options(arguments))
    print(tokenizer.decode(found.tokens, skip_special_tokens=True).strip())
    print(found)
    if arguments.html is None:
        print("--html FILE writes a page that steps through the rounds")
        return 0
    arguments.html.parent.mkdir(parents=True, exist_ok=True)
    found.save(arguments.html)
    print(f"written: {arguments.html}")
    return 0


def _ids(arguments: argparse.Namespace, tokenizer: Any) -> list[int]:
    from ..evaluation.prompts import Question, first_turn_ids, load_questions

    if arguments.text is not None:
        return tokenizer(arguments.text)["input_ids"]
    if arguments.prompt is not None:
        return first_turn_ids(tokenizer, Question("prompt", "prompt", (arguments.prompt,)))
    return first_turn_ids(tokenizer, load_questions(None, 1, arguments.seed)[0])


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate`."""
    options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
    if arguments.temperature > 0:
        options |= {"temperature": arguments.temperature, "top_k": 0}
    if arguments.no_lookup:
        options["assistant_lookup"] = False
    return options
