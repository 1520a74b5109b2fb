"""Makes grammars in a process of its own, which is killed if one takes too long: some take exponential time.

The process reads one JSON object a line, with a `kind` and a `value`, and answers with one that has the `grammar` or
an `error`.
"""

import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import IO, Any

from llguidance import LLMatcher

from vocabulary.grammars import GRAMMAR_CHARS_MAX, limits, of_choices, of_ebnf, of_json_schema, of_regex, of_tool_calls

_DEADLINE_S = 2.0
"""Seconds that a grammar may take."""
_START_S = 30.0
"""Seconds that the process may take to start."""
_MEMORY_BYTES = 2 << 30
"""Address space of the process."""
_ERROR_CHARS = 300


class GrammarKind(StrEnum):
    """The notation that a grammar is made of."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "grammar"
    TOOL_CALL = "tool_call"


class GrammarProcess:
    """The process, which starts with the first grammar. Thread-safe; one grammar is made at a time."""

    def __init__(self, deadline_s: float = _DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def make(self, kind: GrammarKind, value: Any) -> str:
        """Return the grammar; raises ValueError for a value that makes none, or that takes too long."""
        line = json.dumps({"kind": kind, "value": value}).encode() + b"\n"
        if len(line) > 2 * GRAMMAR_CHARS_MAX:
            raise ValueError(f"has {len(line)} bytes as JSON, the limit is {2 * GRAMMAR_CHARS_MAX}")
        with self._lock:
            answer = self._ask(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["grammar"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes) -> Mapping[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            self._end()
            raise ValueError("could not be compiled; send it again") from None
        answer = _line(process.stdout, self._deadline_s)
        if answer is None:
            self._end()
            raise ValueError(f"takes more than {self._deadline_s:g} s or too much memory to compile; simplify it")
        found: Mapping[str, Any] = json.loads(answer)
        return found

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "vocabulary.grammar_process"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert process.stdout is not None
        if _line(process.stdout, _START_S) is None:
            process.kill()
            process.wait()
            raise ValueError("cannot be compiled now, as no process starts; see the router's log")
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._process = None


def _line(stream: IO[bytes], seconds: float) -> bytes | None:
    """Return the next line, None if there is none in time."""
    give_up, read = time.monotonic() + seconds, b""
    while (left := give_up - time.monotonic()) > 0 and select.select([stream], [], [], left)[0]:
        piece: bytes = stream.read1(1 << 16)  # type: ignore[attr-defined]
        if not piece:
            return None
        read += piece
        if read.endswith(b"\n"):
            return read
    return None


_MAKERS: Mapping[str, Callable[[Any], str]] = {
    GrammarKind.JSON_SCHEMA: of_json_schema,
    GrammarKind.REGEX: of_regex,
    GrammarKind.CHOICE: of_choices,
    GrammarKind.EBNF: of_ebnf,
    GrammarKind.TOOL_CALL: of_tool_calls,
}


def _made(line: str) -> dict[str, str]:
    try:
        asked = json.loads(line)
        grammar = _MAKERS[asked["kind"]](asked["value"])
        reason = LLMatcher.validate_grammar(grammar, None, limits=limits())
        if reason and not reason.startswith("WARNING"):
            return {"error": f"cannot be followed: {' '.join(reason.split())[:_ERROR_CHARS]}"}
        return {"grammar": grammar}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": str(error)[:_ERROR_CHARS] or type(error).__name__}


def main() -> None:
    """Run the process until its input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print("{}", flush=True)
    for line in sys.stdin:
        # A parent that dies meanwhile kills nobody: the kernel does.
        seconds = int(time.process_time() + 2 * _DEADLINE_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        print(json.dumps(_made(line)), flush=True)


if __name__ == "__main__":
    main()
