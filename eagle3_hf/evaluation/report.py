"""Prints measurements: one table per size of the tree."""

import os

import torch
from tqdm.auto import tqdm

from ..model.tree_settings import given_tree, tree_settings
from ..model.vocab import check_tokenizer
from .bench import TREE_FIELDS, TaskResult, compare, encode, round_cost
from .tasks import load_tasks


Tree = tuple[int, int, int]


def parse_tree(text: str) -> Tree:
    """Parse the size of a tree such as `"15/4/4"`: drafted nodes, levels, children per node.

    Raises:
        ValueError: the text is not three positive integers.
    """
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"a tree is three positive numbers, nodes/depth/top_k such as 15/4/4, got {text!r}")
    nodes, depth, top_k = map(int, parts)
    return nodes, depth, top_k


def set_tree(target, draft, tree: Tree | None) -> str:
    """Set nodes, depth and top_k on the head, unless `tree` is `None`, and return the resulting size as text."""
    for name, value in zip(TREE_FIELDS, tree or (), strict=False):
        setattr(draft.generation_config, name, value)
    settings = tree_settings(draft, target)
    nodes = "auto" if settings.at_most else settings.num_nodes
    default = "" if given_tree(draft.generation_config) else f" (the default on {target.device.type})"
    return f"{nodes}/{settings.depth}/{settings.top_k}{default}"


def print_tasks(
    target, draft, tokenizer, folder: str | os.PathLike, questions: int, tree: Tree | None, no_coupling: bool, options
) -> dict[str, TaskResult]:
    """Measure every task of a folder with one size of the tree and print a Markdown table."""
    check_tokenizer(draft.config, tokenizer)
    held = set_tree(target, draft, tree)
    draft.generation_config.assistant_coupled_sampling = not no_coupling
    tasks = load_tasks(folder, questions)
    results = {name: TaskResult() for name in tasks}
    compare(target, draft, encode(tokenizer, "Hello", target.device), **{**options, "max_new_tokens": 8})  # warm up
    jobs = [(name, question) for name, asked in tasks.items() for question in asked]
    for seed, (name, question) in enumerate(tqdm(jobs, desc="Measuring", unit="question")):
        inputs = encode(tokenizer, question, target.device)
        results[name].comparisons.append(compare(target, draft, inputs, seed=seed, **options))
    print(f"tree {held}, {options}, {target.dtype}, {torch.get_num_threads()} threads")
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
    """Print the median time of an ordinary step and of a round of each tree, and their ratio."""
    plain, costs = round_cost(target, draft, trees)
    print(f"plain step {plain * 1e3:.1f} ms")
    for tree, cost in zip(trees, costs, strict=True):
        print(f"round {'/'.join(map(str, tree))}: {cost * 1e3:.1f} ms = {cost / plain:.2f} plain steps")
