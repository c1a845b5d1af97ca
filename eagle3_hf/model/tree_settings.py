"""The size of a draft tree, as a head's `generation_config` holds it: names, defaults by device, the largest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..utils.logging import get_logger


logger = get_logger(__name__)

# Drafted nodes, levels and children of an expanded node: the paper's tree (the reference's 60/7/10 counts the root).
PAPER_TREE = {"num_assistant_tokens": 59, "assistant_tree_depth": 8, "assistant_tree_top_k": 10}
# A pass over sixty tokens costs an accelerator about what a pass over one does, and a CPU many times that.
CPU_TREE = {"num_assistant_tokens": 11, "assistant_tree_depth": 3, "assistant_tree_top_k": 4}
# The largest tree that sizing looks at on a CPU: more nodes or children changed replays by less than 1 %.
CPU_LIMITS = {"num_assistant_tokens": 31, "assistant_tree_depth": 8, "assistant_tree_top_k": 4}
# Levels that a branch of the lookup source may go on below the head's last one.
LOOKUP_LEVELS = 16
LARGEST_TREE = 2**16  # of each of the three


def declare_tree_settings(config: GenerationConfig) -> None:
    """Give a generation config (new, or of a published head) our fields; `None` where the head does not say."""
    # Where this is set, transformers saves fields that it does not know, and drops them when it loads the file.
    config._from_model_config = False
    for name in (*PAPER_TREE, "assistant_lookup"):
        setattr(config, name, getattr(config, name, None))


def given_tree(config: GenerationConfig | None) -> dict[str, Any]:
    """Those of the three fields that are set."""
    values = {name: getattr(config, name, None) for name in PAPER_TREE}
    return {name: value for name, value in values.items() if value is not None}


def in_words(tree: dict[str, Any]) -> str:
    """Nodes / levels / children."""
    return " / ".join(str(tree[name]) for name in PAPER_TREE)


@dataclass(frozen=True)
class TreeSettings:
    """How large a tree may grow.

    Args:
        num_nodes: Drafted nodes kept, the root not counted.
        depth: Levels of the head, its longest drafted chain.
        top_k: Children of an expanded node, and nodes expanded a level; 1 is a chain.
        at_most: These are limits; what pays within them is found out round by round (see `sizing`).
        lookup_levels: How many levels deeper than the head's a branch of the lookup source may be; `None` without
            lookup.
    """

    num_nodes: int
    depth: int
    top_k: int
    at_most: bool = False
    lookup_levels: int | None = None

    def __post_init__(self):
        names = {"num_nodes": "num_assistant_tokens", "depth": "assistant_tree_depth", "top_k": "assistant_tree_top_k"}
        for attribute, name in names.items():
            value = getattr(self, attribute)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                auto = "'auto' or " if name == "num_assistant_tokens" else ""
                raise ValueError(f"{name} must be {auto}an int of at least 1, got {value!r}")

    @property
    def reach(self) -> int:
        """The deepest level of a tree."""
        return min(self.num_nodes, self.depth + (self.lookup_levels or 0))

    def capped(self, depth: int) -> "TreeSettings":
        """At most `depth` levels of the head, and no more nodes than its pool can hold."""
        depth = min(self.depth, depth)
        pool = self.top_k + (depth - 1) * self.top_k**2
        return replace(self, depth=depth, num_nodes=min(self.num_nodes, pool))


def draft_window(draft: PreTrainedModel, window: int | None = None) -> int | None:
    """How many positions the draft looks back; `None` for all.

    Args:
        draft: The draft.
        window: A call's own value; without one, the draft's generation config decides.
    """
    window = getattr(draft.generation_config, "assistant_window", None) if window is None else window
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"assistant_window must be None or an int of at least 1, got {window!r}")
    return window


def tree_settings(
    draft: Any,
    target: PreTrainedModel,
    num_assistant_tokens: int | str | None = None,
    assistant_lookup: bool | None = None,
    assistant_tree_depth: int | None = None,
    assistant_tree_top_k: int | None = None,
) -> TreeSettings:
    """The draft's own settings, with those that a call sets in their place.

    Where the number of nodes is not set, or `"auto"`, the settings are the limits of what `sizing` chooses; limits
    that are not set either depend on the target's device. With deterministic algorithms no clock may decide, so that
    the size is fixed by the device then.
    """
    of_call = dict(zip(PAPER_TREE, (num_assistant_tokens, assistant_tree_depth, assistant_tree_top_k), strict=True))
    given = given_tree(draft.generation_config) | {name: size for name, size in of_call.items() if size is not None}
    at_most = given.get("num_assistant_tokens", "auto") == "auto"
    if at_most:
        given.pop("num_assistant_tokens", None)
    lookup = uses_lookup(draft) if assistant_lookup is None else _checked_lookup(assistant_lookup)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if not at_most or deterministic:
        defaults = _tree_by_device(target) if at_most else PAPER_TREE
    else:
        defaults = _limits(target)
    tree = {**defaults, **given}
    return TreeSettings(
        tree["num_assistant_tokens"],
        tree["assistant_tree_depth"],
        tree["assistant_tree_top_k"],
        at_most and not deterministic,
        LOOKUP_LEVELS if lookup else None,
    )


@contextmanager
def measured_alone(draft: Any, target: PreTrainedModel) -> Iterator[None]:
    """Let a head draft alone inside the block, with trees of a fixed size, so that its acceptance can be compared.

    Args:
        draft: The head. If it sets no number of nodes, its target's device decides.
        target: The target.
    """
    config = draft.generation_config
    kept = {name: getattr(config, name, None) for name in (*PAPER_TREE, "assistant_lookup")}
    config.assistant_lookup = False
    if kept["num_assistant_tokens"] in (None, "auto"):
        for name, number in _tree_by_device(target).items():
            if kept[name] in (None, "auto"):
                setattr(config, name, number)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


def uses_lookup(draft: Any) -> bool:
    """Whether the lookup source drafts beside the head, by its generation config."""
    value = getattr(draft.generation_config, "assistant_lookup", None)
    return True if value is None else _checked_lookup(value)


def _checked_lookup(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"assistant_lookup must be True or False, got {value!r}")
    return value


def _is_on_cpu(target: PreTrainedModel) -> bool:
    """Whether all weights of the target are on a CPU.

    Offloaded ones, on the meta device, are not: to fetch them costs so much that large trees pay.
    """
    return all(parameter.device.type == "cpu" for parameter in target.parameters())


def _tree_by_device(target: PreTrainedModel) -> dict[str, int]:
    on_cpu = _is_on_cpu(target)
    tree = CPU_TREE if on_cpu else PAPER_TREE
    _say_default(on_cpu, f"it drafts {in_words(tree)}")
    return tree


def _limits(target: PreTrainedModel) -> dict[str, int]:
    on_cpu = _is_on_cpu(target)
    tree = CPU_LIMITS if on_cpu else PAPER_TREE
    _say_default(on_cpu, f"every round drafts what pays, at most {in_words(tree)}")
    return tree


def _say_default(on_cpu: bool, what: str) -> None:
    where = "a CPU" if on_cpu else "an accelerator"
    logger.info_once(
        f"The draft head does not set its number of nodes and its target is on {where}"
        f": {what} (nodes / levels / children). To choose another tree, set {', '.join(PAPER_TREE)} on "
        "draft.generation_config."
    )
