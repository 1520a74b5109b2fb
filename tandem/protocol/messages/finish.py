"""The end of a generation: its finish reason, and the error if it failed."""

from dataclasses import dataclass
from enum import IntEnum


class FinishReason(IntEnum):
    """The finish reason of a generation, numbered as in `tandem.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """An error in a message: the code and the message of a `TandemError`, and the seconds to wait before a retry."""

    code: str
    message: str
    retry_after_s: float = 0.0
