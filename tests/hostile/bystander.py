"""The other tenant: one stream after the other from a process of its own, and the longest waits between its tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType

import httpx

PROMPT_TOKENS = 24
ANSWER_TOKENS = 64
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0)
"""The waits between the five tries of an answer, as the SDKs of the field have them."""


@dataclass
class Waits:
    """The longest waits of one tenant, in seconds, and the numbers of its answers and of the tries that failed."""

    gap_s: float = 0.0
    """Between two messages with tokens of one stream."""
    first_token_s: float = 0.0
    """From the first try to the first token."""
    answers: int = 0
    retries: int = 0
    why: str = ""
    """The reason of the last try that failed."""
    failures: list[str] = field(default_factory=list)


class Bystander:
    """Streams from a process of its own for the length of a `with`; `waits` has what it saw."""

    def __init__(self, address: str, key: str) -> None:
        self._command = [sys.executable, "-m", "tests.hostile.bystander", address, key]
        self.waits = Waits()

    def __enter__(self) -> Bystander:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "streaming\n", "the first answer failed"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate("", timeout=300)
        self.waits = Waits(**json.loads(output))


def watch(address: str, key: str, stop: threading.Event) -> Waits:
    """Send prompts that nobody sent before, one at a time, until `stop` is set."""
    waits, headers = Waits(), {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"http://{address}/v1", headers=headers, timeout=300) as client:
        while not stop.is_set():
            _answer_with_retries(client, waits, stop)
            if waits.answers == 1 and not stop.is_set():
                print("streaming", flush=True)
                break
        while not stop.is_set():
            _answer_with_retries(client, waits, stop)
    return waits


def _answer_with_retries(client: httpx.Client, waits: Waits, stop: threading.Event) -> None:
    """Count an answer, or a failure after the last try."""
    began = time.monotonic()
    for pause_s in (*BACK_OFF_S, None):
        try:
            _one_answer(client, waits, stop, began)
            waits.answers += 1
            return
        except (httpx.HTTPError, AssertionError) as error:
            if pause_s is None:
                waits.failures.append(f"{type(error).__name__}: {error}")
                return
            waits.retries += 1
            waits.why = f"{type(error).__name__}: {error}"
            time.sleep(pause_s)


def _one_answer(client: httpx.Client, waits: Waits, stop: threading.Event, began: float) -> None:
    seed = time.time_ns()
    body = {
        "prompt": [3 + (seed >> number) % 4000 for number in range(PROMPT_TOKENS)],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    measured, last, generated = waits.answers > 0, None, 0
    with client.stream("POST", "/completions", json=body) as reply:
        if reply.status_code != 200:
            raise AssertionError(f"{reply.status_code} {reply.read()[:300]!r}")
        for line in reply.iter_lines():
            if line.startswith("event: error") or line.startswith('data: {"error"'):
                raise AssertionError(line[:300])
            if not line.startswith("data: {"):
                continue
            if (usage := json.loads(line.removeprefix("data: ")).get("usage")) is not None:
                generated = usage["completion_tokens"]
                continue
            now = time.monotonic()
            if measured and last is None:
                waits.first_token_s = max(waits.first_token_s, now - began)
            elif measured and last is not None:
                waits.gap_s = max(waits.gap_s, now - last)
            last = now
            if stop.is_set():
                return
    if generated != ANSWER_TOKENS:
        raise AssertionError(f"an answer of {generated} tokens instead of {ANSWER_TOKENS}")


def main() -> None:
    """Stream until standard input ends, then print the waits as JSON."""
    stop = threading.Event()

    def wait_for_end() -> None:
        with suppress(OSError):
            sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    print(json.dumps(asdict(watch(sys.argv[1], sys.argv[2], stop))))


if __name__ == "__main__":
    main()
