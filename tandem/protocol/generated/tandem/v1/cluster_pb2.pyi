from tandem.protocol.generated.tandem.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerInfo(_message.Message):
    __slots__ = ("peer", "role", "address", "model", "pages_total", "page_tokens", "max_batch_requests", "max_step_tokens", "device", "transport", "not_ready", "warnings", "assignment", "closing", "started_unix_nanos", "kv_ports", "kv_tiers", "kv_tier_pages")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NOT_READY_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_NANOS_FIELD_NUMBER: _ClassVar[int]
    KV_PORTS_FIELD_NUMBER: _ClassVar[int]
    KV_TIERS_FIELD_NUMBER: _ClassVar[int]
    KV_TIER_PAGES_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    role: str
    address: str
    model: ModelFacts
    pages_total: int
    page_tokens: int
    max_batch_requests: int
    max_step_tokens: int
    device: str
    transport: str
    not_ready: str
    warnings: _containers.RepeatedScalarFieldContainer[str]
    assignment: _types_pb2.Assignment
    closing: str
    started_unix_nanos: int
    kv_ports: _containers.RepeatedScalarFieldContainer[str]
    kv_tiers: _containers.RepeatedScalarFieldContainer[str]
    kv_tier_pages: int
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[_Union[ModelFacts, _Mapping]] = ..., pages_total: _Optional[int] = ..., page_tokens: _Optional[int] = ..., max_batch_requests: _Optional[int] = ..., max_step_tokens: _Optional[int] = ..., device: _Optional[str] = ..., transport: _Optional[str] = ..., not_ready: _Optional[str] = ..., warnings: _Optional[_Iterable[str]] = ..., assignment: _Optional[_Union[_types_pb2.Assignment, _Mapping]] = ..., closing: _Optional[str] = ..., started_unix_nanos: _Optional[int] = ..., kv_ports: _Optional[_Iterable[str]] = ..., kv_tiers: _Optional[_Iterable[str]] = ..., kv_tier_pages: _Optional[int] = ...) -> None: ...

class ModelFacts(_message.Message):
    __slots__ = ("name", "vocab_size", "max_context", "eos_token_ids", "dtype", "summary", "kv_windows", "adapters", "kv_step_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    KV_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    KV_STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    summary: _containers.RepeatedScalarFieldContainer[str]
    kv_windows: _containers.RepeatedScalarFieldContainer[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.AdapterFacts]
    kv_step_tokens: int
    def __init__(self, name: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., summary: _Optional[_Iterable[str]] = ..., kv_windows: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.AdapterFacts, _Mapping]]] = ..., kv_step_tokens: _Optional[int] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnregisterRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ...) -> None: ...

class UnregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Membership(_message.Message):
    __slots__ = ("revision", "workers", "mode", "adapters", "expected")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    revision: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    mode: str
    adapters: AdapterList
    expected: _containers.RepeatedCompositeFieldContainer[ExpectedWorker]
    def __init__(self, revision: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., mode: _Optional[str] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., expected: _Optional[_Iterable[_Union[ExpectedWorker, _Mapping]]] = ...) -> None: ...

class ExpectedWorker(_message.Message):
    __slots__ = ("worker_id", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.AdapterFacts]
    def __init__(self, adapters: _Optional[_Iterable[_Union[_types_pb2.AdapterFacts, _Mapping]]] = ...) -> None: ...

class SetModeRequest(_message.Message):
    __slots__ = ("mode", "prefill", "decode", "step_policy", "step_budget", "itl_target_s", "grace_s")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    STEP_POLICY_FIELD_NUMBER: _ClassVar[int]
    STEP_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    mode: str
    prefill: int
    decode: int
    step_policy: str
    step_budget: int
    itl_target_s: float
    grace_s: float
    def __init__(self, mode: _Optional[str] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ..., step_policy: _Optional[str] = ..., step_budget: _Optional[int] = ..., itl_target_s: _Optional[float] = ..., grace_s: _Optional[float] = ...) -> None: ...

class SetModeResponse(_message.Message):
    __slots__ = ("workers", "seconds")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    seconds: float
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace_s", "restart", "force", "node_leaves")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    RESTART_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    NODE_LEAVES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_s: float
    restart: bool
    force: bool
    node_leaves: bool
    def __init__(self, worker_id: _Optional[str] = ..., grace_s: _Optional[float] = ..., restart: _Optional[bool] = ..., force: _Optional[bool] = ..., node_leaves: _Optional[bool] = ...) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("prefill", "decode", "workers", "grace_s", "wait_s")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    prefill: int
    decode: int
    workers: int
    grace_s: float
    wait_s: float
    def __init__(self, prefill: _Optional[int] = ..., decode: _Optional[int] = ..., workers: _Optional[int] = ..., grace_s: _Optional[float] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ResizeResponse(_message.Message):
    __slots__ = ("workers", "seconds")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    seconds: float
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., seconds: _Optional[float] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class ListAbsentRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAbsentResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Absence]
    def __init__(self, workers: _Optional[_Iterable[_Union[Absence, _Mapping]]] = ...) -> None: ...

class Absence(_message.Message):
    __slots__ = ("worker_id", "reason", "coming")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    reason: str
    coming: bool
    def __init__(self, worker_id: _Optional[str] = ..., reason: _Optional[str] = ..., coming: _Optional[bool] = ...) -> None: ...

class GetMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetMetricsResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...
