"""`LookupDraft`: an assistant without weights, which drafts by lookup alone."""

from typing import Any

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..acceptance import SpeculationStats
from .tree_settings import TreeSettings, declare_tree_settings


class LookupDraft:
    """Drafts what followed earlier occurrences of the newest tokens, for any target and without training.

    ```python
    target.generate(**inputs, assistant_model=eagle3_hf.LookupDraft())
    ```

    It suits texts that repeat their prompt or themselves: summaries, code, edits. Calls share what is learnt of the
    target's speed, so create one object and keep it.

    Args:
        num_assistant_tokens: Drafted nodes of a tree; `"auto"` for as many as pay in each round.
        is_chain: Draft a single continuation instead of a tree.

    Attributes:
        generation_config: The settings, under the names that a head's have.
        stats: `SpeculationStats` of the last `generate` call; `None` before the first.

    Raises:
        ValueError: `num_assistant_tokens` is neither `"auto"` nor an int of at least 1.
    """

    def __init__(self, num_assistant_tokens: int | str = "auto", is_chain: bool = False):
        if num_assistant_tokens != "auto":
            TreeSettings(num_assistant_tokens, 1, 1)  # type: ignore[arg-type] # raises the error for other strings
        self.generation_config: Any = GenerationConfig()
        declare_tree_settings(self.generation_config)
        tree = {
            "num_assistant_tokens": num_assistant_tokens,
            "assistant_tree_depth": 8,
            "assistant_tree_top_k": 1 if is_chain else 2,
        }
        for name, value in tree.items():
            setattr(self.generation_config, name, value)
        self.config: Any = PreTrainedConfig()
        self.config.vocab_size = 0  # no target's, until one is bound
        self.stats: SpeculationStats | None = None

    def bind(self, target: PreTrainedModel) -> "LookupDraft":
        """Copy the target's vocabulary size and eos/pad/bos ids, which a pipeline compares. Returns self."""
        text_config: Any = target.config.get_text_config()
        for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id"):
            setattr(self.config, name, getattr(text_config, name, None))
        return self
