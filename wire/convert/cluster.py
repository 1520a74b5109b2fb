"""Between workers, controller and routers: who is there."""

from wire.generated.tandem.v1 import cluster_pb2
from wire.messages import Membership, ModelFacts, PeerRef, Role, WorkerInfo


def worker_info_to_proto(value: WorkerInfo) -> cluster_pb2.WorkerInfo:
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
        ),
        pages_total=value.pages_total,
        page_tokens=value.page_tokens,
        max_batch_requests=value.max_batch_requests,
        max_step_tokens=value.max_step_tokens,
        device=value.device,
        transport=value.transport,
        not_ready=value.not_ready,
        warnings=value.warnings,
    )


def worker_info_from_proto(message: cluster_pb2.WorkerInfo) -> WorkerInfo:
    model = message.model
    return WorkerInfo(
        peer=PeerRef(message.worker_id, message.incarnation),
        role=Role(message.role),
        address=message.address,
        model=ModelFacts(model.name, model.vocab_size, model.max_context, tuple(model.eos_token_ids), model.dtype),
        pages_total=message.pages_total,
        page_tokens=message.page_tokens,
        max_batch_requests=message.max_batch_requests,
        max_step_tokens=message.max_step_tokens,
        device=message.device,
        transport=message.transport,
        not_ready=message.not_ready,
        warnings=tuple(message.warnings),
    )


def membership_to_proto(value: Membership) -> cluster_pb2.Membership:
    return cluster_pb2.Membership(revision=value.revision, workers=[worker_info_to_proto(w) for w in value.workers])


def membership_from_proto(message: cluster_pb2.Membership) -> Membership:
    return Membership(message.revision, tuple(worker_info_from_proto(w) for w in message.workers))
