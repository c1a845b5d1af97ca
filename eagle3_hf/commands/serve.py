"""`eagle3-hf serve`: the OpenAI-compatible server of transformers, with a head attached to its model."""

import argparse
import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .hub import stay_offline_where_unreachable
from .models import check_targets
from .values import place


_NO_PREFIX = "\0"  # the options are those of `transformers serve`
# The class that loads models, in transformers' server since 5.5, and in 5.4.
_LOADERS = (("serving.model_manager", "ModelManager"), ("serve", "Serve"))
_USAGE = "eagle3-hf serve TARGET HEAD [OPTIONS of transformers serve]"


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "serve",
        help="transformers' OpenAI-compatible server, with a head attached",
        prefix_chars=_NO_PREFIX,
        add_help=False,
    )
    parser.add_argument("words", nargs="*")
    parser.set_defaults(run=run, resumes=False)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    words = list(arguments.words)
    if not words or words[0] in ("--help", "-h"):
        print(f"usage: {_USAGE}\n\n{_ABOUT}")
        return 0 if words else 2
    if len(words) < 2 or any(word.startswith("-") for word in words[:2]):
        raise ValueError(f"TARGET and HEAD come first: {_USAGE}")
    target, head, *options = words
    arguments.model, arguments.head = target, head  # as elsewhere
    check_targets([target])
    stay_offline_where_unreachable([target] if head == "lookup" else [target, head])
    with attaching(place(head)):
        _serve([target, *options])
    return 0


_ABOUT = """\
Run the OpenAI-compatible server of transformers with the model TARGET and the draft head HEAD (a local folder or a Hub
id, or `lookup` for drafts by lookup alone). All other options are passed to `transformers serve` unchanged: see
`transformers serve --help`. For each request that is drafted, a log line counts drafted and accepted tokens.
It needs pip install "eagle3-hf[serving]". With --continuous_batching requests run without the head."""


@contextmanager
def attaching(head: str) -> Iterator[None]:
    """Let transformers' server attach a head to each model that it loads, inside the block.

    Args:
        head: Folder or Hub id of the head, or `lookup`.

    Raises:
        ValueError: this version of transformers has another server.
    """
    owner = _loader()
    original = owner.load_model_and_processor

    @functools.wraps(original)
    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> Any:
        model, processor = original(self, *args, **kwargs)
        _attach_once(model, head)
        return model, processor

    owner.load_model_and_processor = load_model_and_processor
    try:
        yield
    finally:
        owner.load_model_and_processor = original


def _loader() -> Any:
    """Return the class of transformers' server that loads models."""
    import transformers

    for module, name in _LOADERS:
        try:
            found = getattr(importlib.import_module(f"transformers.cli.{module}"), name, None)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("transformers"):
                raise _missing(str(error.name)) from error
            continue
        if hasattr(found, "load_model_and_processor"):
            return found
    raise ValueError(
        f"transformers {transformers.__version__} has no server whose models a head can be attached to: this works "
        "with 5.4 to 5.24"
    )


def _missing(packages: str) -> ValueError:
    return ValueError(f'the server of transformers needs {packages}: pip install "eagle3-hf[serving]"')


def _attach_once(model: Any, head: str) -> None:
    from .. import LookupDraft, attach
    from ..decoding.attachments import attachment_of

    if attachment_of(model) is None:
        attach(model, LookupDraft() if head == "lookup" else head, on_call=_report)


def _report(stats: Any) -> None:
    """Log what a request drafted."""
    accepted = sum(stats.accepted)
    share = f" ({accepted / stats.drafted:.0%})" if stats.drafted else ""
    print(
        f"drafted {stats.drafted} tokens in {stats.rounds} rounds, accepted {accepted}{share}, wrote {stats.emitted}",
        flush=True,
    )


def _serve(words: Sequence[str]) -> None:
    """Run `transformers serve` with a command line."""
    import typer
    from transformers.cli.serve import Serve
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise _missing("fastapi, uvicorn, pydantic and openai")
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    app(args=[_hyphens(word) for word in words], prog_name="eagle3-hf serve TARGET HEAD", standalone_mode=True)


def _hyphens(word: str) -> str:
    """Return an option in the spelling that `transformers serve` knows."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word
