"""How a process of the cluster logs: the same lines everywhere, into one file for each role in the cluster.

A line that belongs to one request says so with `extra=about(...)`; no line carries what a client wrote.
"""

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

PRETTY = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OF_REQUEST = "request_id"


class LogFormat(StrEnum):
    """How a line is written."""

    PRETTY = "pretty"
    """For people: time, level, process and part, then a sentence."""
    JSON = "json"
    """For collectors: an object a line."""


def about(request_id: str) -> dict[str, Any]:
    """For `extra`: the line belongs to this request, by the router's name for it, which every process knows."""
    return {_OF_REQUEST: request_id}


def begin_log(
    file: Path | None, form: LogFormat = LogFormat.PRETTY, process: str = "", incarnation: int | None = None
) -> None:
    """Log from INFO on, to `file` if there is one, whose folder is made where it is missing, else to stderr.

    The whole process's output goes there, what native code prints as it dies too; an earlier incarnation's stays. Every
    line of the log says which `process` wrote it, and which run of it.
    """
    if file is not None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(process, incarnation) if form is LogFormat.JSON else PrettyLines(process, incarnation)
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class PrettyLines(logging.Formatter):
    """`2026-01-31 12:00:00,000 INFO decode-0#17 worker.loop: a sentence`, the process where there is one."""

    def __init__(self, process: str, incarnation: int | None) -> None:
        who = process if incarnation is None else f"{process}#{incarnation}"
        super().__init__(PRETTY.replace("%(name)s", f"{who.replace('%', '%%')} %(name)s") if who else PRETTY)

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        request_id = getattr(record, _OF_REQUEST, "")
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
        request_id = getattr(record, _OF_REQUEST, "")
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._process,
            **self._run,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id:
            line[_OF_REQUEST] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
