"""`eagle3-hf chat`: a chat on the terminal that shows which tokens were drafted."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from .help import Defaults
from .placement import add_placement, load_target, load_tokenizer
from .settings import add_settings, fields
from .values import amount, count, json_object, not_negative, place, positive


_HELP = "/reset forgets the chat, /quit (or Ctrl-D) ends it, Ctrl-C stops an answer"
_QUIT = ("/quit", "/exit")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "chat",
        help="chat with a target, and see which tokens were drafted",
        description="Chat on the terminal. Accepted drafts have the colour of what has proposed them; the mean "
        "acceptance length (tau) and the tokens per second are shown while an answer is written. Without a terminal, "
        f"each line of the input is a turn. {_HELP}.",
        formatter_class=Defaults,
    )
    parser.add_argument("model", metavar="MODEL", type=place, help="target: a local folder or a Hub id")
    parser.add_argument(
        "head",
        metavar="HEAD",
        type=place,
        help="draft head: a local folder or a Hub id, or `lookup` to draft by lookup alone",
    )
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max_new_tokens", type=count, default=512, help="largest number of tokens of an answer")
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, help="0 for greedy decoding; otherwise answers are sampled"
    )
    parser.add_argument("--top_p", type=positive, help="in sampling, keep the likeliest tokens of this probability")
    parser.add_argument("--seed", type=amount, default=0, help="seed of the first answer; each further one adds 1")
    parser.add_argument(
        "--tree",
        help="size of the tree as nodes/depth/top_k, such as 15/4/4, or auto for the size that pays (default: what "
        "the head sets, or auto)",
    )
    parser.add_argument("--no_lookup", action="store_true", help="draft with the head alone")
    parser.add_argument("--no_color", action="store_true", help="no colours (as with NO_COLOR in the environment)")
    parser.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        help='variables for the chat template, as JSON: {"enable_thinking": false}',
    )
    add_settings(parser)
    add_placement(parser)
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from transformers.utils import logging

    from ..evaluation.columns import parse_tree
    from ..model.vocab import check_tokenizer
    from ..utils.devices import place_in_words
    from .live_text import legend

    overrides = fields(arguments.set)
    tree = parse_tree(arguments.tree) if arguments.tree else {}
    if arguments.top_p is not None and (arguments.top_p > 1 or not arguments.temperature):
        raise ValueError(f"--top_p {arguments.top_p:g}: expected a number of at most 1, and a --temperature above 0")
    tokenizer = load_tokenizer(arguments)
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer of {arguments.model} has no chat template: it is not a target to chat with")
    logging.disable_progress_bar()
    target = load_target(arguments)
    draft = _load_draft(arguments.head, target, overrides)
    if arguments.head != "lookup":
        check_tokenizer(draft.config, tokenizer)
    for name, value in tree.items():
        setattr(draft.generation_config, name, value)
    if arguments.no_lookup:
        draft.generation_config.assistant_lookup = False
    coloured = sys.stdout.isatty() and not arguments.no_color and "NO_COLOR" not in os.environ
    print(f"target {arguments.model} on {place_in_words(target)}; head {arguments.head}")
    if coloured:
        print(f"drafted by: {legend(coloured)}; all else is the target's own")
    print(_HELP, flush=True)
    chat = _Chat(arguments, target, draft, tokenizer, coloured)
    for line in _lines():
        if line in _QUIT:
            break
        chat.turn(line)
    return 0


def _load_draft(where: str, target: Any, overrides: dict[str, Any]) -> Any:
    from .. import Eagle3DraftModel, LookupDraft

    if where == "lookup":
        return LookupDraft()
    return Eagle3DraftModel.from_pretrained(where, **overrides).to(target.device)


def _lines() -> Iterator[str]:
    """Yield what is typed, or the lines of an input that is no terminal, without empty ones."""
    if sys.stdin.isatty():
        if importlib.util.find_spec("readline") is not None:  # not on every platform
            importlib.import_module("readline")  # gives `input` a history
        lines: Iterator[str] = _typed()
    else:
        lines = _read()
    yield from (line for line in map(str.strip, lines) if line)


def _typed() -> Iterator[str]:
    while True:
        try:
            yield input("\n> ")
        except KeyboardInterrupt:
            print(f"\n{_HELP}")
        except EOFError:
            print()
            return


def _read() -> Iterator[str]:
    for line in sys.stdin:
        if line.strip():
            print(f"\n> {line.strip()}", flush=True)
        yield line


class _Chat:
    """A chat: its turns so far, and how answers are written."""

    def __init__(self, arguments: argparse.Namespace, target: Any, draft: Any, tokenizer: Any, coloured: bool):
        self._arguments, self._target, self._draft, self._tokenizer = arguments, target, draft, tokenizer
        self._coloured = coloured
        self._answers = 0
        self._reset()

    def turn(self, line: str) -> None:
        """Answer a turn of the user, or do what a command says."""
        if line == "/reset":
            self._reset()
            print("the chat is forgotten")
        elif line.startswith("/") and line[1:].isalpha():
            print(f"{line} is not a command: {_HELP}")
        else:
            self._answer(line)

    def _reset(self) -> None:
        system = self._arguments.system
        self._messages = [] if system is None else [{"role": "system", "content": system}]

    def _answer(self, line: str) -> None:
        import torch

        from .live_text import LiveText, StatusLine

        self._messages.append({"role": "user", "content": line})
        inputs = self._tokenizer.apply_chat_template(
            self._messages,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            **(self._arguments.chat_template_kwargs or {}),
        ).to(self._target.device)
        torch.manual_seed(self._arguments.seed + self._answers)
        self._answers += 1
        stopped = ""
        with StatusLine(sys.stdout) if sys.stdout.isatty() else nullcontext() as status:
            show = None if status is None else lambda tau, speed: status.show(_status(tau, speed))
            text = LiveText(self._tokenizer, sys.stdout, self._coloured, show)
            try:
                with text.watching():
                    self._target.generate(**inputs, assistant_model=self._draft, streamer=text, **self._options())
            except KeyboardInterrupt:
                text.end()
                stopped = "stopped, "
        print(f"\n[{stopped}{_status(text.tau, text.tokens_per_second)}; {_sources(self._draft.stats)}]", flush=True)
        answer = self._tokenizer.decode(text.token_ids, skip_special_tokens=True)
        self._messages.append({"role": "assistant", "content": answer})

    def _options(self) -> dict[str, Any]:
        arguments = self._arguments
        options: dict[str, Any] = {"max_new_tokens": arguments.max_new_tokens, "do_sample": arguments.temperature > 0}
        if arguments.temperature > 0:
            options |= {"temperature": arguments.temperature, "top_k": 0, "top_p": arguments.top_p or 1.0}
        return options


def _status(tau: float, speed: float) -> str:
    return f"tau {tau:.2f}, {speed:.1f} tokens/s"


def _sources(stats: Any) -> str:
    """Return how many tokens of an answer came from where."""
    if stats is None or not stats.rounds:
        return "no round"
    drafted = stats.from_head, stats.from_lookup, stats.from_both
    return (
        f"of {stats.emitted + 1} tokens {drafted[0]} were drafted by the head, {drafted[1]} by lookup, "
        f"{drafted[2]} by both"
    )
