"""`eagle3-hf datagen`: let a target write training chats, or answer the prompts of a dataset."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .help import say_next
from .placement import add_placement, load_target, load_tokenizer
from .values import amount, check_output_folder, count, json_object, path, place, positive, read_lines, share


if TYPE_CHECKING:
    from ..training.datagen.local_writer import WritingSettings
    from ..training.datagen.regeneration import Writer

# Options that belong to one of the two jobs, and are rejected with the other.
_FOR_PROMPTS = ("split", "about", "server", "model_name", "concurrency", "timeout", "request_extra")
_FOR_OWN_CHATS = ("num_chats", "seeds", "max_user_tokens", "top_p")
_FOR_SERVERS = ("concurrency", "timeout", "request_extra")


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "datagen",
        help="let a target write training chats, or answer a dataset's prompts",
        description="Let a target answer the prompts of a dataset (--prompts), in this process, in several under "
        "`accelerate launch`, or on a server (--server); or let it write user turns too (--num_chats). An interrupted "
        "run resumes when it is started again.",
    )
    parser.add_argument(
        "model", metavar="MODEL", type=place, help="target: a local folder or a Hub id, with its chat template"
    )
    parser.add_argument("output", metavar="OUTPUT", type=path, help="JSONL file that is created or continued")
    parser.add_argument(
        "--batch_size", type=count, default=32, help="number of chats that are written at once (default: 32)"
    )
    parser.add_argument(
        "--max_new_tokens", type=count, default=224, help="tokens of the longest answer (default: 224)"
    )
    parser.add_argument(
        "--temperature", type=positive, default=1.0, help="temperature of answers that are not greedy (default: 1)"
    )
    parser.add_argument("--greedy_share", type=share, default=0.5, help="share of greedy answers (default: 0.5)")
    parser.add_argument("--seed", type=amount, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        help='variables for the chat template, as JSON: {"enable_thinking": false}',
    )
    add_placement(parser)
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    _add_own_chats(parser.add_argument_group("chats that the target writes itself"))
    _add_prompts(parser.add_argument_group("answers to the prompts of a dataset"))
    parser.set_defaults(run=run, resumes=True)


def _add_own_chats(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num_chats", type=count, help="number of chats that the file has at the end")
    group.add_argument("--seeds", type=path, help="text file with the beginning of a user turn on each line")
    group.add_argument("--max_user_tokens", type=count, help="tokens of the longest user turn (default: 96)")
    group.add_argument("--top_p", type=share, help="top_p of user turns (default: 0.95)")


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompts", metavar="DATASET", type=place, help="file, folder, or Hub id (name:split[:1000])")
    group.add_argument("--split", help="split of DATASET")
    group.add_argument(
        "--about",
        type=path,
        help="text file with a user turn on each line, in which {text} stands for the last answer of a chat of "
        "DATASET and \\n for a new line: ask about these answers",
    )
    group.add_argument(
        "--server",
        metavar="URL",
        help="ask a server with OpenAI's chat API (vLLM, SGLang), with the key in OPENAI_API_KEY if it requires one",
    )
    group.add_argument("--model_name", help="name of the target on the server (default: MODEL)")
    group.add_argument(
        "--concurrency", type=count, help="number of chats that are sent to the server at once (default: 32)"
    )
    group.add_argument("--timeout", type=positive, help="seconds to wait for an answer (default: 600)")
    group.add_argument("--request_extra", type=json_object, help='fields of every request, as JSON: {"top_k": -1}')


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if (arguments.prompts is None) == (arguments.num_chats is None):
        raise ValueError("pass either --prompts (answer a dataset) or --num_chats (write chats)")
    job, unused = ("--num_chats", _FOR_PROMPTS) if arguments.prompts is None else ("--prompts", _FOR_OWN_CHATS)
    _reject(arguments, unused, f"with {job}")
    if arguments.server is None:
        _reject(arguments, _FOR_SERVERS, "without --server")
    if not arguments.output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder of {arguments.output} does not exist: create it first")
    if arguments.output.exists() and not arguments.output.is_file():  # reading a device may never end
        kind = "a folder" if arguments.output.is_dir() else "not a regular file"
        raise FileExistsError(f"{arguments.output} is {kind}; name the JSONL file to write")
    check_output_folder(arguments.output.parent)
    written = _write_chats(arguments) if arguments.prompts is None else _answer_prompts(arguments)
    print(f"{written} chats written to {arguments.output}{_in_all(arguments.output)}")
    if arguments.output.is_file():
        say_next("show-mask", arguments.model, arguments.output)
    return 0


def _in_all(output: Path) -> str:
    if not output.is_file():  # other processes are not done
        return ""
    with output.open(encoding="utf-8") as file:
        return f", which holds {sum(1 for _ in file)} in all"


def _reject(arguments: argparse.Namespace, options: Sequence[str], where: str) -> None:
    given = [name for name in options if getattr(arguments, name) is not None]
    if given:
        flags = ", ".join(f"--{name}" for name in given)
        raise ValueError(f"{flags}: no meaning {where}")


def _write_chats(arguments: argparse.Namespace) -> int:
    # Before the target is loaded, so that a mistyped file name does not cost a minute.
    seeds = read_lines(arguments.seeds) if arguments.seeds else []
    if arguments.seeds and not any(line.strip() for line in seeds):
        raise ValueError(f"{arguments.seeds} is empty: write the beginning of a user turn on each line")
    if _part()[1] > 1:
        raise ValueError("--num_chats runs in one process only; several can share --prompts")

    from ..training.datagen.synthesis import synthesize

    target, tokenizer = _load(arguments)
    given = {"max_user_tokens": arguments.max_user_tokens, "top_p": arguments.top_p}
    return synthesize(
        target,
        tokenizer,
        arguments.output,
        arguments.num_chats,
        seeds=seeds,
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        greedy_share=arguments.greedy_share,
        seed=arguments.seed,
        template_kwargs=arguments.chat_template_kwargs,
        progress=not arguments.quiet,
        **{name: value for name, value in given.items() if value is not None},
    )


def _answer_prompts(arguments: argparse.Namespace) -> int:
    lines = read_lines(arguments.about) if arguments.about else []
    about = [line.replace("\\n", "\n") for line in lines if line.strip()]
    if arguments.about and not about:
        raise ValueError(f"{arguments.about} is empty: write a user turn with {{text}} on each line")

    from ..training.datagen.local_writer import WritingSettings
    from ..training.datagen.regeneration import Regeneration

    settings = WritingSettings(
        model=arguments.model_name or arguments.model,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        greedy_share=arguments.greedy_share,
        seed=arguments.seed,
        template_kwargs=arguments.chat_template_kwargs,
        request_extra=arguments.request_extra,
    )
    regeneration = Regeneration(
        arguments.prompts,
        arguments.output,
        settings,
        batch_size=arguments.batch_size,
        part=_part(),
        about=about,
        split=arguments.split,
    )
    if not regeneration.pending:  # no target is needed
        regeneration.merge()
        return 0
    return regeneration.run(_writer(arguments, settings), progress=not arguments.quiet and _part()[0] == 0)


def _writer(arguments: argparse.Namespace, settings: "WritingSettings") -> "Writer":
    if arguments.server is None:
        from ..training.datagen.local_writer import TargetWriter

        return TargetWriter.of(*_load(arguments), settings)

    from ..training.datagen.openai_client import ServerWriter

    given = {"concurrency": arguments.concurrency, "timeout": arguments.timeout}
    options = {name: value for name, value in given.items() if value is not None}
    writer = ServerWriter(arguments.server, settings.model, **options)
    writer.check()
    return writer


def _load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    from ..utils.devices import place_in_words

    tokenizer = load_tokenizer(arguments)
    target = load_target(arguments)
    print(f"{arguments.model} runs on {place_in_words(target)}", flush=True)
    return target, tokenizer


def _part() -> tuple[int, int]:
    """Return the rank of this process and the number of processes, which launchers (accelerate, torchrun) set."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
