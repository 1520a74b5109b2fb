"""How a process of the cluster logs: the same lines everywhere, into one file for each role in the cluster.

A line that belongs to one request says so with `extra=about(...)`; no line carries what a client wrote.
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

from wire.logging.log_file import LogFile
from wire.logging.recurring import OF_REQUEST, RecurringErrors

LOOK_S = 5.0
"""Between two looks at what the log has to do when nobody writes to it."""
MAX_MIB = 32
"""Size of a log file from which on another one is begun, in MiB."""
PRETTY = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFormat(StrEnum):
    """How a line is written."""

    PRETTY = "pretty"
    """For people: time, level, process and part, then a sentence."""
    JSON = "json"
    """For collectors: an object a line."""


def about(request_id: str) -> dict[str, Any]:
    """For `extra`: the line belongs to this request, by the router's name for it, which every process knows."""
    return {OF_REQUEST: request_id}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where a process logs, and how."""

    file: Path | None = None
    """Whose folder is made where it is missing; None = stderr."""
    format: LogFormat = LogFormat.PRETTY
    max_bytes: int = MAX_MIB << 20
    """Of one file, from which on the next line goes to a new one; see `wire.logging.log_file`."""


TO_STDERR = LogConfig()
"""For people, on a terminal."""


def begin_log(config: LogConfig, process: str = "", incarnation: int | None = None) -> None:
    """Log from INFO on. The whole process's output goes to the file, what native code prints as it dies too; an earlier
    incarnation's stays. Every line of the log says which `process` wrote it, and which run of it.
    """
    handler = ProcessLog(None if config.file is None else LogFile(config.file, config.max_bytes))
    lines = JsonLines if config.format is LogFormat.JSON else PrettyLines
    handler.setFormatter(lines(process, incarnation))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    threading.Thread(target=handler.tend_forever, name="log", daemon=True).start()


class ProcessLog(logging.StreamHandler[TextIO]):
    """To stderr, which is `file` if there is one; a recurring error is said now and then, with how often it came (see
    `RecurringErrors`).
    """

    def __init__(self, file: LogFile | None = None) -> None:
        super().__init__()
        self._file = file
        self._errors = RecurringErrors()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._errors.take(record)
        except Exception:
            self.handleError(record)
            return
        if line is not None:
            super().emit(line)
            self._look()

    def close(self) -> None:
        """Counts that are not said yet are."""
        self._say_counts(all_of_them=True)
        super().close()

    def tend_forever(self) -> None:
        """What is due without a line that is written; in a thread of its own."""
        while True:
            time.sleep(LOOK_S)
            self._say_counts()
            with self._locked():
                self._look()  # native code may have filled it

    def _say_counts(self, *, all_of_them: bool = False) -> None:
        with self._locked():
            for line in self._errors.due(all_of_them=all_of_them):
                super().emit(line)

    def _look(self) -> None:
        if self._file is not None:
            self._file.look()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


class PrettyLines(logging.Formatter):
    """`2026-01-31 12:00:00,000 INFO decode-0#17 worker.loop: a sentence`, the process where there is one."""

    def __init__(self, process: str, incarnation: int | None) -> None:
        who = process if incarnation is None else f"{process}#{incarnation}"
        super().__init__(PRETTY.replace("%(name)s", f"{who.replace('%', '%%')} %(name)s") if who else PRETTY)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, OF_REQUEST, "")
        return line if request_id in record.message else f"{line} [request {request_id}]"


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, and where they are known process, incarnation, request_id
    and the traceback of an error.
    """

    def __init__(self, process: str, incarnation: int | None) -> None:
        super().__init__()
        self._process = {"process": process} if process else {}
        self._run = {} if incarnation is None else {"incarnation": incarnation}

    def format(self, record: logging.LogRecord) -> str:
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
