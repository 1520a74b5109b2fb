"""A small OpenAI server whose answers depend on the prompt, with the defects that `tandem check` looks for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.unit.cli.bench.openai_server import Handler, OpenAIServer

TOKEN_S = 0.01
SEND_BUFFER_BYTES = 4096
PADDING = b": " + b"x" * (1 << 15) + b"\n"
"""A comment that makes events so long that a client which does not read blocks their sender."""


class Defect(StrEnum):
    NONE = "none"
    LEAKED_REQUESTS = "requests stay after their clients have left"
    ABORTED_NEIGHBOURS = "a client that leaves ends the other answers, too"
    STALE_PAGES = "the next prompt gets pages of a cancelled one"
    UNWRITTEN_PREFIX = "a cancelled prompt is cached although it was not computed"
    SHARED_IDS = "requests with the same id get each other's tokens"
    REFUSED_IDS = "an id in use is refused, which a server may do"
    ONE_SENDER = "a client that does not read blocks all others"
    CUT_SLOW_READERS = "a client that does not read gets an incomplete answer that looks complete"
    UNSTABLE = "every fifth answer is another one"
    NEAR_TIES = "every fifth answer has a token that is nearly as likely"
    MISCOUNTED_ANSWER = "completion_tokens is too large"
    MISCOUNTED_PROMPT = "prompt_tokens depends on streaming"
    TRUNCATED_AT_RESTART = "answers end early at a restart, as if they were complete"
    ERRORS_AT_RESTART = "answers end with an error at a restart, which a server may do"
    DEAD_AFTER_RESTART = "no request succeeds after a restart"
    NO_DONE = "the stream ends without [DONE]"
    NO_OPTIONS = "fields that are not OpenAI's are refused"
    REUSED_HAND_OVERS = "the decode server reads the pages of the last prompt"


def tokens_of(prompt: str, count: int) -> list[str]:
    """Returns the right answer."""
    return [f" {hashlib.sha256(f'{prompt} {at}'.encode()).hexdigest()[:5]}" for at in range(count)]


class DefectiveServer(OpenAIServer):
    """Answers completions; `folder` has the files by which it and the restart command wait for each other."""

    def __init__(self, defect: Defect, folder: Path) -> None:
        super().__init__()
        self.defect = defect
        self.stopping, self.held, self.restarted = folder / "stopping", folder / "held", folder / "restarted"
        self.token_s = TOKEN_S
        self.inside = self.answers = self.departures = 0
        self.cancelled: str = ""
        self.unwritten: set[str] = set()
        self.last_of_id: dict[str, str] = {}
        self.ids_in_use: set[str] = set()
        self.prefilled: list[str] = []
        self.hands_over = True
        self.lock = threading.Lock()
        self.sending = threading.Lock()

    @property
    def restart_command(self) -> str:
        """The command of a restart, during which at least one answer runs."""
        wait = f"until [ -e {self.held} ]; do sleep 0.01; done"
        return f"touch {self.stopping}; {wait}; touch {self.restarted}"

    def hold_until_restarted(self) -> None:
        """Holds an answer that begins during a restart."""
        while self.stopping.exists() and not self.restarted.exists():
            self.held.touch()
            time.sleep(TOKEN_S)

    def prompt_for(self, request: dict[str, Any], request_id: str) -> str:
        """Returns the prompt that is answered: another one if the server has such a defect."""
        prompt = str(request["prompt"])
        handed_over = (request.get("kv_transfer_params") or {}).get("remote_block_ids")
        if handed_over is not None:
            late = self.defect is Defect.REUSED_HAND_OVERS and handed_over != len(self.prefilled) - 1
            return self.prefilled[-1 if late else handed_over]
        if self.defect is Defect.STALE_PAGES and self.cancelled not in ("", prompt):
            prompt, self.cancelled = self.cancelled, ""
        if prompt in self.unwritten and "cache_salt" not in request and self.defect is Defect.UNWRITTEN_PREFIX:
            return f"unwritten {prompt}"
        if request_id and self.defect is Defect.SHARED_IDS:
            return self.last_of_id.setdefault(request_id, prompt)
        return prompt

    def answer_to(self, prompt: str, request: dict[str, Any]) -> list[str]:
        """Returns the tokens of the next answer."""
        self.answers += "cache_salt" not in request
        count = int(request["max_tokens"])
        tokens = tokens_of(prompt, count)
        if self.answers % 5 == 0 and self.defect in (Defect.UNSTABLE, Defect.NEAR_TIES):
            tokens[1:] = tokens_of(f"other {prompt}", count)[1:]
        return tokens


class DefectiveHandler(Handler):
    """Handles one connection of a `DefectiveServer`."""

    server_state: DefectiveServer

    def do_GET(self) -> None:
        if self.path == "/metrics":
            content = f"vllm:num_requests_running {self.server_state.inside}\n".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        state = self.server_state
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request_id = self.headers["X-Request-Id"] or ""
        options = {"cache_salt", "logprobs", "ignore_eos"} & set(request)
        if state.defect is Defect.NO_OPTIONS and options:
            return self._answer(400, {"error": {"message": f"unknown fields {options}"}})
        if state.defect is Defect.DEAD_AFTER_RESTART and state.restarted.exists():
            return self._answer(500, {"error": {"message": "the engine died"}})
        with state.lock:
            if state.defect is Defect.REFUSED_IDS and request_id and request_id in state.ids_in_use:
                return self._answer(409, {"error": {"message": "this id is in use"}})
            state.ids_in_use.add(request_id)
            state.inside += 1
            prompt = state.prompt_for(request, request_id)
            tokens = state.answer_to(prompt, request)
            if (request.get("kv_transfer_params") or {}).get("do_remote_decode"):
                request["handed_over"] = {"remote_block_ids": len(state.prefilled)} if state.hands_over else None
                state.prefilled.append(prompt)
        left = self._left_while_answered(request, tokens)
        with state.lock:
            state.ids_in_use.discard(request_id)
            if left:
                state.departures += 1
                state.cancelled = prompt
                state.unwritten.add(prompt)
            if not (left and state.defect is Defect.LEAKED_REQUESTS):
                state.inside -= 1
        return None

    def _left_while_answered(self, request: dict[str, Any], tokens: list[str]) -> bool:
        """Sends the answer; returns True if its client has left before the end."""
        try:
            if request.get("stream"):
                return self._stream_tokens(request, tokens)
            for _ in tokens:
                time.sleep(self.server_state.token_s)
                if self._client_left():
                    return True
            self._answer(200, self._body(request, tokens))
        except OSError:
            return True
        return False

    def _stream_tokens(self, request: dict[str, Any], tokens: list[str]) -> bool:
        state = self.server_state
        padded = state.defect is Defect.ONE_SENDER
        if padded:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        departures, began_restarted = state.departures, state.restarted.exists()
        state.hold_until_restarted()
        for at, token in enumerate(tokens):
            time.sleep(state.token_s)
            if self._client_left():
                return True
            if state.defect is Defect.ABORTED_NEIGHBOURS and state.departures > departures:
                self._send({"choices": [self._choice(request, "", "abort")]})
                break
            if not began_restarted and state.restarted.exists():
                if state.defect is Defect.ERRORS_AT_RESTART:
                    self._send({"error": {"message": "the worker died"}})
                    break
                if state.defect is Defect.TRUNCATED_AT_RESTART:
                    self._send({"choices": [self._choice(request, "", "stop")]})
                    break
            # The check's slow readers are its only clients that ask for log probabilities without a salt.
            slow = bool(request.get("logprobs")) and "cache_salt" not in request
            if state.defect is Defect.CUT_SLOW_READERS and slow and at:
                self._send({"choices": [self._choice(request, "", "length")]})
                break
            last = at == len(tokens) - 1
            for index in range(request.get("n", 1)):
                choice = {**self._choice(request, token, "length" if last else None), "index": index}
                self._send({"choices": [choice]}, padded=padded)
        self._send({"choices": [], "usage": self._usage(request, tokens)})
        if state.defect is not Defect.NO_DONE or "cache_salt" in request:
            self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return False

    def _send(self, event: dict[str, Any], *, padded: bool = False) -> None:
        one = self.server_state.sending if self.server_state.defect is Defect.ONE_SENDER else contextlib.nullcontext()
        with one:
            self.wfile.write((PADDING if padded else b"") + f"data: {json.dumps(event)}\n\n".encode())

    def _choice(self, request: dict[str, Any], text: str, reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "finish_reason": reason, "logprobs": self._logprobs(request, [text])}

    def _logprobs(self, request: dict[str, Any], tokens: list[str]) -> dict[str, Any] | None:
        if not request.get("logprobs") or tokens == [""]:
            return None
        other = tokens_of(f"other {request['prompt']}", 2)[1]
        near = -0.9 if self.server_state.defect is Defect.NEAR_TIES else -4.0
        likely = [{token: -0.6, other: near} for token in tokens]
        return {"tokens": tokens, "token_logprobs": [-0.6] * len(tokens), "top_logprobs": likely}

    def _body(self, request: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
        choice = {"text": "".join(tokens), "finish_reason": "length", "logprobs": self._logprobs(request, tokens)}
        body = {
            "choices": [{**choice, "index": index} for index in range(request.get("n", 1))],
            "usage": self._usage(request, tokens),
        }
        return body | ({"kv_transfer_params": request["handed_over"]} if "handed_over" in request else {})

    def _usage(self, request: dict[str, Any], tokens: list[str]) -> dict[str, int]:
        defect = self.server_state.defect
        prompt = len(request["prompt"].split()) + (defect is Defect.MISCOUNTED_PROMPT and not request.get("stream"))
        completion = len(tokens) * request.get("n", 1) + (defect is Defect.MISCOUNTED_ANSWER)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""


DefectiveServer.handler = DefectiveHandler


@contextlib.contextmanager
def defective_server(defect: Defect, folder: Path) -> Iterator[tuple[str, DefectiveServer]]:
    """Yields the URL of a server with this defect, and the server."""
    server = DefectiveServer(defect, folder)
    with server.running() as url:
        yield f"{url}/v1", server
