"""Converts between protobuf messages and dataclasses; no other package depends on both.

`to_proto` and `from_proto` convert every dataclass and message with equal field names. `step_output_*` convert the
stream of step outputs, where a defective event must not end the stream; `traces_*` convert the JSON of /traces, and
`*_notice` the bytes of a transfer notice.
"""

from tandem.protocol.conversion.fields import from_proto, to_proto
from tandem.protocol.conversion.notice import decode_notice, encode_notice
from tandem.protocol.conversion.step_output import step_output_from_proto, step_output_to_proto
from tandem.protocol.conversion.traces import traces_from_json, traces_to_json

__all__ = [
    "decode_notice",
    "encode_notice",
    "from_proto",
    "step_output_from_proto",
    "step_output_to_proto",
    "to_proto",
    "traces_from_json",
    "traces_to_json",
]
