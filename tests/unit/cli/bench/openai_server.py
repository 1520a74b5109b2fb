"""A small server with OpenAI's HTTP API, which streams as many tokens as requests ask for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONTEXT = 400
TEMPLATE_TOKENS, TOKENS_PER_WORD = 11, 2


class _ThreadingServer(ThreadingHTTPServer):
    request_queue_size = 128  # with the default, 5, connections of many clients at once are reset


class OpenAIServer:
    """Answers completions and chats; `asked` has the requests. Answers of `refused_tokens` are refused with 429."""

    handler: type[BaseHTTPRequestHandler]

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.refused_tokens = 7
        self.broken_tokens = 9
        """Answers of this length end with an error within the stream."""
        self.token_s = 0.0
        self.counts_usage = True
        self.key = ""

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves until the end of the context; yields http://HOST:PORT."""
        handler = type("Handler", (self.handler,), {"server_state": self})
        with _ThreadingServer(("127.0.0.1", 0), handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()

    @property
    def streamed(self) -> list[dict[str, Any]]:
        """The requests of loads, without those of the warm-up."""
        return [body for body in self.asked if body.get("stream")]


class Handler(BaseHTTPRequestHandler):
    server_state: OpenAIServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._answer(404, {"error": {"message": "no such path"}})
        else:
            self._answer(200, {"data": [{"id": "listed", "max_model_len": CONTEXT}, {"id": "second"}]})

    def do_POST(self) -> None:
        state = self.server_state
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state.asked.append({**request, "path": self.path, "key": self.headers["Authorization"]})
        if state.key and self.headers["Authorization"] != f"Bearer {state.key}":
            self._answer(401, {"error": {"message": "wrong key"}})
        elif request["max_tokens"] == state.refused_tokens:
            self._answer(429, {"error": {"message": "busy"}})
        elif request.get("stream"):
            self._stream(request)
        else:
            self._answer(200, {"usage": {"prompt_tokens": _prompt_tokens(request)}})

    def _stream(self, request: dict[str, Any]) -> None:
        state, wanted = self.server_state, int(request["max_tokens"])
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = "messages" in request
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for number in range(wanted):
            time.sleep(state.token_s)
            text = f" {number}"
            self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
        if wanted == state.broken_tokens:
            self._event({"error": {"message": "the engine died", "code": "engine_dead"}})
        elif state.counts_usage:
            usage = {"prompt_tokens": _prompt_tokens(request), "completion_tokens": wanted}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, data: dict[str, Any]) -> None:
        """Sends an event in two chunks, the first of which ends within its line."""
        line = f"data: {json.dumps(data)}\n\n".encode()
        self._chunk(line[:9])
        self._chunk(line[9:])

    def _chunk(self, content: bytes) -> None:
        try:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        except OSError:  # the client has gone
            self.close_connection = True

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


def _prompt_tokens(request: dict[str, Any]) -> int:
    if "messages" in request:
        words = sum(len(message["content"].split()) for message in request["messages"])
        return TEMPLATE_TOKENS + TOKENS_PER_WORD * words
    prompt = request["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


OpenAIServer.handler = Handler
