"""Answers from a server: real requests, a tiny target behind them, and every way in which it can fail."""

import importlib
import json
import logging
import sys
import threading
import time

import pytest

from eagle3_hf.training.datagen.local_writer import Conversation, TargetWriter, WritingSettings
from eagle3_hf.training.datagen.openai_client import ServerWriter
from eagle3_hf.training.datagen.regeneration import Regeneration
from support.chat_server import Fault, chat_server, reply
from support.chats import chat_tokenizer, tiny_target


SETTINGS = WritingSettings(model="tiny", max_new_tokens=8, greedy_share=1.0)
PROMPTS = [{"prompt": f"What is {i}?"} for i in range(6)]
CHAT = {"messages": [{"role": role, "content": "x"} for role in ("user", "assistant") * 2]}


def ask(url, prompts, path, settings=SETTINGS, **options):
    options = {"timeout": 5.0, "concurrency": 3, **options}
    writer = ServerWriter(url, "tiny", **options)
    return Regeneration(prompts, path, settings).run(writer, progress=False)


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_target_behind_a_server_answers_as_one_in_this_process(tmp_path):
    tokenizer = chat_tokenizer()
    target = tiny_target(tokenizer)
    local = TargetWriter.of(target, tokenizer, SETTINGS)
    lock = threading.Lock()

    def answer(body):
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("tiny", 8, 0.0, 1.0)
        chat = Conversation(0, [*body["messages"], None], greedy=True)
        with lock:  # one model, many threads
            ((done,),) = local.write([[chat]], SETTINGS)
        return reply(done.messages[-1]["content"], "stop" if done.finished else "length")

    prompts = [CHAT, *({"messages": [{"role": "user", "content": row["prompt"]}]} for row in PROMPTS)]
    with chat_server(answer) as (url, requests):
        assert ask(url, prompts, tmp_path / "server") == 7
    Regeneration(prompts, tmp_path / "local", SETTINGS).run(local, progress=False)
    assert (tmp_path / "server").read_bytes() == (tmp_path / "local").read_bytes()
    assert {path for path, _, _ in requests} == {"/v1/chat/completions"}


def test_what_is_asked(tmp_path):
    seen = []
    settings = WritingSettings(
        model="tiny",
        temperature=0.7,
        greedy_share=0.0,
        template_kwargs={"enable_thinking": False},
        request_extra={"top_k": -1},
    )
    tools = [{"type": "function", "function": {"name": "add"}}]
    with chat_server(lambda body: seen.append(body) or reply("Yes.")) as (url, requests):
        ask(url + "/v1/", [{**CHAT, "tools": tools}], tmp_path / "a", settings, api_key="secret")
        ask(url, [CHAT], tmp_path / "b", settings)
    first, second, *again = seen
    assert first["temperature"] == 0.7
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert first["top_k"] == -1
    assert first["tools"] == tools
    assert [message["content"] for message in second["messages"]] == ["x", "Yes.", "x"]
    assert first["seed"] != second["seed"]
    assert [body["seed"] for body in again] == [first["seed"], second["seed"]]
    assert requests[0][1]["Authorization"] == "Bearer secret"
    assert lines_of(tmp_path / "a")[0]["tools"] == json.dumps(tools)


def test_thoughts_cuts_and_calls(tmp_path):
    """Thoughts are kept under one key; an answer that was cut ends its chat unfinished; so does a call of a tool."""
    call = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    replies = {
        "thinks": reply("Four.", reasoning_content="Two and two."),
        "reasons": reply("Four.", reasoning="Two and two."),
        "is cut": reply("Fo", "length"),
        "calls": reply(None, "tool_calls", tool_calls=call),
    }
    prompts = [{"messages": [{"role": "user", "content": name}, *CHAT["messages"][1:]]} for name in replies]
    with chat_server(lambda body: replies.get(body["messages"][-1]["content"], reply("Then."))) as (url, _):
        assert ask(url, prompts, tmp_path / "a") == 4
    thinks, reasons, cut, calls = lines_of(tmp_path / "a")
    thoughtful = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    assert thinks["messages"][1] == reasons["messages"][1] == thoughtful
    assert thinks["messages"][-1]["content"] == "Then."
    assert (len(cut["messages"]), cut["finished"]) == (2, False)
    assert calls["messages"][1:] == [{"role": "assistant", "content": "", "tool_calls": call}]
    assert calls["finished"] is True


@pytest.mark.parametrize("fault", [Fault(0), Fault(500, "oops"), Fault(503), Fault(429, "busy")])
def test_a_request_is_repeated_after_a_passing_fault(tmp_path, fault, caplog):
    failed = set()

    def answer(body):
        key = json.dumps(body["messages"])
        if key not in failed:
            failed.add(key)
            raise fault
        return reply("Yes.")

    with caplog.at_level(logging.INFO, logger="eagle3_hf"), chat_server(answer) as (url, requests):
        assert ask(url, PROMPTS, tmp_path / "a") == 6
    assert len(requests) == 12
    assert caplog.text.count("Retrying request") == 6


def test_a_pause_that_the_server_asks_for_is_granted(tmp_path):
    times = []

    def answer(body):
        times.append(time.monotonic())
        if len(times) == 1:
            raise Fault(429, "busy", Retry_After="1")  # the first pause would be half a second at most
        return reply("Yes.")

    with chat_server(answer) as (url, _):
        ask(url, PROMPTS[:1], tmp_path / "a")
    assert times[1] - times[0] > 0.9


def raising(fault):
    def answer(body):
        raise fault

    return answer


@pytest.mark.parametrize(
    ("fault", "key", "message"),
    [
        (Fault(401, "no key"), None, r"rejects requests without a key: set OPENAI_API_KEY \(401: no key\)"),
        (Fault(403, "bad"), "wrong", r"rejects the key given \(OPENAI_API_KEY\) \(403: bad\)"),
        (Fault(404, "who?"), None, r"knows no model tiny \(404: who\?\)"),
        (Fault(418, "tea"), None, "says 418: tea"),
        (Fault(500, "oops"), None, "gave no answer in 3 attempts, the last time: it says 500: oops"),
        (Fault(0), None, "gave no answer in 3 attempts, the last time: Server disconnected"),
    ],
)
def test_lasting_faults_end_the_run_with_a_reason(tmp_path, fault, key, message, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with chat_server(raising(fault)) as (url, _), pytest.raises(RuntimeError, match=message):
        ask(url, PROMPTS, tmp_path / "a", api_key=key, retries=2)


def test_a_reply_that_makes_no_sense(tmp_path):
    with chat_server(lambda body: {"error": "none"}) as (url, _), pytest.raises(RuntimeError, match="no chat compl"):
        ask(url, PROMPTS, tmp_path / "a")
    page = Fault(200, "<html>It works!</html>")
    with chat_server(raising(page)) as (url, _), pytest.raises(RuntimeError, match="no chat completion: <html>It"):
        ask(url, PROMPTS, tmp_path / "b")


def test_a_server_that_is_slow_or_absent(tmp_path):
    with chat_server(lambda body: time.sleep(0.5) or reply("Late.")) as (url, _):
        with pytest.raises(RuntimeError, match="no answer within 0.1 seconds"):
            ask(url, PROMPTS[:1], tmp_path / "a", timeout=0.1, retries=1)
        absent = url
    with pytest.raises(RuntimeError, match=r"Connection ?[Rr]efused"):
        ServerWriter(absent, "tiny", retries=1).check()


def test_a_chat_that_the_server_refuses_is_left_out(tmp_path, caplog):
    def answer(body):
        if body["messages"][0]["content"] == "What is 3?":
            raise Fault(400, "maximum context length is 10 tokens")
        return reply("Yes.")

    with chat_server(answer) as (url, _):
        assert ask(url, PROMPTS, tmp_path / "a") == 5
        assert "Chat 3 has no answer" in caplog.text
        assert "maximum context length" in caplog.text
        assert [line["index"] for line in lines_of(tmp_path / "a")] == [0, 1, 2, 4, 5]
    with (
        chat_server(raising(Fault(400, "no such field: seed"))) as (url, _),
        pytest.raises(RuntimeError, match=r"none of the first 6 prompts could be answered.*no such field"),
    ):
        ask(url, PROMPTS, tmp_path / "b")


def test_what_was_answered_before_a_fault_is_kept(tmp_path):
    """The run after it asks for the rest only, and ends at the file of a run without faults."""
    broken = threading.Event()

    def answer(body):
        number = int(body["messages"][0]["content"][8])
        if number > 3 and not broken.is_set():
            time.sleep(0.1)  # after the others
            raise Fault(401, "expired")
        return reply(f"It is {number}.")

    with chat_server(answer) as (url, requests):
        with pytest.raises(RuntimeError, match="expired"):
            ask(url, PROMPTS, tmp_path / "a", concurrency=1)
        kept = len((tmp_path / "a.part-000-of-001").read_text().splitlines())
        assert 0 < kept < 6
        broken.set()
        before = len(requests)
        assert ask(url, PROMPTS, tmp_path / "a") == 6 - kept
        assert len(requests) - before == 6 - kept
        ask(url, PROMPTS, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_chats_are_asked_side_by_side(tmp_path):
    together = threading.Barrier(3, timeout=5)

    def answer(body):
        together.wait()
        return reply("Yes.")

    with chat_server(answer) as (url, _):
        assert ask(url, PROMPTS, tmp_path / "a", concurrency=3) == 6


def test_the_server_is_asked_for_its_models_first():
    with chat_server(raising(Fault(500)), models=("big", "small")) as (url, requests):
        ServerWriter(url, "small").check()
        with pytest.raises(RuntimeError, match="does not serve tiny, but big, small: name one of them"):
            ServerWriter(url, "tiny").check()
        assert requests[0][0] == "/v1/models"
    with pytest.raises(ValueError, match="'localhost:8000'; it must begin with http"):
        ServerWriter("localhost:8000", "tiny")
    with pytest.raises(ValueError, match="concurrency is 0"):
        ServerWriter("http://localhost", "tiny", concurrency=0)


def test_a_server_without_a_list_of_models(monkeypatch):
    """What rejects the question does not matter; what answers it with something else is no chat server."""
    with chat_server(None, models=Fault(400, "no such thing")) as (url, _):
        ServerWriter(url, "tiny").check()
    with (
        chat_server(None, models=Fault(200, "<html>It works!</html>")) as (url, _),
        pytest.raises(RuntimeError, match="sent no list of models: is the address right"),
    ):
        ServerWriter(url, "tiny").check()


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_token_of_the_hub_goes_to_no_server(tmp_path, monkeypatch, key):
    """Neither one of the environment nor one that was saved; only a key that was given for the server."""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN"):
        monkeypatch.setenv(name, "hf_of_the_environment")
    saved = tmp_path / "home" / "token"
    saved.parent.mkdir()
    saved.write_text("hf_saved")
    monkeypatch.setenv("HF_HOME", str(saved.parent))
    monkeypatch.setenv("HF_TOKEN_PATH", str(saved))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(saved))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    with chat_server(lambda body: reply("Yes.")) as (url, requests):
        ServerWriter(url, "tiny").check()
        ask(url, [CHAT], tmp_path / "a")
    assert [path for path, _, _ in requests] == ["/v1/models", *["/v1/chat/completions"] * 2]
    for _, headers, body in requests:
        assert headers["Authorization"] == (f"Bearer {key}" if key else None)
        assert "hf_" not in f"{headers}{body}"


def test_without_the_package_the_extra_is_named(monkeypatch):
    name = "eagle3_hf.training.datagen.openai_client"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openai", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'need the package openai.*pip install "eagle3-hf\[server\]"'):
        importlib.import_module(name)


def test_a_wrong_address():
    with chat_server(raising(Fault(500))) as (url, _), pytest.raises(RuntimeError, match="no chat API .404"):
        ServerWriter(url + "/nowhere", "tiny").check()
