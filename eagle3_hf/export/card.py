"""Writes the model card of a head from its config and generation config, unless a person wrote or edited one.

A generated card contains a checksum of itself. As long as the checksum matches, a later save replaces the card; once a
person has changed a word or a tag it no longer matches, and the card is left alone.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, ModelCard, ModelCardData
from transformers import GenerationConfig

from ..model.configuration_eagle3 import Eagle3DraftConfig
from ..model.tree_settings import PAPER_TREE, given_tree, in_words
from ..utils.logging import get_logger
from .engines import CHAIN
from .unsupported import ENGINES, has_windows, unsupported_features


logger = get_logger(__name__)

CARD_FILE = "README.md"
Acceptance = Mapping[str, Mapping[str, float | str]]

_MARK = "<!-- Written by eagle3_hf. Edit this card and no save will overwrite it. Checksum {checksum} -->"
_MARK_PATTERN = re.compile(r"<!-- Written by eagle3_hf\..*?Checksum ([0-9a-f]{16}) -->\n*")
# A sentence in the empty card that transformers writes on a push.
_EMPTY_PATTERN = re.compile(r"This is the model card of a .* has been automatically generated\.")
_TAGS = ["eagle3", "speculative-decoding", "draft-model"]
_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "speculators": "speculators"}


def card_text(
    config: Eagle3DraftConfig,
    generation_config: GenerationConfig | None = None,
    *,
    engine: str = "eagle3-hf",
    coverage: float | None = None,
    acceptance: Acceptance | None = None,
    curves: str | None = None,
    tags: Iterable[str] = (),
) -> str:
    """Return a model card with valid metadata, which [`write_card`] recognises as generated.

    Args:
        config: The head's config.
        generation_config: The head's generation config, with the size of the tree that is saved with the head.
        engine: Format of the folder: "eagle3-hf", "vllm", "sglang" or "speculators".
        coverage: Share of the training targets that the draft vocabulary contains, 0 to 1.
        acceptance: The columns of a table by task, such as `{"HumanEval": {"tau": 2.45, "speed-up": "1.56x"}}`.
        curves: File name of a picture of the training curves, in the same folder.
        tags: Tags for the metadata, in addition to the generated ones.
    """
    name = config.target_name_or_path if looks_like_hub_id(config.target_name_or_path) else None
    sections = [
        f"# EAGLE-3 head for {name.split('/')[-1] if name else _target_in_words(config)}",
        "A draft head for speculative decoding: it drafts the next tokens and its target verifies them, so that the "
        "output is the target's own.",
        _table(_facts(config, generation_config, coverage)),
        _acceptance(acceptance),
        "" if curves is None else f"## Training\n\n![Loss, accuracy and tau against the sequences seen]({curves})",
        _usage(name),
        _serving(config, name, engine),
    ]
    return _signed(_metadata(name, engine, tags), "\n\n".join(section for section in sections if section))


def write_card(
    folder: str | os.PathLike,
    config: Eagle3DraftConfig,
    generation_config: GenerationConfig | None = None,
    **about: Any,
) -> Path | None:
    """Write [`card_text`] to the folder's `README.md` unless a person wrote or edited the card there.

    This function never raises, since a missing card is no reason to lose a save; errors are logged.

    Args:
        folder: Folder of the saved head.
        config: See [`card_text`].
        generation_config: See [`card_text`].
        about: Further arguments of [`card_text`].

    Returns:
        The card's path, or `None` if no card was written.
    """
    path = Path(folder) / CARD_FILE
    try:
        if path.exists():
            text = path.read_text(encoding="utf-8")
            if not is_replaceable(text):
                return None
            about = {**about, "tags": [*about.get("tags", ()), *(ModelCard(text).data.to_dict().get("tags") or ())]}
        path.write_text(card_text(config, generation_config, **about), encoding="utf-8")
    except Exception as error:
        logger.warning(f"No model card was written to {path}: {error}")
        return None
    return path


def is_replaceable(text: str) -> bool:
    """Whether a card was generated and not edited, or is transformers' empty template; line ends do not matter."""
    mark, empty = _MARK_PATTERN.search(text), _EMPTY_PATTERN.search(text)
    card = ModelCard(text.replace("\r\n", "\n"))
    if mark is None:
        return empty is not None and _is_empty_template(card, empty.group())
    return mark.group(1) == _checksum(card.data, _MARK_PATTERN.sub("", card.text))


def looks_like_hub_id(name: str | None) -> bool:
    """Whether a name has the form of a Hub id and is not a local folder."""
    return bool(name and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not Path(name).exists())


def serve_command(engine: str, target: str, head: str) -> str:
    """Return the shell command that serves `target` with the head in folder or repository `head`."""
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} \\\n"
            f"  --speculative-algorithm EAGLE3 --speculative-draft-model-path {head} \\\n"
            f"  --speculative-num-steps {CHAIN} --speculative-eagle-topk 1 --speculative-num-draft-tokens {CHAIN + 1}"
        )
    settings = {"method": "eagle3", "model": head, "num_speculative_tokens": CHAIN}
    return f"vllm serve {target} --speculative-config '{json.dumps(settings)}'"


def _is_empty_template(card: ModelCard, description: str) -> bool:
    """Whether the card is transformers' template as it was rendered."""
    metadata = ModelCardData(**card.data.to_dict())
    return ModelCard.from_template(metadata, model_description=description).text.strip() == card.text.strip()


# ----- the card's own signature --------------------------------------------------------------------------------------


def _signed(metadata: ModelCardData, body: str) -> str:
    mark = _MARK.format(checksum=_checksum(metadata, body))
    return f"---\n{metadata.to_yaml().strip()}\n---\n\n{mark}\n\n{body.strip()}\n"


def _checksum(metadata: CardData, body: str) -> str:
    """Return a checksum of the content, independent of how the metadata is formatted."""
    content = json.dumps(metadata.to_dict(), sort_keys=True, default=str) + body.strip()
    return hashlib.sha256(content.encode()).hexdigest()[:16]


# ----- its parts -----------------------------------------------------------------------------------------------------


def _metadata(name: str | None, engine: str, tags: Iterable[str]) -> ModelCardData:
    base: dict[str, Any] = {} if name is None else {"base_model": name, "base_model_relation": "adapter"}
    return ModelCardData(
        library_name="transformers" if engine == "eagle3-hf" else engine,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([*_TAGS, *tags])),
        **base,
    )


def _target_in_words(config: Eagle3DraftConfig) -> str:
    return f"a {config.target_model_type} model" if config.target_model_type else "its target"


def _facts(
    config: Eagle3DraftConfig, generation_config: GenerationConfig | None, coverage: float | None
) -> dict[str, str]:
    facts = {
        "layers read": _layers_in_words(config),
        "draft vocabulary": _vocabulary_in_words(config, coverage),
        "draft layers": _draft_layers_in_words(config),
        "embedding": "its own" if config.own_embeddings else "the target's, borrowed",
    }
    if not config.own_lm_head:
        facts["output layer"] = "the target's, borrowed"
    facts["RoPE"] = _rope_in_words(config)
    variants = _variants(config)
    if variants:
        facts["variants"] = ", ".join(variants)
    if given_tree(generation_config):
        tree = in_words({**PAPER_TREE, "num_assistant_tokens": "auto", **given_tree(generation_config)})
        facts["tree saved with it"] = f"{tree} (drafted nodes / levels / children per node)"
    else:
        facts["tree"] = "the size that pays, chosen round by round"
    return facts


def _layers_in_words(config: Eagle3DraftConfig) -> str:
    ids, layers = config.target_layer_ids, config.target_num_hidden_layers
    if not config.use_aux_hidden_state:
        return "the target's output after its final norm, alone"
    if ids is None:
        return "not recorded; they follow from the target"
    words = ["the embedding's output" if i == 0 else f"the output of block {i - 1}" for i in ids]
    of = f" of {layers} (counted from 0)" if layers is not None else " (counted from 0)"
    return f"{', '.join(map(str, ids))} as `hidden_states` indices: {', '.join(words)}{of}"


def _vocabulary_in_words(config: Eagle3DraftConfig, coverage: float | None) -> str:
    if config.draft_vocab_size == config.vocab_size:
        return f"the target's, {config.vocab_size:,} tokens"
    covered = "" if coverage is None else f", {coverage:.1%} of the training targets"
    return f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens{covered}"


def _draft_layers_in_words(config: Eagle3DraftConfig) -> str:
    width = f"width {config.hidden_size}"
    if config.hidden_size != config.target_hidden_size:
        width += f" (the target's is {config.target_hidden_size})"
    return f"{config.num_hidden_layers}, {width}"


def _rope_in_words(config: Eagle3DraftConfig) -> str:
    return f"{config.rope_parameters['rope_type']}, base {config.rope_parameters['rope_theta']:g}"


def _variants(config: Eagle3DraftConfig) -> list[str]:
    variants = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output (EAGLE-3.1)": config.norm_output,
        "no final norm": not config.final_norm,
        "norms of queries and keys": config.qk_norm,
        "biases": config.attention_bias or config.mlp_bias or config.fc_bias,
        f"window of {config.sliding_window}": has_windows(config),
        "latent attention (MLA)": config.is_latent,
    }
    return [word for word, holds in variants.items() if holds]


def _table(facts: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())])


def _acceptance(acceptance: Acceptance | None) -> str:
    if not acceptance:
        return ""
    columns = list(dict.fromkeys(column for results in acceptance.values() for column in results))
    lines = ["| task | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for task, results in acceptance.items():
        lines.append("| " + " | ".join([task, *(str(results.get(column, "")) for column in columns)]) + " |")
    meaning = "tau is the mean acceptance length: tokens per forward pass of the target. Plain decoding has 1."
    return "\n\n".join(["## Acceptance", "\n".join(lines), meaning])


def _usage(name: str | None) -> str:
    """Return the section on use in transformers; heads of every format load here."""
    code = f'''```python
from transformers import AutoModelForCausalLM
from eagle3_hf import Eagle3DraftModel

target = AutoModelForCausalLM.from_pretrained("{name or "TARGET"}")
draft = Eagle3DraftModel.from_pretrained("THIS_HEAD")
output = target.generate(**inputs, assistant_model=draft)
```'''
    return f"## Use it in transformers\n\n{code}"


def _serving(config: Eagle3DraftConfig, name: str | None, engine: str) -> str:
    target = name or "TARGET"
    if engine != "eagle3-hf":
        command = serve_command(engine, target, "THIS_HEAD")
        return f"## Serve it\n\nThis folder has the format of {_TITLES[engine]}.\n\n```bash\n{command}\n```"
    parts = ["## Serve it"]
    for other in ENGINES:
        reasons = unsupported_features(config, other)
        if reasons:
            parts.append(f"**{_TITLES[other]}** cannot run it:\n\n" + "\n".join(f"- {reason}" for reason in reasons))
            continue
        convert = f"eagle3-hf convert THIS_HEAD OUT --to {other} --target {target}"
        parts.append(f"**{_TITLES[other]}**:\n\n```bash\n{convert}\n{serve_command(other, target, 'OUT')}\n```")
    return "\n\n".join(parts)


__all__ = ["CARD_FILE", "card_text", "is_replaceable", "looks_like_hub_id", "serve_command", "write_card"]
