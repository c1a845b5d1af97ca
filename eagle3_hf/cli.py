"""The command `eagle3-hf`: one sub-command a job. Each imports what it needs, so that none pays for the others."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command; returns the exit status (0 done, 1 refused with a message, 130 interrupted, 141 unread)."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # a pager or `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (OSError, RuntimeError, ValueError) as error:
        print(f"eagle3-hf {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eagle3-hf", description="EAGLE-3 speculative decoding inside transformers' own generate()."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_datagen(commands)
    _add_bench(commands)
    _add_inspect(commands)
    _add_convert(commands)
    return parser


def _add_datagen(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "datagen",
        help="let a target write training chats itself",
        description="Let a target write user turns and answer them. An interrupted run goes on when started again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="target: a local folder or a Hub id, with its chat template")
    parser.add_argument("output", metavar="OUTPUT", type=Path, help="JSONL file to write or to continue")
    parser.add_argument("--num-chats", type=int, required=True, help="chats that the file is to hold in the end")
    parser.add_argument("--seeds", type=Path, help="text file, a beginning of a user turn on each line")
    parser.add_argument("--batch-size", type=int, default=32, help="chats written at once")
    parser.add_argument("--max-new-tokens", type=int, default=224, help="longest answer")
    parser.add_argument("--max-user-tokens", type=int, default=96, help="longest user turn")
    parser.add_argument("--temperature", type=float, default=1.0, help="of user turns and answers that are not greedy")
    parser.add_argument("--top-p", type=float, default=0.95, help="of user turns")
    parser.add_argument("--greedy-share", type=float, default=0.5, help="share of answers decoded greedily")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="of MODEL")
    parser.add_argument("--device", help="device of MODEL (default: an accelerator where there is one)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=_datagen)


def _datagen(arguments: argparse.Namespace) -> int:
    # Before the target is loaded: a mistyped file name shall not cost a minute.
    seeds = arguments.seeds.read_text(encoding="utf-8").splitlines() if arguments.seeds else []
    if not arguments.output.absolute().parent.is_dir():
        raise FileNotFoundError(f"the folder of {arguments.output} does not exist; create it first")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eagle3_hf.training.synthesis import synthesize

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    target = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype, device_map=device)
    written = synthesize(
        target,
        tokenizer,
        arguments.output,
        arguments.num_chats,
        seeds=seeds,
        batch_size=arguments.batch_size,
        max_new_tokens=arguments.max_new_tokens,
        max_user_tokens=arguments.max_user_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        greedy_share=arguments.greedy_share,
        seed=arguments.seed,
        progress=not arguments.quiet,
    )
    print(f"{written} chats written to {arguments.output}")
    return 0


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure speed-up and acceptance of a head, or the cost of a round",
        description="Plain and assisted decoding in turn on questions; with --round-cost, medians of single rounds.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="target: a local folder or a Hub id")
    parser.add_argument("head", metavar="HEAD", help="draft head: a local folder or a Hub id; `random` for a new one")
    parser.add_argument("--tasks", type=Path, help="folder of JSONL files of questions with `turns`, one file a task")
    parser.add_argument("--questions", type=int, default=10, help="of each task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy; else sampled from equal seeds")
    parser.add_argument("--ignore-noise", action="store_true", help="when sampling, draft without the known noise")
    parser.add_argument("--tree", action="append", help="nodes/depth/top_k, such as 15/4/4; repeat for several")
    parser.add_argument("--round-cost", action="store_true", help="measure rounds of each --tree against plain steps")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from eagle3_hf import Eagle3DraftModel
    from eagle3_hf.evaluation import report

    trees = [report.parse_tree(tree) for tree in arguments.tree or []]
    if arguments.tasks is None and not arguments.round_cost:
        raise ValueError("name a folder of questions with --tasks, or ask for --round-cost")
    logging.disable_progress_bar()
    dtype = getattr(torch, arguments.dtype)
    target = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype)
    if arguments.head == "random":
        ids = torch.randperm(target.config.get_text_config().vocab_size)[:8192]
        draft = Eagle3DraftModel.from_target(target, draft_vocab=ids, dtype=dtype)
        draft.init_weights()
    else:
        draft = Eagle3DraftModel.from_pretrained(arguments.head)
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


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what a head is and whether it fits a target, without loading weights",
        description="Show a head's dialect, fields, layers read, rope and what it borrows. The exit status is 1 if it "
        "does not fit.",
    )
    parser.add_argument("head", metavar="HEAD", help="a local folder or a Hub id")
    parser.add_argument("--target", help="a local folder or a Hub id, of which only the config is read")
    _add_set(parser)
    parser.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from eagle3_hf.inspection import inspect_head

    found = inspect_head(arguments.head, arguments.target, **_fields(arguments.set))
    print(found)
    return 1 if found.problems else 0


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the head's config that its file leaves open or gets wrong, the value as JSON, such as "
        "target_layer_ids=[2,16,29] or norm_output=false; repeat for several",
    )


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as warnings spell them


def _fields(settings: Sequence[str]) -> dict[str, Any]:
    """The fields of `--set`."""
    from eagle3_hf.configuration_eagle3 import FIELDS

    fields = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            fields[name] = json.loads(_PYTHON.get(value, value))
        except ValueError:
            raise ValueError(f'--set {setting}: no JSON value, such as true, 16, [2,16,29] or "text"') from None
        if name not in FIELDS:
            raise ValueError(f"--set {setting}: {name} is no field of Eagle3DraftConfig")
    return fields


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a head in the layout that a serving engine loads",
        description="Load a head of any layout and write it for one engine, or in our own layout. What the engine "
        "cannot express is refused by name, before anything is written.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("head", metavar="HEAD", help="draft head: a local folder or a Hub id")
    parser.add_argument("output", metavar="OUT", type=Path, help="folder to write to")
    parser.add_argument("--to", required=True, choices=["vllm", "sglang", "speculators", "eagle3-hf"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of OUT (default: as it is)")
    parser.add_argument("--target", help="local folder or Hub id; its weights are read only where OUT needs them")
    parser.add_argument("--verifier", help="name of the target to write for speculators (default: the head's, TARGET)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export in OUT")
    _add_set(parser)
    parser.set_defaults(run=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    from transformers import AutoConfig

    from eagle3_hf import Eagle3DraftModel
    from eagle3_hf.export import check_folder, export_head, needs_target_weights, serve_command
    from eagle3_hf.inspection import model_class

    check_folder(arguments.output, arguments.overwrite)  # before anything is loaded
    draft = Eagle3DraftModel.from_pretrained(arguments.head, **_fields(arguments.set))
    config: Any = draft.config
    target: Any = AutoConfig.from_pretrained(arguments.target) if arguments.target is not None else None
    if target is not None and needs_target_weights(config, arguments.to, target):
        target = model_class(target).from_pretrained(arguments.target)
    verifier = arguments.verifier or (arguments.target if arguments.to == "speculators" else None)
    folder = export_head(
        draft,
        arguments.output,
        arguments.to,
        target=target,
        dtype=arguments.dtype,
        verifier=verifier,
        overwrite=arguments.overwrite,
    )
    print(f"wrote {', '.join(sorted(file.name for file in folder.iterdir()))} to {folder}")
    if arguments.to != "eagle3-hf":
        name = arguments.target or config.target_name_or_path or "TARGET"
        print(f"serve it with\n\n{serve_command(arguments.to, name, str(folder))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
