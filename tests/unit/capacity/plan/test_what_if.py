"""Effects of quantization, and memory by hand."""

from dataclasses import replace

import pytest

from tandem.capacity.plan.memory import OVERHEAD_BYTES, Memory
from tandem.capacity.plan.what_if import Quantized, changes
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.sizing import Sizing
from tandem.engine.memory import GIB
from tandem.protocol.cost_parameters import CostParameters
from tandem.settings.planner import Limits, Range
from tests.unit.capacity.planner.scenes import FACTS, TARGETS

MEMORY = Memory(device_bytes=20 * GIB + OVERHEAD_BYTES, weight_bytes=10 * GIB, kv_bytes_per_token=GIB / 1000)
ANSWERS = Sizing(Demand(20.0, 100, 400), TARGETS, FACTS, replace(FACTS, kv_tokens=MEMORY.kv_tokens))
"""A memory with ten thousand tokens of KV, which is the limit that binds."""


def forms(memory: Memory) -> list[tuple[Quantized, Quantized]]:
    """Half of the bytes of weights, of KV and of both, in steps that take as long as they read."""

    def form(name: str, weights: float, kv: float) -> tuple[Quantized, Quantized]:
        smaller = replace(
            memory, weight_bytes=memory.weight_bytes * weights, kv_bytes_per_token=memory.kv_bytes_per_token * kv
        )
        before = CostParameters(base_s=1e-3, context_s=1e-6, free_tokens=100)
        after = replace(before, base_s=weights * 1e-3, context_s=kv * 1e-6, free_tokens=round(weights * 100))
        return (Quantized(name, smaller, before, after),) * 2

    return [form("--quantization fp8", 0.5, 1.0), form("--kv-cache-dtype int8", 1.0, 0.5), form("both", 0.5, 0.5)]


def test_kv_has_the_memory_that_weights_leave() -> None:
    assert MEMORY.kv_tokens == pytest.approx(10_000)
    assert Memory(GIB, 10 * GIB, 1.0).kv_tokens == 0


def test_quantization_helps_where_kv_binds() -> None:
    rates = {change.name: change.rate for change in changes(ANSWERS, ANSWERS.best(8, Limits()), forms(MEMORY))}  # type: ignore[arg-type]
    assert rates["--kv-cache-dtype int8"] > 1.3
    assert rates["--quantization fp8"] > 1.2
    assert rates["both"] > max(rates["--kv-cache-dtype int8"], rates["--quantization fp8"])


def test_a_step_that_reads_half_of_the_kv_is_shorter() -> None:
    """If the inter-token target binds, a row of 1,000 tokens takes 0.1 + 1 ms, and 0.1 + 0.5 ms with 8 bits."""
    reads = replace(FACTS, cost=replace(FACTS.cost, context_s=1e-6))
    sizing = Sizing(Demand(20.0, 800, 400), TARGETS, FACTS, reads)
    roomy = replace(MEMORY, device_bytes=1e4 * GIB)
    split = sizing.best(40, Limits(Range(20, 20), Range(20, 20)))
    assert split is not None
    rates = {change.name: change.rate for change in changes(sizing, split, forms(roomy))}
    assert rates["--kv-cache-dtype int8"] > 1.3


def test_the_fewest_workers_have_the_requested_headroom() -> None:
    sizing = Sizing(Demand(50.0, 900, 200), LatencyTargets(10.0, 20e-3), FACTS, FACTS)
    for shared in (False, True):
        split = sizing.fewest(Range(2, 100), Limits(), 0.75, shared=shared)
        assert split is not None
        assert sizing.worst(split).value <= 0.75
        one_less = sizing.best(split.workers - 1, Limits(), shared=shared)
        assert one_less is not None
        assert sizing.worst(one_less).value > 0.75
