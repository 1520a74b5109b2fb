"""Between transports where the receiving side moves the pages."""

from typing import cast

from google.protobuf.message import DecodeError

from wire.convert.transfer import notice_from_proto, notice_to_proto
from wire.generated.tandem.v1 import transfer_pb2
from wire.read_notes import ReadAnswer, ReadCancel, ReadEnd, ReadNote, ReadOrder


def read_note_to_proto(value: ReadNote) -> transfer_pb2.ReadNote:
    match value:
        case ReadOrder():
            order = transfer_pb2.ReadOrder(
                number=value.number,
                oldest=value.oldest,
                reader_incarnation=value.reader_incarnation,
                source_pages=value.source_pages,
                target_pages=value.target_pages,
                notice=None if value.notice is None else notice_to_proto(value.notice),
            )
            return transfer_pb2.ReadNote(order=order)
        case ReadCancel():
            cancel = transfer_pb2.ReadCancel(
                number=value.number, oldest=value.oldest, reader_incarnation=value.reader_incarnation
            )
            return transfer_pb2.ReadNote(cancel=cancel)
        case ReadAnswer():
            answer = transfer_pb2.ReadAnswer(
                number=value.number,
                sender_incarnation=value.sender_incarnation,
                end=cast(transfer_pb2.ReadEnd, value.end),
            )
            return transfer_pb2.ReadNote(answer=answer)


def read_note_from_proto(message: transfer_pb2.ReadNote) -> ReadNote:
    """DecodeError for a note of no known kind, or an answer that does not say how it ended."""
    match message.WhichOneof("kind"):
        case "order":
            order = message.order
            return ReadOrder(
                number=order.number,
                oldest=order.oldest,
                reader_incarnation=order.reader_incarnation,
                source_pages=tuple(order.source_pages),
                target_pages=tuple(order.target_pages),
                notice=notice_from_proto(order.notice) if order.HasField("notice") else None,
            )
        case "cancel":
            return ReadCancel(message.cancel.number, message.cancel.oldest, message.cancel.reader_incarnation)
        case "answer":
            answer = message.answer
            return ReadAnswer(answer.number, answer.sender_incarnation, _end_from_proto(answer.end))
        case _:
            raise DecodeError("a note without a kind")


def _end_from_proto(value: int) -> ReadEnd:
    try:
        return ReadEnd(value)
    except ValueError:
        raise DecodeError(f"an answer whose end is {value}") from None


def encode_read_note(value: ReadNote) -> bytes:
    """The bytes that travel as a notification."""
    return read_note_to_proto(value).SerializeToString()


def decode_read_note(data: bytes) -> ReadNote:
    """Inverse of `encode_read_note`; google.protobuf.message.DecodeError on anything else."""
    return read_note_from_proto(transfer_pb2.ReadNote.FromString(data))
