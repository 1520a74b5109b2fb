"""The router that is fuzzed, and the number of cases."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, settings

from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tests.soak import SOAKING
from tests.unit.router.fuzz.router_process import KEYS, RouterState

CASES = 50_000 if SOAKING else 600
"""The number of cases of all properties together: the same ones in each `make test`, new ones in each `make soak`."""
_QUIET_WITHIN_S = 60.0
IDLE_S = 4.0
"""Less than the time after which the router closes an idle connection."""
AUTHORIZATION, HOSTILE_AUTHORIZATION = (f"Bearer {key}" for key in KEYS)
ANSWERED = {"model": "fake", "prompt": [5, 6, 7, 8], "max_tokens": 2}
ROOT = Path(__file__).parents[4]


def cases(share: float) -> settings:
    """Returns the settings of a property with this share of all cases, half of them for each kind of `router`."""
    return settings(
        max_examples=max(1, round(share * CASES / 2)),
        derandomize=not SOAKING,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


class FuzzedRouter:
    """A client of a `router_process`, which it starts."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.router.fuzz.router_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.http_address, self.grpc_address = self._ask(str(model))
        host, port = self.http_address.split(":")
        self.http_listener = host, int(port)
        self._http = http.client.HTTPConnection(*self.http_listener, timeout=60)
        self._asked = 0
        self._answered_at = time.monotonic()
        self.channel = grpc.insecure_channel(self.grpc_address)
        self._stub = inference_pb2_grpc.InferenceStub(self.channel)

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def state(self) -> RouterState:
        """Returns the router's current state."""
        return RouterState(**self._ask("state"))

    def memory_mib(self) -> float:
        """Returns the resident memory of the router's process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def send(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Sends one whole HTTP request over a persistent connection; returns status, headers and body."""
        idle_s = time.monotonic() - self._answered_at
        try:
            self._http.putrequest(method, path, skip_accept_encoding=True)
            for name, value in [*headers, ("Content-Length", str(len(body)))]:
                self._http.putheader(name, value)
            self._http.endheaders(body)
            reply = self._http.getresponse()
            self._answered_at = time.monotonic()
            return reply.status, reply.headers, reply.read()
        except http.client.CannotSendRequest:
            self._http.close()
            raise
        except ConnectionError:
            self._http.close()
            # Between two examples the connection may have been idle for as long as the router keeps one.
            if idle_s < IDLE_S:
                raise
            self._answered_at = time.monotonic()
            return self.send(method, path, headers, body)

    def assert_next_one_works(self, every: int = 1) -> None:
        """Asserts that one request over HTTP and one over gRPC succeed; checked only every `every`th time."""
        self._asked += 1
        if self._asked % every:
            return
        headers = [("Authorization", AUTHORIZATION)]
        status, _, body = self.send("POST", "/v1/completions", headers, json.dumps(ANSWERED).encode())
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 2)
        asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7, 8]), options=pb.GenerationOptions(max_tokens=2))
        *_, last = self._stub.Generate(asked, metadata=(("authorization", AUTHORIZATION),), timeout=60)
        assert last.complete.completion_tokens == 2

    def assert_quiet(self) -> RouterState:
        """Waits until router and workers are idle, asserts that no error was logged, and returns the final state."""
        deadline_s = time.monotonic() + _QUIET_WITHIN_S
        lag_s = turn_cpu_s = 0.0
        while True:
            state = self.state()
            assert not state.errors
            lag_s, turn_cpu_s = max(lag_s, state.lag_s), max(turn_cpu_s, state.turn_cpu_s)
            if not (state.requests or state.worker_requests):
                return RouterState(0, 0, (), lag_s, turn_cpu_s)
            assert time.monotonic() < deadline_s, state
            time.sleep(0.02)

    def close(self) -> None:
        """Ends the process."""
        self._http.close()
        self.channel.close()
        self._process.communicate(timeout=60)


@pytest.fixture(scope="package")
def running_router(model: Path) -> Iterator[FuzzedRouter]:
    """A router, started once."""
    router = FuzzedRouter(model)
    yield router
    router.close()


@pytest.fixture
def router(running_router: FuzzedRouter) -> Iterator[FuzzedRouter]:
    """The router, which must serve and be idle at the end of each test."""
    router = running_router
    yield router
    router.assert_next_one_works()
    router.assert_quiet()
