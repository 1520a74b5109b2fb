from tandem.protocol.generated.tandem.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TIER_UNSPECIFIED: _ClassVar[KvTier]
    KV_TIER_HOST: _ClassVar[KvTier]
    KV_TIER_DISK: _ClassVar[KvTier]
    KV_TIER_PEER: _ClassVar[KvTier]
KV_TIER_UNSPECIFIED: KvTier
KV_TIER_HOST: KvTier
KV_TIER_DISK: KvTier
KV_TIER_PEER: KvTier

class Lease(_message.Message):
    __slots__ = ("request_id", "attempt", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("router_id", "prefixes")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    prefixes: bool
    def __init__(self, router_id: _Optional[str] = ..., prefixes: _Optional[bool] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("step", "events", "load", "prefixes", "tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    load: WorkerLoad
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixChanges]
    tokens: _containers.RepeatedCompositeFieldContainer[StepTokens]
    def __init__(self, step: _Optional[int] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., prefixes: _Optional[_Iterable[_Union[PrefixChanges, _Mapping]]] = ..., tokens: _Optional[_Iterable[_Union[StepTokens, _Mapping]]] = ...) -> None: ...

class StepTokens(_message.Message):
    __slots__ = ("request_ids", "attempts", "indices", "token_ids", "counts")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ..., attempts: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixChanges(_message.Message):
    __slots__ = ("sequence", "stored", "removed", "tiers")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: _containers.RepeatedCompositeFieldContainer[PrefixRun]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    tiers: _containers.RepeatedCompositeFieldContainer[TierPages]
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[PrefixRun, _Mapping]]] = ..., removed: _Optional[_Iterable[bytes]] = ..., tiers: _Optional[_Iterable[_Union[TierPages, _Mapping]]] = ...) -> None: ...

class TierPages(_message.Message):
    __slots__ = ("tier", "digests")
    TIER_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PrefixRun(_message.Message):
    __slots__ = ("parent", "digests", "token_ids", "salt")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: str
    def __init__(self, parent: _Optional[bytes] = ..., digests: _Optional[_Iterable[bytes]] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[str] = ...) -> None: ...

class ReadAheadRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: PrefixRun
    def __init__(self, prefix: _Optional[_Union[PrefixRun, _Mapping]] = ...) -> None: ...

class ReadAheadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPrefixesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPrefixesResponse(_message.Message):
    __slots__ = ("sequence", "stored", "tiers")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stored: _containers.RepeatedCompositeFieldContainer[PrefixRun]
    tiers: _containers.RepeatedCompositeFieldContainer[TierPages]
    def __init__(self, sequence: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[PrefixRun, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierPages, _Mapping]]] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("ref", "first_index", "token_ids", "finish_reason", "error", "event_times", "transfer", "logprobs", "cached_tokens", "preempted", "prompt_logprobs", "reloaded_tokens")
    REF_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    EVENT_TIMES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RELOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ref: RequestRef
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _types_pb2.FinishReason
    error: _types_pb2.ErrorDetail
    event_times: _containers.RepeatedCompositeFieldContainer[_types_pb2.EventTime]
    transfer: _types_pb2.TransferStats
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    cached_tokens: int
    preempted: bool
    prompt_logprobs: PromptLogprobs
    reloaded_tokens: int
    def __init__(self, ref: _Optional[_Union[RequestRef, _Mapping]] = ..., first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., event_times: _Optional[_Iterable[_Union[_types_pb2.EventTime, _Mapping]]] = ..., transfer: _Optional[_Union[_types_pb2.TransferStats, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., preempted: _Optional[bool] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., reloaded_tokens: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("chosen", "top_count", "top_ids", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: _containers.RepeatedScalarFieldContainer[float]
    top_count: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[_Iterable[float]] = ..., top_count: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top_ids", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, chosen: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("prefill_requests", "prefill_tokens", "decode_requests", "pages_used", "pages_total", "prefix_query_tokens", "prefix_hit_tokens", "decode_context_tokens", "cost", "preemptions", "decode_speedup", "tiers", "pulls")
    PREFILL_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    pages_used: int
    pages_total: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    decode_context_tokens: int
    cost: CostParameters
    preemptions: int
    decode_speedup: float
    tiers: _containers.RepeatedCompositeFieldContainer[TierLoad]
    pulls: TierLoad
    def __init__(self, prefill_requests: _Optional[int] = ..., prefill_tokens: _Optional[int] = ..., decode_requests: _Optional[int] = ..., pages_used: _Optional[int] = ..., pages_total: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., decode_context_tokens: _Optional[int] = ..., cost: _Optional[_Union[CostParameters, _Mapping]] = ..., preemptions: _Optional[int] = ..., decode_speedup: _Optional[float] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ..., pulls: _Optional[_Union[TierLoad, _Mapping]] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("tier", "page_s", "queued_pages")
    TIER_FIELD_NUMBER: _ClassVar[int]
    PAGE_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PAGES_FIELD_NUMBER: _ClassVar[int]
    tier: KvTier
    page_s: float
    queued_pages: int
    def __init__(self, tier: _Optional[_Union[KvTier, str]] = ..., page_s: _Optional[float] = ..., queued_pages: _Optional[int] = ...) -> None: ...

class CostParameters(_message.Message):
    __slots__ = ("base_s", "prompt_base_s", "token_s", "pair_s", "row_s", "context_s", "free_tokens", "error", "observed", "tile_tokens", "mixed_step_margin", "wave_tokens", "verify_base_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BASE_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PAIR_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    TILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIXED_STEP_MARGIN_FIELD_NUMBER: _ClassVar[int]
    WAVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_BASE_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    prompt_base_s: float
    token_s: float
    pair_s: float
    row_s: float
    context_s: float
    free_tokens: int
    error: float
    observed: int
    tile_tokens: int
    mixed_step_margin: float
    wave_tokens: int
    verify_base_s: float
    def __init__(self, base_s: _Optional[float] = ..., prompt_base_s: _Optional[float] = ..., token_s: _Optional[float] = ..., pair_s: _Optional[float] = ..., row_s: _Optional[float] = ..., context_s: _Optional[float] = ..., free_tokens: _Optional[int] = ..., error: _Optional[float] = ..., observed: _Optional[int] = ..., tile_tokens: _Optional[int] = ..., mixed_step_margin: _Optional[float] = ..., wave_tokens: _Optional[int] = ..., verify_base_s: _Optional[float] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("router_id", "ref", "prompt_token_ids", "sampling", "prefill", "prior_output_tokens", "cache_salt", "gap_target_s", "adapter", "source", "tenant", "retention_s", "hinted_s", "hinted_tokens")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    PRIOR_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GAP_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_S_FIELD_NUMBER: _ClassVar[int]
    HINTED_S_FIELD_NUMBER: _ClassVar[int]
    HINTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    ref: RequestRef
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    prefill: _types_pb2.PeerRef
    prior_output_tokens: int
    cache_salt: str
    gap_target_s: float
    adapter: str
    source: PrefixSource
    tenant: str
    retention_s: float
    hinted_s: float
    hinted_tokens: int
    def __init__(self, router_id: _Optional[str] = ..., ref: _Optional[_Union[RequestRef, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., prefill: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., prior_output_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., gap_target_s: _Optional[float] = ..., adapter: _Optional[str] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ..., tenant: _Optional[str] = ..., retention_s: _Optional[float] = ..., hinted_s: _Optional[float] = ..., hinted_tokens: _Optional[int] = ...) -> None: ...

class PrefixSource(_message.Message):
    __slots__ = ("peer", "address", "tokens")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    address: str
    tokens: int
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., address: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("lease", "duration_s", "held_tokens")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    duration_s: float
    held_tokens: int
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., duration_s: _Optional[float] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("router_id", "ref", "prompt_token_ids", "sampling", "destination", "prior_output_tokens", "cache_salt", "adapter", "source", "waited_s", "tenant", "retention_s", "hinted_s", "hinted_tokens")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    PRIOR_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_S_FIELD_NUMBER: _ClassVar[int]
    HINTED_S_FIELD_NUMBER: _ClassVar[int]
    HINTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    ref: RequestRef
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    destination: Destination
    prior_output_tokens: int
    cache_salt: str
    adapter: str
    source: PrefixSource
    waited_s: float
    tenant: str
    retention_s: float
    hinted_s: float
    hinted_tokens: int
    def __init__(self, router_id: _Optional[str] = ..., ref: _Optional[_Union[RequestRef, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., destination: _Optional[_Union[Destination, _Mapping]] = ..., prior_output_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., source: _Optional[_Union[PrefixSource, _Mapping]] = ..., waited_s: _Optional[float] = ..., tenant: _Optional[str] = ..., retention_s: _Optional[float] = ..., hinted_s: _Optional[float] = ..., hinted_tokens: _Optional[int] = ...) -> None: ...

class Destination(_message.Message):
    __slots__ = ("peer", "address", "lease")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    address: str
    lease: Lease
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., address: _Optional[str] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortWorkRequest(_message.Message):
    __slots__ = ("router_id", "requests")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    requests: _containers.RepeatedCompositeFieldContainer[RequestRef]
    def __init__(self, router_id: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[RequestRef, _Mapping]]] = ...) -> None: ...

class RequestRef(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class AbortWorkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, unknown: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_s",)
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    grace_s: float
    def __init__(self, grace_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...

class SetAssignmentRequest(_message.Message):
    __slots__ = ("peer", "assignment", "grace_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    assignment: _types_pb2.Assignment
    grace_s: float
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., assignment: _Optional[_Union[_types_pb2.Assignment, _Mapping]] = ..., grace_s: _Optional[float] = ...) -> None: ...

class SetAssignmentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadWorkerAdapterRequest(_message.Message):
    __slots__ = ("peer", "adapter", "in_use")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    adapter: _types_pb2.AdapterFacts
    in_use: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., adapter: _Optional[_Union[_types_pb2.AdapterFacts, _Mapping]] = ..., in_use: _Optional[_Iterable[str]] = ...) -> None: ...

class LoadWorkerAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.AdapterFacts
    def __init__(self, adapter: _Optional[_Union[_types_pb2.AdapterFacts, _Mapping]] = ...) -> None: ...

class UnloadWorkerAdapterRequest(_message.Message):
    __slots__ = ("peer", "name")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    name: str
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class UnloadWorkerAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InspectResponse(_message.Message):
    __slots__ = ("peer", "pages_total", "pages_free", "pages_owned", "pages_shared", "pages_advertised", "pages_quarantined", "pages_reserved", "requests", "leases", "integrity_error", "fenced", "checksums_equal", "checksum_failures", "pages_cached", "prefix_query_tokens", "prefix_hit_tokens", "step_cost_error", "adapters_in_use")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_OWNED_FIELD_NUMBER: _ClassVar[int]
    PAGES_SHARED_FIELD_NUMBER: _ClassVar[int]
    PAGES_ADVERTISED_FIELD_NUMBER: _ClassVar[int]
    PAGES_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RESERVED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERROR_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_EQUAL_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_ERROR_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    pages_total: int
    pages_free: int
    pages_owned: int
    pages_shared: int
    pages_advertised: int
    pages_quarantined: int
    pages_reserved: int
    requests: int
    leases: int
    integrity_error: str
    fenced: int
    checksums_equal: int
    checksum_failures: int
    pages_cached: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    step_cost_error: float
    adapters_in_use: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_owned: _Optional[int] = ..., pages_shared: _Optional[int] = ..., pages_advertised: _Optional[int] = ..., pages_quarantined: _Optional[int] = ..., pages_reserved: _Optional[int] = ..., requests: _Optional[int] = ..., leases: _Optional[int] = ..., integrity_error: _Optional[str] = ..., fenced: _Optional[int] = ..., checksums_equal: _Optional[int] = ..., checksum_failures: _Optional[int] = ..., pages_cached: _Optional[int] = ..., prefix_query_tokens: _Optional[int] = ..., prefix_hit_tokens: _Optional[int] = ..., step_cost_error: _Optional[float] = ..., adapters_in_use: _Optional[_Iterable[str]] = ...) -> None: ...

class SendPrefixRequest(_message.Message):
    __slots__ = ("destination", "digests", "held", "within_s")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    destination: Destination
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    held: int
    within_s: float
    def __init__(self, destination: _Optional[_Union[Destination, _Mapping]] = ..., digests: _Optional[_Iterable[bytes]] = ..., held: _Optional[int] = ..., within_s: _Optional[float] = ...) -> None: ...

class SendPrefixResponse(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: int
    def __init__(self, digests: _Optional[int] = ...) -> None: ...

class ConnectPeerRequest(_message.Message):
    __slots__ = ("protocol_version", "compatibility_hash", "compatibility_facts", "description")
    class CompatibilityFactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_HASH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FACTS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    compatibility_hash: str
    compatibility_facts: _containers.ScalarMap[str, str]
    description: PeerDescription
    def __init__(self, protocol_version: _Optional[int] = ..., compatibility_hash: _Optional[str] = ..., compatibility_facts: _Optional[_Mapping[str, str]] = ..., description: _Optional[_Union[PeerDescription, _Mapping]] = ...) -> None: ...

class ConnectPeerResponse(_message.Message):
    __slots__ = ("description",)
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    description: PeerDescription
    def __init__(self, description: _Optional[_Union[PeerDescription, _Mapping]] = ...) -> None: ...

class PeerDescription(_message.Message):
    __slots__ = ("peer", "agent_metadata", "base_address", "page_bytes", "pages", "device_id", "memory", "host", "process", "probe_address", "other_ranks", "stage")
    PEER_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    BASE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    PROBE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    OTHER_RANKS_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    peer: _types_pb2.PeerRef
    agent_metadata: bytes
    base_address: int
    page_bytes: int
    pages: int
    device_id: int
    memory: str
    host: str
    process: str
    probe_address: int
    other_ranks: _containers.RepeatedCompositeFieldContainer[PeerDescription]
    stage: int
    def __init__(self, peer: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., agent_metadata: _Optional[bytes] = ..., base_address: _Optional[int] = ..., page_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., device_id: _Optional[int] = ..., memory: _Optional[str] = ..., host: _Optional[str] = ..., process: _Optional[str] = ..., probe_address: _Optional[int] = ..., other_ranks: _Optional[_Iterable[_Union[PeerDescription, _Mapping]]] = ..., stage: _Optional[int] = ...) -> None: ...

class AllocatePagesRequest(_message.Message):
    __slots__ = ("lease", "pages", "prefill")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    pages: int
    prefill: _types_pb2.PeerRef
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., pages: _Optional[int] = ..., prefill: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ...) -> None: ...

class AllocatePagesResponse(_message.Message):
    __slots__ = ("page_ids", "write_for_s")
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_FOR_S_FIELD_NUMBER: _ClassVar[int]
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    write_for_s: float
    def __init__(self, page_ids: _Optional[_Iterable[int]] = ..., write_for_s: _Optional[float] = ...) -> None: ...

class RenewPermissionsRequest(_message.Message):
    __slots__ = ("leases", "prefill")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    prefill: _types_pb2.PeerRef
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., prefill: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ...) -> None: ...

class RenewPermissionsResponse(_message.Message):
    __slots__ = ("over", "write_for_s")
    OVER_FIELD_NUMBER: _ClassVar[int]
    WRITE_FOR_S_FIELD_NUMBER: _ClassVar[int]
    over: _containers.RepeatedCompositeFieldContainer[Lease]
    write_for_s: float
    def __init__(self, over: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., write_for_s: _Optional[float] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("lease", "prefill", "in_doubt")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    IN_DOUBT_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    prefill: _types_pb2.PeerRef
    in_doubt: bool
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., prefill: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., in_doubt: _Optional[bool] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NameDeliveriesRequest(_message.Message):
    __slots__ = ("leases", "prefill")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    prefill: _types_pb2.PeerRef
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., prefill: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ...) -> None: ...

class NameDeliveriesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TransferNotice(_message.Message):
    __slots__ = ("lease", "prefill", "token_hash", "pages", "first_token_id", "next_draw", "checksums", "skipped", "part", "parts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HASH_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAW_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    prefill: _types_pb2.PeerRef
    token_hash: bytes
    pages: int
    first_token_id: int
    next_draw: int
    checksums: _containers.RepeatedCompositeFieldContainer[PageChecksum]
    skipped: int
    part: int
    parts: int
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., prefill: _Optional[_Union[_types_pb2.PeerRef, _Mapping]] = ..., token_hash: _Optional[bytes] = ..., pages: _Optional[int] = ..., first_token_id: _Optional[int] = ..., next_draw: _Optional[int] = ..., checksums: _Optional[_Iterable[_Union[PageChecksum, _Mapping]]] = ..., skipped: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class PageChecksum(_message.Message):
    __slots__ = ("page", "value")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    page: int
    value: int
    def __init__(self, page: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
