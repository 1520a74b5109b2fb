"""Converts the messages about membership between workers, controller and routers."""

from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import cluster_pb2, types_pb2
from tandem.protocol.messages import (
    Absence,
    AdapterFacts,
    Assignment,
    ExpectedWorker,
    Membership,
    ModelFacts,
    PeerRef,
    Role,
    WorkerInfo,
)
from tandem.protocol.policy_name import PolicyName


def assignment_to_proto(value: Assignment) -> types_pb2.Assignment:
    """Convert an `Assignment` to protobuf."""
    """Convert an `Assignment` to protobuf."""
    return types_pb2.Assignment(
        role=value.role.value,
        step_policy=value.step_policy.value,
        step_budget=value.step_budget or 0,
        itl_target_s=value.itl_target_s or 0.0,
    )


def assignment_from_proto(message: types_pb2.Assignment) -> Assignment:
    """Convert an `Assignment` from protobuf; raises InvalidArgument for an unknown role or step policy."""
    for field, name, known in (("role", message.role, Role), ("step_policy", message.step_policy, PolicyName)):
        if name not in list(known):
            raise InvalidArgument(field, f"{name!r} is none of {', '.join(known)}")
    return Assignment(
        Role(message.role),
        PolicyName(message.step_policy),
        message.step_budget or None,
        message.itl_target_s or None,
    )


def adapter_to_proto(value: AdapterFacts) -> types_pb2.AdapterFacts:
    """Convert an `AdapterFacts` to protobuf."""
    return types_pb2.AdapterFacts(name=value.name, identity=value.identity, path=value.path)


def adapter_from_proto(message: types_pb2.AdapterFacts) -> AdapterFacts:
    """Convert an `AdapterFacts` from protobuf."""
    return AdapterFacts(message.name, message.identity, message.path)


def worker_info_to_proto(value: WorkerInfo) -> cluster_pb2.WorkerInfo:
    """Convert a `WorkerInfo` to protobuf."""
    return cluster_pb2.WorkerInfo(
        worker_id=value.peer.worker_id,
        incarnation=value.peer.incarnation,
        role=value.role.value,
        address=value.address,
        model=cluster_pb2.ModelFacts(
            name=value.model.name,
            vocab_size=value.model.vocab_size,
            max_context=value.model.max_context,
            eos_token_ids=value.model.eos_token_ids,
            dtype=value.model.dtype,
            summary=value.model.summary,
            kv_windows=[window or 0 for window in value.model.kv_windows],
            adapters=[adapter_to_proto(each) for each in value.model.adapters],
            kv_step_tokens=value.model.kv_step_tokens,
        ),
        pages_total=value.pages_total,
        page_tokens=value.page_tokens,
        max_batch_requests=value.max_batch_requests,
        max_step_tokens=value.max_step_tokens,
        device=value.device,
        transport=value.transport,
        not_ready=value.not_ready,
        warnings=value.warnings,
        assignment=None if value.assignment is None else assignment_to_proto(value.assignment),
        closing="" if value.closing is None else value.closing.value,
        started_unix_nanos=value.started_unix_nanos,
        kv_ports=value.kv_ports,
    )


def worker_info_from_proto(message: cluster_pb2.WorkerInfo) -> WorkerInfo:
    """Convert a `WorkerInfo` from protobuf."""
    model = message.model
    return WorkerInfo(
        peer=PeerRef(message.worker_id, message.incarnation),
        role=Role(message.role),
        address=message.address,
        model=ModelFacts(
            model.name,
            model.vocab_size,
            model.max_context,
            tuple(model.eos_token_ids),
            model.dtype,
            tuple(model.summary),
            tuple(window or None for window in model.kv_windows) or (None,),
            tuple(map(adapter_from_proto, model.adapters)),
            model.kv_step_tokens,
        ),
        pages_total=message.pages_total,
        page_tokens=message.page_tokens,
        max_batch_requests=message.max_batch_requests,
        max_step_tokens=message.max_step_tokens,
        device=message.device,
        transport=message.transport,
        not_ready=message.not_ready,
        warnings=tuple(message.warnings),
        assignment=assignment_from_proto(message.assignment) if message.HasField("assignment") else None,
        closing=Role(message.closing) if message.closing else None,
        started_unix_nanos=message.started_unix_nanos,
        kv_ports=tuple(message.kv_ports),
    )


def membership_to_proto(value: Membership) -> cluster_pb2.Membership:
    """Convert a `Membership` to protobuf."""
    return cluster_pb2.Membership(
        revision=value.revision,
        workers=[worker_info_to_proto(w) for w in value.workers],
        mode=value.mode,
        adapters=None
        if value.adapters is None
        else cluster_pb2.AdapterList(adapters=map(adapter_to_proto, value.adapters)),
        expected=[
            cluster_pb2.ExpectedWorker(worker_id=each.worker_id, role=each.role.value) for each in value.expected
        ],
    )


def membership_from_proto(message: cluster_pb2.Membership) -> Membership:
    """Convert a `Membership` from protobuf."""
    return Membership(
        message.revision,
        tuple(worker_info_from_proto(w) for w in message.workers),
        message.mode,
        tuple(map(adapter_from_proto, message.adapters.adapters)) if message.HasField("adapters") else None,
        tuple(ExpectedWorker(each.worker_id, Role(each.role)) for each in message.expected),
    )


def absence_to_proto(value: Absence) -> cluster_pb2.Absence:
    """Convert an `Absence` to protobuf."""
    return cluster_pb2.Absence(worker_id=value.worker_id, reason=value.reason, coming=value.coming)


def absence_from_proto(message: cluster_pb2.Absence) -> Absence:
    """Convert an `Absence` from protobuf."""
    return Absence(message.worker_id, message.reason, message.coming)
