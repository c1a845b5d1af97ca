"""A chat server as vLLM's and SGLang's are, in a thread of the test: real requests, faults on demand."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Fault(Exception):
    """A reply other than an answer: a status with headers and text, or a connection that breaks (status 0)."""

    def __init__(self, status, text="", **headers):
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


def reply(content, finish_reason="stop", **message):
    return {
        "choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}]
    }


@contextmanager
def chat_server(answer, models=("tiny",)):
    """Yields the address, and the list of all requests: (path, headers, body); names of headers in either case.

    `answer(body)` returns the reply to a chat request, or raises a `Fault`; `models` are the names that the server
    lists, or a `Fault`.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._serve(None, self._models)

        def _models(self, body):
            if self.path != "/v1/models":
                raise Fault(404, "not found")
            if isinstance(models, Fault):
                raise models
            return {"data": [{"id": name} for name in models]}

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._serve(body, answer)

        def _serve(self, body, answer):
            with suppress(ConnectionError):  # the client may have stopped waiting
                self._reply(body, answer)

        def _reply(self, body, answer):
            requests.append((self.path, self.headers, body))
            try:
                self._send(200, json.dumps(answer(body)), {})
            except Fault as fault:
                if fault.status:
                    self._send(fault.status, fault.text, fault.headers)
                else:
                    self.close_connection = True

        def _send(self, status, text, headers):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
