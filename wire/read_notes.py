"""What two transports tell each other where the receiving side moves the pages; see proto/tandem/v1/transfer.proto."""

from dataclasses import dataclass
from enum import IntEnum

from wire.messages import TransferNotice


class ReadEnd(IntEnum):
    """How a transfer ended, in the reader's words. At each of these no byte of it moves any more, and none will."""

    LANDED = 1
    """All pages are there and the notice, if any, was delivered."""
    WITHHELD = 2
    """Cancelled before its end: the notice was not delivered and will not be."""
    NOT_BEGUN = 3
    """Cancelled or refused before it began: nothing moved."""
    FAILED = 4
    """The connection failed: the notice was not delivered and will not be."""


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Read my `source_pages` into your `target_pages`, one to one; then, if given, deliver `notice`.

    `number` names the transfer among those of this sender's run. All to this reader below `oldest` are over. Meant for
    the run `reader_incarnation` of the reader.
    """

    number: int
    oldest: int
    reader_incarnation: int
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    notice: TransferNotice | None = None


@dataclass(frozen=True, slots=True)
class ReadCancel:
    """Do not begin `number`, or deliver its notice no more. Other fields as in `ReadOrder`."""

    number: int
    oldest: int
    reader_incarnation: int


@dataclass(frozen=True, slots=True)
class ReadAnswer:
    """How `number` of the sender's run `sender_incarnation` ended."""

    number: int
    sender_incarnation: int
    end: ReadEnd


ReadNote = ReadOrder | ReadCancel | ReadAnswer
