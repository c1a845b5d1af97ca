"""The option `--set FIELD=VALUE` of the commands that read a head."""

import argparse
import json
from collections.abc import Sequence
from typing import Any


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the option `--set`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override a field of the head's config that its file leaves open or has wrong; the value is JSON, such "
        "as target_layer_ids=[2,16,29] or norm_output=false; repeat for several fields",
    )


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # the spelling in warnings


def fields(settings: Sequence[str]) -> dict[str, Any]:
    """Return the config fields given by `--set`.

    Raises:
        ValueError: a value is not JSON, or a field does not exist.
    """
    from ..model.configuration_eagle3 import FIELDS

    found = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            found[name] = json.loads(_PYTHON.get(value, value))
        except ValueError:
            raise ValueError(f'--set {setting}: expected JSON, such as true, 16, [2,16,29] or "text"') from None
        if name not in FIELDS:
            raise ValueError(f"--set {setting}: {name} is not a field of Eagle3DraftConfig")
    return found
