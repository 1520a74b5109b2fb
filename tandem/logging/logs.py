"""Logging for all processes of the cluster, with the same format.

A line about one request has `extra=about(...)`. No line contains text of clients.
"""

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from tandem.logging.log_file import LogFile
from tandem.logging.recurring import OF_REQUEST, RecurringErrors

LOOK_S = 5.0
"""Interval in seconds at which pending counts of recurring errors are written and the file's size is checked."""
MAX_MIB = 32
"""Size at which a log file is rotated, in MiB."""
PRETTY = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """The format of log lines."""

    PRETTY = "pretty"
    """Text for people: time, level, process and logger, then the message."""
    JSON = "json"
    """JSON for log collectors: one object per line."""


def about(request_id: str) -> dict[str, Any]:
    """Return the `extra` argument for a log line about a request, given its internal id, which all processes use."""
    return {OF_REQUEST: request_id}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log settings of a process."""

    file: Path | None = None
    """The log file; its folder is created if missing. None = stderr."""
    format: LogFormat = LogFormat.PRETTY
    max_bytes: int = MAX_MIB << 20
    """Size in bytes at which the file is rotated; see `tandem.logging.log_file`."""


def begin_log(config: LogConfig, process: str = "", incarnation: int | None = None) -> None:
    """Set up logging at level INFO.

    Everything that the process prints goes to the file, including output of native code; the output of earlier
    incarnations is kept. Every line names the `process` and its incarnation.
    """
    handler = ProcessLog(None if config.file is None else LogFile(config.file, config.max_bytes))
    lines = JsonLines if config.format is LogFormat.JSON else PrettyLines
    handler.setFormatter(lines(process, incarnation))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    threading.Thread(target=handler.tend_forever, name="log", daemon=True).start()


class ProcessLog(logging.StreamHandler[TextIO]):
    """A logging handler that writes to stderr, which is redirected to `file` if one is given.

    Recurring errors are logged at intervals with their count, see `RecurringErrors`.
    """

    def __init__(self, file: LogFile | None = None) -> None:
        super().__init__()
        self._file = file
        self._errors = RecurringErrors()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record unless it repeats a recent error, and rotate the file if it is full."""
        try:
            line = self._errors.take(record)
        except Exception:
            self.handleError(record)
            return
        if line is not None:
            super().emit(line)
            self._poll()

    def close(self) -> None:
        """Write the pending counts of recurring errors and close the handler."""
        self._say_counts(all_of_them=True)
        super().close()

    def tend_forever(self) -> None:
        """Write due counts of recurring errors and rotate the file, periodically; runs in its own thread."""
        while True:
            time.sleep(LOOK_S)
            self._say_counts()
            with self._locked():
                self._poll()  # native code may have filled it

    def _say_counts(self, *, all_of_them: bool = False) -> None:
        with self._locked():
            for line in self._errors.due(all_of_them=all_of_them):
                super().emit(line)

    def _poll(self) -> None:
        if self._file is not None:
            self._file.poll()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


class PrettyLines(logging.Formatter):
    """Formats lines as `2026-01-31 12:00:00,000 INFO decode-0#17 tandem.worker.loop: message`.

    The process is omitted if it is unknown.
    """

    def __init__(self, process: str, incarnation: int | None) -> None:
        who = process if incarnation is None else f"{process}#{incarnation}"
        super().__init__(PRETTY.replace("%(name)s", f"{who.replace('%', '%%')} %(name)s") if who else PRETTY)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format a record, and append its request id unless the message contains it."""
        line = super().formatMessage(record)
        request_id = getattr(record, OF_REQUEST, "")
        return line if request_id in record.message else f"{line} [request {request_id}]"


class JsonLines(logging.Formatter):
    """Formats each line as a JSON object.

    Its fields are time (UTC), level, logger, message and, if known, process, incarnation, request_id and the traceback
    of an error.
    """

    def __init__(self, process: str, incarnation: int | None) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}
        self._run = {} if incarnation is None else {"incarnation": incarnation}

    def format(self, record: logging.LogRecord) -> str:
        """Return the JSON object of a record."""
        request_id = getattr(record, OF_REQUEST, "")
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._process,
            **self._run,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id:
            line[OF_REQUEST] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
