"""A diagnosis as text for a terminal."""

from collections.abc import Iterator, Sequence

from .result import Diagnosis, Group


_SHOWN_SETTINGS = 5
_FEW_POSITIONS = 300


def to_text(result: Diagnosis) -> str:
    """Return the whole report; its last paragraph is the conclusion."""
    sections = [
        "\n".join(header_lines(result)),
        _table("misses by cause", *cause_table(result)),
        _table("acceptance by depth", *depth_table(result)),
        _table("by task", *group_table(result.by_task, "task")) if len(result.by_task) > 1 else "",
        _table("by length of prompt", *group_table(result.by_prompt_length, "tokens")),
        _table("in sampling, at depth 1", *temperature_table(result)),
        _table("probability of the first choice", *calibration_table(result)),
        _table("other settings", *sweep_table(result)[:2]) if result.sweep else "",
        "\n".join(f"- {finding}" for finding in result.findings[1:]),
        result.conclusion,
    ]
    return "\n\n".join(section for section in sections if section)


def header_lines(result: Diagnosis) -> list[str]:
    """Return what was diagnosed, and the figures that are single numbers."""
    covered = result.coverage
    writer = "written by the target" if result.own_answers else "as given"
    lines = [
        f"{result.head} on {result.target}: {result.texts} chats, answers {writer}, {result.positions} positions",
        f"tau {result.stats.tau:.2f} with trees of {result.tree} (nodes/levels/children) in {result.stats.rounds} "
        f"rounds, {result.misses} of which ended with a miss",
        f"the target chooses the text's own next token at {result.agreement:.1%} of the positions",
        f"draft vocabulary: {covered.size} tokens, {covered.of_choices:.1%} of the target's choices and "
        f"{covered.of_text:.1%} of the text (the best {covered.size} of these texts: {covered.best:.1%})",
    ]
    if result.positions < _FEW_POSITIONS:
        lines.append(f"{result.positions} positions are few: with more chats, smaller effects can be told from chance")
    if result.missing_words:
        lines.append(f"most frequent choices outside it: {', '.join(map(repr, result.missing_words))}")
    return [*lines, str(result.record), _precision_line(result)]


def cause_table(result: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines: how many misses have each cause."""
    lines = [
        [f"the token is {cause.words}", str(number), _share(number, result.misses)]
        for cause, number in result.causes.items()
    ]
    return ["cause", "misses", "share"], [*lines, ["all", str(sum(result.causes.values())), _share(1, 1)]]


def depth_table(result: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines: acceptance of trees, and accuracy of first choices, at each depth."""
    trees, chain = result.stats.per_depth, result.accuracy_by_depth
    lines = [
        [
            str(at + 1),
            _percent(trees, at),
            str(result.stats.reached[at]) if at < len(trees) else "",
            _percent(chain, at),
        ]
        for at in range(max(len(trees), len(chain)))
    ]
    return ["depth", "accepted in trees", "rounds", "first choice right"], lines


def group_table(groups: Sequence[Group], name: str) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines: tau and accuracy of each group of texts."""
    lines = [
        [
            each.name,
            str(each.texts),
            str(each.positions),
            "" if each.tau is None else str(each.tau),
            f"{each.accuracy:.1%}",
        ]
        for each in groups
    ]
    return [name, "chats", "positions", "tau", "first choice right"], lines


def temperature_table(result: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines: what can be accepted at each temperature."""
    lines = [
        [f"{each.temperature:g}", f"{each.first:.1%}", f"{each.children:.1%}", f"{each.overlap:.1%}"]
        for each in result.by_temperature
    ]
    return ["temperature", "first choice", "any child", "overlap with the target"], lines


def calibration_table(result: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines: how often the first choice is right, by its probability."""
    lines = [
        [f"{each.low:.1f} to {each.high:.1f}", str(each.count), f"{each.probability:.1%}", f"{each.accuracy:.1%}"]
        for each in result.calibration.bins
    ]
    found = result.calibration
    return ["probability", "positions", "mean", "right"], [*lines, ["error", "", f"{found.error:.1%}", ""]]


def sweep_table(result: Diagnosis, shown: int = _SHOWN_SETTINGS) -> tuple[list[str], list[list[str]]]:
    """Return heading and lines: the best other settings."""
    lines = [["present", f"{_present(result):.1%}", "", ""]]
    lines += [
        [str(each.setting), f"{each.accuracy:.1%}", f"{100 * each.gain:+.1f}", f"{each.p_value:.2g}"]
        for each in result.sweep[:shown]
    ]
    return [f"setting (best of {len(result.sweep)})", "first choice right", "gain", "p (corrected)"], lines


def _present(result: Diagnosis) -> float:
    return result.sweep[0].accuracy - result.sweep[0].gain


def _precision_line(result: Diagnosis) -> str:
    found = result.precision
    line = f"head in {found.dtype}, target in {found.target_dtype}: "
    line += f"numbers are not finite at {found.not_finite:.1%} of the positions"
    if found.in_float32 is not None:
        line += f"; first choice right {found.accuracy:.1%}, in float32 {found.in_float32:.1%}"
    return line


def _percent(shares: Sequence[float], at: int) -> str:
    return f"{shares[at]:.1%}" if at < len(shares) else ""


def _share(number: int, total: int) -> str:
    return f"{number / total:.1%}" if total else ""


def _table(title: str, heading: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([title, *_aligned([list(heading), *map(list, lines)])])


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(["  " + first, *others]).rstrip()


__all__ = [
    "calibration_table",
    "cause_table",
    "depth_table",
    "group_table",
    "header_lines",
    "sweep_table",
    "temperature_table",
    "to_text",
]
