"""Experts over several hosts: the predicted throughput of DeepSeek-V3, beside that of two published systems.

DeepSeek, "DeepSeek-V3/R1 Inference System Overview" (2025): H800, prefill workers of 32 GPUs and decode workers of 144;
a day of 608 billion input tokens, 56.3 % of them cached, and 168 billion output tokens, with 4,989 tokens of context on
average and 20 to 22 tokens per second and request; 73,700 input and 14,800 output tokens per second and host of eight
GPUs. SGLang, "Deploying DeepSeek with PD Disaggregation and Large-scale Expert Parallelism on 96 H100 GPUs" (2025):
52,300 input and 22,300 output tokens per second and host for prompts of 2,000 tokens, prefill workers of 32 GPUs,
decode workers of 72 with 256 requests a GPU.
"""

from dataclasses import replace

import pytest

from tandem.capacity.plan.inputs import PlanInputs
from tandem.capacity.plan.trials import trials
from tandem.capacity.plan.worker_kind import WorkerKind
from tandem.capacity.planner.decision import Split
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.policy import TARGET_RATIO
from tandem.cost_model.devices import DEVICES
from tandem.cost_model.expert_exchange import HOST_GPUS, ExpertExchange
from tandem.cost_model.step_cost import StepCost
from tandem.engine.models.load_spec import quantized_at_load
from tandem.engine.models.shapes import shape_config
from tandem.protocol.errors import InvalidArgument

CHUNK = 16_384
"""The prompt tokens of a GPU in a step, as in DeepSeek's published profile."""
PROMPT, CACHED, CONTEXT = 4384.0, 0.563, 4989.0
"""Mean prompt and context of DeepSeek's day: the context is the prompt and half of an answer of PROMPT · 168 / 608."""


def workers(gpu: str, gpus: int, *, two_batch_overlap: bool = False) -> WorkerKind:
    model = quantized_at_load(shape_config("deepseek-v3"), "fp8")
    overlap = {"two_batch_overlap": two_batch_overlap}
    return WorkerKind("deepseek-v3", model, DEVICES[gpu], gpus, expert_parallel=True, **overlap)


def input_tokens_per_s(kind: WorkerKind, demand: Demand) -> float:
    """Returns the input tokens per second and host, cached ones included, of workers that compute all the time."""
    seconds = demand.prompt_seconds(StepCost(kind.costs), CHUNK)
    return demand.prompt_tokens / seconds * HOST_GPUS


def output_tokens_per_s(kind: WorkerKind, context: float, *, step_s: float = 0.0, rows: float = 0.0) -> float:
    """Returns the output tokens per second and host with `rows` rows a GPU, or as many as a step of `step_s` has."""
    cost = StepCost(kind.costs)
    rows = rows or cost.rows_within(step_s, context)
    return rows / cost.rows_seconds(rows, rows * context) * HOST_GPUS


def test_the_throughput_of_sglang_on_96_gpus() -> None:
    prefill = input_tokens_per_s(workers("H100", 32), Demand(1.0, 2000, 100))
    assert prefill == pytest.approx(52_300, rel=0.15)
    assert output_tokens_per_s(workers("H100", 72), 2050, rows=256) == pytest.approx(22_300, rel=0.15)


def test_the_throughput_of_deepseek_over_a_day() -> None:
    """The planner loads prefill workers to three quarters, since requests do not come evenly."""
    prefill = input_tokens_per_s(workers("H800", 32), Demand(1.0, PROMPT, 1211, CACHED))
    assert TARGET_RATIO * prefill == pytest.approx(73_700, rel=0.15)
    assert output_tokens_per_s(workers("H800", 144), CONTEXT, step_s=1 / 21) == pytest.approx(14_800, rel=0.15)


def test_more_gpus_of_a_decode_worker_read_fewer_experts_each() -> None:
    """DeepSeek's technical report describes decode workers of 320 GPUs without a throughput: 15,100 are predicted."""
    few, many, most = (output_tokens_per_s(workers("H800", gpus), CONTEXT, step_s=1 / 21) for gpus in (32, 144, 320))
    assert few < many < most
    assert most == pytest.approx(15_100, rel=0.02)


def test_overlap_hides_the_exchange_of_prompts_and_doubles_the_reads_of_weights() -> None:
    """It predicts half as much again as the published systems reach with it, so it is no default."""
    demand = Demand(1.0, 2000, 100)
    plain, overlap = (workers("H100", 32, two_batch_overlap=overlap) for overlap in (False, True))
    assert input_tokens_per_s(overlap, demand) > 1.3 * input_tokens_per_s(plain, demand)
    assert overlap.costs.base_s > 1.5 * plain.costs.base_s


def test_an_exchange_takes_as_long_as_it_was_published() -> None:
    """DeepEP on H800: 128 rows and 128 GPUs, dispatch 192 us and combine 369 us."""
    layer = ExpertExchange(128, 1, 8, 7168)
    assert 128 * layer.row_s == pytest.approx(192e-6 + 369e-6, rel=0.05)
    assert ExpertExchange(8, 1, 8, 7168).token_s == pytest.approx(3 * 7168 / 5e10), "one host"
    assert ExpertExchange(32, 1, 8, 7168).token_s < 4 * 3 * 7168 / 5e10, "at most four hosts"


def test_experts_are_divided_and_all_other_weights_are_not() -> None:
    demand = Demand(1.0, PROMPT, 1211)
    gib = {gpus: workers("H800", gpus).memory(demand).weight_bytes / 2**30 for gpus in (32, 144, 320)}
    assert gib[32] - gib[144] == pytest.approx((8 - 2) * 58 * 3 * 7168 * 2048 / 2**30, rel=0.01)
    assert gib[144] - gib[320] == pytest.approx((2 - 1) * 58 * 3 * 7168 * 2048 / 2**30, rel=0.01)


def test_a_model_without_experts_is_refused() -> None:
    dense = WorkerKind("llama-3-8b", shape_config("llama-3-8b"), DEVICES["H800"], 32, expert_parallel=True)
    with pytest.raises(InvalidArgument, match="it has no experts"):
        dense.check_memory(Demand(1.0, 2000, 100))


def qwen(gpus: int) -> WorkerKind:
    return WorkerKind("qwen3-30b-a3b", shape_config("qwen3-30b-a3b"), DEVICES["H100"], gpus, expert_parallel=True)


def test_each_gpu_of_a_worker_has_its_own_requests() -> None:
    """Twice the GPUs serve twice the load with steps as long; a prompt takes one GPU's time."""
    demand, targets = Demand(400.0, 500, 50), LatencyTargets(1.0, 0.05)
    inputs = PlanInputs(qwen(16), qwen(8), demand, targets)
    assert inputs.with_fewest_gpus() == inputs, "their number of GPUs is given"
    inputs.check()
    split = Split(1, 1)
    assert inputs.gpus(split) == 24
    facts = inputs.decode.facts(demand)
    alone = replace(inputs.sizing, answers=replace(facts, replicas=1))
    assert alone.load_ratios(Split(1, 8))[1] == inputs.sizing.load_ratios(split)[1]
    with pytest.raises(InvalidArgument, match="a prompt of 8000 tokens alone takes"):
        qwen(16).check_prefill(Demand(1.0, 8000, 50), LatencyTargets(0.05))


def test_simulated_workers_are_gpus_in_the_proportion_of_the_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("REQUESTS", 20), ("SECONDS_MIN", 1.0), ("LIVES", 1.0), ("LOADS_MAX", 2)):
        monkeypatch.setattr(f"tandem.capacity.simulation.knee.{name}", value)
    inputs = PlanInputs(qwen(16), qwen(8), Demand(400.0, 500, 50), LatencyTargets(1.0, 0.05))
    (result,) = trials(inputs, Split(1, 4))
    assert (result.strategy.prefill, result.strategy.decode, result.times) == (2, 4, 8.0)
    assert result.asked.share > 0.9
