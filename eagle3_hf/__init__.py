"""EAGLE-3 speculative decoding for unmodified transformers models.

```python
import eagle3_hf

draft = eagle3_hf.Eagle3DraftModel.from_pretrained(path_or_repo)
target.generate(**inputs, assistant_model=draft)  # the same text, sooner
```
"""

import importlib

from transformers import AutoConfig, AutoModel

from .decoding.draft.candidate import Eagle3Candidate
from .decoding.patching import disable, enable, enabled
from .decoding.tree import DraftTree
from .model.configuration_eagle3 import Eagle3DraftConfig
from .model.modeling_eagle3 import Eagle3DraftModel


__version__ = "0.1.0"

# Imported on first use: a decoder needs neither Trainer nor datasets.
_LAZY = {
    "Eagle3Trainer": ".training.trainer",
    "Eagle3TrainingArguments": ".training.arguments",
    "export_head": ".export.head",
}

__all__ = [
    "DraftTree",
    "Eagle3Candidate",
    "Eagle3DraftConfig",
    "Eagle3DraftModel",
    "Eagle3Trainer",
    "Eagle3TrainingArguments",
    "disable",
    "enable",
    "enabled",
    "export_head",
]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


AutoConfig.register("eagle3_draft", Eagle3DraftConfig, exist_ok=True)
AutoModel.register(Eagle3DraftConfig, Eagle3DraftModel, exist_ok=True)
enable()
