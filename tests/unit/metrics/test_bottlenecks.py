"""The diagnosis at its thresholds."""

from dataclasses import replace

import pytest

from tandem.metrics.bottlenecks import (
    BACKLOG,
    BATCH_FULL,
    COMPUTING,
    CONCURRENT_TRANSFERS,
    KV_FULL,
    TRANSFERRING,
    Bottleneck,
    Figures,
    diagnose,
)

IDLE = Figures(
    steps=99, busy=0.1, compute=0.1, bandwidth=0.1, collectives=0.0, kv_used=0.2, holders=2, refused=0, preempted=0,
    decoding=2, batch_limit=64, transferring=0.0, arriving=0.0, others_transferring=0.0, prompts_waiting=0,
    requests_waiting=0,
)  # fmt: skip
BELOW = 1e-6


def bottleneck(**figures: float) -> Bottleneck:
    return diagnose(replace(IDLE, **figures)).bottleneck


def test_a_worker_with_little_to_do() -> None:
    diagnosis = diagnose(IDLE)
    assert (diagnosis.bottleneck, diagnosis.because) == (Bottleneck.NONE, "it computes 10% of the time")
    elsewhere = diagnose(replace(IDLE, requests_waiting=4))
    assert elsewhere.bottleneck is Bottleneck.NONE
    assert "other workers" in elsewhere.because


@pytest.mark.parametrize(
    ("compute", "bandwidth", "expected"),
    [
        (0.6, 0.3, Bottleneck.COMPUTE),
        (0.3, 0.6, Bottleneck.BANDWIDTH),
        (0.3, 0.3, Bottleneck.HOST),
        (0.34, 0.33, Bottleneck.COMPUTE),
        (0.33, 0.34, Bottleneck.BANDWIDTH),
        (0.32, 0.33, Bottleneck.HOST),
        (0.1, 0.1, Bottleneck.HOST),
        (0.0, 0.0, Bottleneck.HOST),
        (1.3, 0.2, Bottleneck.COMPUTE),  # a device better than its ceilings
    ],
)
def test_what_takes_most_of_its_steps(compute: float, bandwidth: float, expected: Bottleneck) -> None:
    assert bottleneck(busy=COMPUTING, compute=compute, bandwidth=bandwidth) is expected
    assert bottleneck(busy=COMPUTING - BELOW, compute=compute, bandwidth=bandwidth) is Bottleneck.NONE


def test_exchanges_between_gpus_are_a_share_of_their_own() -> None:
    group = replace(IDLE, busy=1.0, compute=0.2, bandwidth=0.25, collectives=0.3, requests_waiting=1)
    diagnosis = diagnose(group)
    assert diagnosis.bottleneck is Bottleneck.COLLECTIVES
    assert "its GPUs exchange data for 30% of its time; none of these explains 25%" in diagnosis.because
    assert "--tensor-parallel-size" in diagnosis.change
    assert diagnose(replace(group, collectives=0.2)).bottleneck is Bottleneck.HOST, "35 % are the host's"


def test_pages() -> None:
    assert bottleneck(kv_used=KV_FULL, requests_waiting=1) is Bottleneck.KV_CAPACITY
    assert bottleneck(kv_used=KV_FULL - BELOW, holders=64, requests_waiting=1) is Bottleneck.NONE  # one more fits
    assert bottleneck(kv_used=1.0) is Bottleneck.NONE  # no request needs more
    assert bottleneck(kv_used=0.5, preempted=1) is Bottleneck.KV_CAPACITY
    assert bottleneck(kv_used=0.7, requests_waiting=1) is Bottleneck.KV_CAPACITY  # the third does not fit
    assert bottleneck(kv_used=0.6, requests_waiting=1) is Bottleneck.NONE
    assert bottleneck(refused=1, requests_waiting=1) is Bottleneck.KV_CAPACITY
    assert bottleneck(refused=1) is Bottleneck.NONE  # it has been admitted since
    assert "2 refusals for lack of pages" in diagnose(replace(IDLE, refused=2, requests_waiting=1)).because
    assert "3 requests were preempted" in diagnose(replace(IDLE, preempted=3)).because


def test_the_batch() -> None:
    full = BATCH_FULL * IDLE.batch_limit
    assert bottleneck(decoding=full, requests_waiting=1) is Bottleneck.QUEUE
    assert bottleneck(decoding=full - BELOW, requests_waiting=1) is Bottleneck.NONE
    assert bottleneck(decoding=full) is Bottleneck.NONE
    assert bottleneck(decoding=full, requests_waiting=1, busy=1.0, bandwidth=0.9) is Bottleneck.QUEUE
    assert (
        bottleneck(decoding=full, requests_waiting=1, busy=1.0, compute=0.9) is Bottleneck.COMPUTE
    )  # a larger batch has no effect
    assert bottleneck(decoding=0, batch_limit=0, requests_waiting=1) is Bottleneck.NONE


def test_the_wire() -> None:
    assert bottleneck(transferring=TRANSFERRING, prompts_waiting=1) is Bottleneck.TRANSFER
    assert bottleneck(transferring=TRANSFERRING, requests_waiting=1) is Bottleneck.TRANSFER
    assert bottleneck(transferring=TRANSFERRING - BELOW, requests_waiting=1) is Bottleneck.NONE
    assert bottleneck(transferring=CONCURRENT_TRANSFERS - BELOW) is Bottleneck.NONE, "they overlap, and nobody waits"
    assert bottleneck(transferring=CONCURRENT_TRANSFERS) is Bottleneck.TRANSFER
    assert bottleneck(transferring=0.9, busy=0.9, compute=0.8) is Bottleneck.COMPUTE
    assert (
        bottleneck(transferring=3.0, kv_used=1.0, requests_waiting=9) is Bottleneck.TRANSFER
    )  # the transfers hold the pages


def test_many_short_handovers_are_no_narrow_wire() -> None:
    many = {"transferring": 4.0, "prompts_waiting": 1, "compute": 0.9}
    assert bottleneck(**many, busy=0.74, kv_used=BACKLOG - BELOW) is Bottleneck.COMPUTE
    assert bottleneck(**many, busy=0.74, kv_used=BACKLOG) is Bottleneck.TRANSFER, "more come than leave"
    assert bottleneck(**many, busy=COMPUTING - BELOW, kv_used=0.0) is Bottleneck.TRANSFER, (
        "it computes less than it could"
    )


def test_pages_that_others_write() -> None:
    """Incoming transfers at a decode worker whose prefill workers have a slow transport, or do not."""
    full = replace(IDLE, kv_used=1.0, arriving=0.5, others_transferring=CONCURRENT_TRANSFERS, requests_waiting=9)
    assert diagnose(full).bottleneck is Bottleneck.TRANSFER
    assert "50% of its KV pages wait for incoming hand-overs, 9 requests wait" in diagnose(full).because
    assert diagnose(replace(full, arriving=0.5 - BELOW)).bottleneck is Bottleneck.KV_CAPACITY, (
        "answers have most of them"
    )
    assert (
        diagnose(replace(full, others_transferring=CONCURRENT_TRANSFERS - BELOW)).bottleneck is Bottleneck.KV_CAPACITY
    )
    assert diagnose(replace(full, preempted=1)).bottleneck is Bottleneck.KV_CAPACITY
    assert diagnose(replace(full, requests_waiting=0)).bottleneck is Bottleneck.NONE
    assert diagnose(replace(full, kv_used=0.0, arriving=0.0, refused=1)).bottleneck is Bottleneck.KV_CAPACITY


def test_a_look_shorter_than_a_step() -> None:
    diagnosis = diagnose(replace(IDLE, steps=0, busy=0.0, prompts_waiting=3))
    assert diagnosis.bottleneck is Bottleneck.NONE
    assert "--seconds" in diagnosis.change
    assert diagnose(replace(IDLE, steps=0, busy=0.0)).change == diagnose(IDLE).change  # nothing to do


def test_prompts_that_are_not_taken() -> None:
    diagnosis = diagnose(replace(IDLE, prompts_waiting=3))
    assert diagnosis.bottleneck is Bottleneck.QUEUE
    assert "--step-policy" in diagnosis.change
