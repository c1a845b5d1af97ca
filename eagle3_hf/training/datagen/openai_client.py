"""Answers from a server that speaks the chat API of OpenAI: vLLM, SGLang, llama.cpp, and others.

This is for targets that need more than this machine. Many chats are asked at once, each in a thread of its own, and
the server batches them as it sees fit. The `openai` package makes the requests, and repeats those that may succeed
the next time.
"""

import contextlib
import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from ...utils.logging import shown_with_ours
from ..data.chat_template import REASONING_KEYS
from .errors import ServerError
from .local_writer import Conversation, WritingSettings


try:
    import openai
except ImportError as error:
    raise ImportError(
        'answers from a server need the package openai, which is not installed: pip install "eagle3-hf[server]"'
    ) from error

# Status codes that say something about this chat only: it is too long for the model, say.
_REJECTED = {400, 413, 422}
# Those below 500 after which the package repeats a request, as after all from 500 on.
_REPEATED = {408, 409, 429}


class _RejectedError(Exception):
    """The server does not take this chat."""


class _StoppedError(Exception):
    """Another chat has ended the run."""


class ServerWriter:
    """Asks a server for answers.

    The only secret that the server is sent is the API key. Tokens for the Hugging Face Hub are not read here.

    Args:
        url: `http://host:8000` or `http://host:8000/v1`.
        model: name that the server knows the target by.
        concurrency: number of chats asked at once.
        timeout: seconds to wait for an answer; long answers take their time.
        retries: how often a request is repeated after a broken connection, a timeout or an error of a busy server.
            The pauses grow to eight seconds, so that the default waits for half a minute; a pause of up to two
            minutes that the server asks for (Retry-After) is granted.
        api_key: key of the server. Default: the environment variable OPENAI_API_KEY; without one no key is sent.

    Raises:
        ValueError: the concurrency is below 1, or the address has no scheme.
    """

    batched = False

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int = 32,
        timeout: float = 600.0,
        retries: int = 7,
        api_key: str | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; it must be at least 1")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server's address is {url!r}; it must begin with http:// or https://")
        base = url.rstrip("/")
        self.url = base if base.endswith("/v1") else base + "/v1"
        self.model = model
        self.concurrency = concurrency
        self.timeout = timeout
        self.retries = retries
        self._key = api_key or os.environ.get("OPENAI_API_KEY")
        # The package asks for a key even where the server wants none.
        self._headers: dict[str, Any] = {} if self._key else {"Authorization": openai.Omit()}
        self._stop = threading.Event()

    def check(self) -> None:
        """Ask the server which models it has, before anything else.

        Raises:
            ServerError: the server cannot be reached, requires a key, or does not have the model.
        """
        with self._client() as client:
            known = self._models(client)
        if known and self.model not in known:
            raise ServerError(f"{self.url} does not serve {self.model}, but {', '.join(known)}: name one of them")

    def write(
        self, batches: Sequence[Sequence[Conversation]], settings: WritingSettings
    ) -> Iterator[list[Conversation]]:
        """Yield every chat when its last answer is there.

        Raises:
            ServerError: the server cannot be reached, or rejects the key or the model.
        """
        self._stop.clear()
        chats = [chat for batch in batches for chat in batch]
        with self._client() as client:
            pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="ask")
            try:
                for future in as_completed([pool.submit(self._converse, client, chat, settings) for chat in chats]):
                    if not isinstance(future.exception(), _StoppedError):  # the one that stopped it is still to come
                        yield [future.result()]
            finally:
                self._stop.set()  # threads leave at their next turn, and closing the client ends their repetitions
                pool.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _client(self) -> Iterator[openai.OpenAI]:
        """A client for one run; its lines about repeated requests are shown where ours are."""
        with (
            shown_with_ours("openai"),
            openai.OpenAI(
                base_url=self.url, api_key=self._key or "none", timeout=self.timeout, max_retries=self.retries
            ) as client,
        ):
            yield client

    def _converse(self, client: openai.OpenAI, chat: Conversation, settings: WritingSettings) -> Conversation:
        try:
            while chat.wants_answer():
                if self._stop.is_set():
                    raise _StoppedError
                message, finished = self._answer(self._ask(client, chat, settings))
                chat.answer(message, finished)
        except _RejectedError as error:
            chat.problem = str(error)
        except RuntimeError:
            self._stop.set()
            raise
        return chat

    def _ask(self, client: openai.OpenAI, chat: Conversation, settings: WritingSettings) -> str:
        """The text of the server's reply: the types of the package know no thoughts."""
        messages: list[Any] = [_for_api(message) for message in chat.messages]
        template = {"chat_template_kwargs": dict(settings.template_kwargs)} if settings.template_kwargs else {}
        try:
            reply = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                max_tokens=settings.max_new_tokens,
                temperature=0.0 if chat.greedy else settings.temperature,
                top_p=1.0,
                seed=random.Random(f"{settings.seed}/{chat.index}/{chat.turn}").getrandbits(31),
                tools=chat.tools or openai.omit,
                extra_body=template | dict(settings.request_extra or {}),
                extra_headers=self._headers,
            )
        except openai.APIError as error:
            raise self._in_words(error, not_found=f"{self.url} knows no model {self.model}") from error
        return reply.http_response.text

    def _answer(self, reply: str) -> tuple[dict[str, Any], bool]:
        """The message of a reply, thoughts under one key and nulls left out, and whether it came to its end."""
        try:
            choice = json.loads(reply)["choices"][0]
            given = choice["message"]
            message = {"role": "assistant", "content": given.get("content") or ""}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url} sent something that is no chat completion: {_shortened(reply)}") from error
        thoughts = next((given[key] for key in REASONING_KEYS if given.get(key)), None)
        if thoughts:
            message["reasoning_content"] = thoughts
        if given.get("tool_calls"):
            message["tool_calls"] = given["tool_calls"]
        return message, choice.get("finish_reason") in ("stop", "tool_calls")

    def _models(self, client: openai.OpenAI) -> list[str]:
        """Names of the models that the server has; none where it does not list them."""
        try:
            return [str(model.id) for model in client.models.list(extra_headers=self._headers)]
        except openai.APIError as error:
            missing = f"{self.url} has no chat API (404 for {self.url}/models): is the address right?"
            problem = self._in_words(error, not_found=missing)
            if isinstance(problem, _RejectedError):
                return []
            raise problem from error
        except (AttributeError, TypeError, ValueError) as error:  # the package found no list in the reply
            raise ServerError(f"{self.url}/models sent no list of models: is the address right?") from error

    def _in_words(self, error: openai.APIError, not_found: str) -> Exception:
        """Return what an error means that is left after all repetitions.

        Args:
            error: Error of the package.
            not_found: What the status 404 means.

        Returns:
            `_RejectedError` if the server rejects this chat only, else `ServerError`.
        """
        if isinstance(error, openai.APIStatusError):
            code = error.status_code
            said = f"{code}: {_shortened(error.response.text) or error.response.reason_phrase}"
            if code in (401, 403):
                has = "the key given (OPENAI_API_KEY)" if self._key else "requests without a key: set OPENAI_API_KEY"
                return ServerError(f"{self.url} rejects {has} ({said})")
            if code in _REJECTED:
                return _RejectedError(f"{self.url} rejects it ({said})")
            if code == 404:
                return ServerError(f"{not_found} ({said})")
            if code < 500 and code not in _REPEATED:
                return ServerError(f"{self.url} says {said}")
            problem = f"it says {said}"
        elif isinstance(error, openai.APITimeoutError):
            problem = f"no answer within {self.timeout:g} seconds"
        else:
            cause = error.__cause__ or error
            problem = str(cause).rstrip(".") or type(cause).__name__
        attempts = 1 + int(error.request.headers.get("x-stainless-retry-count", self.retries))
        return ServerError(
            f"{self.url} gave no answer in {attempts} attempts, the last time: {problem}. Is the server up? If it is "
            "busy, lower the concurrency or raise the timeout"
        )


def _for_api(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON: templates take them as objects, APIs do not."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        if isinstance(call.get("function"), dict) and not isinstance(call["function"].get("arguments", ""), str)
        else call
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _shortened(text: str) -> str:
    """The beginning of what a server wrote, on one line."""
    return " ".join(text.split())[:300]
