"""The outcome of a generation: its finish reason, and the error if it failed."""

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
    """A failure in a message: the code of a `TandemError`, its message and its retry hint in seconds."""

    code: str
    message: str
    retry_after_s: float = 0.0
