"""Measurements as text: a table per tree size, lines as they come."""

import os

import torch
from tqdm.auto import tqdm

from ..vocab import check_tokenizer
from .bench import TaskResult, compare, encode, round_cost
from .tasks import load_tasks


Tree = tuple[int, int, int]

TREE_FIELDS = ("num_assistant_tokens", "assistant_tree_depth", "assistant_tree_top_k")


def set_tree(draft, tree: Tree | None) -> Tree:
    """Set nodes, depth and top_k on the head (kept as they are for `None`); returns what holds now."""
    for name, value in zip(TREE_FIELDS, tree or (), strict=False):
        setattr(draft.generation_config, name, value)
    return tuple(getattr(draft.generation_config, name) for name in TREE_FIELDS)


def print_tasks(
    target, draft, tokenizer, folder: str | os.PathLike, questions: int, tree: Tree | None, ignore_noise: bool, options
) -> dict[str, TaskResult]:
    """Measure every task of a folder with one tree and print a Markdown table."""
    check_tokenizer(draft.config, tokenizer)
    held = set_tree(draft, tree)
    draft.generation_config.assistant_known_noise = not ignore_noise
    tasks = load_tasks(folder, questions)
    results = {name: TaskResult() for name in tasks}
    compare(target, draft, encode(tokenizer, "Hello", target.device), **{**options, "max_new_tokens": 8})  # warm up
    jobs = [(name, question) for name, asked in tasks.items() for question in asked]
    for seed, (name, question) in enumerate(tqdm(jobs, desc="Measuring", unit="question")):
        inputs = encode(tokenizer, question, target.device)
        results[name].comparisons.append(compare(target, draft, inputs, seed=seed, **options))
    print(f"tree {'/'.join(map(str, held))}, {options}, {target.dtype}, {torch.get_num_threads()} threads")
    print("| task | speed-up | tau | loop overhead | equal ids |\n|---|---|---|---|---|")
    for name, result in results.items():
        count = len(result.comparisons)
        print(f"| {name} | {result.speedup:.2f} | {result.tau:.2f} | {result.overhead:.1%} | {result.equal}/{count} |")
    _print_mean(results)
    return results


def _print_mean(results: dict[str, TaskResult]) -> None:
    count = len(results)
    speedup = sum(result.speedup for result in results.values()) / count
    tau = sum(result.tau for result in results.values()) / count
    print(f"| mean | {speedup:.2f} | {tau:.2f} | | |")
    for name, result in results.items():
        for difference in result.differences:
            print(f"{name}: {difference}")


def print_round_cost(target, draft, trees: list[Tree]) -> None:
    """Median seconds of a plain step and of a round of each tree, and their ratio."""
    costs = round_cost(target, draft, trees)
    plain = costs["plain"]
    print(f"plain step {plain * 1e3:.1f} ms")
    for tree in trees:
        name = "/".join(map(str, tree))
        print(f"round {name}: {costs[tree] * 1e3:.1f} ms = {costs[tree] / plain:.2f} plain steps")
