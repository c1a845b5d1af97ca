"""`export_head`: writes a head in the format that one engine loads, completely or not at all."""

import copy
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedConfig, PreTrainedModel

from ..model.configuration_eagle3 import Eagle3DraftConfig
from ..model.features import check_target, num_target_layers
from ..model.offload import require_resident
from ..utils.logging import get_logger
from . import borrowed
from .card import CARD_FILE, looks_like_hub_id, write_card
from .engines import engine_tensor_name, sglang_config, speculators_config, vllm_config
from .errors import ExportError
from .unsupported import ENGINES, unsupported_features


logger = get_logger(__name__)

FORMATS = (*ENGINES, "eagle3-hf")
_SCALED_EMBEDDINGS = "gemma"  # prefix of the model types whose embedding scales its weight


def export_head(
    draft: Any,
    folder: str | os.PathLike,
    to: str,
    *,
    target: PreTrainedModel | PreTrainedConfig | None = None,
    dtype: str | torch.dtype | None = None,
    verifier: str | None = None,
    acceptance: Mapping[str, Mapping[str, float | str]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a head as `config.json`, `model.safetensors` and a model card for one engine.

    Args:
        draft: An [`Eagle3DraftModel`]; it is not changed.
        folder: The folder to write to, which is created. One that is not empty is rejected; with `overwrite`, only one
            that does not hold a head is.
        to: "vllm", "sglang", "speculators" or "eagle3-hf" (the format of `save_pretrained`).
        target: The head's target, for what the head's own file leaves open. Its config is enough, except where the
            format needs the target's weights (see [`needs_target_weights`]).
        dtype: The dtype of the floating-point tensors; by default they keep theirs. `d2t` stays int64.
        verifier: Hub id or folder of the target, for "speculators"; by default the name that head or `target` records.
        acceptance: Results for the card's table, by task, such as `{"HumanEval": {"tau": 2.45, "speed-up": "1.56x"}}`.
        overwrite: Replace the files of an earlier export; other files, and a card that was edited, are kept.

    Returns:
        The folder.

    Raises:
        ExportError: the engine cannot run this head (the message lists every reason), or the draft vocabulary or the
            layer ids are unknown. Nothing was written.
        FileExistsError: the folder is not empty, see `folder`.
        ValueError: `to` or `dtype` is unknown, the head does not fit `target`, or the head is offloaded.
    """
    if to not in FORMATS:
        raise ValueError(f"unknown format {to!r}: choose from {', '.join(FORMATS)}")
    require_resident(draft, "export")
    folder, torch_dtype = Path(folder), _torch_dtype(dtype)
    check_folder(folder, overwrite)
    config = _completed_config(draft.config, target)
    problems = _unsettled(draft, config) + (unsupported_features(config, to) if to in ENGINES else [])
    verifier = _verifier(config, verifier, target) if to == "speculators" else None
    if to == "speculators" and verifier is None:
        problems.append(
            "the verifier: it needs the folder or Hub id of the target, and the head records none that exists; pass "
            "verifier= (--verifier)"
        )
    extra, missing = _borrowed_tensors(draft, config, to, target)
    problems += missing
    if problems:
        raise ExportError(f"{to} cannot run this head as it is:\n" + "\n".join(f"- {reason}" for reason in problems))
    if config.guessed_layer_ids:
        logger.warning(
            f"The layer ids {config.target_layer_ids} of this head are a guess, since its file does not say what they "
            f"number, and {folder} will not say that they are. If acceptance is low, load the head with "
            "target_layer_ids=[...] and export it again."
        )
    about = {"engine": to, "acceptance": acceptance}
    with _all_or_nothing(folder) as draft_folder:
        if to == "eagle3-hf":
            _save_own(draft, config, draft_folder, torch_dtype)
        else:
            _save_for_engine(draft, config, to, draft_folder, torch_dtype, extra, verifier, target)
        write_card(draft_folder, config, draft.generation_config, **about)
    write_card(folder, config, draft.generation_config, **about)  # an earlier card of ours was left in place
    return folder


def needs_target_weights(config: Eagle3DraftConfig, to: str, target: PreTrainedConfig | None = None) -> bool:
    """Whether the export needs the target's weights, to write or to compare them.

    Args:
        config: The head's config.
        to: The format, see [`export_head`].
        target: The target's config, for what the head has not recorded.
    """
    model_type = config.target_model_type or (target.get_text_config().model_type if target is not None else "")
    may_scale = model_type.startswith(_SCALED_EMBEDDINGS)
    if to == "speculators":
        return not (config.own_embeddings and config.own_lm_head)
    same_width = config.hidden_size == config.target_hidden_size
    if to == "sglang":
        return same_width and (config.own_embeddings or may_scale)
    return to == "vllm" and not config.own_embeddings and may_scale


def check_folder(folder: Path, overwrite: bool) -> None:
    """Reject a folder in which the export would mix with other files, or replace them.

    Raises:
        FileExistsError: the folder is a file, or not empty.
    """
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file: name a folder to write the head to")
    if overwrite and folder.is_dir() and any(folder.iterdir()) and not _holds_a_head(folder):
        raise FileExistsError(
            f"{folder} is not empty and holds no earlier export (a config.json of a draft head, beside its "
            "weights), so there is nothing to overwrite: choose another folder"
        )
    if not overwrite and folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(
            f"{folder} is not empty: choose another folder, or replace the export in it "
            "with overwrite=True (--overwrite)"
        )


def _holds_a_head(folder: Path) -> bool:
    """Whether the folder holds a draft head, by keys that only configs of heads have."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        marks = [str(config.get(name)) for name in ("model_type", "architectures", "speculators_model_type")]
    except (OSError, ValueError, AttributeError):
        return False
    return "eagle3" in " ".join(marks).lower() and any(folder.glob("*.safetensors"))


# ----- what is exported ----------------------------------------------------------------------------------------------


class _ConfigOfTarget:
    """Stands in for a target of which only the config is known, for checks that need no weights."""

    def __init__(self, config: PreTrainedConfig):
        self.config = config

    def get_input_embeddings(self) -> None:
        return None

    def get_output_embeddings(self) -> None:
        return None


def _completed_config(
    config: Eagle3DraftConfig, target: PreTrainedModel | PreTrainedConfig | None
) -> Eagle3DraftConfig:
    """Return a copy of the config, completed with what only the target knows."""
    config = copy.deepcopy(config)
    if target is None:
        return config
    model: Any = _ConfigOfTarget(target) if isinstance(target, PreTrainedConfig) else target
    check_target(config, model)
    text_config = model.config.get_text_config()
    config.target_num_hidden_layers = num_target_layers(model)
    config.target_model_type = config.target_model_type or text_config.model_type
    config.target_name_or_path = config.target_name_or_path or getattr(model.config, "_name_or_path", None) or None
    return config


def _unsettled(draft: Any, config: Eagle3DraftConfig) -> list[str]:
    problems = []
    if not draft.has_draft_vocab:
        problems.append(
            "draft vocabulary: only its size is known; train the head or call draft.set_draft_vocab(ids) first"
        )
    if config.target_layer_ids is None:
        problems.append(
            "target_layer_ids: the head's file names none, and they depend on the target; pass target= (--target)"
        )
    return problems


def _verifier(
    config: Eagle3DraftConfig, given: str | None, target: PreTrainedModel | PreTrainedConfig | None
) -> str | None:
    """Return the given or first known name that is a local folder (as an absolute path) or could be a Hub id."""
    known = config.target_name_or_path, getattr(getattr(target, "config", target), "_name_or_path", None)
    for name in (given,) if given else known:
        if name and Path(name).is_dir():
            return str(Path(name).resolve())
        if looks_like_hub_id(name):
            return name
    return None


def _borrowed_tensors(
    draft: Any, config: Eagle3DraftConfig, to: str, target: PreTrainedModel | PreTrainedConfig | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the target's tensors that the file must hold, and the reasons why that is not possible."""
    model = target if isinstance(target, PreTrainedModel) else None
    if to == "speculators":
        return _speculators_tensors(config, model)
    if not needs_target_weights(config, to):
        return {}, []
    if model is None:
        what = "its embedding must be compared with the target's" if config.own_embeddings else _SCALES_REASON
        return {}, [f"embed_tokens: {what}; pass the target itself, a model, as target= (--target)"]
    embedding = borrowed.embedding_of(model, config.vocab_size)
    scales = borrowed.scales_embedding(model, embedding)
    if to == "vllm":
        return ({"embed_tokens.weight": embedding} if scales else {}), []
    if config.own_embeddings and not torch.equal(draft.embed_tokens.weight.detach().cpu().float(), embedding.float()):
        return {}, ["embed_tokens: the head's own differs from the target's, by which SGLang replaces it"]
    return {}, ([f"embed_tokens: {_SCALES_REASON}, and SGLang shares the bare weight"] if scales else [])


_SCALES_REASON = "the target scales its embedding inside the module"


def _speculators_tensors(
    config: Eagle3DraftConfig, model: PreTrainedModel | None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    owned = {"embed_tokens": config.own_embeddings, "lm_head": config.own_lm_head}
    missing = [name for name, own in owned.items() if not own]
    if missing and model is None:
        return {}, [
            f"{name}: speculators leaves a missing tensor uninitialised, and this head borrows it; pass the target "
            "itself, a model, as target= (--target)"
            for name in missing
        ]
    if model is None or config.hidden_size != config.target_hidden_size:
        return {}, []
    read = {"embed_tokens": borrowed.embedding_of, "lm_head": borrowed.lm_head_of}
    return {f"{name}.weight": read[name](model, config.vocab_size) for name in missing}, []


# ----- writing -------------------------------------------------------------------------------------------------------


def _save_own(draft: Any, config: Eagle3DraftConfig, folder: Path, dtype: torch.dtype | None) -> None:
    clone = copy.deepcopy(draft)
    if dtype is not None:
        clone.to(dtype)
    for name in ("target_layer_ids", "target_num_hidden_layers", "target_model_type", "target_name_or_path"):
        setattr(clone.config, name, getattr(config, name))
    clone.save_pretrained(folder)


def _save_for_engine(
    draft: Any,
    config: Eagle3DraftConfig,
    to: str,
    folder: Path,
    dtype: torch.dtype | None,
    extra: dict[str, torch.Tensor],
    verifier: str | None,
    target: PreTrainedModel | PreTrainedConfig | None,
) -> None:
    """Write config and tensors for an engine; `verifier` is given only for speculators."""
    tensors = _tensors(draft, to, dtype, extra)
    written = str(tensors["layers.0.input_layernorm.weight"].dtype).removeprefix("torch.")
    if verifier is not None:
        architectures = getattr(getattr(target, "config", target), "architectures", None) or []
        fields = speculators_config(config, written, verifier, architectures)
    else:
        fields = {"vllm": vllm_config, "sglang": sglang_config}[to](config, written)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _tensors(
    draft: Any, to: str, dtype: torch.dtype | None, extra: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors under the engine's names; `d2t` and `t2d` only with a reduced vocabulary."""
    whole_vocabulary = draft.config.draft_vocab_size == draft.config.vocab_size
    tensors = {}
    for name, tensor in {**draft.state_dict(), **extra}.items():
        if whole_vocabulary and name in ("d2t", "t2d"):
            continue
        tensor = tensor.detach().cpu()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        tensors[engine_tensor_name(name, to)] = tensor.contiguous()
    return tensors


@contextmanager
def _all_or_nothing(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to, which is moved to `folder` at the end; an error leaves nothing behind."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        yield part
        if folder.is_dir():
            for file in sorted(part.iterdir(), reverse=True):  # weights before the config that describes them
                if file.name != CARD_FILE or not (folder / CARD_FILE).exists():
                    os.replace(file, folder / file.name)
        else:
            os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is None or dtype in known.values():
        return dtype  # type: ignore[return-value]
    name = re.sub(r"^torch\.", "", str(dtype))
    if name not in known:
        raise ValueError(f"dtype must be one of {', '.join(known)}, got {dtype!r}")
    return known[name]


__all__ = ["FORMATS", "check_folder", "export_head", "needs_target_weights"]
