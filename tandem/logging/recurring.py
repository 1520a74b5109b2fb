"""Rate limiting of recurring errors: each is logged once with its traceback, then at intervals with a count.

The process's log handler applies it to every line (`tandem.logging.logs`), so that a loop that continues after an error
cannot fill the disk.
"""

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

AGAIN_S = 60.0
"""Minimum interval between two lines of the same error, in seconds."""
MOST_KINDS = 256
"""Maximum number of errors that are told apart by their arguments.

Beyond it, further errors of the same log statement share one count.
"""

_MARK = "recurring"
RECURRING: dict[str, Any] = {_MARK: True}
"""The `extra` argument for a line that has no traceback but is rate limited like an error."""
OF_REQUEST = "request_id"
"""The attribute of a log record that has the request id; see `tandem.logging.logs.about`."""

_Kind = tuple[object, ...]


@dataclass(slots=True)
class _LoggedMessage:
    """A logged error: the time `at_s` of its last line, and the number `more` of repetitions since then."""

    at_s: float
    line: logging.LogRecord
    more: int = 0


@dataclass(slots=True)
class RecurringErrors:
    """Decides which error lines of a process are written. Not thread-safe.

    Two errors are the same if they have the same log statement, arguments and type, and were raised by the same line.
    """

    again_s: float = AGAIN_S
    clock: Callable[[], float] = time.monotonic
    _said: dict[_Kind, _LoggedMessage] = field(default_factory=dict)

    def take(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """Return the record to write, with the count of suppressed repetitions; None if nothing is to be written.

        Lines about requests are always written, but the traceback of a repeated error is removed.
        """
        error = record.exc_info[1] if record.exc_info else None
        if error is None and not getattr(record, _MARK, False):
            return record
        now = self.clock()
        kind = self._kind_of(record, error)
        before = self._said.get(kind)
        if before is None or now >= before.at_s + self.again_s:
            self._said[kind] = _LoggedMessage(now, _plain(record, error))
            return record if before is None or not before.more else _counted(record, before, now)
        before.more += 1
        return _plain(record, error) if getattr(record, OF_REQUEST, "") else None

    def due(self, *, all_of_them: bool = False) -> list[logging.LogRecord]:
        """Forget the errors whose interval has ended; return a line with the count for each error that was repeated.

        With `all_of_them`, the intervals of all errors end now.
        """
        now = self.clock()
        over = {kind: said for kind, said in self._said.items() if all_of_them or now >= said.at_s + self.again_s}
        for kind in over:
            del self._said[kind]
        return [_counted(said.line, said, now) for said in over.values() if said.more]

    def _kind_of(self, record: logging.LogRecord, error: BaseException | None) -> _Kind:
        place = _place(error.__traceback__) if error is not None else None
        statement = record.name, record.msg, type(error), place
        about = record.args if isinstance(record.args, tuple) and not getattr(record, OF_REQUEST, "") else ()
        exactly = *statement, *(part for part in about if isinstance(part, str))
        return exactly if exactly in self._said or len(self._said) < MOST_KINDS else statement


def _place(traceback: TracebackType | None) -> tuple[str, int] | None:
    if traceback is None:
        return None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename, traceback.tb_lineno


def _plain(record: logging.LogRecord, error: BaseException | None) -> logging.LogRecord:
    """Return a copy of the record without traceback and arguments, which would keep objects alive."""
    message = record.getMessage()
    return _with(record, message if error is None else f"{message} ({type(error).__name__})", None)


def _counted(record: logging.LogRecord, said: _LoggedMessage, now: float) -> logging.LogRecord:
    text = f"{record.getMessage()} ({said.more} more like it in the last {now - said.at_s:.0f} s)"
    return _with(record, text, record.exc_info)


def _with(record: logging.LogRecord, message: str, exc_info: Any) -> logging.LogRecord:
    made = copy.copy(record)
    made.msg, made.args, made.exc_info, made.exc_text = message, (), exc_info, None
    return made
