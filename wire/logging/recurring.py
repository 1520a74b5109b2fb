"""Errors that come again and again: said once with their traceback, counted, said again after a while with the count.

The process's log asks for every line (see `wire.logging.logs`), so that no loop that goes on after an error can fill
a disk.
"""

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

AGAIN_S = 60.0
"""Between two times that the same error is said."""
MOST_KINDS = 256
"""That are told apart by what they are about; more are not."""

_MARK = "recurring"
RECURRING: dict[str, Any] = {_MARK: True}
"""For `extra`: a line without a traceback that may come again and again, too."""
OF_REQUEST = "request_id"
"""The field of a line that belongs to one request; see `wire.logging.logs.about`."""

_Kind = tuple[object, ...]


@dataclass(slots=True)
class _Said:
    """An error that was said at `at_s`, and came `more` times since then."""

    at_s: float
    line: logging.LogRecord
    more: int = 0


@dataclass(slots=True)
class RecurringErrors:
    """What to write of the errors of one process. Two errors are the same if they are logged by the same statement
    about the same thing, are of one type and were raised at one place. For one thread at a time.
    """

    again_s: float = AGAIN_S
    clock: Callable[[], float] = time.monotonic
    _said: dict[_Kind, _Said] = field(default_factory=dict)

    def take(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """What to write for it; None = nothing. Each request's line is written, its traceback only where it is new."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None and not getattr(record, _MARK, False):
            return record
        now = self.clock()
        kind = self._kind_of(record, error)
        before = self._said.get(kind)
        if before is None or now >= before.at_s + self.again_s:
            self._said[kind] = _Said(now, _plain(record, error))
            return record if before is None or not before.more else _counted(record, before, now)
        before.more += 1
        return _plain(record, error) if getattr(record, OF_REQUEST, "") else None

    def due(self, *, all_of_them: bool = False) -> list[logging.LogRecord]:
        """Counts of errors that were said long enough ago, or of all; these errors are new when they come again."""
        now = self.clock()
        over = {kind: said for kind, said in self._said.items() if all_of_them or now >= said.at_s + self.again_s}
        for kind in over:
            del self._said[kind]
        return [_counted(said.line, said, now) for said in over.values() if said.more]

    def _kind_of(self, record: logging.LogRecord, error: BaseException | None) -> _Kind:
        place = _place(error.__traceback__) if error is not None else None
        statement = record.name, record.msg, type(error), place
        about = record.args if isinstance(record.args, tuple) and not getattr(record, OF_REQUEST, "") else ()
        exactly = *statement, *(each for each in about if isinstance(each, str))
        return exactly if exactly in self._said or len(self._said) < MOST_KINDS else statement


def _place(traceback: TracebackType | None) -> tuple[str, int] | None:
    if traceback is None:
        return None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def _plain(record: logging.LogRecord, error: BaseException | None) -> logging.LogRecord:
    """It without traceback and arguments, which would keep objects alive."""
    message = record.getMessage()
    return _with(record, message if error is None else f"{message} ({type(error).__name__})", None)


def _counted(record: logging.LogRecord, said: _Said, now: float) -> logging.LogRecord:
    text = f"{record.getMessage()} ({said.more} more like it in the last {now - said.at_s:.0f} s)"
    return _with(record, text, record.exc_info)


def _with(record: logging.LogRecord, message: str, exc_info: Any) -> logging.LogRecord:
    made = copy.copy(record)
    made.msg, made.args, made.exc_info, made.exc_text = message, (), exc_info, None
    return made
