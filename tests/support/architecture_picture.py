"""The picture of the packages and their imports in docs/architecture.md, drawn from the source.

    python tests/support/architecture_picture.py

writes it into the page; `tests/docs/test_architecture.py` checks that the page is current.
"""

import ast
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path


REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGE = "eagle3_hf"
BEGIN = "<!-- picture: written by tests/support/architecture_picture.py -->"
END = "<!-- end of the picture -->"

Edge = tuple[str, str]


def room_of(module: str) -> str:
    """Return the top-level package or module to which a module belongs; the package itself for its `__init__`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else PACKAGE


def modules() -> dict[str, Path]:
    """Return the files of all modules by their dotted names."""
    found = {}
    for path in sorted((REPOSITORY / PACKAGE).rglob("*.py")):
        parts = path.relative_to(REPOSITORY).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """Yield the modules of the package that a module imports, with whether it does so only when a function runs."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node, deferred in _import_nodes(ast.parse(path.read_text(encoding="utf-8")), False):
        if isinstance(node, ast.Import):
            yield from ((alias.name, deferred) for alias in node.names if alias.name.split(".")[0] == PACKAGE)
            continue
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        if source.split(".")[0] == PACKAGE:
            for alias in node.names:
                name = f"{source}.{alias.name}"
                yield (name if name in known else source), deferred


def _import_nodes(node: ast.AST, deferred: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, deferred
        yield from _import_nodes(child, deferred or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))


def room_edges() -> tuple[set[Edge], set[Edge]]:
    """Return the imports between rooms: those that happen at once, and those that only happen when a function runs."""
    known, found = modules(), {True: set(), False: set()}
    for module, path in known.items():
        for target, deferred in imports(module, path, known):
            edge = room_of(module), room_of(target)
            if edge[0] != edge[1]:
                found[deferred].add(edge)
    return found[False], found[True] - found[False]


def levels() -> dict[str, int]:
    """Return the level of each room in the import contract of setup.cfg, the highest first."""
    config = ConfigParser()
    config.read(REPOSITORY / "setup.cfg", encoding="utf-8")
    lines = config["importlinter:contract:rooms"]["layers"].strip().splitlines()
    return {room.strip(): level for level, line in enumerate(lines) for room in line.split("|")}


def reduced(edges: set[Edge]) -> set[Edge]:
    """Return the edges that no longer path replaces."""
    return {
        (start, end)
        for start, end in edges
        if not any(middle != end and _reaches(middle, end, edges) for first, middle in edges if first == start)
    }


def _reaches(start: str, end: str, edges: set[Edge]) -> bool:
    waiting, seen = [start], set()
    while waiting:
        room = waiting.pop()
        if room == end:
            return True
        if room not in seen:
            seen.add(room)
            waiting += [target for source, target in edges if source == room]
    return False


def picture() -> str:
    """Return the picture as a Mermaid flowchart.

    Arrows that follow from others are left out. A dashed arrow is an import that only happens when a function runs.
    """
    at_once, deferred = room_edges()
    height = levels()
    # The exceptions of the contract, which point to a higher level: shown, but no part of longer paths.
    up = {(start, end) for start, end in at_once | deferred if height.get(end, -1) < height.get(start, -1)}
    solid = reduced(at_once - up) | (at_once & up)
    dashed = (reduced((at_once | deferred) - up) & deferred) | (deferred & up)
    rooms = sorted({room for edge in solid | dashed for room in edge}, key=lambda room: (height.get(room, -1), room))
    names = {PACKAGE: f"{PACKAGE}/__init__.py"}
    lines = ["flowchart TD", *(f'    {room}["{names.get(room, room)}"]' for room in rooms)]
    lines += [f"    {start} --> {end}" for start, end in sorted(solid)]
    lines += [f"    {start} -.-> {end}" for start, end in sorted(dashed)]
    return "\n".join(["```mermaid", *lines, "```"])


def page_with(drawn: str, text: str) -> str:
    """Return the page's text with this picture in it."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{drawn}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(picture(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
