"""The walls of a model: arithmetic intensity by phase, the ridge of GPUs, the memory of KV, and the network."""

import pytest

from tandem.capacity.plan.walls import BATCHES, kv_gib, phases, ridge, transfer_seconds
from tandem.capacity.plan.worker_kind import WorkerKind
from tandem.capacity.planner.demand import Demand
from tandem.cost_model.devices import DEVICES, NOT_SERVED, device_kind
from tandem.engine.models.shapes import shape_config
from tandem.metrics.bottlenecks import Bottleneck
from tandem.protocol.errors import InvalidArgument


def kind(shape: str) -> WorkerKind:
    return WorkerKind(shape, shape_config(shape), DEVICES["H200"])


def test_the_kv_of_4096_tokens_of_a_70b_takes_26_ms_over_400_gigabits() -> None:
    """80 layers of 8 KV heads of 128 elements: 320 KiB a token."""
    assert transfer_seconds(kind("llama-3-70b"), 4096, 400e9 / 8) == pytest.approx(4096 * 2 * 80 * 8 * 128 * 2 / 50e9)
    assert 0.026 < transfer_seconds(kind("llama-3-70b"), 4096, 400e9 / 8) < 0.027


def test_kv_grows_with_requests_and_with_tokens() -> None:
    assert kv_gib(kind("llama-3-8b"), 1, 2048) == pytest.approx(2048 * 131072 / 2**30)
    assert kv_gib(kind("llama-3-8b"), 32, 8192) == pytest.approx(32.0)


def test_prompts_are_bound_by_compute_and_decode_steps_by_bandwidth() -> None:
    prompt, *decode = phases(kind("llama-3-8b"), Demand(1.0, 2000.0, 500.0))
    assert len(decode) == len(BATCHES)
    assert {prompt.wall(device) for device in DEVICES.values()} == {Bottleneck.COMPUTE}
    assert {decode[0].wall(device) for device in DEVICES.values()} == {Bottleneck.BANDWIDTH}
    intensities = [work.intensity for work in decode]
    assert intensities == sorted(intensities)
    assert intensities[0] == pytest.approx(1.0, rel=0.1), "two operations for each weight of two bytes"


def test_a_short_context_makes_large_batches_bound_by_compute() -> None:
    """The KV, which each request reads for itself, keeps the intensity of long contexts low."""
    *_, short = phases(kind("llama-3-8b"), Demand(1.0, 16.0, 16.0))
    *_, long = phases(kind("llama-3-8b"), Demand(1.0, 8000.0, 16.0))
    assert long.intensity < ridge(DEVICES["H200"]) < short.intensity
    assert short.wall(DEVICES["H200"]) is Bottleneck.COMPUTE
    assert short.wall(DEVICES["L40S"]) is Bottleneck.BANDWIDTH


def test_each_gpu_of_the_table_is_known() -> None:
    assert {"H100-NVL", "B200", "GB200", "A100-80"} <= set(DEVICES)


def test_no_worker_is_planned_on_a_gpu_that_only_the_roofline_has() -> None:
    for name in NOT_SERVED:
        with pytest.raises(InvalidArgument, match=f"^--gpu: '{name}' is not one of"):
            device_kind("--gpu", name)
