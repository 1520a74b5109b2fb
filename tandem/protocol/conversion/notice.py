"""The bytes of the notice that completes a KV transfer, for transfer back ends, which know no protobuf types."""

from tandem.protocol.conversion.fields import from_proto, to_proto
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import TransferNotice


def encode_notice(value: TransferNotice) -> bytes:
    """Return the bytes of a transfer's notification."""
    return to_proto(value, worker_pb2.TransferNotice).SerializeToString()


def decode_notice(data: bytes) -> TransferNotice:
    """Parse the bytes from `encode_notice`; raises google.protobuf.message.DecodeError for anything else."""
    return from_proto(worker_pb2.TransferNotice.FromString(data), TransferNotice)
