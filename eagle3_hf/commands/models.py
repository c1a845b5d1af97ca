"""Names of models, looked at before anything is loaded or asked of the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def exists(place: str) -> bool:
    """Whether it is here; a name that no file can have is not."""
    try:
        return Path(place).exists()
    except (OSError, ValueError):
        return False


def check_targets(places: Iterable[str | None]) -> None:
    """Refuse what can be no target: transformers would say it by a TypeError, or without the name.

    Args:
        places: Local folders or Hub ids; `None` is passed over.

    Raises:
        ValueError: naming the place, and what was expected.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for place in filter(None, places):
        if exists(place):
            _check_folder(Path(place))
            continue
        try:
            validate_repo_id(place)
        except HFValidationError:
            raise ValueError(f"{place!r} is neither a local folder nor a Hub id (owner/name)") from None


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected the folder of a model, or a Hub id")
    config = folder / "config.json"
    if not config.is_file():
        # A tokenizer is enough for some commands, and adapters name their model.
        if any(folder.glob("tokenizer*")) or (folder / "adapter_config.json").is_file():
            return
        raise ValueError(f"{folder} has no config.json: it is not the folder of a model")
    try:
        known = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is no JSON ({error})") from None
    if not isinstance(known, dict):
        raise ValueError(f"{config} is no config: expected a JSON object, found a {type(known).__name__}")
