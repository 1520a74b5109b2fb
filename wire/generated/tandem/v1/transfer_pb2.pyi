from wire.generated.tandem.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReadEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_END_UNSPECIFIED: _ClassVar[ReadEnd]
    READ_END_LANDED: _ClassVar[ReadEnd]
    READ_END_WITHHELD: _ClassVar[ReadEnd]
    READ_END_NOT_BEGUN: _ClassVar[ReadEnd]
    READ_END_FAILED: _ClassVar[ReadEnd]
READ_END_UNSPECIFIED: ReadEnd
READ_END_LANDED: ReadEnd
READ_END_WITHHELD: ReadEnd
READ_END_NOT_BEGUN: ReadEnd
READ_END_FAILED: ReadEnd

class ReadNote(_message.Message):
    __slots__ = ("order", "cancel", "answer")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    order: ReadOrder
    cancel: ReadCancel
    answer: ReadAnswer
    def __init__(self, order: _Optional[_Union[ReadOrder, _Mapping]] = ..., cancel: _Optional[_Union[ReadCancel, _Mapping]] = ..., answer: _Optional[_Union[ReadAnswer, _Mapping]] = ...) -> None: ...

class ReadOrder(_message.Message):
    __slots__ = ("number", "oldest", "reader_incarnation", "source_pages", "target_pages", "notice")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_PAGES_FIELD_NUMBER: _ClassVar[int]
    TARGET_PAGES_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    number: int
    oldest: int
    reader_incarnation: int
    source_pages: _containers.RepeatedScalarFieldContainer[int]
    target_pages: _containers.RepeatedScalarFieldContainer[int]
    notice: _worker_pb2.TransferNotice
    def __init__(self, number: _Optional[int] = ..., oldest: _Optional[int] = ..., reader_incarnation: _Optional[int] = ..., source_pages: _Optional[_Iterable[int]] = ..., target_pages: _Optional[_Iterable[int]] = ..., notice: _Optional[_Union[_worker_pb2.TransferNotice, _Mapping]] = ...) -> None: ...

class ReadCancel(_message.Message):
    __slots__ = ("number", "oldest", "reader_incarnation")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    number: int
    oldest: int
    reader_incarnation: int
    def __init__(self, number: _Optional[int] = ..., oldest: _Optional[int] = ..., reader_incarnation: _Optional[int] = ...) -> None: ...

class ReadAnswer(_message.Message):
    __slots__ = ("number", "sender_incarnation", "end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SENDER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    number: int
    sender_incarnation: int
    end: ReadEnd
    def __init__(self, number: _Optional[int] = ..., sender_incarnation: _Optional[int] = ..., end: _Optional[_Union[ReadEnd, str]] = ...) -> None: ...
