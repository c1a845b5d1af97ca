"""EAGLE-3 speculative decoding for unmodified transformers models.

```python
import eagle3_hf

draft = eagle3_hf.Eagle3DraftModel.from_pretrained(path_or_repo)
target.generate(**inputs, assistant_model=draft)  # the same text, sooner
```

The names listed in `__all__` are the public ones, see docs/api.md.
"""

import importlib
from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel

from .acceptance import SpeculationStats, simulated_acceptance_length
from .decoding.attachments import Attachment, attach, detach
from .decoding.draft.candidate import Eagle3Candidate
from .decoding.patching import disable, enable, enabled
from .decoding.tree import DraftTree
from .model.configuration_eagle3 import Eagle3DraftConfig
from .model.loading import describe_head
from .model.lookup_draft import LookupDraft
from .model.modeling_eagle3 import Eagle3DraftModel
from .model.target_check import default_layer_ids
from .model.vocab import check_tokenizer
from .published_formats import HeadDescription, HeadFormatError
from .utils.devices import own_device


# A decoder needs neither Trainer nor datasets: these modules are imported on first use. Type checkers do not see the
# function `__getattr__`, so that to them a misspelt name is an error.
if TYPE_CHECKING:
    from .evaluation.bench import bench
    from .evaluation.compare import Comparison, TaskResult, compare
    from .evaluation.diagnosis.diagnose import diagnose
    from .evaluation.diagnosis.result import Diagnosis
    from .evaluation.lossless import LosslessError, LosslessReport, assert_lossless, check_lossless
    from .evaluation.results import BenchResult
    from .evaluation.trace import Trace, TracedNode, TracedRound, trace
    from .export import ExportError, export_head
    from .inspection import inspect_head
    from .training.arguments import Eagle3TrainingArguments
    from .training.callbacks import MeasureTau
    from .training.data.collator import Eagle3DataCollator
    from .training.data.draft_vocab import cached_draft_vocab
    from .training.data.encoding import dropped_chats, encode_dataset, prepare_dataset, render_mask
    from .training.data.options import EncodingOptions
    from .training.data.packing import PackedDataset
    from .training.data.sources import load_chats
    from .training.datagen.local_writer import TargetWriter, WritingSettings
    from .training.datagen.regeneration import Regeneration
    from .training.datagen.synthesis import synthesize
    from .training.resume import last_whole_checkpoint
    from .training.targets.feature_store import StoredFeatures, write_features
    from .training.trainer import Eagle3Trainer
    from .ttt.settings import TTTSettings
else:
    _LAZY = {
        "BenchResult": "evaluation.results",
        "Comparison": "evaluation.compare",
        "Diagnosis": "evaluation.diagnosis.result",
        "Eagle3DataCollator": "training.data.collator",
        "Eagle3Trainer": "training.trainer",
        "Eagle3TrainingArguments": "training.arguments",
        "EncodingOptions": "training.data.options",
        "ExportError": "export",
        "LosslessError": "evaluation.lossless",
        "LosslessReport": "evaluation.lossless",
        "MeasureTau": "training.callbacks",
        "PackedDataset": "training.data.packing",
        "Regeneration": "training.datagen.regeneration",
        "StoredFeatures": "training.targets.feature_store",
        "TTTSettings": "ttt.settings",
        "TargetWriter": "training.datagen.local_writer",
        "TaskResult": "evaluation.compare",
        "Trace": "evaluation.trace",
        "TracedNode": "evaluation.trace",
        "TracedRound": "evaluation.trace",
        "WritingSettings": "training.datagen.local_writer",
        "assert_lossless": "evaluation.lossless",
        "bench": "evaluation.bench",
        "cached_draft_vocab": "training.data.draft_vocab",
        "check_lossless": "evaluation.lossless",
        "compare": "evaluation.compare",
        "diagnose": "evaluation.diagnosis.diagnose",
        "dropped_chats": "training.data.encoding",
        "encode_dataset": "training.data.encoding",
        "export_head": "export",
        "inspect_head": "inspection",
        "last_whole_checkpoint": "training.resume",
        "load_chats": "training.data.sources",
        "prepare_dataset": "training.data.encoding",
        "render_mask": "training.data.encoding",
        "synthesize": "training.datagen.synthesis",
        "trace": "evaluation.trace",
        "write_features": "training.targets.feature_store",
    }

    def __getattr__(name: str):
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        return value


__version__ = "0.1.0"

__all__ = [
    "Attachment",
    "BenchResult",
    "Comparison",
    "Diagnosis",
    "DraftTree",
    "Eagle3Candidate",
    "Eagle3DataCollator",
    "Eagle3DraftConfig",
    "Eagle3DraftModel",
    "Eagle3Trainer",
    "Eagle3TrainingArguments",
    "EncodingOptions",
    "ExportError",
    "HeadDescription",
    "HeadFormatError",
    "LookupDraft",
    "LosslessError",
    "LosslessReport",
    "MeasureTau",
    "PackedDataset",
    "Regeneration",
    "SpeculationStats",
    "StoredFeatures",
    "TTTSettings",
    "TargetWriter",
    "TaskResult",
    "Trace",
    "TracedNode",
    "TracedRound",
    "WritingSettings",
    "assert_lossless",
    "attach",
    "bench",
    "cached_draft_vocab",
    "check_lossless",
    "check_tokenizer",
    "compare",
    "default_layer_ids",
    "describe_head",
    "detach",
    "diagnose",
    "disable",
    "dropped_chats",
    "enable",
    "enabled",
    "encode_dataset",
    "export_head",
    "inspect_head",
    "last_whole_checkpoint",
    "load_chats",
    "own_device",
    "prepare_dataset",
    "render_mask",
    "simulated_acceptance_length",
    "synthesize",
    "trace",
    "write_features",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


AutoConfig.register("eagle3_draft", Eagle3DraftConfig, exist_ok=True)
AutoModel.register(Eagle3DraftConfig, Eagle3DraftModel, exist_ok=True)
enable()
