"""`eagle3-hf diagnose`: why few drafts of a head are accepted, and what to do about it."""

import argparse
import json
from pathlib import Path
from typing import Any

from .files import check_result_files, require_matplotlib
from .help import Defaults
from .placement import add_placement, load_target, load_tokenizer
from .settings import add_settings, fields
from .values import amount, count, json_object, not_negative, path, place


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "diagnose",
        help="find out why few drafts of a head are accepted",
        description="Run target and head over chats, and report why drafts miss, whether other layer ids or rope "
        "bases fit better, what the draft vocabulary covers, and acceptance by depth, task, length of prompt and "
        "temperature. Trees have the size that the head sets, or 11/3/4 on a CPU and 59/8/10 on an accelerator. The "
        "last paragraph names the likely cause and what to do.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="MODEL", type=place, help="target: a local folder or a Hub id")
    parser.add_argument("head", metavar="HEAD", type=place, help="draft head: a local folder or a Hub id")
    chats = parser.add_argument_group("chats")
    chats.add_argument(
        "--data",
        type=place,
        nargs="+",
        required=True,
        help="chats with answers, of the kind that the target is used for: files, folders, or Hub ids "
        "(name:split[:1000]), each of which is a task; best are answers that the target wrote (`eagle3-hf datagen`)",
    )
    chats.add_argument("--split", help="split of the data")
    chats.add_argument("--chats", type=amount, default=24, help="number of chats of each task; 0 for all")
    chats.add_argument("--max_length", type=count, default=1024, help="tokens kept of each chat")
    chats.add_argument(
        "--own_answers", action="store_true", help="let the target answer first, and diagnose on its own answers"
    )
    chats.add_argument("--max_new_tokens", type=count, default=128, help="largest number of tokens of its own answers")
    chats.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        help='variables for the chat template, as JSON: {"enable_thinking": false}',
    )
    chats.add_argument("--seed", type=amount, default=0, help="seed of the choice of chats")
    what = parser.add_argument_group("what is measured")
    what.add_argument("--rounds", type=count, default=400, help="number of rounds whose misses are explained")
    what.add_argument("--depth", type=count, default=4, help="number of depths at which first choices are counted")
    what.add_argument(
        "--temperature",
        type=not_negative,
        nargs="+",
        default=[0.0, 0.5, 1.0],
        help="temperatures of acceptance in sampling (default: 0 0.5 1)",
    )
    what.add_argument("--no_sweep", action="store_true", help="do not try other layer ids and rope bases")
    results = parser.add_argument_group("results")
    for name in ("json", "html"):
        results.add_argument(f"--{name}", type=path, metavar="FILE", help=f"write the results as {name.upper()} too")
    add_settings(parser)
    add_placement(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from transformers.utils import logging

    from .. import Eagle3DraftModel
    from ..evaluation.diagnosis.diagnose import diagnose
    from ..utils.devices import place_in_words

    overrides = fields(arguments.set)
    check_result_files(filter(None, (arguments.json, arguments.html)))
    if arguments.html is not None:
        require_matplotlib()
    data = _load_data(arguments)
    logging.disable_progress_bar()
    target = load_target(arguments)
    draft = Eagle3DraftModel.from_pretrained(arguments.head, **overrides).to(target.device)
    print(f"target {arguments.model} on {place_in_words(target)}; head {arguments.head} on {place_in_words(draft)}\n")
    result = diagnose(
        target,
        draft,
        data,
        load_tokenizer(arguments),
        chats=arguments.chats or None,
        max_length=arguments.max_length,
        answers="own" if arguments.own_answers else "given",
        max_new_tokens=arguments.max_new_tokens,
        rounds=arguments.rounds,
        depth=arguments.depth,
        temperatures=arguments.temperature,
        sweep=not arguments.no_sweep,
        template_kwargs=arguments.chat_template_kwargs,
        seed=arguments.seed,
        progress=True,
    )
    _write(arguments, result)
    print(result)
    return 0


def _load_data(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the chats of each task, by its name."""
    from ..training.data.sources import load_chats

    names = [Path(each).name.split(".")[0] for each in arguments.data]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"--data {' '.join(arguments.data)}: two tasks have the name {twice}: rename a file")
    return {name: load_chats(each, split=arguments.split) for name, each in zip(names, arguments.data, strict=True)}


def _write(arguments: argparse.Namespace, result: Any) -> None:
    if arguments.json is not None:
        text = json.dumps(result.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        arguments.json.write_text(text, encoding="utf-8")
        print(f"written: {arguments.json}")
    if arguments.html is not None:
        from ..evaluation.diagnosis.page import to_html

        arguments.html.write_text(to_html(result), encoding="utf-8")
        print(f"written: {arguments.html}")
