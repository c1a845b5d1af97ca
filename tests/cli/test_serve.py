"""`eagle3-hf serve`: transformers' own server with a head, whose packages .ci/serving installs."""

import gc
import importlib.util
import re
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import main
from eagle3_hf.commands import serve
from eagle3_hf.decoding.attachments import attachment_of
from support.chats import chat_tokenizer, tiny_target


needs_server = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")),
    reason="the extra `serving` is not installed",
)
QUESTIONS = ["Sing.", "What is the sea?", "Write a poem", "Hello"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    target = tiny_target(tokenizer)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    torch.manual_seed(1)
    Eagle3DraftModel.from_target(target).save_pretrained(folder / "head")
    return str(folder / "target"), str(folder / "head")


# ----- without a server ----------------------------------------------------------------------------------------------


def test_words(capsys, folders):
    target, head = folders
    assert main(["serve", "--help"]) == 0
    assert "usage: eagle3-hf serve TARGET HEAD [OPTIONS of transformers serve]" in capsys.readouterr().out
    for words in (["serve", target], ["serve", "--port", "9", target, head], ["serve", target, "--port"]):
        assert main(words) == 1
        assert "TARGET and HEAD come first: eagle3-hf serve TARGET HEAD" in capsys.readouterr().err
    assert main(["serve", "no/such/target/at/all", head]) == 1
    assert "is neither a local folder nor a Hub id" in capsys.readouterr().err
    assert main(["serve"]) == 2


def test_options_reach_the_server_unchanged(monkeypatch, folders):
    target, head = folders
    seen = []
    monkeypatch.setattr(serve, "_serve", seen.append)
    monkeypatch.setattr(serve, "attaching", lambda head: contextmanager(lambda: (yield seen.append(head)))())
    assert main(["serve", target, head, "--port", "9", "--chat_template_kwargs", '{"a_b": 1}', "--compile"]) == 0
    assert seen == [head, [target, "--port", "9", "--chat_template_kwargs", '{"a_b": 1}', "--compile"]]
    words = ["--chat_template_kwargs", '{"a_b": 1}', "--log_level=info"]
    assert [serve._hyphens(word) for word in words] == ["--chat-template-kwargs", '{"a_b": 1}', "--log-level=info"]


def test_a_transformers_without_such_a_server_is_named(monkeypatch, folders, capsys):
    monkeypatch.setattr(serve, "_LOADERS", (("no_such_module", "ModelManager"), ("serve", "NoSuchClass")))
    monkeypatch.setattr("transformers.__version__", "5.0.0")
    assert main(["serve", *folders]) == 1
    assert "transformers 5.0.0 has no server whose models a head can be attached to" in capsys.readouterr().err


# ----- with one ------------------------------------------------------------------------------------------------------


@contextmanager
def serving(target: str, head: str):
    """transformers' server in a thread, on a free port; gives a client and the server."""
    import openai
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serve.attaching(head):
        place = {"host": "127.0.0.1", "port": port, "device": "cpu", "dtype": "float32"}
        server = Serve(force_model=target, **place, non_blocking=True)
        while not server.server.started:
            time.sleep(0.05)
        try:
            yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0), server
        finally:
            server.kill_server()


def ask(client, target: str, number: int, **options):
    question = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    return client.chat.completions.create(model=target, messages=question, temperature=0, **options)


def text_of(answer) -> str:
    if hasattr(answer, "choices"):
        return answer.choices[0].message.content
    return "".join(part.choices[0].delta.content or "" for part in answer if part.choices)


def expected(target: str, number: int, length: int) -> str:
    """What the same model writes without a server and without a head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(target), AutoModelForCausalLM.from_pretrained(target)
    chat = [{"role": "user", "content": QUESTIONS[number]}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=length, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


@needs_server
@pytest.mark.slow
def test_a_hundred_requests(folders, capfd):
    """Streaming and not, some cancelled, from several clients at once: the text is the model's own."""
    target, head = folders
    texts = [expected(target, number, 24) for number in range(len(QUESTIONS))]
    wrong: list = []
    capfd.readouterr()
    with serving(target, head) as (client, server):
        model = next(iter(server._model_manager.loaded_models.values())).model
        assert attachment_of(model) is not None

        def work(first: int) -> None:
            for number in range(first, first + 25):
                stream = number % 2 == 0
                if number % 5 == 4:  # cancelled
                    answer = ask(client, target, number, max_tokens=200, stream=True)
                    next(iter(answer))
                    answer.close()
                    continue
                text = text_of(ask(client, target, number, max_tokens=24, stream=stream))
                if text != texts[number % len(QUESTIONS)]:
                    wrong.append((number, text))

        work(0)
        gc.collect()
        before = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
        threads = [threading.Thread(target=work, args=(25 * part,)) for part in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        text_of(ask(client, target, 0, max_tokens=4))  # all others are done: one thread runs them in order
        gc.collect()
        after = sum(isinstance(each, torch.Tensor) for each in gc.get_objects())
    assert not wrong
    assert after <= before + 20, "nothing piles up"
    lines = re.findall(r"drafted (\d+) tokens in (\d+) rounds, accepted (\d+)", capfd.readouterr().out)
    assert len(lines) >= 80
    assert sum(int(rounds) for _, rounds, _ in lines) > 80


@needs_server
def test_the_head_is_attached_when_the_server_loads_its_model(folders):
    from transformers.cli.serving.model_manager import ModelManager

    target, head = folders
    original = ModelManager.load_model_and_processor
    with serve.attaching(head):
        manager = ModelManager(device="cpu", force_model=target)
        model, _ = manager.load_model_and_processor(target)
        attached = attachment_of(model)
        assert isinstance(attached.draft, Eagle3DraftModel)
        assert attachment_of(manager.load_model_and_processor(target)[0]) is attached, "once"
    assert ModelManager.load_model_and_processor is original
    manager.shutdown()
