"""Arrivals and lengths from a production trace, replayed at the recorded speed or scaled to another rate.

There are two formats, by suffix: `.jsonl` is that of Mooncake (https://github.com/kvcache-ai/Mooncake, FAST'25), whose
hashes identify the blocks of each prompt; `.csv` is that of Azure's LLM inference traces (Splitwise, ISCA'24). Prompts
without hashes share no prefix.
"""

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.protocol.errors import InvalidArgument

BLOCK_TOKENS = 512
"""Tokens of a prompt per hash in a Mooncake trace."""
_UNSHARED = 1 << 41
"""Lowest key of blocks without a hash in the trace; all hashes of a trace are smaller."""
_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class Trace:
    """The recorded requests; the first is due at 0 s."""

    name: str
    requests: tuple[Arrival, ...]

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return the first `rate` × `seconds` requests, with due times scaled to fill `seconds`."""
        count = round(rate * seconds)
        if not 0 < count <= len(self.requests):
            had = f"the trace has {len(self.requests)}"
            raise InvalidArgument("--rates", f"{rate:g} a second for {seconds:g} s are {count} requests; {had}")
        span = self._span_s(count)
        if span == 0:
            raise InvalidArgument("--rates", f"the first {count} requests of the trace arrive at once; ask for more")
        return self._paced(count, span / seconds, rate, seconds, seed)

    def at_speed(self, speed: float, seconds: float, seed: int) -> Workload:
        """Return the requests of the trace's first `seconds` × `speed` seconds, with due times divided by `speed`."""
        if speed <= 0:
            raise InvalidArgument("--speed", f"{speed:g} is not above 0")
        count = sum(request.due_s < seconds * speed for request in self.requests)
        return self._paced(count, speed, count / seconds, seconds, seed)

    def scaled(self, factor: float) -> "Trace":
        """Return the trace with prompts, blocks and answers `factor` times as long, each at least one token."""
        if factor <= 0:
            raise InvalidArgument("--length-scale", f"{factor:g} is not above 0")

        def length(tokens: int) -> int:
            return max(1, round(tokens * factor))

        requests = (
            Arrival(r.due_s, tuple(Block(b.key, length(b.tokens)) for b in r.prompt), length(r.new_tokens))
            for r in self.requests
        )
        return replace(self, requests=tuple(requests))

    def _span_s(self, count: int) -> float:
        """Return the due time of the request that follows the first `count` requests.

        Past the end of the trace, the due time is extrapolated by one mean gap.
        """
        if count < len(self.requests):
            return self.requests[count].due_s
        return self.requests[-1].due_s * count / max(1, count - 1)

    def _paced(self, count: int, speed: float, rate: float, seconds: float, seed: int) -> Workload:
        arrivals = tuple(replace(request, due_s=request.due_s / speed) for request in self.requests[:count])
        return Workload(self.name, rate, seconds, seed, arrivals)


def read_trace(file: Path) -> Trace:
    """Read a whole trace. Raises InvalidArgument, which names the wrong line or the file."""
    if file.suffix not in _FORMATS:
        raise InvalidArgument("--trace", f"{file.name} is neither a .jsonl nor a .csv file")
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise InvalidArgument("--trace", f"{file.name} cannot be read: {error.strerror}") from None
    requests = sorted(_FORMATS[file.suffix](file.name, lines), key=lambda request: request.due_s)
    if not requests:
        raise InvalidArgument("--trace", f"{file.name} has no requests")
    first = requests[0].due_s
    return Trace(file.stem, tuple(replace(request, due_s=request.due_s - first) for request in requests))


def _read_jsonl(name: str, lines: list[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise InvalidArgument(where, f"is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidArgument(where, "is no JSON object")
        yield _mooncake_request(where, number, fields)


def _mooncake_request(where: str, number: int, fields: dict[str, Any]) -> Arrival:
    at_ms = fields.get("timestamp")
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms < float("inf"):
        raise InvalidArgument(where, f"timestamp {at_ms!r} is no number of milliseconds")
    prompt = _length(where, "input_length", fields.get("input_length"))
    hashes = fields.get("hash_ids")
    if hashes is None:
        blocks: tuple[Block, ...] = (Block(_UNSHARED + number, prompt),)
        return Arrival(at_ms / 1e3, blocks, _length(where, "output_length", fields.get("output_length")))
    if not isinstance(hashes, list) or not all(type(key) is int and key >= 0 for key in hashes):
        raise InvalidArgument(where, "hash_ids is no list of numbers")
    if len(hashes) != -(-prompt // BLOCK_TOKENS):
        raise InvalidArgument(where, f"has {len(hashes)} hash_ids for {prompt} tokens in blocks of {BLOCK_TOKENS}")
    blocks = tuple(Block(key, min(BLOCK_TOKENS, prompt - i * BLOCK_TOKENS)) for i, key in enumerate(hashes))
    return Arrival(at_ms / 1e3, blocks, _length(where, "output_length", fields.get("output_length")))


def _read_csv(name: str, lines: list[str]) -> Iterator[Arrival]:
    if not lines or lines[0].split(",") != _COLUMNS:
        raise InvalidArgument(f"{name} line 1", f"is not {','.join(_COLUMNS)}")
    for number, row in enumerate(csv.reader(lines[1:]), 2):
        if not row:
            continue
        where = f"{name} line {number}"
        if len(row) != len(_COLUMNS):
            raise InvalidArgument(where, f"has {len(row)} fields, not {len(_COLUMNS)}")
        try:
            at = datetime.fromisoformat(row[0]).timestamp()
        except ValueError:
            raise InvalidArgument(where, f"TIMESTAMP {row[0]!r} is no ISO date and time") from None
        prompt, answer = (
            _length(where, column, int(text) if text.isdecimal() else text)
            for column, text in zip(_COLUMNS[1:], row[1:], strict=True)
        )
        yield Arrival(at, (Block(number, prompt),), answer)


def _length(where: str, field: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise InvalidArgument(where, f"{field} {value!r} is no number of tokens above 0")
    return value


_FORMATS: dict[str, Callable[[str, list[str]], Iterator[Arrival]]] = {".jsonl": _read_jsonl, ".csv": _read_csv}
