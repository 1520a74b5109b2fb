"""Every message between processes survives the round trip dataclass → proto → bytes → dataclass, for random values."""

import dataclasses
import math
import struct
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol import conversion, cost_parameters, messages, prefixes
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import cluster_pb2, inference_pb2, types_pb2, worker_pb2
from tandem.protocol.kv_pages import STATE
from tandem.protocol.lifecycle import events as lifecycle_events
from tandem.protocol.lifecycle import request_trace
from tandem.protocol.policy_name import PolicyName


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


text = st.text(max_size=12)
uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
unit = st.floats(0, 1, width=32)
token_ids = st.lists(uint32, max_size=5).map(tuple)

refs = st.builds(messages.RequestRef, text, uint32)
leases = st.builds(messages.Lease, text, uint32, uint64)
peers = st.builds(messages.PeerRef, text, uint64)
sampling = st.builds(
    messages.SamplingParams,
    uint32,
    unit,
    uint32,
    unit,
    unit,
    uint64,
    token_ids,
    st.booleans(),
    unit,
    unit,
    unit,
    st.none() | uint32,
    prompt_logprobs=st.none() | uint32,
    logit_bias=st.dictionaries(uint32, unit, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
)
prompt_scores = st.builds(
    messages.PromptLogprobs, st.lists(unit, max_size=5).map(tuple), uint32, token_ids, st.lists(unit).map(tuple)
)
scores = st.builds(messages.TokenLogprobs, unit, token_ids, st.lists(unit, max_size=5).map(tuple))
event_times = st.lists(
    st.builds(lifecycle_events.EventTime, st.sampled_from(lifecycle_events.LifecycleEvent), st.integers(0, 2**62)),
    max_size=3,
).map(tuple)
transfers = st.builds(lifecycle_events.TransferStats, uint64, uint32, text, uint64)
timelines = st.builds(lifecycle_events.Timeline, event_times, st.none() | transfers, text, text)
errors = st.builds(messages.ErrorDetail, text, text, st.floats(0, 9))
events = st.builds(
    messages.RequestEvent,
    refs,
    uint32,
    token_ids,
    st.none() | st.sampled_from(messages.FinishReason),
    st.none() | errors,
    event_times,
    st.none() | transfers,
    st.lists(scores, max_size=2).map(tuple),
    uint32,
    prompt_logprobs=st.none() | prompt_scores,
)
step_tokens = st.lists(st.tuples(text, uint32, uint32, uint32), min_size=1, max_size=3).map(
    lambda rows: messages.StepTokens(*zip(*rows, strict=True))
)
seconds = st.floats(0, 9)
costs = st.builds(
    cost_parameters.CostParameters,
    *[seconds] * 6,
    uint32,
    seconds,
    uint64,
    *[st.integers(1, 1024)] * 2,
    st.floats(1.0, 2.0),
)
kv_tiers = st.sampled_from(prefixes.KvTier)
tier_loads = st.lists(st.builds(messages.TierLoad, kv_tiers, st.floats(0.0, math.inf), uint32), max_size=2).map(tuple)
loads = st.builds(messages.WorkerLoad, *[uint32] * 5, *[uint64] * 3, costs, tiers=tier_loads)
digests = st.lists(st.binary(max_size=16), max_size=3).map(tuple)
page_tokens = st.lists(uint32, max_size=4).map(tuple)
runs = st.lists(st.builds(prefixes.PrefixRun, st.binary(max_size=16), digests, page_tokens, text), max_size=2).map(
    tuple
)
tier_pages = st.lists(st.builds(prefixes.TierPages, kv_tiers, digests), max_size=2).map(tuple)
prefix_changes = st.builds(prefixes.PrefixChanges, uint64, runs, digests, tier_pages)
descriptions = st.builds(
    messages.PeerDescription,
    peers,
    st.binary(max_size=9),
    uint64,
    uint64,
    uint32,
    uint32,
    st.sampled_from(["DRAM"]),
    text,
)
destinations = st.builds(messages.Destination, peers, text, leases)
assignments = st.builds(
    messages.Assignment,
    st.sampled_from(messages.Role),
    st.sampled_from(PolicyName),
    st.none() | st.integers(1, 2**32 - 1),
    st.none() | st.floats(1e-6, 60),
)
adapters = st.builds(messages.AdapterFacts, text, text, text)
workers = st.builds(
    messages.WorkerInfo,
    peers,
    st.sampled_from(messages.Role),
    text,
    st.builds(
        messages.ModelFacts,
        text,
        uint32,
        uint32,
        token_ids,
        text,
        st.lists(text, max_size=3).map(tuple),
        adapters=st.lists(adapters, max_size=2).map(tuple),
        kv_windows=st.lists(st.none() | st.just(STATE) | st.integers(1, 4096), max_size=3).map(tuple),
        kv_step_tokens=uint32,
    ),
    uint32,
    uint32,
    uint32,
    uint32,
    text,
    text,
    text,
    st.lists(text, max_size=2).map(tuple),
    st.none() | assignments,
    st.none() | st.sampled_from(messages.Role),
    st.integers(0, 2**62),
    st.lists(text, max_size=2).map(tuple),
)
checksums = st.lists(st.builds(messages.PageChecksum, uint32, uint64), max_size=3).map(tuple)
notices = st.builds(
    messages.TransferNotice, leases, peers, st.binary(max_size=32), uint32, uint32, uint32, checksums, uint32
)
facts = st.dictionaries(text, text, max_size=3).map(lambda d: tuple(sorted(d.items())))

CASES: dict[str, tuple[st.SearchStrategy[Any], type[Message]]] = {
    "sampling": (sampling, types_pb2.SamplingParams),
    "transfer": (transfers, types_pb2.TransferStats),
    "error": (errors, types_pb2.ErrorDetail),
    "adapter": (adapters, types_pb2.AdapterFacts),
    "timeline": (timelines, inference_pb2.Timeline),
    "trace": (
        st.builds(
            request_trace.RequestTrace,
            text,
            text,
            st.builds(request_trace.TraceContext, text, text, st.booleans()),
            *[text] * 4,
            *[uint32] * 3,
            timelines,
        ),
        inference_pb2.RequestTrace,
    ),
    "ref": (refs, worker_pb2.RequestRef),
    "lease": (leases, worker_pb2.Lease),
    "reservation": (
        st.builds(
            messages.Reservation,
            text,
            refs,
            token_ids,
            sampling,
            peers,
            prior_output_tokens=uint32,
            cache_salt=text,
            adapter=text,
            tenant=text,
            retention_s=seconds,
            hinted_s=seconds,
            hinted_tokens=uint32,
            gap_target_s=st.just(math.inf) | st.floats(1e-6, 60),
        ),
        worker_pb2.ReserveRequest,
    ),
    "granted": (st.builds(messages.GrantedLease, leases, st.floats(0, 60), uint32), worker_pb2.ReserveResponse),
    "destination": (destinations, worker_pb2.Destination),
    "prefill_task": (
        st.builds(
            messages.PrefillTask,
            text,
            refs,
            token_ids,
            sampling,
            st.none() | destinations,
            prior_output_tokens=uint32,
            cache_salt=text,
            adapter=text,
            waited_s=seconds,
            tenant=text,
            retention_s=seconds,
            hinted_s=seconds,
            hinted_tokens=uint32,
        ),
        worker_pb2.PrefillRequest,
    ),
    "token_logprobs": (scores, worker_pb2.TokenLogprobs),
    "event": (events, worker_pb2.RequestEvent),
    "cost": (costs, worker_pb2.CostParameters),
    "load": (loads, worker_pb2.WorkerLoad),
    "step_tokens": (step_tokens, worker_pb2.StepTokens),
    "prefix_changes": (prefix_changes, worker_pb2.PrefixChanges),
    "prefix_list": (st.builds(prefixes.PrefixList, uint64, runs, tier_pages), worker_pb2.ListPrefixesResponse),
    "inspection": (
        st.builds(
            messages.WorkerInspection, peers, *[uint32] * 9, text, *[uint64] * 3, uint32, uint64, uint64, seconds
        ),
        worker_pb2.InspectResponse,
    ),
    "description": (descriptions, worker_pb2.PeerDescription),
    "handshake": (st.builds(messages.Handshake, uint32, text, facts, descriptions), worker_pb2.ConnectPeerRequest),
    "notice": (notices, worker_pb2.TransferNotice),
    "assignment": (assignments, types_pb2.Assignment),
    "worker_info": (workers, cluster_pb2.WorkerInfo),
    "absence": (st.builds(messages.Absence, text, text, st.booleans()), cluster_pb2.Absence),
    "membership": (
        st.builds(
            messages.Membership,
            uint64,
            st.lists(workers, max_size=3).map(tuple),
            text,
            st.none() | st.lists(adapters, max_size=2).map(tuple),
            st.lists(st.builds(messages.ExpectedWorker, text, st.sampled_from(messages.Role)), max_size=2).map(tuple),
        ),
        cluster_pb2.Membership,
    ),
}


step_events = st.builds(
    messages.StepOutput,
    uint64,
    st.lists(events, max_size=3).map(tuple),
    loads,
    st.lists(prefix_changes, max_size=2).map(tuple),
    st.lists(step_tokens, max_size=2).map(tuple),
)


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_a_message_survives_the_round_trip(name: str, data: st.DataObject) -> None:
    strategy, message_type = CASES[name]
    value = data.draw(strategy)
    sent = conversion.to_proto(value, message_type).SerializeToString()
    assert conversion.from_proto(message_type.FromString(sent), type(value)) == value


@given(value=step_events)
def test_a_step_output_survives_the_round_trip(value: messages.StepOutput) -> None:
    sent = conversion.step_output_to_proto(value).SerializeToString()
    assert conversion.step_output_from_proto(worker_pb2.StepOutput.FromString(sent)) == value


@given(value=notices)
def test_a_notice_survives_the_round_trip(value: messages.TransferNotice) -> None:
    assert conversion.decode_notice(conversion.encode_notice(value)) == value


def test_every_message_with_a_dataclass_is_tested() -> None:
    tested = {message_type.DESCRIPTOR.name for _, message_type in CASES.values()}
    for _, message_type in CASES.values():
        tested |= {field.message_type.name for field in message_type.DESCRIPTOR.fields if field.message_type}
    named = {
        name for name in messages.__all__ if any(hasattr(pb2, name) for pb2 in (types_pb2, worker_pb2, cluster_pb2))
    }
    assert named - tested == {"StepOutput", "FinishReason"}


def test_absent_fields_take_the_defaults_of_the_dataclass() -> None:
    sampling = conversion.from_proto(types_pb2.SamplingParams(max_tokens=1), messages.SamplingParams)
    assert (sampling.repetition_penalty, sampling.logprobs, sampling.speculate) == (1.0, None, True)
    greedy = types_pb2.SamplingParams(max_tokens=1, logprobs=0)
    assert conversion.from_proto(greedy, messages.SamplingParams).logprobs == 0
    assert conversion.from_proto(worker_pb2.ReserveRequest(), messages.Reservation).gap_target_s == math.inf
    load = conversion.from_proto(worker_pb2.WorkerLoad(), messages.WorkerLoad)
    assert (load.cost, load.decode_speedup) == (cost_parameters.UNMEASURED, 1.0)


def test_an_unknown_role_is_an_invalid_argument_that_names_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="role: 'dcode' is not one of prefill, decode, both"):
        conversion.from_proto(types_pb2.Assignment(role="dcode", step_policy="chunked"), messages.Assignment)


def test_a_message_with_other_fields_than_the_dataclass_is_refused() -> None:
    with pytest.raises(TypeError, match="Lease and RequestRef differ in: epoch"):
        conversion.to_proto(messages.Lease("a", 1, 2), worker_pb2.RequestRef)


@pytest.mark.parametrize(
    ("mine", "theirs", "prefix"),
    [
        (lifecycle_events.LifecycleEvent, types_pb2.LifecycleEvent, "LIFECYCLE_EVENT_"),
        (messages.FinishReason, types_pb2.FinishReason, "FINISH_REASON_"),
    ],
)
def test_enums_have_the_schema_s_members(mine: Any, theirs: Any, prefix: str) -> None:
    schema = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
    schema.pop("TOOL_CALLS", None)  # the router's own, of an answer that stopped and has calls
    assert schema == {member.name: int(member) for member in mine}


def test_every_dataclass_is_frozen() -> None:
    classes = [
        c
        for m in (cost_parameters, messages, lifecycle_events)
        for c in vars(m).values()
        if dataclasses.is_dataclass(c)
    ]
    assert classes
    assert all(c.__dataclass_params__.frozen for c in classes)  # type: ignore[union-attr]


LOAD = messages.WorkerLoad(0, 0, 0, 0, 8)


def test_an_event_that_cannot_be_written_is_its_request_s_failure(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = messages.RequestEvent(messages.RequestRef("a", 1)), messages.RequestRef("b", 2)
    columns = messages.StepTokens(("c", "b"), (1, 2), (3, 3), (7, -1))
    step = messages.StepOutput(1, (messages.RequestEvent(bad, 0, (-1,)), good), LOAD, tokens=(columns,))
    parsed = list(conversion.step_output_from_proto(conversion.step_output_to_proto(step)).each())
    assert [(event.ref.request_id, event.error and event.error.code) for event in parsed] == [
        ("b", "INTERNAL"), ("a", None), ("c", None), ("b", "INTERNAL"),
    ]  # fmt: skip
    assert parsed[2].token_ids == (7,)
    assert "an event of request b could not be written" in caplog.text


def test_an_event_that_cannot_be_read_is_its_request_s_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Such an event comes from a worker of a later release, which has more events."""
    message = conversion.step_output_to_proto(messages.StepOutput(1, (), LOAD))
    message.events.add(
        ref=worker_pb2.RequestRef(request_id="b", attempt=2),
        event_times=[types_pb2.EventTime(event=9999, unix_nanos=1)],
    )  # type: ignore[arg-type]
    message.events.add(ref=worker_pb2.RequestRef(request_id="a", attempt=1), token_ids=[7])
    bad, good = conversion.step_output_from_proto(message).each()
    assert (bad.ref, bad.error and bad.error.code) == (messages.RequestRef("b", 2), "INTERNAL")
    assert good.token_ids == (7,)
    assert "an event of request b could not be read" in caplog.text
