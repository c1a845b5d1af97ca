"""The size of a draft tree, as a head's `generation_config` holds it: names, defaults by device, the largest."""

from typing import Any

from transformers import GenerationConfig


# Drafted nodes, levels and children of an expanded node: the paper's tree (the reference's 60/7/10 counts the root).
PAPER_TREE = {"num_assistant_tokens": 59, "assistant_tree_depth": 8, "assistant_tree_top_k": 10}
# A pass over sixty tokens costs an accelerator about what a pass over one does, and a CPU many times that.
CPU_TREE = {"num_assistant_tokens": 11, "assistant_tree_depth": 3, "assistant_tree_top_k": 4}
LARGEST_TREE = 2**16  # of each of the three


def declare_tree_settings(config: GenerationConfig) -> None:
    """Give a generation config (new, or of a published head) the three fields; `None` where the head does not say."""
    # Where this is set, transformers saves fields that it does not know, and drops them when it loads the file.
    config._from_model_config = False
    for name in PAPER_TREE:
        setattr(config, name, getattr(config, name, None))


def given_tree(config: GenerationConfig | None) -> dict[str, Any]:
    """Those of the three fields that are set."""
    values = {name: getattr(config, name, None) for name in PAPER_TREE}
    return {name: value for name, value in values.items() if value is not None}


def in_words(tree: dict[str, Any]) -> str:
    """Nodes / levels / children."""
    return " / ".join(str(tree[name]) for name in PAPER_TREE)
