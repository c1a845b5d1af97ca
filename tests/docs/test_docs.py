"""The documentation is true: every code block of README and docs runs, and every relative link leads somewhere.

Blocks of a page share one namespace and run in order, in an empty folder. A block whose info string says
`python no-run` (it needs a download or a training run) is only compiled.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest


REPOSITORY = Path(__file__).resolve().parents[2]
README = REPOSITORY / "README.md"
PAGES = [README, *sorted((REPOSITORY / "docs").glob("*.md"))]
MAX_README_LINES = 150

FENCE = re.compile(r"^```")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced code block: its info string, its code, and the line number of its opening fence."""

    info: list[str]
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced code blocks of a page, in order."""
    found, lines, start = [], text.splitlines(), None
    for number, line in enumerate(lines, start=1):
        if not FENCE.match(line):
            continue
        if start is None:
            start = number
        else:
            found.append(Block(lines[start - 1][3:].split(), "\n".join(lines[start : number - 1]), start))
            start = None
    if start is not None:
        raise ValueError(f"the code block of line {start} is never closed")
    return found


def prose(text: str) -> str:
    """The page without its code blocks and code spans, where brackets are not links."""
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "", without_blocks)


def anchors(text: str) -> set[str]:
    """The anchors that a page's headings get: lower case, spaces to hyphens, punctuation dropped."""
    outside_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = (heading.replace("`", "") for heading in HEADING.findall(outside_code))
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def page_id(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_code_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace, ran = {"__name__": "__main__"}, 0
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.info[:1] != ["python"]:
            continue
        # Empty lines in front, so that a traceback names the line of the page.
        code = compile("\n" * block.line + block.code, str(page), "exec")
        if "no-run" not in block.info:
            exec(code, namespace)
            ran += 1
    assert len(namespace) > 1 or not ran, "the blocks that ran have left their names"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_info_strings_are_known(page):
    """A misspelt language would quietly keep a block from being run."""
    for block in blocks(page.read_text(encoding="utf-8")):
        known = [[], ["bash"], ["text"], ["json"], ["mermaid"], ["python"], ["python", "no-run"]]
        assert block.info in known, f"{page.name}:{block.line}: ```{' '.join(block.info)}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        assert target == page or REPOSITORY in target.parents, f"{page.name} links to {link}, outside the repository"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name}: no heading for {link}"


def test_every_page_is_reached_from_the_readme():
    reached, queue = set(), [README]
    while queue:
        page = queue.pop()
        if page in reached or page.suffix != ".md" or not page.is_file():
            continue
        reached.add(page)
        links = LINK.findall(prose(page.read_text(encoding="utf-8")))
        queue += [(page.parent / link.partition("#")[0]).resolve() for link in links if not re.match(r"[a-z]+:", link)]
    assert set(PAGES) <= reached


def test_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_blocks_are_found_with_their_info():
    text = 'a\n```python no-run\nx = "```"\n```\n\n```\nplain\n```\n'
    assert blocks(text) == [Block(["python", "no-run"], 'x = "```"', 2), Block([], "plain", 6)]
    with pytest.raises(ValueError, match="line 2 is never closed"):
        blocks("a\n```python\nx\n")


def test_anchors_are_those_of_the_headings():
    assert anchors("# One `two`, three\n```\n# no heading\n```\n## n-alpha\n") == {"one-two-three", "n-alpha"}
