"""Checks the names of models before anything is loaded or requested from the Hub."""

import json
from collections.abc import Iterable
from pathlib import Path


def exists(place: str) -> bool:
    """Whether a local file or folder of this name exists; a name that no file can have is not an error."""
    try:
        return Path(place).exists()
    except (OSError, ValueError):
        return False


def check_targets(places: Iterable[str | None]) -> None:
    """Reject names that cannot be targets, for which transformers raises a TypeError or an error without the name.

    Args:
        places: Local folders or Hub ids; `None` is skipped.

    Raises:
        ValueError: a name cannot be a target; the message names it and what was expected.
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
        # A tokenizer is enough for some commands, and an adapter names its model.
        if any(folder.glob("tokenizer*")) or (folder / "adapter_config.json").is_file():
            return
        raise ValueError(f"{folder} has no config.json: it is not the folder of a model")
    try:
        known = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is not valid JSON ({error})") from None
    if not isinstance(known, dict):
        raise ValueError(f"{config} is not a config: expected a JSON object, found a {type(known).__name__}")
