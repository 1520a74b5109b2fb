"""Encodes transfer notices as bytes, so that transfer back ends need no protobuf types.

A transfer notice completes a KV transfer.
"""

from tandem.protocol.conversion.fields import from_proto, to_proto
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import TransferNotice


def encode_notice(value: TransferNotice) -> bytes:
    """Return the bytes of a transfer notice."""
    return to_proto(value, worker_pb2.TransferNotice).SerializeToString()


def decode_notice(data: bytes) -> TransferNotice:
    """Parse the bytes from `encode_notice`. Raises google.protobuf.message.DecodeError for other bytes."""
    return from_proto(worker_pb2.TransferNotice.FromString(data), TransferNotice)
