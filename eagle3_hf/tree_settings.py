"""The size of a draft tree, as a head's `generation_config` holds it: names, the paper's values, the largest."""

from transformers import GenerationConfig


# Drafted nodes, levels and children of an expanded node: the paper's tree (the reference's 60/7/10 counts the root).
PAPER_TREE = {"num_assistant_tokens": 59, "assistant_tree_depth": 8, "assistant_tree_top_k": 10}
LARGEST_TREE = 2**16  # of each of the three


def complete_tree_settings(config: GenerationConfig) -> None:
    """Give a generation config without tree settings (new, or of a published head) the paper's."""
    # Where this is set, transformers saves fields that it does not know, and drops them when it loads the file.
    config._from_model_config = False
    for name, value in PAPER_TREE.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
