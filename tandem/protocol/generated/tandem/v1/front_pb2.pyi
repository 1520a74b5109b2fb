from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrontFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[FrontFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[FrontFrame, _Mapping]]] = ...) -> None: ...

class FrontFrame(_message.Message):
    __slots__ = ("call", "opened", "grpc", "http", "body", "gone", "passed", "alive", "rejected")
    CALL_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    GRPC_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    call: int
    opened: Opened
    grpc: GrpcCall
    http: HttpRequest
    body: HttpBody
    gone: Gone
    passed: int
    alive: Alive
    rejected: Rejected
    def __init__(self, call: _Optional[int] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., grpc: _Optional[_Union[GrpcCall, _Mapping]] = ..., http: _Optional[_Union[HttpRequest, _Mapping]] = ..., body: _Optional[_Union[HttpBody, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ..., passed: _Optional[int] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("method", "peer", "code")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    method: str
    peer: str
    code: str
    def __init__(self, method: _Optional[str] = ..., peer: _Optional[str] = ..., code: _Optional[str] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Alive(_message.Message):
    __slots__ = ("connections",)
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    connections: int
    def __init__(self, connections: _Optional[int] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Header(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: bytes
    value: bytes
    def __init__(self, name: _Optional[bytes] = ..., value: _Optional[bytes] = ...) -> None: ...

class GrpcCall(_message.Message):
    __slots__ = ("method", "metadata", "message", "more", "peer")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    method: str
    metadata: _containers.RepeatedCompositeFieldContainer[Header]
    message: bytes
    more: bool
    peer: str
    def __init__(self, method: _Optional[str] = ..., metadata: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., message: _Optional[bytes] = ..., more: _Optional[bool] = ..., peer: _Optional[str] = ...) -> None: ...

class HttpRequest(_message.Message):
    __slots__ = ("method", "path", "raw_path", "query_string", "http_version", "scheme", "headers", "client")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RAW_PATH_FIELD_NUMBER: _ClassVar[int]
    QUERY_STRING_FIELD_NUMBER: _ClassVar[int]
    HTTP_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    method: str
    path: str
    raw_path: bytes
    query_string: bytes
    http_version: str
    scheme: str
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    client: str
    def __init__(self, method: _Optional[str] = ..., path: _Optional[str] = ..., raw_path: _Optional[bytes] = ..., query_string: _Optional[bytes] = ..., http_version: _Optional[str] = ..., scheme: _Optional[str] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ..., client: _Optional[str] = ...) -> None: ...

class HttpBody(_message.Message):
    __slots__ = ("data", "more")
    DATA_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    more: bool
    def __init__(self, data: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class RouterFrames(_message.Message):
    __slots__ = ("frames",)
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[RouterFrame]
    def __init__(self, frames: _Optional[_Iterable[_Union[RouterFrame, _Mapping]]] = ...) -> None: ...

class RouterFrame(_message.Message):
    __slots__ = ("call", "message", "end", "response", "body", "serving", "leave_s", "ask", "passed")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    LEAVE_S_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    call: int
    message: bytes
    end: CallEnd
    response: HttpResponse
    body: HttpBody
    serving: bool
    leave_s: float
    ask: Ask
    passed: int
    def __init__(self, call: _Optional[int] = ..., message: _Optional[bytes] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ..., response: _Optional[_Union[HttpResponse, _Mapping]] = ..., body: _Optional[_Union[HttpBody, _Mapping]] = ..., serving: _Optional[bool] = ..., leave_s: _Optional[float] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., passed: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("status", "details", "trailing_metadata")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    TRAILING_METADATA_FIELD_NUMBER: _ClassVar[int]
    status: int
    details: str
    trailing_metadata: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, status: _Optional[int] = ..., details: _Optional[str] = ..., trailing_metadata: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...

class HttpResponse(_message.Message):
    __slots__ = ("status", "headers")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    status: int
    headers: _containers.RepeatedCompositeFieldContainer[Header]
    def __init__(self, status: _Optional[int] = ..., headers: _Optional[_Iterable[_Union[Header, _Mapping]]] = ...) -> None: ...
