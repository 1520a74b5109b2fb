"""Workers whose model is divided among several GPUs: the predicted cost of their steps, and their number."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.capacity.plan.inputs import PlanInputs
from tandem.capacity.plan.worker_kind import GROUP_SIZES, WorkerKind
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.policy import TARGET_RATIO
from tandem.capacity.simulation.arrivals import Mix
from tandem.capacity.simulation.hardware import hardware, kv_element_bytes, roofline
from tandem.capacity.simulation.knee import Trial
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.strategy import Strategy
from tandem.cost_model.devices import DEVICES
from tandem.cost_model.step_collectives import StepCollectives
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.engine.config.sharding import rank_spec
from tandem.engine.models.load_spec import load_spec, parse_spec
from tandem.engine.models.shapes import shape_config
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.mode import Mode
from tandem.settings.slo import SloClass
from tests.factories import FAMILIES, write_tiny_model

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"
FREE = CostParameters(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def measured_ranks(shape: str) -> dict[str, float]:
    """Returns the newest result of `benchmarks.engine ranks` on two H200."""
    result: dict[str, float] = json.loads(max(RESULTS.glob(f"ranks-{shape}-NVIDIA_H200*.json")).read_text())
    return result


def work_of(name: str) -> StepWork:
    """Returns the work of a step in a result of `benchmarks.engine ranks`; decode rows have 1,024 tokens of context."""
    size = name.rpartition("_")[2]
    if name.startswith("decode"):
        return StepWork(decode_rows=int(size[1:]), decode_context_tokens=1024 * int(size[1:]))
    tokens = int(size.partition("x")[2])
    return StepWork(tokens, chunk_pairs(tokens, 0))


@pytest.mark.parametrize(("shape", "off"), [("llama-3-8b", 0.17), ("llama-3-70b", 0.08)])
def test_steps_of_two_ranks_take_as_long_as_they_were_measured(shape: str, off: float) -> None:
    """On two H200; steps of 8 to 32 rows of the 8B model take longer than their reads and sums."""
    measured, cost = measured_ranks(shape), StepCost(roofline(shape_config(shape), ranks=2))
    steps = {name: ms for name, ms in measured.items() if name.startswith(("decode_ms_", "prefill_ms_"))}
    assert len(steps) == 6
    for name, ms in steps.items():
        assert cost.seconds(work_of(name)) * 1e3 == pytest.approx(ms, rel=off), name


def test_a_sum_takes_as_long_as_it_was_measured() -> None:
    """Decode rows are summed in one shot, prompts by NCCL."""
    measured = measured_ranks("llama-3-8b")
    link = DEVICES["H200"].link_bytes_per_s
    for kib, rows in ((8, 1), (64, 8), (256, 32), (1024, 128)):
        both = StepCollectives(2, 1, 8192, 0, link).added_to(FREE)
        without = StepCollectives(2, 0, 8192, 0, link).added_to(FREE)
        predicted = both.base_s - without.base_s + (rows - 1) * both.row_s
        assert predicted * 1e6 == pytest.approx(measured[f"sum_one_shot_us_{kib}k"], rel=0.1), kib
    for kib, tokens in ((4096, 512), (8192, 1024)):
        cost = StepCollectives(2, 1, 8192, 0, link).added_to(FREE)
        predicted = cost.base_s - without.base_s + cost.prompt_base_s + tokens * cost.token_s
        assert predicted * 1e6 == pytest.approx(measured[f"sum_nccl_us_{kib}k"], rel=0.05), kib


def test_more_ranks_are_faster_and_never_as_much_as_they_are_more() -> None:
    model = shape_config("llama-3-70b")
    alone, *groups = (roofline(model, ranks=ranks) for ranks in (1, 2, 4, 8))
    assert roofline(model) == alone
    for ranks, group in zip((2, 4, 8), groups, strict=True):
        assert alone.base_s / ranks < group.base_s < alone.base_s
        assert alone.token_s / ranks < group.token_s < alone.token_s
    slow = replace(DEVICES["H200"], link_bytes_per_s=DEVICES["L4"].link_bytes_per_s)
    assert roofline(model, slow.ceilings, ranks=2).token_s > 2 * groups[0].token_s, "without NVLink"


def test_ranks_that_divide_tokens_have_the_predicted_prompt_time() -> None:
    """By hand for 8,192 tokens of the 8B model: half of the tokens and pairs, and 32 gathers of 16 MiB of KV."""
    measured, model = measured_ranks("llama-3-8b"), shape_config("llama-3-8b")
    alone, two = (StepCost(roofline(model, context_ranks=ranks)) for ranks in (1, 2))
    work = work_of("prefill_ms_1x8192")
    link = 0.58 * DEVICES["H200"].link_bytes_per_s
    gathers_s = 32 * (19e-6 + (16 << 20) / link) + (64 << 20) / link
    half = StepWork(4096, chunk_pairs(8192, 0) / 2)
    assert two.seconds(work) == pytest.approx(alone.seconds(half) + gathers_s, rel=0.002)
    measured_alone_ms = measured["alone_prefill_ms_1x8192"]
    assert two.seconds(work) / alone.seconds(work) * measured_alone_ms == pytest.approx(105, rel=0.02)
    assert two.seconds(work) < StepCost(roofline(model, ranks=2)).seconds(work), "sums move eight times as many bytes"
    decoding = StepWork(decode_rows=8, decode_context_tokens=8192)
    assert two.seconds(decoding) == pytest.approx(alone.seconds(decoding), rel=0.01), "each rank decodes as a whole"


@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-30b-a3b"])
def test_more_ranks_that_divide_tokens_compute_long_prompts_faster(shape: str) -> None:
    model, work = shape_config(shape), StepWork(32_768, chunk_pairs(32_768, 0))
    seconds = [StepCost(roofline(model, context_ranks=ranks)).seconds(work) for ranks in (1, 2, 4, 8)]
    for ranks, group_s in zip((2, 4, 8), seconds[1:], strict=True):
        assert seconds[0] / ranks < group_s < 1.2 * seconds[0] / ranks


def inputs_of(shape: str, gpu: str, targets: LatencyTargets, rate: float, **fields: object) -> PlanInputs:
    kind = WorkerKind(shape, shape_config(shape), DEVICES[gpu], group_sizes=GROUP_SIZES)
    return replace(PlanInputs(kind, kind, Demand(rate, 2000, 500), targets), **fields)


def test_a_model_that_does_not_fit_one_gpu_gets_several() -> None:
    alone = inputs_of("llama-3-70b", "H100", LatencyTargets(2.0, 0.05), 2.0)
    with pytest.raises(InvalidArgument, match="it fits with --quantization int8 or --tensor-parallel-size 2 or"):
        alone.check()
    chosen = alone.with_fewest_gpus()
    assert chosen.decode.gpus == chosen.prefill.gpus == 4
    memory = chosen.decode.memory(chosen.demand)
    assert memory.kv_bytes_per_token == 80 * 2 * 2 * 2 * 128, "each rank has two of the eight KV heads"
    assert 4 * memory.weight_bytes > 2 * 70e9


def test_the_number_of_gpus_is_the_smallest_that_serves_the_load() -> None:
    """A strict ITL target needs more GPUs a worker; a loose one needs none of that."""
    loose = inputs_of("llama-3-8b", "H200", LatencyTargets(1.0, 0.025), 20.0).with_fewest_gpus()
    assert (loose.prefill.gpus, loose.decode.gpus) == (1, 1)
    strict = inputs_of("llama-3-8b", "H200", LatencyTargets(1.0, 0.003), 20.0).with_fewest_gpus()
    assert strict.decode.gpus > 1
    split = strict.split()
    assert strict.sizing.worst(split).value <= TARGET_RATIO
    assert strict.gpus(split) == split.workers * strict.decode.gpus
    for kind in strict.decode.groups():
        other = replace(strict, prefill=kind, decode=kind)
        try:
            other.check()
        except InvalidArgument:
            continue
        enough = other.sizing.worst(other.split()).value <= TARGET_RATIO
        assert not enough or other.gpus(other.split()) >= strict.gpus(split)


def test_pools_of_different_gpus_have_as_many_each_as_they_need() -> None:
    both = inputs_of("llama-3-70b", "H200", LatencyTargets(2.0, 0.05), 4.0)
    pools = replace(both, prefill=replace(both.prefill, device=DEVICES["B200"])).with_fewest_gpus()
    assert not pools.one_kind
    assert (pools.prefill.gpus, pools.decode.gpus) == (1, 2), "the weights fit into one B200"
    split = pools.split()
    assert pools.gpus(split) == split.prefill + 2 * split.decode


def test_simulated_workers_may_have_several_gpus() -> None:
    """Two GPUs decode faster, send a page over two links, and take prompts from workers of one GPU."""
    demand, slo = Demand(1.0, 1000, 40), SloClass("plan", ttft_s=1.0, itl_s=0.025)
    kind = WorkerKind("llama-3-8b", shape_config("llama-3-8b"), DEVICES["H200"])
    one, two = kind.hardware(demand), replace(kind, gpus=2).hardware(demand)
    assert (one.device.links, two.device.links) == (1, 2)
    assert one.device.page_bytes == two.device.page_bytes
    alone, group = (hardware("llama-3-8b", None, 10.0, 1.0, ranks=ranks) for ranks in (1, 2))
    assert group.pages == 2 * alone.pages, "each GPU has 10 GiB of KV pages, with half of the heads"
    assert (group.links, group.actual_cost) == (2, two.actual_cost)
    apart = Strategy("disaggregated 1:1", Mode.DISAGGREGATED, 1, 1)
    figures = [
        Trial(machine, apart, Mix(1.0, 1000, 40), slo, Network(), prefill=one).load(4.0) for machine in (one, two)
    ]
    assert all(load.share == 1.0 for load in figures)
    assert figures[1].gap_p50_s < 0.7 * figures[0].gap_p50_s


def test_a_number_that_does_not_divide_the_model_is_left_out() -> None:
    four_heads = rank_spec(shape_config("llama-3-8b"), 8)
    kind = WorkerKind("small", four_heads, DEVICES["H200"], group_sizes=GROUP_SIZES)
    assert [group.gpus for group in kind.groups()] == [1, 2, 4]
    given = replace(kind, gpus=8, group_sizes=())
    with pytest.raises(InvalidArgument, match="4 attention heads cannot be divided among 8 ranks"):
        replace(inputs_of("llama-3-8b", "H200", LatencyTargets(), 1.0), decode=given).with_fewest_gpus()


def long_prompts(shape: str, ttft_s: float) -> PlanInputs:
    kind = WorkerKind(shape, shape_config(shape), DEVICES["H200"], group_sizes=GROUP_SIZES)
    demand = Demand(0.3, 32_000, 100)
    return PlanInputs(kind, kind, demand, LatencyTargets(ttft_s, 0.025), compares_context_ranks=True)


def test_long_prompts_with_a_strict_target_are_divided_where_that_takes_fewer_gpus() -> None:
    strict = long_prompts("llama-3.1-8b", 0.6)
    chosen, without = strict.with_fewest_gpus(), replace(strict, compares_context_ranks=False).with_fewest_gpus()
    assert chosen.prefill.context_ranks == chosen.prefill.gpus > 1
    assert chosen.decode.context_ranks == 1
    assert chosen.gpus(chosen.split()) < without.gpus(without.split())
    memory, alone = (kind.memory(strict.demand) for kind in (chosen.prefill, strict.prefill))
    assert memory.kv_bytes_per_token == alone.kv_bytes_per_token
    assert memory.weight_bytes == pytest.approx(alone.weight_bytes, rel=1e-3), "each has the whole model"
    loose = long_prompts("llama-3.1-8b", 20.0).with_fewest_gpus()
    assert loose.prefill.context_ranks == 1


def test_the_tokens_of_models_with_states_are_planned_undivided(tmp_path: Path) -> None:
    prefill = long_prompts("llama-3.1-8b", 1.0).prefill
    assert [kind.gpus for kind in prefill.context_groups()] == [2, 4, 8]
    with_states = replace(prefill, model=load_spec(write_tiny_model(tmp_path, "qwen3_next")))
    assert with_states.context_groups() == []
    with pytest.raises(InvalidArgument, match="a state depends on all earlier tokens"):
        replace(with_states, gpus=2, context_ranks=2).groups()


def test_an_element_of_kv_has_no_share_of_a_state() -> None:
    """A page for one token holds a whole state, which is hundreds of times as large as the token's KV."""
    assert kv_element_bytes(parse_spec(FAMILIES["nemotron_h"]), "auto") == 2
    assert kv_element_bytes(parse_spec(FAMILIES["nemotron_h"]), "int8") == 1 + 4 / 32


def test_simulated_prompts_take_as_long_as_the_cost_model_says() -> None:
    """A prompt alone: its chunks follow each other, and the hand-over of the last one adds little."""
    demand, slo = Demand(0.01, 8000, 20), SloClass("plan", ttft_s=1.0, itl_s=0.025)
    one = WorkerKind("llama-3.1-8b", shape_config("llama-3.1-8b"), DEVICES["H200"])
    four = replace(one, gpus=4, context_ranks=4)
    assert four.hardware(demand).links == 1, "the first rank hands over the KV of all tokens"
    assert four.hardware(demand).step_tokens == four.facts(demand).chunk_tokens == 4 * 2048
    apart = Strategy("disaggregated 1:1", Mode.DISAGGREGATED, 1, 1)
    for kind in (one, four):
        machine = kind.hardware(demand)
        trial = Trial(one.hardware(demand), apart, Mix(0.01, 8000, 20, 0.0), slo, Network(), prefill=machine)
        alone_s = demand.lone_prompt_seconds(StepCost(kind.costs), kind.facts(demand).chunk_tokens)
        assert trial.load(0.01).ttft_p50_s == pytest.approx(alone_s, rel=0.25)
