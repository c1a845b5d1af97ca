"""How the tests themselves are made: helpers live in `support`, and no test module imports another."""

import re
from pathlib import Path


TESTS = Path(__file__).parents[1]
FOLDERS = sorted(path.name for path in TESTS.iterdir() if path.is_dir() and any(path.glob("test_*.py")))
# Also in the scripts that tests run in other processes, which are strings.
IMPORT = re.compile(rf"^\s*(?:from|import)\s+((?:{'|'.join(FOLDERS)})\b(?!\s*=)\S*|\S*\btest_\w+)", re.MULTILINE)


def test_no_test_module_is_imported():
    files = {path.relative_to(TESTS): IMPORT.findall(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}
    files.pop(Path(__file__).relative_to(TESTS))  # has examples
    assert {str(path): found for path, found in files.items() if found} == {}


def test_an_import_of_a_test_module_is_found():
    for line in ("from decoding.test_batch import x", "import unit.test_tree", "    from test_tree import x"):
        assert IMPORT.findall(f"a = 1\n{line}\n"), line
    for line in ("from support.drafts import x", "from eagle3_hf.training import y", "import json"):
        assert not IMPORT.findall(f"a = 1\n{line}\n"), line
