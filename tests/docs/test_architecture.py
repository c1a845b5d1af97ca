"""The page on the architecture is current: its picture is drawn from the imports, and the files it names exist."""

import re

import pytest

from support.architecture_picture import PACKAGE, PAGE, REPOSITORY, imports, modules, page_with, picture, reduced


def test_the_picture_is_current():
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(picture(), text) == text, "run python tests/support/architecture_picture.py"


def test_every_top_level_package_is_described():
    described = PAGE.read_text(encoding="utf-8").split("| package | content |")[1].split("\n\n")[0]
    names = {module.split(".")[1] for module in modules() if "." in module}
    assert {name for name in names if not re.search(rf"`{name}/?`", described)} == set()


def test_named_files_exist():
    """A path in full, or a file's name of which there is at least one."""
    text = PAGE.read_text(encoding="utf-8")
    files = {str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("*/**/*.py")}
    for name in set(re.findall(r"`([\w/]+\.py)`", text)):
        assert any(file == name or file.endswith(f"/{name}") for file in files), name


def test_imports_are_found(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "import torch\n"
        "from ..model import features\n"
        "from ..utils.logging import get_logger\n"
        "if TYPE_CHECKING:\n    from ..export import head\n"
        "def later():\n    from .. import Eagle3DraftModel\n"
    )
    known = modules()
    assert list(imports(f"{PACKAGE}.decoding.module", module, known)) == [
        (f"{PACKAGE}.model.features", False),
        (f"{PACKAGE}.utils.logging", False),
        (PACKAGE, True),
    ]


@pytest.mark.parametrize(
    ("edges", "kept"),
    [
        ({("a", "b"), ("b", "c"), ("a", "c")}, {("a", "b"), ("b", "c")}),
        ({("a", "b"), ("a", "c")}, {("a", "b"), ("a", "c")}),
        ({("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")}, {("a", "b"), ("b", "c"), ("c", "d")}),
    ],
)
def test_arrows_that_follow_from_others_are_left_out(edges, kept):
    assert reduced(edges) == kept
