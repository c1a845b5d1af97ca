"""What a new interpreter shows of the package: one for all tests that ask, since its imports take seconds.

`python -m support.fresh_interpreter FOLDER`, which the fixture `fresh` starts, runs one section after another, in an
order in which none disturbs the next. Nothing is imported here before its section.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes import run_python


FOUND = "found.json"
# What decoding needs none of.
OTHERS = ("datasets", "transformers.trainer")
ROOMS = tuple(f"eagle3_hf.{room}" for room in ("training", "ttt", "export", "evaluation", "commands", "cli"))


@dataclass
class Fresh:
    """What each section has found, and what was printed meanwhile."""

    found: dict[str, Any]
    stdout: dict[str, str]
    stderr: dict[str, str]


def start(folder: Path) -> Fresh:
    """Run all sections.

    Args:
        folder: with a target in `target` and a head of it in `head`.
    """
    run = run_python(
        ["-W", "always", "-m", "support.fresh_interpreter", folder],
        PYTHONHASHSEED="7",
        TRANSFORMERS_VERBOSITY="",
        CI="",
    )
    assert run.returncode == 0, run.stderr
    printed = ({"": run.stdout}, {"": run.stderr})
    for sections in printed:
        _, *parts = sections.pop("").split("== ")
        sections |= dict(part.split("\n", 1) for part in parts)
    return Fresh(json.loads((folder / FOUND).read_text()), *printed)


# ----- in the new interpreter ----------------------------------------------------------------------------------------


def imports(folder: Path) -> list[str]:
    """The modules that decoding does not need, and importing the package loads."""
    import eagle3_hf  # noqa: F401

    return others()


def others() -> list[str]:
    return [name for name in sys.modules if name in OTHERS or name.startswith(ROOMS)]


def auto_classes(folder: Path) -> str:
    """The class of config that transformers knows the head by."""
    import transformers

    return type(transformers.AutoConfig.for_model("eagle3_draft")).__name__


def first_lines(folder: Path) -> int:
    """What the README begins with; the length of the text."""
    import torch
    from transformers import AutoModelForCausalLM

    import eagle3_hf

    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    draft = eagle3_hf.Eagle3DraftModel.from_pretrained(folder / "head")
    ids = target.generate(torch.tensor([[5, 6, 7]]), assistant_model=draft, max_new_tokens=8, do_sample=False)
    assert draft.stats is not None
    return ids.shape[1]


def modules_of_decoding(folder: Path) -> list[str]:
    """The modules that decoding does not need, and making a head and a call of `generate` load."""
    import torch
    from transformers import AutoModelForCausalLM

    import eagle3_hf

    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    draft = eagle3_hf.Eagle3DraftModel.from_target(target)
    target.generate(torch.tensor([[1, 2, 3]]), assistant_model=draft, max_new_tokens=5)
    return others()


def heavy_modules_of_help(folder: Path) -> list[str]:
    """What `eagle3-hf --help` and `--version` load of the packages that take seconds."""
    from eagle3_hf.cli import main

    for option in ("--help", "--version"):
        with contextlib.suppress(SystemExit):
            main([option])
    return [name for name in sys.modules if name in (*OTHERS, "peft", "eagle3_hf.training.trainer")]


def logs(folder: Path | None = None) -> None:
    """Write a line of each level at several verbosities."""
    from transformers.utils import logging

    from eagle3_hf.utils.logging import get_logger

    logger = get_logger("eagle3_hf.training.data.packing")
    for verbosity in (None, logging.INFO, logging.ERROR):
        if verbosity is not None:
            logging.set_verbosity(verbosity)
        for level in ("info", "warning", "error"):
            getattr(logger, level)(f"<{level} at {verbosity}>")
    logging.set_verbosity(logging.WARNING)


def fingerprint(folder: Path | None = None) -> str:
    """The key under which prepared chats are cached."""
    from eagle3_hf.training.data.encoding import prepare_dataset
    from support.chats import chat_tokenizer

    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    return prepare_dataset([{"messages": chat}], chat_tokenizer(), max_length=64)._fingerprint


SECTIONS: list[Callable[[Path], Any]] = [imports, auto_classes, first_lines, modules_of_decoding]
SECTIONS += [heavy_modules_of_help, logs, fingerprint]


def main(folder: Path) -> None:
    found = {}
    for section in SECTIONS:
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"== {section.__name__}\n")
            stream.flush()
        found[section.__name__] = section(folder)
    (folder / FOUND).write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
