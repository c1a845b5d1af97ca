"""A trace says what happened in each round, and the page shows it; the text is that of a call that nobody watches."""

import json
import re

import pytest
import torch

import eagle3_hf
from eagle3_hf import Eagle3DraftModel, LookupDraft
from eagle3_hf.decoding.loop import SpeculativeDecoding
from eagle3_hf.evaluation.misses import Cause
from eagle3_hf.evaluation.trace.page import page_data, to_html
from eagle3_hf.evaluation.trace.words import pieces, word
from support.chats import chat_tokenizer
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
