"""The package as a whole: what it asks for, what it offers, and what importing it costs."""

import importlib.metadata
import logging
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import eagle3_hf


REPOSITORY = Path(__file__).resolve().parents[2]
PYPROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
DEPENDENCIES = {"transformers", "torch", "peft", "accelerate", "safetensors", "huggingface-hub", "datasets"}


def toml_list(name: str) -> list[str]:
    """The strings of a top-level list of pyproject.toml (Python 3.10 has no TOML reader)."""
    body = re.search(rf"^{name} = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL).group(1)
    return re.findall(r'^    "([^"]+)",$', body, re.MULTILINE)


def test_public_names_are_there_and_documented():
    table = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    documented = {
        name for row in re.findall(r"^\| (`.+) \|$", table, re.M) for name in re.findall(r"`([A-Za-z]\w+)`", row)
    }
    assert set(eagle3_hf.__all__) <= documented
    assert set(eagle3_hf.__all__) <= set(dir(eagle3_hf))
    for name in eagle3_hf.__all__:
        assert getattr(eagle3_hf, name).__doc__, name


SNIPPET = """
import eagle3_hf
from eagle3_hf import *
from eagle3_hf import Eagle3Trianer
eagle3_hf.lod_chats
Eagle3DraftConfig(hiden_size=64)
reveal_type(Eagle3DraftConfig().head_dim)
"""


def test_type_checkers_see_every_public_name(tmp_path):
    """With exact types, and errors where a name is misspelt."""
    pytest.importorskip("mypy")
    names = [f"reveal_type(eagle3_hf.{name})" for name in eagle3_hf.__all__]
    file = tmp_path / "snippet.py"
    file.write_text(SNIPPET + "\n".join(names), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", str(file)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    said = [line for line in result.stdout.splitlines() if "snippet.py:" in line]
    errors = [line.partition("error: ")[2] for line in said if " error: " in line]
    assert len(errors) == 3, result.stdout + result.stderr
    assert errors[0].startswith('Module "eagle3_hf" has no attribute "Eagle3Trianer"')
    assert errors[1].startswith('Module has no attribute "lod_chats"')
    assert errors[2].startswith('Unexpected keyword argument "hiden_size" for "Eagle3DraftConfig"')
    revealed = [line.partition("Revealed type is ")[2] for line in said if "Revealed" in line]
    assert revealed[0] == '"int"'
    assert len(revealed) == 1 + len(names)
    for name, shown in zip(eagle3_hf.__all__, revealed[1:], strict=True):
        assert shown.startswith(('"def (', '"Overload(')), (name, shown)
        if isinstance(getattr(eagle3_hf, name), type):
            assert re.search(rf"-> (\w+\.)*{name}\b", shown), (name, shown)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = eagle3_hf.no_such_name


def test_the_version_stands_in_one_place():
    files = [*REPOSITORY.glob("*.*"), *(REPOSITORY / "eagle3_hf").rglob("*.py")]
    holders = [
        path.relative_to(REPOSITORY).as_posix()
        for path in files
        if path.is_file()
        and re.search(r"^(__)?version(__)?\s*[:=]\s*['\"]?\d", path.read_text(encoding="utf-8"), re.M)
    ]
    assert holders == ["eagle3_hf/__init__.py"]
    try:
        installed = importlib.metadata.version("eagle3-hf")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the source tree
    assert installed == eagle3_hf.__version__


def test_the_sdist_has_all_that_the_tests_read(tmp_path):
    """And the version, which its builder reads from the source."""
    pytest.importorskip("setuptools", minversion="77")
    caches = shutil.ignore_patterns(".git", "*cache*", "*.egg-info", "*.safetensors", "build", "dist", "*venv*")
    source = shutil.copytree(REPOSITORY, tmp_path / "source", ignore=caches)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    assert path.name == f"eagle3_hf-{eagle3_hf.__version__}.tar.gz"
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("tests", "docs", "examples", "eagle3_hf"):
        files = [path for path in (source / folder).rglob("*") if path.is_file()]
        assert files
        assert {path.relative_to(source).as_posix() for path in files} <= packed
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "setup.cfg", ".ci/run"} <= packed


def test_exactly_the_seven_dependencies_each_with_a_floor():
    requirements = toml_list("dependencies")
    assert {re.split(r"[><=]", requirement)[0] for requirement in requirements} == DEPENDENCIES
    assert all(">=" in requirement for requirement in requirements)
    assert "transformers>=5.4,<6" in requirements


def test_files_that_go_with_the_package():
    assert (REPOSITORY / "eagle3_hf" / "py.typed").read_text(encoding="utf-8") == ""
    assert "Apache License" in (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "2503.01840" in (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")


def test_decoding_loads_neither_training_nor_export(fresh):
    """At import, and after a head was loaded, another one made, and both used by `generate`."""
    assert fresh.found["imports"] == fresh.found["modules_of_decoding"] == []


def test_import_prints_nothing(fresh):
    assert fresh.stdout["imports"] == ""


def test_auto_classes_know_the_head(fresh):
    assert fresh.found["auto_classes"] == "Eagle3DraftConfig"


def test_help_and_version_wait_for_no_heavy_package(fresh):
    assert fresh.found["heavy_modules_of_help"] == []
    assert "usage: eagle3-hf" in fresh.stdout["heavy_modules_of_help"]


def test_console_script_exists():
    from eagle3_hf.cli import main

    assert callable(main)
    assert 'eagle3-hf = "eagle3_hf.cli:main"' in PYPROJECT


def test_a_logged_deprecation_would_fail_a_test(no_deprecated_calls):
    logging.getLogger("transformers.some_module").warning("`this` is deprecated and will be removed")
    assert no_deprecated_calls.lines == ["`this` is deprecated and will be removed"]
    no_deprecated_calls.lines.clear()
