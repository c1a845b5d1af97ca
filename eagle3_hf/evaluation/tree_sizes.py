"""Tau and speed-up against the number of nodes of a tree: modelled by a replay, and as measured by a benchmark."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .replay import FixedTree, Replay, ReplayResult
from .statistics import Interval


_TREE = re.compile(r"\b(\d+)/(\d+)/(\d+)\b")
_STEP = 1.25  # ratio of neighbouring sizes


@dataclass(frozen=True)
class SizePoint:
    """Fixed trees of one size.

    Attributes:
        nodes: Drafted nodes.
        tau: Mean acceptance length over all texts.
        speedup: Modelled speed-up over all texts, by the replay's costs.
    """

    nodes: int
    tau: float
    speedup: float


@dataclass(frozen=True)
class MeasuredSize:
    """A column of a benchmark with a tree of fixed size.

    Attributes:
        nodes: Drafted nodes.
        speedup: Measured speed-up.
        tau: Measured mean acceptance length; `None` where passes were not counted.
    """

    nodes: int
    speedup: Interval
    tau: float | None


def sizes_up_to(most: int) -> list[int]:
    """Return numbers of nodes from 1 to `most`, evenly spread on a logarithmic scale."""
    sizes, size = {most}, 1.0
    while size < most:
        sizes.add(round(size))
        size = max(size * _STEP, size + 1)
    return sorted(sizes)


def modelled_sizes(replay: Replay, depth: int, top_k: int, sizes: Sequence[int]) -> list[SizePoint]:
    """Replay trees of several sizes.

    Args:
        replay: The record and its costs.
        depth: Levels of the trees.
        top_k: Children of an expanded node.
        sizes: Numbers of drafted nodes.
    """
    points = []
    for nodes in sizes:
        whole = ReplayResult.total("", replay.run(FixedTree(nodes, depth, top_k)))
        points.append(SizePoint(nodes, whole.stats.tau, whole.speedup))
    return points


def measured_sizes(results: Mapping[str, Any] | str | os.PathLike) -> dict[tuple[int, int], list[MeasuredSize]]:
    """Return the columns with fixed trees of a benchmark by depth and top_k, in all tasks of its first setting.

    Args:
        results: What `BenchResult.as_dict` returns, or the file that `bench --json` has written.

    Raises:
        ValueError: the file is none of a benchmark.
    """
    if not isinstance(results, Mapping):
        path = Path(results)
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            assert isinstance(results, Mapping)
            figures = results["figures"]
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise ValueError(f"{path} is not a file that `bench --json` has written: {error!r}") from error
    else:
        figures = results["figures"]
    found: dict[tuple[int, int], list[MeasuredSize]] = {}
    for key, point in _points(figures):
        found.setdefault(key, []).append(point)
    return {key: sorted(points, key=lambda point: point.nodes) for key, points in found.items()}


def _points(figures: Sequence[Mapping[str, Any]]) -> Iterator[tuple[tuple[int, int], MeasuredSize]]:
    for figure in figures:
        tree = _TREE.search(figure["column"])
        if tree is None or figure["task"] is not None or figure["setting"] != figures[0]["setting"]:
            continue
        nodes, depth, top_k = map(int, tree.groups())
        tau = figure["tau"]
        yield (
            (depth, top_k),
            MeasuredSize(nodes, Interval(**figure["speedup"]), None if tau is None else tau["value"]),
        )


__all__ = ["MeasuredSize", "SizePoint", "measured_sizes", "modelled_sizes", "sizes_up_to"]
