"""`eagle3-hf chat`: the answers are the target's own, and each accepted draft has the colour of its source."""

import io
import re

import pytest
import torch

from eagle3_hf.cli import main
from eagle3_hf.commands.live_text import COLOURS, LiveText, StatusLine
from eagle3_hf.decoding.draft.mixture import BOTH, HEAD, LOOKUP
from support.chats import chat_tokenizer
from support.sound_heads import FEW_STEPS, sound_pair


NEW_TOKENS = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Target and head on disk."""
    pair, folder = sound_pair(0, FEW_STEPS), tmp_path_factory.mktemp("chat")
    pair.target.save_pretrained(folder / "target")
    pair.tokenizer.save_pretrained(folder / "target")
    pair.draft.save_pretrained(folder / "head")
    return folder


@pytest.fixture
def chat(folder, monkeypatch, capsys):
    """`chat(lines, options)`: what the command prints for these lines."""

    def run(lines, *options, head=None):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        words = [str(folder / "target"), head or str(folder / "head"), "--max-new-tokens", str(NEW_TOKENS)]
        assert main(["chat", *words, *options]) == 0
        return capsys.readouterr().out

    return run


def plain_answer(messages, **options) -> str:
    """What the target answers without a head."""
    pair = sound_pair(0, FEW_STEPS)
    inputs = pair.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    ids = pair.target.generate(**inputs, max_new_tokens=NEW_TOKENS, **{"do_sample": False, **options})
    return pair.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def answers(shown: str) -> list[str]:
    return re.findall(r"\n> [^/\n]*\n(.*?)\n\[tau ", shown, re.DOTALL)


@pytest.mark.parametrize("head", [None, "lookup"])
def test_answers_are_the_targets_own_and_turns_are_remembered(chat, head):
    shown = chat(["the sea", "", "is wide"], head=head)
    first = plain_answer([user("the sea")])
    second = plain_answer([user("the sea"), {"role": "assistant", "content": first}, user("is wide")])
    assert answers(shown) == [shown_text(first), shown_text(second)]
    assert len(re.findall(r"\[tau \d\.\d\d, [\d.]+ tokens/s; of 14 tokens \d+ were drafted by the head", shown)) == 2


def shown_text(text: str) -> str:
    """Control characters are shown as pictures."""
    return "".join(chr(0x2400 + ord(one)) if ord(one) < 32 and one not in "\n\t" else one for one in text)


def test_reset_quit_and_unknown_commands(chat):
    shown = chat(["the sea", "/reset", "the sea", "/forget", "/quit", "never asked"])
    first, second = answers(shown)
    assert first == second
    assert "the chat is forgotten" in shown
    assert "/forget is not a command: /reset forgets the chat" in shown
    assert "never asked" not in shown


def test_sampled_answers_are_those_of_the_seed(chat):
    shown = chat(["the sea"], "--temperature", "0.8", "--seed", "3", "--system", "poem", "--tree", "6/3/2")
    torch.manual_seed(3)
    messages = [{"role": "system", "content": "poem"}, user("the sea")]
    expected = plain_answer(messages, do_sample=True, temperature=0.8, top_k=0, top_p=1.0)
    assert answers(shown) == [shown_text(expected)]


def test_an_interrupt_stops_one_answer_only(chat, monkeypatch):
    put, calls = LiveText.put, []

    def interrupted(self, value):
        put(self, value)
        calls.append(value)
        if len(calls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(LiveText, "put", interrupted)
    shown = chat(["the sea", "is wide"])
    assert shown.count("[stopped, tau") == 1
    assert shown.count("[tau") == 1
    assert len(calls) > 10


def test_a_target_without_a_template_is_rejected(folder, tmp_path, capsys):
    chat_tokenizer(None).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((folder / "target" / "config.json").read_text())
    assert main(["chat", str(tmp_path), str(folder / "head")]) == 1
    assert "has no chat template: it is not a target to chat with" in capsys.readouterr().err


def test_top_p_needs_a_temperature(folder, capsys):
    assert main(["chat", str(folder / "target"), str(folder / "head"), "--top-p", "0.9"]) == 1
    assert "--top_p 0.9: expected a number of at most 1, and a --temperature above 0" in capsys.readouterr().err


# ----- the text ------------------------------------------------------------------------------------------------------


def written(rounds, coloured: bool = True, tokenizer=None) -> str:
    """What a streamer writes that gets the first token and then rounds of (tokens, sources)."""
    out = io.StringIO()
    text = LiveText(tokenizer or chat_tokenizer(), out, coloured, clock=iter(range(1000)).__next__)
    text.put(torch.tensor([[0, 1, 2]]))
    (first, _), *later = rounds
    text.put(torch.tensor(first))
    for tokens, sources in later:
        text._sources = sources
        for token in tokens:
            text.put(torch.tensor([token]))
        text.end_round(len(tokens) - 1)
    text.end()
    return out.getvalue()


def test_drafts_are_coloured_by_source():
    tokenizer = chat_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abcdef"]
    shown = written([(ids[:1], []), (ids[1:5], [HEAD, LOOKUP, BOTH]), (ids[5:], [])])
    off = "\033[0m"
    assert shown == f"a{COLOURS[HEAD]}b{off}{COLOURS[LOOKUP]}c{off}{COLOURS[BOTH]}d{off}ef"
    assert written([(ids[:1], []), (ids[1:5], [HEAD, LOOKUP, BOTH])], coloured=False) == "abcde"


def test_characters_of_several_tokens_and_control_characters():
    tokenizer = chat_tokenizer()
    ids = tokenizer("é€ x\u009b", add_special_tokens=False)["input_ids"]
    assert len(ids) > 6  # bytes
    rounds = [(ids[:1], []), *(([token], []) for token in ids[1:])]
    assert written(rounds) == "é€ x\ufffd"
    escape = tokenizer("\x1b[2J\n", add_special_tokens=False)["input_ids"]
    assert written([(escape[:1], []), (escape[1:], [])]) == "␛[2J\n"
    # Half a character at the end is written when the text has ended.
    assert written([(ids[:1], []), (ids[1:3], [])]) == "é\ufffd"


def test_tau_and_speed():
    seen = []
    text = LiveText(
        chat_tokenizer(), io.StringIO(), False, lambda *figures: seen.append(figures), iter([0, 2, 4]).__next__
    )
    for value in ([[5, 6]], [7]):
        text.put(torch.tensor(value))
    assert text.tau == 0.0
    for tokens in ([8, 9, 10], [11]):
        for token in tokens:
            text.put(torch.tensor([token]))
        text.end_round(len(tokens) - 1)
    assert seen == [(3.0, 3 / 2), (2.0, 4 / 4)]
    assert text.token_ids == [7, 8, 9, 10, 11]


def test_the_status_line_is_the_last_of_the_terminal():
    out, size = io.StringIO(), [20, 10]
    with StatusLine(out, lambda: tuple(size)) as line:
        assert out.getvalue().endswith("\033[1;9r\0338")
        line.show("tau 2.00, 31.4 tokens/s")
        assert "\033[10;1H\033[2K\033[7mtau 2.00, 31.4 token\033[0m\0338" in out.getvalue()
        size[1] = 30  # the window was enlarged
        line.show("tau")
        assert "\033[1;29r" in out.getvalue()
    assert out.getvalue().endswith("\0337\033[r\033[30;1H\033[2K\0338")
