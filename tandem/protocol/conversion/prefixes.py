"""Converts the prefix cache updates that workers send to routers."""

from collections.abc import Iterable

from tandem.protocol.generated.tandem.v1 import worker_pb2
from tandem.protocol.prefixes import PrefixChanges, PrefixList, PrefixRun


def prefix_changes_to_proto(value: PrefixChanges) -> worker_pb2.PrefixChanges:
    """Convert a `PrefixChanges` to protobuf."""
    return worker_pb2.PrefixChanges(sequence=value.sequence, stored=_to_proto(value.stored), removed=value.removed)


def prefix_changes_from_proto(message: worker_pb2.PrefixChanges) -> PrefixChanges:
    """Convert a `PrefixChanges` from protobuf."""
    return PrefixChanges(message.sequence, _from_proto(message.stored), tuple(message.removed))


def prefix_list_to_proto(value: PrefixList) -> worker_pb2.ListPrefixesResponse:
    """Convert a `PrefixList` to protobuf."""
    return worker_pb2.ListPrefixesResponse(sequence=value.sequence, stored=_to_proto(value.stored))


def prefix_list_from_proto(message: worker_pb2.ListPrefixesResponse) -> PrefixList:
    """Convert a `PrefixList` from protobuf."""
    return PrefixList(message.sequence, _from_proto(message.stored))


def _to_proto(runs: Iterable[PrefixRun]) -> list[worker_pb2.PrefixRun]:
    return [worker_pb2.PrefixRun(parent=run.parent, digests=run.digests) for run in runs]


def _from_proto(messages: Iterable[worker_pb2.PrefixRun]) -> tuple[PrefixRun, ...]:
    return tuple(PrefixRun(message.parent, tuple(message.digests)) for message in messages)
