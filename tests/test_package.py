"""The package as a whole: what it asks for, what it offers, and what importing it costs."""

import importlib.metadata
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eagle3_hf


REPOSITORY = Path(__file__).resolve().parents[1]
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
PUBLIC_NAMES = {
    "DraftTree",
    "Eagle3Candidate",
    "Eagle3DraftConfig",
    "Eagle3DraftModel",
    "Eagle3Trainer",
    "Eagle3TrainingArguments",
    "disable",
    "enable",
    "enabled",
}
DEPENDENCIES = {"transformers", "torch", "peft", "accelerate", "safetensors", "huggingface-hub", "datasets"}


def in_fresh_interpreter(code: str) -> str:
    """Run `code` in a new Python with the repository on its path; returns what it printed."""
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def toml_list(name: str) -> list[str]:
    """The strings of a top-level list of pyproject.toml (Python 3.10 has no TOML reader)."""
    body = re.search(rf"^{name} = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL).group(1)
    return re.findall(r'^    "([^"]+)",$', body, re.MULTILINE)


def test_public_names_are_there_and_listed():
    assert set(eagle3_hf.__all__) >= PUBLIC_NAMES
    assert set(dir(eagle3_hf)) >= PUBLIC_NAMES
    for name in eagle3_hf.__all__:
        assert getattr(eagle3_hf, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = eagle3_hf.no_such_name


def test_version_is_the_one_of_the_metadata():
    declared = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE).group(1)
    assert eagle3_hf.__version__ == declared
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {declared}\n" in citation
    try:
        installed = importlib.metadata.version("eagle3-hf")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the source tree
    assert installed == declared


def test_exactly_the_seven_dependencies_each_with_a_floor():
    requirements = toml_list("dependencies")
    assert {re.split(r"[><=]", requirement)[0] for requirement in requirements} == DEPENDENCIES
    assert all(">=" in requirement for requirement in requirements)
    assert "transformers>=5.4,<6" in requirements


def test_files_that_go_with_the_package():
    assert (REPOSITORY / "eagle3_hf" / "py.typed").read_text(encoding="utf-8") == ""
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "2503.01840" in (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")


def test_import_loads_neither_the_trainer_nor_datasets():
    heavy = "datasets", "transformers.trainer", "eagle3_hf.training", "eagle3_hf.cli"
    loaded = in_fresh_interpreter(f"import sys, eagle3_hf; print([name for name in {heavy} if name in sys.modules])")
    assert loaded == "[]"


def test_import_prints_nothing():
    assert in_fresh_interpreter("import eagle3_hf") == ""


def test_auto_classes_know_the_head():
    name = in_fresh_interpreter(
        "import eagle3_hf, transformers; print(type(transformers.AutoConfig.for_model('eagle3_draft')).__name__)"
    )
    assert name == "Eagle3DraftConfig"


def test_console_script_exists():
    from eagle3_hf.cli import main

    assert callable(main)
    assert 'eagle3-hf = "eagle3_hf.cli:main"' in PYPROJECT


def test_a_logged_deprecation_would_fail_a_test(no_deprecated_calls):
    logging.getLogger("transformers.some_module").warning("`this` is deprecated and will be removed")
    assert no_deprecated_calls.lines == ["`this` is deprecated and will be removed"]
    no_deprecated_calls.lines.clear()
