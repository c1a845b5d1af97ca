"""The model card of adapters on a head, which replaces the empty form that peft leaves in their folder."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel

from ..export.card import CARD_FILE, looks_like_hub_id


_EMPTY = "# Model Card for Model ID"  # the title of peft's form
_MARK = "<!-- Written by eagle3_hf for adapters. Delete this line, and no save will overwrite the card. -->"


def write_adapter_card(folder: str, model: PeftModel, tau: float | None = None) -> Path | None:
    """Write `README.md` unless a person wrote one: the head of the adapters, how they were made, how to use them.

    Args:
        folder: Folder of the saved adapters.
        model: The adapters on their head.
        tau: Mean acceptance length that was measured on held-out prompts, if it was.

    Returns:
        The card's path, or `None` where the card was left as it was.
    """
    path = Path(folder) / CARD_FILE
    if path.exists() and not {_EMPTY, _MARK} & set(path.read_text(encoding="utf-8").splitlines()):
        return None
    path.write_text(_text(model, tau), encoding="utf-8")
    return path


def _text(model: PeftModel, tau: float | None) -> str:
    config = model.peft_config[model.active_adapter]
    # Paths of this machine would help no reader, and should not be published.
    base: Any = model.get_base_model()
    head, target = config.base_model_name_or_path, base.config.target_name_or_path
    head = head if looks_like_hub_id(head) else "HEAD"
    target = target if looks_like_hub_id(target) else "TARGET"
    metadata = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding", "draft-model", "lora"],
        base_model=head if head != "HEAD" else None,
        base_model_relation="adapter" if head != "HEAD" else None,
    )
    targets = getattr(config, "target_modules", None)
    modules = ", ".join(sorted(targets)) if isinstance(targets, (set, list)) else str(targets)
    lines = [
        "# Adapters for an EAGLE-3 head",
        "",
        _MARK,
        "",
        f"LoRA adapters (rank {getattr(config, 'r', '-')} on {modules}) that adjust a draft head for speculative "
        "decoding. The output is the target's own, whatever a head drafts.",
        *(
            [
                "",
                f"On held-out prompts the mean acceptance length (tau) with greedy decoding was {tau:.2f}; ordinary "
                "decoding has 1.",
            ]
            if tau is not None
            else []
        ),
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "from eagle3_hf import Eagle3DraftModel",
        "",
        f'target = AutoModelForCausalLM.from_pretrained("{target}")',
        f'draft = PeftModel.from_pretrained(Eagle3DraftModel.from_pretrained("{head}"), "THESE_ADAPTERS")',
        "output = target.generate(**inputs, assistant_model=draft)",
        "# or, as a head like any other: draft.merge_and_unload().save_pretrained(FOLDER)",
        "```",
        "",
    ]
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n" + "\n".join(lines)))
