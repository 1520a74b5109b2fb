"""Converts the messages of the transfer handshake and of KV transfers between workers."""

from tandem.protocol.conversion.work import lease_from_proto, lease_to_proto
from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.messages import Handshake, PageChecksum, PeerDescription, PeerRef, TransferNotice


def description_to_proto(value: PeerDescription) -> worker_pb2.PeerDescription:
    """Convert a `PeerDescription` to protobuf."""
    return worker_pb2.PeerDescription(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        agent_metadata=value.agent_metadata,
        base_address=value.base_address,
        page_bytes=value.page_bytes,
        pages=value.pages,
        device_id=value.device_id,
        memory=value.memory,
        host=value.host,
        process=value.process,
        probe_address=value.probe_address,
    )


def description_from_proto(message: worker_pb2.PeerDescription) -> PeerDescription:
    """Convert a `PeerDescription` from protobuf."""
    return PeerDescription(
        peer=PeerRef(message.worker_id, message.incarnation),
        agent_metadata=message.agent_metadata,
        base_address=message.base_address,
        page_bytes=message.page_bytes,
        pages=message.pages,
        device_id=message.device_id,
        memory=message.memory,
        host=message.host,
        process=message.process,
        probe_address=message.probe_address,
    )


def handshake_to_proto(value: Handshake) -> worker_pb2.ConnectPeerRequest:
    """Convert a `Handshake` to protobuf."""
    return worker_pb2.ConnectPeerRequest(
        protocol_version=value.protocol_version,
        compatibility_hash=value.compatibility_hash,
        compatibility_facts=dict(value.compatibility_facts),
        peer=description_to_proto(value.description),
    )


def handshake_from_proto(message: worker_pb2.ConnectPeerRequest) -> Handshake:
    """Convert a `Handshake` from protobuf."""
    return Handshake(
        protocol_version=message.protocol_version,
        compatibility_hash=message.compatibility_hash,
        compatibility_facts=tuple(sorted(message.compatibility_facts.items())),
        description=description_from_proto(message.peer),
    )


def notice_to_proto(value: TransferNotice) -> worker_pb2.TransferNotice:
    """Convert a `TransferNotice` to protobuf."""
    return worker_pb2.TransferNotice(
        lease=lease_to_proto(value.lease),
        prefill_worker_id=value.prefill.worker_id,
        prefill_incarnation=value.prefill.incarnation,
        token_hash=value.token_hash,
        pages=value.pages,
        first_token_id=value.first_token_id,
        next_draw=value.next_draw,
        checksums=[worker_pb2.PageChecksum(page=each.page, value=each.value) for each in value.checksums],
        skipped=value.skipped,
    )


def notice_from_proto(message: worker_pb2.TransferNotice) -> TransferNotice:
    """Convert a `TransferNotice` from protobuf."""
    return TransferNotice(
        lease=lease_from_proto(message.lease),
        prefill=PeerRef(message.prefill_worker_id, message.prefill_incarnation),
        token_hash=message.token_hash,
        pages=message.pages,
        first_token_id=message.first_token_id,
        next_draw=message.next_draw,
        checksums=tuple(PageChecksum(each.page, each.value) for each in message.checksums),
        skipped=message.skipped,
    )


def encode_notice(value: TransferNotice) -> bytes:
    """Return the bytes of a transfer's notification."""
    return notice_to_proto(value).SerializeToString()


def decode_notice(data: bytes) -> TransferNotice:
    """Parse the bytes from `encode_notice`; raises google.protobuf.message.DecodeError for anything else."""
    return notice_from_proto(worker_pb2.TransferNotice.FromString(data))
