"""Files of options: YAML or JSON, with the names that the options have on the command line."""

import json
from pathlib import Path
from typing import Any

from .values import read_lines


def read_options(file: str) -> dict[str, Any]:
    """Return the options in a file by name, with underscores.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no options by name.
    """
    path = Path(file)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file; options begin with --")
    import yaml

    text = "\n".join(read_lines(path))
    try:
        values = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not valid {path.suffix[1:] or 'yaml'}: {' '.join(str(error).split())}") from None
    if values is None:
        raise ValueError(f"{path} is empty: expected options, such as target: NAME")
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected options by name, found a {type(values).__name__}")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def words_of(value: Any) -> list[str]:
    """Return a value of a file as the words of a command line."""
    if isinstance(value, list):
        return [word for each in value for word in words_of(each)]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]
