"""The audit log: one line with a JSON object for each call of a client, without keys, prompts or answers."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from router.access.client_call import ClientCall
from tandem.logging.recurring import RECURRING
from tandem.metrics import families as f
from tandem.metrics.registry import Registry
from tandem.protocol.errors import FailedPrecondition

log = logging.getLogger(__name__)

_WAITING_MAX = 16_384
"""Maximum number of records that wait to be written; further records are lost."""
_CLOSE_S = 5.0
"""Maximum time that `close` waits for the last records to be written, in seconds."""


class AuditLog:
    """Writes audit records to a file in its own thread, so that no caller waits for the disk.

    The router's server owns it, and the event loop calls `write`; `close` writes the last records. A file that was
    moved or deleted is created again, so that log rotation needs no signal. A record that cannot be written because the
    disk is full or slow is lost and counted.
    """

    def __init__(self, path: Path, registry: Registry) -> None:
        """Open the file, or create it with mode 0600. Raises FailedPrecondition if the file cannot be written."""
        self._path = path
        try:
            self._file = _open(path)
        except OSError as error:
            raise FailedPrecondition(f"audit_log: cannot write {path} ({error.strerror}); give another file") from error
        self._waiting: SimpleQueue[tuple[ClientCall, float] | None] = SimpleQueue()
        # Each counter has one writer and needs no lock: the thread counts the first two, the event loop the last.
        self._written = self._failed = self._overflowed = 0
        registry.read(lambda: {f.AUDIT_RECORDS: self._written, f.AUDIT_RECORDS_LOST: self._failed + self._overflowed})
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()

    def write(self, call: ClientCall) -> None:
        """Queue the record of a call that has ended; never blocks and never raises."""
        if self._waiting.qsize() >= _WAITING_MAX:
            self._overflowed += 1
        else:
            self._waiting.put((call, time.monotonic()))

    def close(self) -> None:
        """Write the waiting records and end the thread; blocks for at most `_CLOSE_S`."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                self._follow_rotation()
                self._append(_line(*record))
            except OSError as error:
                self._failed += 1
                log.error("an audit record is lost: %s (%s)", self._path, error.strerror, extra=RECURRING)
            else:
                self._written += 1
        self._file.close()

    def _append(self, line: bytes) -> None:
        """Append a line; if a full disk takes only a part of the line, remove that part again."""
        written = self._file.write(line)
        if written != len(line):
            os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _follow_rotation(self) -> None:
        """Reopen the log if its path now names another file or no file."""
        try:
            same = os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            same = False
        if not same:
            fresh = _open(self._path)
            self._file.close()
            self._file = fresh


def _open(path: Path) -> IO[bytes]:
    # Unbuffered, because a buffer would write a failed record again later, after other records.
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab", buffering=0)


def _line(call: ClientCall, ended_s: float) -> bytes:
    record = {
        "time": datetime.fromtimestamp(call.received_unix_s, UTC).isoformat(timespec="milliseconds"),
        "request_id": call.request_id,
        "tenant": call.caller.name,
        "endpoint": call.endpoint,
        "model": call.model,
        "status": call.status,
        "error": call.error,
        "prompt_tokens": call.prompt_tokens,
        "completion_tokens": call.completion_tokens,
        "duration_s": round(ended_s - call.received_s, 6),
        "client": call.client,
    }
    return json.dumps(record).encode() + b"\n"
