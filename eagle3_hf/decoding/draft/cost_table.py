"""What rounds cost on this machine, kept on disk for later processes: a small JSON file in the cache of Hugging Face.

A process that finds its kind of call there need not measure first. The file is `eagle3_hf/costs.json` in `HF_HOME`;
with `EAGLE3_HF_COST_TABLE=0` it is neither read nor written. It holds ratios only, nothing of any text. Whatever is
wrong with it, or with the disk, is passed over: then costs are measured as if there were no file.
"""

import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants


_MOST = 256  # kinds of calls; the ones written longest ago are dropped
_LARGEST = 1 << 20  # bytes; a larger file is not ours


def table_path() -> Path | None:
    """Return where the table is kept; `None` if it is switched off."""
    if os.environ.get("EAGLE3_HF_COST_TABLE", "1").lower() in ("0", "false", "no", "off"):
        return None
    return Path(constants.HF_HOME) / "eagle3_hf" / "costs.json"


def read(key: str) -> Any:
    """Return what was written under a key; `None` if there is nothing that can be read."""
    return _read_all().get(key)


def write(key: str, state: Any) -> None:
    """Write JSON values under a key, beside what other processes have written. The file is replaced as a whole."""
    path = table_path()
    if path is None:
        return
    with suppress(OSError, ValueError, TypeError):
        table = _read_all()
        table.pop(key, None)
        kept = dict([*table.items(), (key, state)][-_MOST:])
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix="costs-", suffix=".json")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file, allow_nan=False)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is no cost")  # nor could the table be written with it again


def _read_all() -> dict[str, Any]:
    path = table_path()
    if path is None:
        return {}
    try:
        if path.stat().st_size > _LARGEST:
            return {}
        table = json.loads(path.read_text(encoding="utf-8"), parse_constant=_reject)
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}
