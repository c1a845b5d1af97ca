"""A trace says what happened in each round, and the page shows it; the text is that of a call that nobody watches."""

import json
import re

import pytest
import torch

import eagle3_hf
from eagle3_hf import Eagle3DraftModel, LookupDraft
from eagle3_hf.cli import main
from eagle3_hf.decoding.loop import SpeculativeDecoding
from eagle3_hf.evaluation.misses import Cause
from eagle3_hf.evaluation.trace.page import page_data, to_html
from eagle3_hf.evaluation.trace.words import pieces, word
from support.browser import in_browser
from support.chats import chat_tokenizer, tiny_target
from support.drafts import SAMPLED, new_draft, set_tree, target_of
from support.families import prompt


TOKENS = 24
IDS = prompt(9, 3)


@pytest.fixture(scope="module")
def target():
    return target_of("llama")


@pytest.fixture(scope="module")
def draft(target):
    return set_tree(new_draft(target, half=True), "cpu")


def traced(target, draft, seed=0, **options):
    """A trace of a head that is told the text, and the text."""
    options = {"max_new_tokens": TOKENS, **options}
    torch.manual_seed(seed)
    plain = target.generate(IDS, **{name: value for name, value in options.items() if name != "assistant_lookup"})
    if isinstance(draft, Eagle3DraftModel):
        draft.foretell(plain[:, IDS.shape[1] :], seed)
    return eagle3_hf.trace(target, draft, IDS, seed=seed, **options), plain[0, IDS.shape[1] :].tolist()


def check_whole(found, text):
    """Every token comes from a round, and every number adds up."""
    assert list(found.tokens) == text
    stats = found.stats
    assert len(found.rounds) == stats.rounds
    at = 1  # the first token comes from the prefill
    for each in found.rounds:
        assert each.start == at
        assert list(each.emitted) == text[at : at + len(each.emitted)]
        at += len(each.emitted)
        path = [each.nodes[index] for index in each.path]
        assert path[0].token == text[each.start - 1]
        assert [node.token for node in path[1:]] == list(each.emitted[: each.num_accepted])
        assert [node.depth for node in path] == list(range(len(path)))
        assert each.cause is None or each.has_choice
        assert all(each.nodes[node.parent].depth == node.depth - 1 for node in each.nodes[1:])
        assert all(0 <= node.target_probability <= 1 for node in each.nodes)
        assert all((node.source == "lookup") == (node.head_probability is None) for node in each.nodes[1:])
        assert each.num_candidates >= len(each.nodes) - 1
        assert each.seconds >= each.draft_seconds > 0
    assert at == len(text)
    assert sum(len(each.nodes) - 1 for each in found.rounds) == stats.drafted
    assert sum(each.num_accepted for each in found.rounds) == sum(stats.accepted)
    assert sum(each.draft_seconds for each in found.rounds) == pytest.approx(stats.draft_seconds)


@pytest.mark.parametrize("lookup", [False, True], ids=["head", "head and lookup"])
@pytest.mark.parametrize("mode", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_trace(mode, lookup, target, draft):
    found, text = traced(target, draft, assistant_lookup=lookup, **mode)
    check_whole(found, text)
    missed = [each for each in found.rounds if each.cause is not None]
    assert missed
    half = set(draft.draft_vocab_ids().tolist())
    for each in missed:
        token, depth = each.emitted[-1], each.num_accepted + 1
        elsewhere = [node for node in each.nodes if node.depth == depth and node.token == token]
        if each.cause is Cause.OUTSIDE_VOCABULARY:
            assert token not in half
        if each.cause is Cause.WRONG_ANCESTOR:
            assert elsewhere
        assert (each.pruned_value is not None) == (each.cause is Cause.PRUNED)
    if not lookup:
        assert all(each.cause is Cause.OUTSIDE_VOCABULARY for each in missed if each.emitted[-1] not in half)
        assert {node.source for each in found.rounds for node in each.nodes} == {"root", "head"}
    assert sum(found.causes.values()) == len(missed)
    said = str(found)
    assert f"of {len(found.rounds)} rounds {len(missed)} ended with a miss" in said


def test_a_trace_of_lookup_alone(target):
    ids = torch.cat([IDS, IDS, IDS], 1)
    plain = target.generate(ids, max_new_tokens=12)[0, ids.shape[1] :].tolist()
    found = eagle3_hf.trace(target, LookupDraft(8), ids, max_new_tokens=12)
    check_whole(found, plain)
    assert {node.source for each in found.rounds for node in each.nodes} <= {"root", "lookup"}
    assert Cause.OUTSIDE_VOCABULARY not in {each.cause for each in found.rounds}


def test_the_largest_probability_is_the_greedy_choice(target, draft):
    found, _ = traced(target, draft, assistant_lookup=False)
    for each in found.rounds:
        if each.has_choice:
            tail = each.path[-1]
            rivals = [node.target_probability for node in each.nodes if node.parent == tail]
            assert all(each.choice_probability >= chance for chance in rivals)


def test_nothing_is_left_behind(target, draft):
    before = {name: getattr(SpeculativeDecoding, name) for name in ("_round", "_propose", "_verify", "_accept")}
    with pytest.raises(ValueError, match="one text, got 2"):
        eagle3_hf.trace(target, draft, IDS, max_new_tokens=3, num_return_sequences=2, do_sample=True)
    assert before == {name: getattr(SpeculativeDecoding, name) for name in before}


@pytest.mark.parametrize("inputs", [prompt(4, rows=2), prompt(4)[0], {"inputs_embeds": None}], ids=str)
def test_one_prompt_only(inputs, target, draft):
    with pytest.raises(ValueError, match=r"a trace takes one prompt, input_ids of shape \(1, P\), got"):
        eagle3_hf.trace(target, draft, inputs, max_new_tokens=3)


# ----- tokens as text ------------------------------------------------------------------------------------------------

TEXTS = [
    "plain words, and more\n\n\tindented",
    "<b>bold</b> & </script><script>alert('x')</script>",
    "שלום עולם, مرحبا بالعالم",
    "naïve 😀👩‍👩‍👧 end",
    "\u202eturned\u202c zero\u200bwidth\x00\x1b",
]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_text(text):
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces(tokenizer.decode, ids)) == text
    for cut in range(1, len(ids)):
        found = pieces(tokenizer.decode, ids[cut:], ids[:cut])
        if not tokenizer.decode(ids[:cut]).endswith("\ufffd"):
            assert tokenizer.decode(ids[:cut]) + "".join(found) == text


def test_a_text_that_ends_within_a_character():
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    assert pieces(tokenizer.decode, ids) == ["a", "", "", "", "😀"]
    assert pieces(tokenizer.decode, ids[:-1]) == ["a", "", "", "\ufffd"]
    assert word(tokenizer.decode, ids[1]) == f"#{ids[1]}"
    assert pieces(None, [7, 8]) == [" 7", " 8"]
    assert word(None, 7) == "7"


# ----- the page ------------------------------------------------------------------------------------------------------


def test_the_page_carries_the_trace(target, draft, tmp_path):
    found, text = traced(target, draft)
    odd = dict(enumerate(TEXTS))
    found.decode = lambda tokens: "".join(odd.get(token % 11, f" w{token}") for token in tokens)
    found.save(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page == to_html(found)
    carried = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
    assert carried == page_data(found)
    assert [token for token, _ in carried["text"]] == text
    assert len(carried["rounds"]) == len(found.rounds)
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(" not in page.replace("\\u003cscript>alert(", "")
    assert "default-src 'none'" in page
    assert not re.search(r"https?://|src=|url\(", page)


def test_a_text_without_rounds(target, draft):
    found = eagle3_hf.trace(target, draft, IDS, max_new_tokens=1)
    assert found.rounds == ()
    assert "1 tokens in 0 rounds" in to_html(found)


def test_the_command(tokenizer, tmp_path, capsys):
    torch.manual_seed(0)
    target = tiny_target(tokenizer)
    target.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    Eagle3DraftModel.from_target(target).save_pretrained(tmp_path / "head")
    words = ["trace", str(tmp_path / "target"), str(tmp_path / "head"), "--max-new-tokens", "6", "--tree", "4/2/2"]
    page = tmp_path / "new" / "a.html"
    assert main([*words, "--html", str(page), "--text", "The sea <b>", "--no-lookup", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "mean acceptance length (tau)" in said
    assert f"written: {page}" in said
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert main([*words, "--temperature", "0.7", "--prompt", "What is the sea?"]) == 0
    assert "--html FILE writes a page" in capsys.readouterr().out
    assert main([*words, "--html", str(tmp_path)]) == 1
    assert "is a folder: name a file" in capsys.readouterr().err


# ----- in a browser --------------------------------------------------------------------------------------------------

ODD = [*TEXTS, "\n", "\n\n", "<b>bold</b>", " &amp;", "\t", "\u00a0", "\u2028", "a" * 60, "  two ", "", "日本語"]
# Steps through the page as a reader does, and tells what is seen.
STEPS = """<script>
const ids = () => [...document.querySelectorAll(".text .token")]
  .filter((each) => getComputedStyle(each).display !== "none").map((each) => +each.dataset.id);
const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const place = () => document.querySelector("output").textContent;
const overflow = () => [...document.querySelectorAll("body *")].filter(
  (each) => !each.closest(".strip") && each.getBoundingClientRect().right > innerWidth + 1).length;
const colour = getComputedStyle(document.body).backgroundColor;
const seen = { rounds: [], inner: innerWidth, scrolled: 0, wide: 0, colour };
press("End"); seen.end = [place(), ids()];
press("ArrowRight"); seen.beyond = place();
press("Home"); seen.home = [place(), ids()];
press("ArrowLeft"); seen.before = place();
const count = document.querySelectorAll(".strip button").length;
for (let index = 0; index < count; index++) {
  if (index) press("ArrowRight");
  const rows = [...document.querySelectorAll(".tree .row[data-id]")];
  const chips = rows.map((row) => row.querySelector(".chip"));
  const boxes = chips.map((chip) => chip.getBoundingClientRect());
  seen.wide += overflow();
  seen.scrolled = Math.max(seen.scrolled, document.documentElement.scrollWidth);
  seen.rounds.push({
    place: place(), ids: ids(), nodes: rows.map((row) => +row.dataset.id),
    accepted: rows.filter((row) => row.classList.contains("accepted")).map((row) => +row.dataset.id),
    verdict: document.querySelector(".verdict").textContent,
    narrow: Math.min(...boxes.map((box) => box.width)), low: Math.min(...rows.map((row) => row.offsetHeight)),
    small: Math.min(...chips.map((chip) => parseFloat(getComputedStyle(chip).fontSize))),
    overlaps: boxes.slice(1).filter((box, at) => box.top < boxes[at].bottom - 1).length,
  });
}
document.querySelectorAll(".strip button")[1].click(); seen.clicked = place();
document.querySelector(".steps button:last-of-type").click(); seen.last = place();
seen.markup = document.querySelectorAll("main b:not(.node b), main script, main img").length;
seen.words = document.querySelector(".tree").textContent + document.querySelector(".text").textContent;
seen.turned = /[\\u202e\\u0000\\u001b]/.test(document.querySelector("main").textContent);
parent.document.documentElement.dataset.seen = JSON.stringify(seen);
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser(width, dark, target, tmp_path):
    """Keys and clicks reach every round, each shows the generated ids, and trees of 60 nodes can be read."""
    found, text = traced(target, set_tree(new_draft(target, half=True), "paper"), max_new_tokens=60)
    found.decode = lambda tokens: "".join(
        ODD[token % 23] if token % 23 < len(ODD) else f" w{token}" for token in tokens
    )
    said, log = in_browser(to_html(found), STEPS, width, dark, tmp_path)
    assert "CONSOLE" not in log, log
    seen, rounds = json.loads(said), found.rounds
    whole = f"Round {len(rounds)} of {len(rounds)}"
    first = text[: rounds[0].start + len(rounds[0].emitted)]
    assert seen["end"] == [whole, text]
    assert seen["beyond"] == seen["last"] == whole
    assert seen["home"] == [f"Round 1 of {len(rounds)}", first]
    assert seen["before"] == seen["home"][0]
    assert seen["clicked"] == f"Round 2 of {len(rounds)}"
    assert max(len(each.nodes) for each in rounds) == 60
    for each, shown in zip(rounds, seen["rounds"], strict=True):
        assert shown["ids"] == text[: each.start + len(each.emitted)]
        assert sorted(shown["nodes"]) == sorted(node.token for node in each.nodes)
        assert shown["accepted"] == [each.nodes[index].token for index in each.path]
        assert ("right. " in shown["verdict"]) == (len(each.nodes) > 1)
        assert ("outside the draft vocabulary" in shown["verdict"]) == (each.cause is Cause.OUTSIDE_VOCABULARY)
        assert shown["narrow"] >= 14
        assert shown["low"] >= 22
        assert shown["small"] >= 13
        assert shown["overlaps"] == 0
    assert seen["inner"] == width
    assert seen["scrolled"] <= width
    assert seen["wide"] == 0
    assert seen["markup"] == 0
    assert not seen["turned"]
    assert "<b>bold</b>" in seen["words"]
    assert seen["colour"] == ("rgb(22, 22, 22)" if dark else "rgb(255, 255, 255)")
