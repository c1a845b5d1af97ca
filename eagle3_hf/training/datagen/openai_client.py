"""Answers from a server that speaks the chat API of OpenAI: vLLM, SGLang, llama.cpp, and others.

For targets that need more than this machine. Many chats are asked at once, each in a thread of its own, and the
server batches them as it sees fit.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from ...utils.logging import get_logger
from ..data.chat_template import REASONING_KEYS
from .local_writer import Conversation, WritingSettings


logger = get_logger(__name__)

# A request that the server may answer when it is made again.
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
# One that says something about this chat only: too long for the model, say.
_REFUSED = {400, 413, 422}


class _RefusedError(Exception):
    """The server does not take this chat."""


class _StoppedError(Exception):
    """Another chat has ended the run."""


class ServerWriter:
    """Asks a server for answers.

    Args:
        url: `http://host:8000` or `http://host:8000/v1`.
        model: name that the server knows the target by.
        concurrency: chats asked at once.
        timeout: seconds to wait for an answer; long ones take their time.
        retries: how often a request is made again after a broken connection, a timeout, or a busy server.
        backoff: seconds before the first repetition, doubled each time, up to a minute; a server that names a time
            (Retry-After) is heard.
        api_key: default: the environment variable OPENAI_API_KEY.
    """

    batched = False

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int = 32,
        timeout: float = 600.0,
        retries: int = 5,
        backoff: float = 1.0,
        api_key: str | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server's address is {url!r}; it begins with http:// or https://")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else base + "/v1"
        self.model = model
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self.backoff = backoff
        self._key = api_key or os.environ.get("OPENAI_API_KEY")
        self._stop = threading.Event()

    def check(self) -> None:
        """Ask the server which models it has, before anything else.

        Raises:
            RuntimeError: it cannot be reached, wants a key, or does not have the model.
        """
        known = self._models()
        if known and self.model not in known:
            raise RuntimeError(f"{self.url} does not serve {self.model}, but {', '.join(known)}: name one of them")

    def write(
        self, batches: Sequence[Sequence[Conversation]], settings: WritingSettings
    ) -> Iterator[list[Conversation]]:
        """Every chat when its last answer is there.

        Raises:
            RuntimeError: the server cannot be reached, or refuses key or model.
        """
        self._stop.clear()
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="ask")
        try:
            chats = [chat for batch in batches for chat in batch]
            for future in as_completed([pool.submit(self._converse, chat, settings) for chat in chats]):
                if not isinstance(future.exception(), _StoppedError):  # the one that stopped it is still to come
                    yield [future.result()]
        finally:
            self._stop.set()  # threads leave at their next turn
            pool.shutdown(wait=False, cancel_futures=True)

    def _converse(self, chat: Conversation, settings: WritingSettings) -> Conversation:
        try:
            while chat.wants_answer():
                if self._stop.is_set():
                    raise _StoppedError
                message, finished = self._answer(self._ask(chat, settings))
                chat.answer(message, finished)
        except _RefusedError as error:
            chat.problem = str(error)
        except RuntimeError:
            self._stop.set()
            raise
        return chat

    def _ask(self, chat: Conversation, settings: WritingSettings) -> dict[str, Any]:
        seed = random.Random(f"{settings.seed}/{chat.index}/{chat.turn}").getrandbits(31)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_for_api(message) for message in chat.messages],
            "max_tokens": settings.max_new_tokens,
            "temperature": 0.0 if chat.greedy else settings.temperature,
            "top_p": 1.0,
            "seed": seed,
        }
        if chat.tools:
            body["tools"] = chat.tools
        if settings.template_kwargs:
            body["chat_template_kwargs"] = dict(settings.template_kwargs)
        return self._request("/chat/completions", body | dict(settings.request_extra or {}))

    def _answer(self, reply: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """The message of a reply, thoughts under one key and nulls left out, and whether it came to its end."""
        try:
            choice = reply["choices"][0]
            given = choice["message"]
        except (KeyError, IndexError, TypeError) as error:
            raise RuntimeError(f"{self.url} sent something that is no chat completion: {str(reply)[:300]}") from error
        message = {"role": "assistant", "content": given.get("content") or ""}
        thoughts = next((given[key] for key in REASONING_KEYS if given.get(key)), None)
        if thoughts:
            message["reasoning_content"] = thoughts
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]
        return message, choice.get("finish_reason") in ("stop", "tool_calls")

    def _models(self) -> list[str]:
        try:
            return [str(model["id"]) for model in self._request("/models").get("data") or []]
        except _RefusedError:
            return []

    def _request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The reply to a request, made again while there is hope."""
        for attempt in range(self.retries + 1):
            try:
                return self._send(path, body)
            except urllib.error.HTTPError as error:
                self._raise_final(error, path)
                problem, wait = f"it says {error.code}: {_said(error)}", error.headers.get("Retry-After")
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = getattr(error, "reason", error)
                late = isinstance(reason, TimeoutError)
                problem, wait = f"no answer within {self.timeout:g} seconds" if late else repr(reason), None
            if attempt == self.retries or self._stop.wait(self._delay(attempt, wait)):
                break
            logger.info("%s: %s; asked again (%d of %d)", self.url, problem, attempt + 1, self.retries)
        raise RuntimeError(
            f"{self.url} gave no answer in {attempt + 1} attempts, the last time: {problem}. Is the server up? A "
            "busy one wants a lower concurrency or a longer timeout"
        )

    def _delay(self, attempt: int, wait: str | None) -> float:
        if wait is not None and wait.strip().isdigit():
            return min(60.0, float(wait))
        return min(60.0, self.backoff * 2**attempt)

    def _send(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as reply:
            return json.loads(reply.read())

    def _raise_final(self, error: urllib.error.HTTPError, path: str) -> None:
        """Raise what no repetition would change."""
        if error.code in _PASSING:
            return
        if error.code in (401, 403):
            has = "the key given (OPENAI_API_KEY)" if self._key else "requests without a key: set OPENAI_API_KEY"
            raise RuntimeError(f"{self.url} refuses {has} ({error.code}: {_said(error)})") from error
        if error.code in _REFUSED:
            raise _RefusedError(f"{self.url} refuses it ({error.code}: {_said(error)})") from error
        if error.code == 404 and path == "/models":
            raise RuntimeError(
                f"{self.url} has no chat API (404 for {self.url}/models): is the address right?"
            ) from error
        if error.code == 404:
            raise RuntimeError(f"{self.url} knows no model {self.model} (404: {_said(error)})") from error
        raise RuntimeError(f"{self.url} says {error.code}: {_said(error)}") from error


def _for_api(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON: templates take them as objects, APIs do not."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        if isinstance(call.get("function"), dict) and not isinstance(call["function"].get("arguments", ""), str)
        else call
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _said(error: urllib.error.HTTPError) -> str:
    """What a server wrote about an error, shortened."""
    try:
        text = error.read().decode("utf-8", "replace")
    except OSError:
        text = ""
    return " ".join(text.split())[:300] or str(error.reason)
