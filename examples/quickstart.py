"""EAGLE-3 on a real model in one command: the same output, sooner.

    python examples/quickstart.py

The script loads the demo target (or `--target FOLDER_OR_HUB_ID`) and the demo head (or `--head`), and answers five
prompts with and without it in turn. Accepted tokens are printed in colour.
"""

import sys
from pathlib import Path

import torch
from demo_target import demo_target
from transformers import AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from eagle3_hf import Eagle3DraftModel, TaskResult, check_tokenizer, compare
from eagle3_hf.commands.errors import in_words
from eagle3_hf.commands.parser import Parser
from eagle3_hf.commands.placement import add_placement, load_target
from eagle3_hf.evaluation.compare import encode
from eagle3_hf.utils.devices import place_in_words


HEAD = Path(__file__).parent / "heads" / "SmolLM2-135M-Instruct-EAGLE3"

PROMPTS = [
    "What is the capital of France, and what is it known for?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain in simple words how photosynthesis works.",
    "Give me a recipe for pancakes with a list of ingredients and steps.",
    "Write a Python function that checks whether a word is a palindrome.",
]


class ColouredStreamer(BaseStreamer):
    """Prints each round when it ends: accepted tokens in green, the target's own token in the usual colour."""

    def __init__(self, tokenizer, colour: bool):
        self.tokenizer = tokenizer
        self.colour = colour
        self.pending: list[int] = []
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:
            self.prompt_seen = True
            return
        self.pending.extend(value.flatten().tolist())

    def end_round(self, accepted: int) -> None:
        drafted, own = self.pending[:-1], self.pending[-1:]
        first = len(drafted) - accepted  # the prefill emitted a token before the first round
        self._show(drafted[:first], green=False)
        self._show(drafted[first:], green=True)
        self._show(own, green=False)
        self.pending = []

    def end(self) -> None:
        self._show(self.pending, green=False)
        print(flush=True)

    def _show(self, tokens: list[int], green: bool) -> None:
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if text:
            print(f"\033[32m{text}\033[0m" if green and self.colour else text, end="", flush=True)


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", dest="model", help="folder or Hub id of the target (default: the demo target)")
    parser.add_argument("--head", default=str(HEAD), help="folder or Hub id of the draft head")
    add_placement(parser)
    parser.add_argument("--max_new_tokens", type=int, default=128, help="length of the answers (default: 128)")
    arguments = parser.parse_args()
    logging.disable_progress_bar()

    arguments.model = folder = arguments.model or demo_target()
    target = load_target(arguments)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = Eagle3DraftModel.from_pretrained(arguments.head).to(target.device)
    check_tokenizer(draft.config, tokenizer)

    print(f"Target {folder} on {place_in_words(target)}, head {arguments.head}, greedy\n")
    compare(target, draft, encode(tokenizer, PROMPTS[0], target.device), max_new_tokens=8)  # warm up
    total = TaskResult()
    for prompt in PROMPTS:
        print(f"> {prompt}")
        streamer = ColouredStreamer(tokenizer, colour=sys.stdout.isatty())
        inputs = encode(tokenizer, prompt, target.device)
        result = compare(
            target, draft, inputs, streamer=streamer, do_sample=False, max_new_tokens=arguments.max_new_tokens
        )
        total.comparisons.append(result)
        report(result)
    print(
        f"All: {total.speedup:.2f}x, mean acceptance length (tau) {total.tau:.2f}, equal ids in {total.equal} of "
        f"{len(PROMPTS)} texts"
    )
    if total.differences and all(difference.is_near_tie for difference in total.differences):
        print(
            f"The others differ where rounding in {target.dtype} decides a tie; with --dtype float32 they are equal."
        )


def report(result) -> None:
    """Print tokens per second, speed-up, mean acceptance length, shares of the time, and whether the ids are equal."""
    plain, assisted, stats = result.plain, result.assisted, result.stats
    rates = len(plain.tokens) / plain.seconds, len(assisted.tokens) / assisted.seconds
    spent = stats.draft_seconds + stats.verify_seconds + stats.other_seconds or 1.0
    shares = [100 * part / spent for part in (stats.draft_seconds, stats.verify_seconds, stats.other_seconds)]
    print(
        f"  plain {rates[0]:.1f} tokens/s, with the head {rates[1]:.1f}: {rates[1] / rates[0]:.2f}x; "
        f"tau {stats.tau:.2f} (tokens per target pass); time: draft {shares[0]:.0f} %, verify {shares[1]:.0f} %, "
        f"other {shares[2]:.0f} %"
    )
    if result.equal:
        print("  ids equal\n")
    else:
        print(f"  {result.difference}\n")


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.exit(f"quickstart: {in_words(error)}")
