from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]

class LifecycleEvent(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIFECYCLE_EVENT_UNSPECIFIED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_RECEIVED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_TOKENIZED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_PLACED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_RESERVED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_PREFILL_QUEUED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_PREFILL_STARTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_PREFILL_FINISHED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_TRANSFER_STARTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_TRANSFER_FINISHED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_FIRST_TOKEN: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_DECODE_ADMITTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_DECODE_STARTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_FINISHED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_PREEMPTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_LAST_PAGES_POSTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_NOTICE_MADE: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_NOTICE_POSTED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_NOTICE_SEEN: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_KV_CHECKED: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_SILENT: _ClassVar[LifecycleEvent]
    LIFECYCLE_EVENT_REQUEUED: _ClassVar[LifecycleEvent]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
LIFECYCLE_EVENT_UNSPECIFIED: LifecycleEvent
LIFECYCLE_EVENT_RECEIVED: LifecycleEvent
LIFECYCLE_EVENT_TOKENIZED: LifecycleEvent
LIFECYCLE_EVENT_PLACED: LifecycleEvent
LIFECYCLE_EVENT_RESERVED: LifecycleEvent
LIFECYCLE_EVENT_PREFILL_QUEUED: LifecycleEvent
LIFECYCLE_EVENT_PREFILL_STARTED: LifecycleEvent
LIFECYCLE_EVENT_PREFILL_FINISHED: LifecycleEvent
LIFECYCLE_EVENT_TRANSFER_STARTED: LifecycleEvent
LIFECYCLE_EVENT_TRANSFER_FINISHED: LifecycleEvent
LIFECYCLE_EVENT_FIRST_TOKEN: LifecycleEvent
LIFECYCLE_EVENT_DECODE_ADMITTED: LifecycleEvent
LIFECYCLE_EVENT_DECODE_STARTED: LifecycleEvent
LIFECYCLE_EVENT_FINISHED: LifecycleEvent
LIFECYCLE_EVENT_PREEMPTED: LifecycleEvent
LIFECYCLE_EVENT_LAST_PAGES_POSTED: LifecycleEvent
LIFECYCLE_EVENT_NOTICE_MADE: LifecycleEvent
LIFECYCLE_EVENT_NOTICE_POSTED: LifecycleEvent
LIFECYCLE_EVENT_NOTICE_SEEN: LifecycleEvent
LIFECYCLE_EVENT_KV_CHECKED: LifecycleEvent
LIFECYCLE_EVENT_SILENT: LifecycleEvent
LIFECYCLE_EVENT_REQUEUED: LifecycleEvent

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty", "logprobs", "min_tokens", "speculate", "grammar", "prompt_logprobs", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logprobs: int
    min_tokens: int
    speculate: bool
    grammar: str
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., speculate: _Optional[bool] = ..., grammar: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class EventTime(_message.Message):
    __slots__ = ("event", "unix_nanos")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    UNIX_NANOS_FIELD_NUMBER: _ClassVar[int]
    event: LifecycleEvent
    unix_nanos: int
    def __init__(self, event: _Optional[_Union[LifecycleEvent, str]] = ..., unix_nanos: _Optional[int] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("bytes", "pages", "backend", "duration_nanos")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DURATION_NANOS_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    pages: int
    backend: str
    duration_nanos: int
    def __init__(self, bytes: _Optional[int] = ..., pages: _Optional[int] = ..., backend: _Optional[str] = ..., duration_nanos: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class PeerRef(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("role", "step_policy", "step_budget", "itl_target_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STEP_POLICY_FIELD_NUMBER: _ClassVar[int]
    STEP_BUDGET_FIELD_NUMBER: _ClassVar[int]
    ITL_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    step_policy: str
    step_budget: int
    itl_target_s: float
    def __init__(self, role: _Optional[str] = ..., step_policy: _Optional[str] = ..., step_budget: _Optional[int] = ..., itl_target_s: _Optional[float] = ...) -> None: ...

class AdapterFacts(_message.Message):
    __slots__ = ("name", "identity", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: str
    path: str
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("lora_name", "lora_path")
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    LORA_PATH_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    lora_path: str
    def __init__(self, lora_name: _Optional[str] = ..., lora_path: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterFacts
    def __init__(self, adapter: _Optional[_Union[AdapterFacts, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("lora_name",)
    LORA_NAME_FIELD_NUMBER: _ClassVar[int]
    lora_name: str
    def __init__(self, lora_name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
