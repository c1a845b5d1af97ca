"""Files that results are written to, checked before any work is done for them."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from .values import check_output_folder


def check_result_files(files: Iterable[Path]) -> None:
    """Check that files can be written.

    Raises:
        ValueError: a name is that of a folder, or its folder does not exist.
        OSError: nothing can be written there.
    """
    for file in files:
        if file.is_dir():
            raise ValueError(f"{file} is a folder: name a file")
        check_output_folder(file.absolute().parent)
        if not file.absolute().parent.is_dir():
            raise ValueError(f"{file}: the folder {file.parent} does not exist")


def require_matplotlib(option: str = "--html") -> None:
    """Check that plots can be drawn.

    Raises:
        ValueError: matplotlib is missing; the message says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f'{option} needs matplotlib, which is missing: pip install "eagle3-hf[plot]"')
