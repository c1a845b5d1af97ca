"""`eagle3-hf datagen`: let a target write training chats itself."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
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
