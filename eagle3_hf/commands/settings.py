"""The option `--set FIELD=VALUE` of the commands that read a head."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field of the head's config that its file leaves open or gets wrong, the value as JSON, such as "
        "target_layer_ids=[2,16,29] or norm_output=false; repeat for several",
    )


_PYTHON = {"True": "true", "False": "false", "None": "null"}  # as warnings spell them


def fields(settings: Sequence[str]) -> dict[str, Any]:
    """The fields of `--set`."""
    from ..model.configuration_eagle3 import FIELDS

    found = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            found[name] = json.loads(_PYTHON.get(value, value))
        except ValueError:
            raise ValueError(f'--set {setting}: no JSON value, such as true, 16, [2,16,29] or "text"') from None
        if name not in FIELDS:
            raise ValueError(f"--set {setting}: {name} is no field of Eagle3DraftConfig")
    return found
