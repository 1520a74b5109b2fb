"""Every message between processes survives the round trip dataclass → proto → bytes → dataclass, for random values."""

import dataclasses
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol import conversion, cost_parameters, messages, prefixes
from tandem.protocol.generated.tandem.v1 import cluster_pb2, inference_pb2, types_pb2, worker_pb2
from tandem.protocol.lifecycle import request_trace, timeline
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
edges = st.lists(st.builds(timeline.EdgeStamp, st.sampled_from(timeline.Edge), st.integers(0, 2**62)), max_size=3).map(
    tuple
)
transfers = st.builds(timeline.TransferStats, uint64, uint32, text, uint64)
timelines = st.builds(timeline.Timeline, edges, st.none() | transfers, text, text)
errors = st.builds(messages.ErrorDetail, text, text, st.floats(0, 9))
events = st.builds(
    messages.RequestEvent,
    refs,
    uint32,
    token_ids,
    st.none() | st.sampled_from(messages.FinishReason),
    st.none() | errors,
    edges,
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
loads = st.builds(messages.WorkerLoad, *[uint32] * 5, *[uint64] * 3, costs)
digests = st.lists(st.binary(max_size=16), max_size=3).map(tuple)
runs = st.lists(st.builds(prefixes.PrefixRun, st.binary(max_size=16), digests), max_size=2).map(tuple)
prefix_changes = st.builds(prefixes.PrefixChanges, uint64, runs, digests)
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
        adapters=st.lists(st.builds(messages.AdapterFacts, text, text, text), max_size=2).map(tuple),
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
)
checksums = st.lists(st.builds(messages.PageChecksum, uint32, uint64), max_size=3).map(tuple)
notices = st.builds(
    messages.TransferNotice, leases, peers, st.binary(max_size=32), uint32, uint32, uint32, checksums, uint32
)
facts = st.dictionaries(text, text, max_size=3).map(lambda d: tuple(sorted(d.items())))

CASES: dict[str, tuple[Any, type]] = {
    "sampling": (sampling, types_pb2.SamplingParams),
    "transfer": (transfers, types_pb2.TransferStats),
    "error": (errors, types_pb2.ErrorDetail),
    "adapter": (st.builds(messages.AdapterFacts, text, text, text), types_pb2.AdapterFacts),
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
            answered=uint32,
            cache_salt=text,
            adapter=text,
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
            answered=uint32,
            cache_salt=text,
            adapter=text,
        ),
        worker_pb2.PrefillRequest,
    ),
    "token_logprobs": (scores, worker_pb2.TokenLogprobs),
    "event": (events, worker_pb2.RequestEvent),
    "cost": (costs, worker_pb2.CostParameters),
    "load": (loads, worker_pb2.WorkerLoad),
    "step_events": (
        st.builds(
            messages.StepEvents,
            uint64,
            st.lists(events, max_size=3).map(tuple),
            loads,
            st.lists(prefix_changes, max_size=2).map(tuple),
            st.lists(step_tokens, max_size=2).map(tuple),
        ),
        worker_pb2.StepEvents,
    ),
    "step_tokens": (step_tokens, worker_pb2.StepTokens),
    "prefix_changes": (prefix_changes, worker_pb2.PrefixChanges),
    "prefix_list": (st.builds(prefixes.PrefixList, uint64, runs), worker_pb2.ListPrefixesResponse),
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
        st.builds(messages.Membership, uint64, st.lists(workers, max_size=3).map(tuple), text),
        cluster_pb2.Membership,
    ),
}


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject) -> None:
    strategy, message_type = CASES[name]
    value = data.draw(strategy)
    to_proto, from_proto = getattr(conversion, f"{name}_to_proto"), getattr(conversion, f"{name}_from_proto")
    assert from_proto(message_type.FromString(to_proto(value).SerializeToString())) == value


def test_without_a_repetition_penalty_there_is_none() -> None:
    """A router of an earlier release does not send the field."""
    old = conversion.sampling_from_proto(types_pb2.SamplingParams(max_tokens=1))
    assert (old.repetition_penalty, old.penalized, old.logprobs, old.min_tokens) == (1.0, False, None, 0)
    greedy = types_pb2.SamplingParams(max_tokens=1, logprobs=0)
    assert conversion.sampling_from_proto(greedy).logprobs == 0


def test_a_load_without_costs_has_those_of_nothing_measured() -> None:
    """A worker of an earlier release does not send the field."""
    assert conversion.load_from_proto(worker_pb2.WorkerLoad()).cost == cost_parameters.CostParameters()
    old = conversion.cost_from_proto(worker_pb2.CostParameters(base_s=1.0))
    assert (old.tile_tokens, old.wave_tokens) == (1, 1)
    assert old.mixed_noise == cost_parameters.UNMEASURED.mixed_noise


def test_every_pair_is_tested() -> None:
    pairs = {n.removesuffix("_to_proto") for n in dir(conversion) if n.endswith("_to_proto")}
    assert pairs - {"finish", "edges"} == set(CASES)


@pytest.mark.parametrize(
    ("mine", "theirs", "prefix"),
    [
        (timeline.Edge, types_pb2.Edge, "EDGE_"),
        (messages.FinishReason, types_pb2.FinishReason, "FINISH_REASON_"),
    ],
)
def test_enums_have_the_schema_s_members(mine: Any, theirs: Any, prefix: str) -> None:
    schema = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
    schema.pop("TOOL_CALLS", None)  # the router's own, of an answer that stopped and has calls
    assert schema == {member.name: int(member) for member in mine}


def test_every_dataclass_is_frozen() -> None:
    classes = [
        c for m in (cost_parameters, messages, timeline) for c in vars(m).values() if dataclasses.is_dataclass(c)
    ]
    assert classes
    assert all(c.__dataclass_params__.frozen for c in classes)  # type: ignore[union-attr]


LOAD = messages.WorkerLoad(0, 0, 0, 0, 8)


def test_an_event_that_cannot_be_written_is_its_request_s_failure(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = messages.RequestEvent(messages.RequestRef("a", 1)), messages.RequestRef("b", 2)
    columns = messages.StepTokens(("c", "b"), (1, 2), (3, 3), (7, -1))
    step = messages.StepEvents(1, (messages.RequestEvent(bad, 0, (-1,)), good), LOAD, tokens=(columns,))
    found = list(conversion.step_events_from_proto(conversion.step_events_to_proto(step)).each())
    assert [(each.ref.request_id, each.error and each.error.code) for each in found] == [
        ("b", "INTERNAL"), ("a", None), ("c", None), ("b", "INTERNAL"),
    ]  # fmt: skip
    assert found[2].token_ids == (7,)
    assert "an event of request b could not be written" in caplog.text


def test_an_event_that_cannot_be_read_is_its_request_s_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Such an event comes from a worker of a later release, which has more edges."""
    message = conversion.step_events_to_proto(messages.StepEvents(1, (), LOAD))
    message.events.add(request_id="b", attempt=2, edges=[types_pb2.EdgeStamp(edge=9999, unix_nanos=1)])  # type: ignore[arg-type]
    message.events.add(request_id="a", attempt=1, token_ids=[7])
    bad, good = conversion.step_events_from_proto(message).each()
    assert (bad.ref, bad.error and bad.error.code) == (messages.RequestRef("b", 2), "INTERNAL")
    assert good.token_ids == (7,)
    assert "an event of request b could not be read" in caplog.text
