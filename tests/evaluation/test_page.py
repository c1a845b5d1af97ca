"""The page: it needs nothing but itself, and shows every figure."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.evaluation.bench import benchmark_columns
from eagle3_hf.evaluation.differences import TextDifference
from eagle3_hf.evaluation.runs import Benchmark
from support.benchmarks import QUESTIONS, Pretended
from support.browser import in_browser


pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
from eagle3_hf.evaluation import plots  # noqa: E402
from eagle3_hf.evaluation.page import by_batch, to_html  # noqa: E402


VOID = {"meta", "link", "br", "path", "use", "rect", "circle", "line"}


class Outline(HTMLParser):
    """Ids, links and the nesting of tags."""

    def __init__(self, page: str):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values[name] for name in ("href", "src", "xlink:href") if name in values]
        self.links += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for value in values.values()))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def result(target, tokenizer, tmp_path_factory):
    """Two settings and a column whose name is no HTML and no mathematics."""
    odd = TextDifference("<odd> $x$", "poems/a", 3, "different", "<b>one", "two & more", "three", 9.0, 0.2)
    heads = {"head": Eagle3DraftModel.from_target(target)}
    columns = benchmark_columns(heads, ["4/2/2", "3/3/1"], ["<odd> $x$:tree=4/2/2"])
    path = tmp_path_factory.mktemp("page") / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle3_hf.evaluation.runs.measure", Pretended())
        patch.setattr("eagle3_hf.evaluation.runs.text_differences", lambda *args, **kwargs: [odd])
        run = Benchmark(target, heads, tokenizer, QUESTIONS, columns, path, temperatures=[0, 1], max_new_tokens=[20])
        return run.run(progress=False)


@pytest.fixture(scope="module")
def text(result):
    return to_html(result)


def test_a_page_needs_no_other_file(text):
    page = Outline(text)
    assert page.open == ["html"] or page.open == []
    assert page.links
    assert all(link.startswith(("#", "data:,")) for link in page.links)
    ids = set(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= ids
    assert len(page.ids) == len(ids)
    assert "<script" not in text


def test_a_page_shows_every_column_and_setting(text):
    page = Outline(text)
    for words in (
        "greedy, batch size 1",
        "temperature 1, batch size 1",
        "prompt lookup",
        "head 3/3/1 (chain: n-alpha)",
    ):
        assert words in page.text
    assert text.count("<svg") == 2 * 5 + 1
    assert "<odd> $x$, poems/a (greedy, batch size 1, at most 20 new tokens): different at new token 3" in page.text
    assert "<odd>" not in text
    assert "<b>one" not in text


def test_colours_are_those_of_the_page(text):
    for plot in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL):
        assert "var(--ink)" in plot
        assert not re.search(r"#0000(0[12]|a\d)", plot)
        assert not re.search(r"(fill|stroke): #(?!none)[0-9a-f]{3,6}", plot), "a colour that ignores a dark page"
        assert re.match(r"<svg[^>]* viewBox=", plot)
        assert not re.match(r"<svg[^>]* width=", plot)
    used = {int(index) for index in re.findall(r"var\(--series-(\d)\)", text)}
    assert used <= set(range(plots.NUM_SERIES))
    for index in range(plots.NUM_SERIES):
        assert text.count(f"--series-{index}:") == 2, "one colour for a light page and one for a dark one"


def test_plots_of_few_figures(result):
    """One column, one point: no plot may fail."""
    plain = [result.of("plain")]
    assert "<svg" in plots.speedups(plain, result.columns)
    assert plots.speedups(plain, result.columns) == plots.speedups(plain, result.columns), (
        "a page is the same each time"
    )
    assert "<svg" in plots.time_split(plain)
    assert "<svg" in plots.machine_over_time([1.0, 1.0])


# ----- in a browser --------------------------------------------------------------------------------------------------

MEASURE = """<script>
const wide = [...document.querySelectorAll("body *")].filter(
  (each) => !each.closest(".table") && each.getBoundingClientRect().right > innerWidth + 1);
parent.document.documentElement.dataset.seen = [innerWidth, document.documentElement.scrollWidth, wide.length,
  document.querySelectorAll("svg text").length, getComputedStyle(document.body).backgroundColor].join(" ");
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(width, dark, text, tmp_path):
    """At the widths of a phone and of a screen: no error in the console, nothing sticks out, the theme is followed."""
    seen, log = in_browser(text, MEASURE, width, dark, tmp_path)
    assert "CONSOLE" not in log, log
    inner, scrolled, wide, texts, *colour = seen.split()
    assert int(inner) == width
    assert int(scrolled) <= width
    assert int(wide) == 0
    assert int(texts) > 50
    assert "".join(colour) == ("rgb(22,22,22)" if dark else "rgb(255,255,255)")


@pytest.mark.slow
def test_what_a_browser_would_complain_of_is_seen(tmp_path):
    page = "<!DOCTYPE html><p style='width: 900px'>wide<script>undefined.x</script>"
    seen, log = in_browser(page, MEASURE, 390, False, tmp_path)
    assert "CONSOLE" in log
    inner, scrolled, wide, *_ = seen.split()
    assert int(scrolled) > int(inner)
    assert int(wide) > 0


def test_batch_sizes_are_plotted_against_each_other(result):
    """Two sizes of one temperature and length make a plot; the settings of other pages do not."""
    setting, columns = result.figures[0].setting, result.columns
    figures = [each for each in result.figures if each.setting == setting]
    larger = [replace(each, setting=replace(setting, batch_size=4)) for each in figures]
    assert not [*by_batch(result)]
    (shown,) = by_batch(replace(result, figures=[*result.figures, *larger]))
    assert shown.startswith("<figure><figcaption>Speed-up by batch size")
    whole = [each for each in figures if each.task is None]
    assert plots.speedups_by_batch({1: whole, 4: whole}, columns) in shown
