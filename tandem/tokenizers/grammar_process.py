"""Creates and compiles grammars in a separate process, which is killed if a grammar takes too long.

The process reads one JSON object per line, with a `kind` and a `value`, and responds with an object that has the
`grammar` or an `error`. It compiles with the same limits as workers: no worker rejects a grammar that passes here.
"""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from tandem.protocol.errors import InvalidArgument, TandemError
from tandem.tokenizers.grammars import (
    GRAMMAR_CHARS_MAX,
    Grammars,
    of_choices,
    of_ebnf,
    of_json_schema,
    of_regex,
    of_tool_calls,
)

_DEADLINE_S = 2.0
"""Maximum time in seconds to compile a grammar and compute its first mask."""
_START_S = 30.0
"""Maximum time in seconds for the process to start, which includes loading the model's tokenizer."""
_POLL_S = 0.05
"""Maximum delay in seconds until a cancellation by the client is noticed."""
_MEMORY_BYTES = 512 << 20
"""Address space in bytes that compiling a grammar may add to that of the process with its tokenizer loaded."""
_ERROR_CHARS = 300


class GrammarKind(StrEnum):
    """The notation that a grammar is created from."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "grammar"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True, slots=True)
class GrammarTokens:
    """The tokens over which grammars are compiled; see `Grammars`."""

    folder: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class GrammarProcess:
    """Starts the process with the first grammar, and supervises it; the process compiles one grammar at a time.

    Thread-safe.
    """

    def __init__(self, tokens: GrammarTokens, deadline_s: float = _DEADLINE_S) -> None:
        self._tokens = tokens
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def make(self, kind: GrammarKind, value: Any, unwanted: threading.Event | None = None) -> str:
        """Create and compile the grammar of `value`, and return its text.

        Raises ValueError if no grammar can be made of the value, or if its compilation takes too long. If `unwanted` is
        set meanwhile, the process is killed and ValueError is raised.
        """
        line = json.dumps({"kind": kind, "value": value}).encode() + b"\n"
        if len(line) > 2 * GRAMMAR_CHARS_MAX:
            raise ValueError(f"has {len(line)} bytes as JSON, the limit is {2 * GRAMMAR_CHARS_MAX}")
        with self._lock:
            answer = self._ask(line, unwanted or threading.Event())
        if "error" in answer:
            raise ValueError(answer["error"])
        return str(answer["grammar"])

    def close(self) -> None:
        """Kill the process."""
        with self._lock:
            self._end()

    def _ask(self, line: bytes, unwanted: threading.Event) -> Mapping[str, Any]:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._process = self._start(unwanted)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError:
            self._end()
            raise ValueError("could not be compiled; send it again") from None
        answer = _line(process.stdout, self._deadline_s, unwanted)
        if answer is None:
            self._end()
            if unwanted.is_set():
                raise ValueError("is compiled no further, as its client has left")
            raise ValueError(f"takes more than {self._deadline_s:g} s or too much memory to compile; simplify it")
        reply: Mapping[str, Any] = json.loads(answer)
        return reply

    def _start(self, unwanted: threading.Event) -> "subprocess.Popen[bytes]":
        tokens = self._tokens
        arguments = map(str, (tokens.folder, tokens.vocab_size, *tokens.eos_token_ids))
        command = [sys.executable, "-m", "tandem.tokenizers.grammar_process", *arguments]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        assert process.stdout is not None
        ready = _line(process.stdout, _START_S, unwanted)
        error = "cannot be compiled now, as no process starts; see the router's log"
        if ready is not None and not (error := json.loads(ready).get("error", "")):
            return process
        process.kill()
        process.communicate()
        raise ValueError(error)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._process = None


def _line(stream: IO[bytes], seconds: float, unwanted: threading.Event) -> bytes | None:
    """Return the next line of the stream.

    Returns None if there is none within `seconds` seconds, or if `unwanted` is set first.
    """
    deadline_s, read = time.monotonic() + seconds, b""
    while (left := deadline_s - time.monotonic()) > 0 and not unwanted.is_set():
        if not select.select([stream], [], [], min(left, _POLL_S))[0]:
            continue
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


def _made(line: str, grammars: Grammars) -> dict[str, str]:
    try:
        asked = json.loads(line)
        grammar = _MAKERS[asked["kind"]](asked["value"])
        grammars.check(grammar)
        return {"grammar": grammar}
    except InvalidArgument as error:
        return {"error": f"cannot be followed: {error.problem}"}
    except (ValueError, RecursionError, MemoryError) as error:
        return {"error": str(error)[:_ERROR_CHARS] or type(error).__name__}


def _limit_memory() -> None:
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Run in the child process: compile one grammar per input line, until the input ends."""
    # Windows does not have it; `tandem plan` there imports this module, too.
    import resource

    folder, vocab_size, *eos_token_ids = sys.argv[1:]
    try:
        grammars = Grammars(
            Path(folder), int(vocab_size), [int(token_id) for token_id in eos_token_ids], cached_chars=0
        )
    except TandemError as error:
        print(json.dumps({"error": f"needs the model's tokenizer: {error.message}"}), flush=True)
        return
    _limit_memory()
    print("{}", flush=True)
    for line in sys.stdin:
        # This limit also applies if the parent, which would kill the process, dies in the meantime: the kernel enforces
        # it.
        seconds = int(time.process_time() + 2 * _DEADLINE_S) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        print(json.dumps(_made(line, grammars)), flush=True)


if __name__ == "__main__":
    main()
