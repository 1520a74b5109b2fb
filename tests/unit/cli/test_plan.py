"""`tandem plan`: its output, its errors, and its comparison of knees with a measured table."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.capacity.plan.measured_knees import Compared, bracket
from tandem.capacity.plan.speculation import Drafting
from tandem.capacity.simulation.hardware import hardware
from tandem.cli.main import app
from tandem.cost_model.devices import DEVICES
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork
from tandem.protocol.cost_parameters import CostParameters
from tests.factories import write_tiny_model
from tests.medusa_heads import write_heads

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
LOAD = ["--prompt-tokens", "2000", "--answer-tokens", "500"]


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["plan", *options])


@pytest.fixture
def short_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the loads; the knee is only roughly right."""
    for name, value in (("REQUESTS", 20), ("SECONDS_MIN", 1.0), ("LIVES", 1.0), ("LOADS_MAX", 2)):
        monkeypatch.setattr(f"tandem.capacity.simulation.knee.{name}", value)


def test_quantized_weights_take_fewer_bytes() -> None:
    plain, packed = (run(*LOAD, "--rate", "200", "--no-simulate", *more) for more in ((), ("--quantization", "int8")))
    assert "weights 15.0 GiB" in plain.stdout
    assert "weights 8.5 GiB" in packed.stdout
    refused = run(*LOAD, "--rate", "200", "--quantization", "int3")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --quantization: 'int3' is not known")


def test_8_bit_kv_takes_its_bytes_with_scales() -> None:
    results = [
        run(*LOAD, "--rate", "200", "--no-simulate", "--kv-cache-dtype", name) for name in ("auto", "int8", "fp8")
    ]
    memory_lines = [
        next(line for line in result.stdout.splitlines() if line.startswith("memory")) for result in results
    ]
    assert "128 KiB of KV a token" in memory_lines[0]
    assert "66 KiB of KV a token" in memory_lines[1]
    assert memory_lines[1] == memory_lines[2]
    tokens = [
        float(line.split(" a worker")[0].rpartition(" tokens")[0].rpartition(" ")[2].replace(",", ""))
        for line in memory_lines
    ]
    assert tokens[1] / tokens[0] == pytest.approx(256 / 132, rel=0.01)
    assert "--kv-cache-dtype int8: " in results[0].stdout
    assert "--kv-cache-dtype int8: " not in results[1].stdout
    refused = run(*LOAD, "--rate", "200", "--kv-cache-dtype", "int4")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --kv-cache-dtype: 'int4' is not supported; use auto, int8, fp8")


def test_effects_are_those_of_steps_with_the_bits_that_are_held() -> None:
    """Embeddings stay in 16 bits, and scales take 4 bytes a row or a head."""
    from tandem.capacity.plan.worker_kind import WorkerKind
    from tandem.capacity.planner.demand import Demand
    from tandem.capacity.simulation.hardware import roofline
    from tandem.cost_model.devices import device_kind
    from tandem.engine.models.load_spec import quantized_at_load
    from tandem.engine.models.shapes import shape_config

    model, device = shape_config("llama-3-8b"), device_kind("--gpu", "H200")
    forms = {
        form.name: form for form in WorkerKind("llama-3-8b", model, device).quantized_forms(Demand(20.0, 2000, 500))
    }
    weights, kv = forms["--quantization fp8"], forms["--kv-cache-dtype int8"]
    both = forms["--quantization fp8 --kv-cache-dtype int8"]
    layers = 32 * (4096 * (6144 + 4096 + 3 * 14336))
    rows = 32 * (6144 + 4096 + 2 * 14336 + 4096)
    assert weights.memory.weight_bytes == pytest.approx(4 * 128256 * 4096 + layers + 4 * rows)
    assert weights.before == kv.before == both.before == roofline(model, device.ceilings)
    assert weights.after == roofline(quantized_at_load(model, "fp8"), device.ceilings)
    assert (weights.after.context_s, kv.after.base_s) == (weights.before.context_s, kv.before.base_s)
    assert kv.after.context_s / kv.before.context_s == pytest.approx(132 / 256)
    assert (both.after.base_s, both.after.context_s) == (weights.after.base_s, kv.after.context_s)


@pytest.mark.parametrize(
    ("scheme", "off"),
    [("kv-int8", 0.06), ("fp8", 0.15), ("fp8_kv-int8", 0.18), ("int8", 0.17), ("int4", 0.27)],
)
def test_quantized_steps_are_as_much_faster_as_they_were_measured(scheme: str, off: float) -> None:
    """Decode steps of 1 to 256 rows and prompts of 512 to 16,384 tokens, on an H100, beside 16 bits in the same run."""
    from tandem.capacity.simulation.hardware import kv_element_bytes, roofline
    from tandem.cost_model.devices import device_kind
    from tandem.cost_model.step_cost import StepCost
    from tandem.cost_model.step_work import StepWork
    from tandem.engine.models.load_spec import quantized_at_load
    from tandem.engine.models.shapes import shape_config

    (file,) = RESULTS.glob(f"engine-llama-3-8b_{scheme}-NVIDIA_H100*.json")
    measured, model = json.loads(file.read_text()), shape_config("llama-3-8b")
    ceilings = device_kind("--gpu", "H100").ceilings
    packed = quantized_at_load(model, None if scheme.startswith("kv") else scheme.partition("_")[0])
    element_bytes = kv_element_bytes(packed, "int8" if "kv" in scheme else "auto")
    costs = [StepCost(roof) for roof in (roofline(model, ceilings), roofline(packed, ceilings, element_bytes))]
    for name, factor in measured.items():
        kind, _, size = name.partition("_over_before_")
        if kind == "decode":
            rows = int(size.removeprefix("b"))
            work = StepWork(decode_rows=rows, decode_context_tokens=1024 * rows)
        elif kind == "prefill":
            prompts, tokens = map(int, size.split("x"))
            work = StepWork(prompts * tokens, prompts * tokens**2 / 2)
        else:
            continue
        before, after = (cost.seconds(work) for cost in costs)
        assert before / after == pytest.approx(factor, rel=off), name


def test_it_sizes_a_cluster_for_a_load() -> None:
    result = run(*LOAD, "--rate", "200", "--no-simulate")
    assert result.exit_code == 0, result.stderr
    for part in (
        "model     8.03 B parameters",
        "attention: 32 layers see all tokens",
        "KiB of KV a token",
        "bottleneck  prefill, at 7",
        "headroom  no role is planned above 75% of its capacity",
        "--quantization fp8: ",
        "speculative decoding",
        "TTFT 1000 ms",
    ):
        assert part in result.stdout
    assert "prefill:decode" in result.stdout


def test_it_says_how_much_headroom_it_leaves_and_whether_a_change_is_too_little() -> None:
    said = run(*LOAD, "--rate", "200", "--no-simulate").stdout
    size, without = (int(re.findall(pattern, said)[0]) for pattern in (r"size +(\d+) workers", r"100%, (\d+) workers"))
    assert without < size
    assert "\nheadroom" in said

    def verdict(rate: float) -> str:
        fixed = ("--workers", "4", "--tensor-parallel-size", "1", "--no-simulate")
        lines = run(*LOAD, "--rate", f"{rate:g}", *fixed).stdout.splitlines()
        assert not [line for line in lines if line.startswith("headroom")], "the number of workers is given"
        return next(line for line in lines if line.startswith("  --quantization fp8: "))

    most = float(verdict(10).split("up to ")[1].split()[0])
    assert ", enough for the load; with " in verdict(0.7 * most)
    assert ", enough for the load, without headroom; with " in verdict(0.95 * most)
    assert ", too little for the load; with " in verdict(1.1 * most)


def size_of(*options: str) -> str:
    """Returns the line about the number of workers."""
    result = run(*LOAD, "--no-simulate", *options)
    assert result.exit_code == 0, result.stderr
    return next(line for line in result.stdout.splitlines() if line.startswith("size"))


def test_it_says_how_many_gpus_a_model_that_fits_none_needs() -> None:
    targets = ["--slo-itl", "50", "--slo-ttft", "2000"]
    assert "6 workers of 2 GPUs = 12 GPUs, prefill:decode" in size_of("--shape", "llama-3-70b", *targets)
    assert "workers of 4 GPUs = " in size_of("--shape", "llama-3-70b", "--tensor-parallel-size", "4", *targets)
    size = size_of("--shape", "llama-3-70b", "--decode-tensor-parallel-size", "4", *targets)
    assert "4 prefill workers of 2 GPUs + 2 decode workers of 4 GPUs = 16 GPUs" in size


def test_prefill_workers_have_pipeline_stages_where_that_takes_fewer_gpus() -> None:
    """Sums over PCIe take longer than the first stage waits; one GPU is too small for the model."""
    shape = ["--shape", "qwen3-32b", "--gpu", "L40S", "--slo-itl", "100", "--slo-ttft", "30000", "--rate", "20"]
    staged, whole = size_of(*shape), size_of(*shape, "--prefill-pipeline-size", "1")
    assert "of 2 GPUs in 2 stages + " in staged
    assert "stages" not in whole
    gpus = [int(size.partition(" GPUs, ")[0].rpartition("= ")[2].split()[0]) for size in (staged, whole)]
    assert gpus[0] < gpus[1]


def test_prefill_workers_divide_the_tokens_of_long_prompts_where_that_takes_fewer_gpus() -> None:
    load = ["--shape", "llama-3.1-8b", "--prompt-tokens", "32000", "--slo-ttft", "600", "--rate", "0.3"]
    chosen, given = size_of(*load), size_of(*load, "--prefill-context-parallel-size", "8")
    assert "prefill workers of 2 GPUs, which divide the tokens of prompts, + 1 decode worker of 1 GPU" in chosen
    assert "of 8 GPUs, which divide the tokens of prompts, + " in given
    assert "divide" not in size_of(*load, "--prefill-context-parallel-size", "1")


def test_stages_have_the_measured_throughput_and_a_part_of_the_layers() -> None:
    from dataclasses import replace

    from tandem.capacity.plan.worker_kind import WorkerKind
    from tandem.capacity.planner.demand import Demand, LatencyTargets
    from tandem.capacity.planner.load_ratio import prefill_load_ratio
    from tandem.cost_model.devices import device_kind
    from tandem.engine.models.shapes import shape_config

    demand, targets = Demand(2.0, 7000, 50), LatencyTargets()
    one = WorkerKind("llama-3-8b", shape_config("llama-3-8b"), device_kind("--gpu", "H200"))
    two = replace(one, gpus=2, stages=2)
    ratios = [prefill_load_ratio(demand, targets, kind.facts(demand), 1).value for kind in (one, two)]
    assert ratios[0] / ratios[1] == pytest.approx(1.85)
    assert two.costs == one.costs, "a lone prompt passes all stages"
    memories = [kind.memory(demand) for kind in (one, two)]
    assert memories[0].kv_bytes_per_token == 2 * memories[1].kv_bytes_per_token
    assert memories[1].weight_bytes < 0.6 * memories[0].weight_bytes


@pytest.mark.usefixtures("short_loads")
def test_prefill_and_decode_workers_may_have_different_gpus() -> None:
    pools = ["--prefill-gpu", "H100", "--decode-gpu", "H200"]
    assert "1 prefill worker of 1 GPU + 1 decode worker of 1 GPU = 2 GPUs" in size_of(*pools)
    short = ["--prompt-tokens", "500", "--answer-tokens", "20", "--rate", "30", "--tensor-parallel-size", "2"]
    result = run(*short, *pools)
    assert result.exit_code == 0, result.stderr
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("disaggregated 1:1")]
    assert float(row.split()[2]) > 5
    assert "colocated, unchunked" not in result.stdout, "no worker does both"


def test_experts_may_be_divided_among_gpus_of_several_hosts() -> None:
    model = [
        "--shape",
        "deepseek-v3",
        "--quantization",
        "fp8",
        "--gpu",
        "H800",
        "--slo-itl",
        "50",
        "--slo-ttft",
        "5000",
    ]
    sizes = ["--prefill-expert-parallel-size", "32", "--decode-expert-parallel-size", "144"]
    assert "1 prefill worker of 32 GPUs + 1 decode worker of 144 GPUs = 176 GPUs" in size_of(*model, *sizes)
    for options in (["--two-batch-overlap"], ["--check", "/nowhere.json", *sizes]):
        refused = run(*model, *options)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"error: {options[0]}: ")


def test_more_load_takes_more_workers_and_longer_answers_more_of_them_that_decode() -> None:
    def split(*options: str) -> tuple[int, int]:
        line = next(line for line in run(*options, "--no-simulate").stdout.splitlines() if line.startswith("size"))
        prefill, decode = line.rpartition(" ")[2].split(":")
        return int(prefill), int(decode)

    little, much = split(*LOAD, "--rate", "50"), split(*LOAD, "--rate", "500")
    assert sum(much) > 5 * sum(little)
    long = split("--prompt-tokens", "500", "--answer-tokens", "2000", "--rate", "50")
    assert long[1] / long[0] > much[1] / much[0]


@pytest.mark.usefixtures("short_loads")
def test_knees_of_every_strategy_are_simulated() -> None:
    result = run("--prompt-tokens", "500", "--answer-tokens", "20", "--rate", "30", "--workers", "2")
    assert result.exit_code == 0, result.stderr
    for name in ("disaggregated 1:1", "adaptive", "colocated, decode-priority", "colocated, unchunked"):
        (row,) = [line for line in result.stdout.splitlines() if line.startswith(name)]
        assert float(row.removeprefix(name).split()[0]) > 5


@pytest.mark.usefixtures("short_loads")
def test_simulated_workers_draft_if_asked() -> None:
    def gap_ms(*options: str) -> float:
        result = run("--prompt-tokens", "2000", "--answer-tokens", "60", "--rate", "1", "--workers", "1", *options)
        assert result.exit_code == 0, result.stderr
        (row,) = [line for line in result.stdout.splitlines() if line.startswith("colocated, unchunked")]
        return float(row.split()[-2])

    assert gap_ms("--speculate", "0.9,5") == 0.0, "most tokens come together with another one"
    assert gap_ms() > 3.0


@pytest.mark.usefixtures("short_loads")
def test_one_worker_does_both() -> None:
    result = run("--prompt-tokens", "500", "--answer-tokens", "20", "--rate", "3", "--workers", "1")
    assert result.exit_code == 0, result.stderr
    assert "1 worker of 1 GPU, which computes prompts and decodes" in result.stdout
    assert "disaggregated" not in result.stdout
    assert "adaptive" in result.stdout


def test_fitted_costs_take_the_place_of_the_roofline(tmp_path: Path) -> None:
    costs = asdict(hardware("llama-3-8b", None, 50.0, 1.0).actual_cost)
    slow = {name: value * (2 if name.endswith("_s") else 1) for name, value in costs.items()}
    (tmp_path / "slow.json").write_text(json.dumps({"costs": slow, "more": 1}))
    result = run(*LOAD, "--rate", "50", "--no-simulate", "--from", str(tmp_path / "slow.json"))
    assert "as fitted" in result.stdout
    assert f"{2e3 * costs['base_s']:.1f} ms to decode" in result.stdout


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--gpu", "TPU"], "--gpu"),
        (["--rate", "0"], "--rate"),
        (["--cached", "1"], "--cached"),
        (["--shape", "nobody's"], '--shape: "nobody\'s" is not one of deepseek-v2-lite'),
        (["--shape", "qwen3-32b", "--gpu", "L4", "--tensor-parallel-size", "2"], "--gpu"),
        (["--slo-itl", "0.5"], "--slo-itl: a single request has"),
        (["--slo-ttft", "5"], "--slo-ttft: a prompt of 2000 tokens alone takes"),
        (["--tensor-parallel-size", "3"], "--tensor-parallel-size: 32 attention heads cannot be divided among 3 ranks"),
        (
            ["--tensor-parallel-size", "16"],
            "--tensor-parallel-size: the GPUs of a worker, in all its stages, are on one",
        ),
        (
            ["--prefill-tensor-parallel-size", "8", "--prefill-pipeline-size", "2"],
            "one host, which has up to 8; give fewer",
        ),
        (["--prefill-pipeline-size", "2", "--workers", "1"], "--workers: 1 worker decodes, too, and has one stage"),
        (["--prefill-pipeline-size", "2", "--prefill-expert-parallel-size", "8"], "excludes expert parallelism"),
        (["--shape", "gemma-3-12b", "--prefill-pipeline-size", "7"], "48 layers"),
        (
            ["--prefill-context-parallel-size", "2", "--prefill-pipeline-size", "2"],
            "--prefill-context-parallel-size: excludes prefill workers that divide the model",
        ),
        (
            ["--prefill-context-parallel-size", "2", "--workers", "1"],
            "--workers: 1 worker decodes, too, and divides no",
        ),
        (["--prefill-context-parallel-size", "16"], "one host, which has up to 8; give fewer"),
        (["--decode-pipeline-size", "2"], "No such option"),
        (["--prefill-gpu", "H800X"], "--prefill-gpu"),
        (["--decode-gpu", "H100", "--workers", "1"], "--workers: 1 worker cannot have two kinds of GPUs"),
        (["--decode-gpu", "H100", "--check", "/nowhere.json"], "--check: is for equal workers on one host each"),
        (["--prompt-tokens", "9000"], "--prompt-tokens"),
        (["--ceilings", "fast"], "--ceilings"),
        (["--from", "/nowhere.json"], "--from"),
        (["--check", "/nowhere.json"], "--check"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: list[str], names: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert names in result.stderr


def test_a_model_that_cannot_be_divided_into_stages_is_planned_without_them() -> None:
    result = run("--shape", "gemma-3-12b", "--rate", "20", "--prompt-tokens", "4000", "--no-simulate")
    assert result.exit_code == 0, result.stderr


def test_a_measured_knee_lies_between_two_rates() -> None:
    shares = {3.0: 1.0, 6.0: 0.95, 9.0: 0.4}
    loads = [{"rate": rate, "goodput": {"quick": {"share": share}}} for rate, share in shares.items()]
    assert bracket(loads, "quick") == (6.0, 9.0)
    assert bracket(loads[:2], "quick") == (6.0, None)
    assert bracket(loads[2:], "quick") == (0.0, 9.0)


@pytest.mark.parametrize(("predicted", "near"), [(5.0, False), (5.2, True), (10.0, True), (10.4, False)], ids=str)
def test_near_is_within_15_percent_of_where_the_measured_knee_may_be(predicted: float, near: bool) -> None:
    assert Compared("w", "r", "c", 6.0, 9.0, predicted).near is near
    assert Compared("w", "r", "c", 6.0, None, predicted).near is (predicted > 5.1)


@pytest.mark.usefixtures("short_loads")
def test_a_table_is_compared_row_by_row(tmp_path: Path) -> None:
    load = {"rate": 2.0, "goodput": {name: {"share": 1.0} for name in ("strict", "balanced", "quick")}}
    table = {
        "model": "llama-3-8b",
        "workers": 2,
        "ask": "adaptive",
        "unloaded_step_s": 0.004,
        "tables": {"balanced": {}},
        "loads": {"disaggregated-1-1": [load], "unheard-of": [load]},
    }
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    result = run("--check", str(file))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("disaggregated-1-1") == 3
    assert "of 3 knees within 15%" in result.stdout
    assert "unheard-of" not in result.stdout


@pytest.mark.parametrize(
    ("options", "remedies"),
    [
        (["--shape", "qwen3-32b", "--gpu", "L40S"], "--quantization int8 or --tensor-parallel-size 2 or --gpu A100-80"),
        (["--gpu", "L4", "--prompt-tokens", "60000"], "int8 or --tensor-parallel-size 2 or --gpu A100-40"),
        (["--shape", "qwen3-32b", "--gpu", "L4"], "it fits with --tensor-parallel-size 4 or --gpu A100-80"),
        (["--shape", "qwen3-32b", "--gpu", "L4", "--memory-gib", "2"], "it fits with --gpu A100-80"),
        (["--shape", "qwen3-32b", "--prompt-tokens", "5000000"], "it fits in fewer bits neither, and on no known GPU"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused_with_what_would_fit(options: list[str], remedies: str) -> None:
    refused = run("--no-simulate", "--tensor-parallel-size", "1", *options)
    assert refused.exit_code
    assert remedies in " ".join(refused.stderr.split())


def test_a_table_with_an_unknown_strict_cell_is_refused(tmp_path: Path) -> None:
    load = {"rate": 2.0, "goodput": {"strict": {"share": 1.0}}}
    table = {"model": "llama-3-8b", "workers": 2, "tables": {"balanced": {}}, "loads": {"shared": [load]}}
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    result = run("--check", str(file))
    assert result.exit_code == 2
    assert "unloaded step" in result.stderr


def test_an_incomplete_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    done = run("--model", str(tmp_path))
    assert done.exit_code == 3
    assert f"{tmp_path / 'config.json'}: " in done.output.replace("\n", "")


def test_what_speculation_would_bring() -> None:
    """The expected tokens are those of a geometric series; a row costs the same whether it verifies or not.

    A step with drafts has a cost of its own, and at most 256 rows.
    """
    drafting = Drafting.parse("0.8,4,0.05")
    assert drafting.tokens == pytest.approx((1 - 0.8**5) / (1 - 0.8)) == pytest.approx(3.3616)
    cost = StepCost(CostParameters(base_s=4e-3, row_s=0.1e-3, context_s=0.0, verify_base_s=2e-3))
    assert drafting.speedup(cost, 1, 1000) == pytest.approx(3.3616 * 4.1 / (6.5 + 0.2 * 4.1))
    assert drafting.speedup(cost, 85, 1000) == pytest.approx((1 + 0.8 + 0.64) * 12.5 / (6 + 25.5 + 0.1 * 4.1))
    assert drafting.speedup(cost, 129, 1000) == 1.0
    rows = drafting.break_even(cost, 1000)
    assert drafting.speedup(cost, rows - 1, 1000) > 1 >= drafting.speedup(cost, rows, 1000)
    said = run(*LOAD, "--no-simulate", "--speculate", "0.8,4,0.05").output
    assert "3.36 tokens a step" in said
    assert "by the roofline, times as fast by decoding requests: " in said
    assert "by the measured steps" not in said


def test_predicted_steps_with_drafts_are_as_much_longer_as_measured_ones() -> None:
    """By the roofline of the GPU that ran them, for each batch and number of drafts: 3 % off, 13 % at most."""
    report = json.loads(next(RESULTS.glob("speculation-speed-llama-3-8b-NVIDIA_H100*.json")).read_text())
    cost = StepCost(hardware("llama-3-8b", None, 10.0, 1.0, device=DEVICES["H100"].ceilings).actual_cost)
    errors = []
    for row in report["rows"]:
        plain = StepWork(decode_rows=row["batch"], decode_context_tokens=row["batch"] * report["context"])
        for drafts, cell in row["fixed"].items():
            predicted = cost.seconds(plain.with_drafts(row["batch"] * int(drafts), 0)) / cost.seconds(plain)
            errors.append(abs(predicted / (cell["verify_ms"] / row["off_ms"]) - 1))
    assert fmean(errors) < 0.05
    assert max(errors) < 0.2


def test_what_it_would_bring_by_measured_steps_stands_beside(tmp_path: Path) -> None:
    """Rows that cost thirty times as much lose from fewer requests on."""
    roofline = asdict(hardware("llama-3-8b", None, 10.0, 1.0).actual_cost)
    (tmp_path / "costs.json").write_text(json.dumps(roofline | {"row_s": 30 * roofline["row_s"]}))
    said = run(*LOAD, "--no-simulate", "--slo-itl", "100", "--from", str(tmp_path / "costs.json"))
    assert said.exit_code == 0, said.stderr
    predicted, measured = (line for line in said.stdout.splitlines() if "times as fast" in line)
    assert predicted.strip().startswith("by the roofline")
    assert predicted.endswith("1.00 at 256; it does not pay from 129 on")
    assert measured.strip().startswith("by the measured steps")
    assert 1 < int(measured.rpartition("it does not pay from ")[2].removesuffix(" on")) < 129


def test_memory_and_time_of_a_draft_model_count(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=256, num_attention_heads=16, num_hidden_layers=4)
    draft = write_tiny_model(tmp_path / "draft", hidden_size=256, num_attention_heads=16, num_hidden_layers=1)
    options = ["--model", str(model), "--no-simulate", "--prompt-tokens", "200", "--answer-tokens", "50"]
    plain, drafting = run(*options), run(*options, "--draft", str(draft), "--speculate", "0.7,3")
    assert drafting.exit_code == 0, drafting.stderr

    def tokens(said: str) -> float:
        line = next(line for line in said.splitlines() if line.startswith("memory"))
        return float(line.partition(" tokens a worker")[0].rpartition(" ")[2].replace(",", ""))

    assert tokens(plain.stdout) / tokens(drafting.stdout) == pytest.approx(5 / 4, rel=0.01), "one layer beside four"
    assert ", for drafts " in drafting.stdout
    assert "proposed in 0 of a step" in plain.stdout
    ratio = float(drafting.stdout.partition("proposed in ")[2].partition(" ")[0])
    assert 0.1 < ratio < 1.0
    given = run(*options, "--draft", str(draft), "--speculate", "0.7,3,0.02")
    assert "proposed in 0.02 of a step" in given.stdout
    heads = write_heads(tmp_path / "heads", 256, 160)
    assert ", for drafts " in run(*options, "--draft", str(heads)).stdout
    refused = run(*options, "--draft", str(write_tiny_model(tmp_path / "other", vocab_size=96)))
    assert refused.exit_code
    assert "a vocabulary of 96 tokens" in refused.stderr


def test_the_break_even_of_drafts_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines have the speedups of `Drafting`; labels have where they end to pay."""
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr("tandem.cli.load.pictures.draw_lines", lambda *given: drawn.append(given))
    file = tmp_path / "even.svg"
    assert run(*LOAD, "--plot", str(file), "--speculate", "0.8,4").exit_code == 0
    monkeypatch.undo()
    ((title, _, lines, even, _),) = drawn
    cost = StepCost(hardware("llama-3-8b", None, 10.0, 1.0).actual_cost)
    drafting = Drafting.parse("0.8,4")
    assert title == "4 drafts, llama-3-8b, context 2250"
    assert list(lines)[2] == f"0.8 accepted, pays below {drafting.break_even(cost, 2250)}"
    assert [label.partition(" ")[0] for label in lines] == ["0.5", "0.7", "0.8", "0.9"]
    points = lines[list(lines)[2]]
    assert points[7] == (8.0, pytest.approx(drafting.speedup(cost, 8, 2250)))
    assert [points[0][0], points[-1], even] == [1.0, (256.0, 1.0), 1.0]
    said = run(*LOAD, "--plot", str(file))
    assert said.stdout == f"drew {file}\n"
    assert "</svg>" in file.read_text()
    for wrong in ("even.txt", "none/even.svg"):
        refused = run(*LOAD, "--plot", str(tmp_path / wrong))
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: --plot: ")


@pytest.mark.parametrize("wrong", ["", "0.7", "1.2,3,0", "0.7,0,0", "0.7,8", "0.7,3,-1", "a,b,c", "0.7,3,nan"])
def test_a_wrong_speculation_is_refused(wrong: str) -> None:
    refused = run("--no-simulate", "--speculate", wrong)
    assert refused.exit_code
    assert "--speculate" in refused.output


def test_the_roofline_has_a_row_for_each_known_gpu() -> None:
    result = run(*LOAD, "--roofline")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[2:]}
    assert {*DEVICES, "MI300X*"} < set(rows)
    assert rows["H200"] == ["168", "compute", *["bandwidth"] * 5]
    assert "GiB" not in result.stdout


def test_the_kv_table_marks_what_does_not_fit() -> None:
    result = run(*LOAD, "--kv-table", "--shape", "llama-3-8b", "--gpu", "L40S")
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[2:]}
    assert (rows["1"], rows["128"]) == (["0.25", "1"], ["32*", "128*"])


def test_the_time_of_a_transfer_over_the_network() -> None:
    lines_of = [
        next(line for line in run(*LOAD, "--no-simulate", *more).stdout.splitlines() if line.startswith("transfer"))
        for more in ((), ("--network-gbps", "100"))
    ]
    assert "5.2 ms over 400 Gb/s" in lines_of[0]
    assert "21.0 ms over 100 Gb/s" in lines_of[1]
    refused = run(*LOAD, "--network-gbps", "0")
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --network-gbps: 0 is not above 0")


def test_the_price_of_tokens_is_that_of_all_gpus_at_the_knee(short_loads: None) -> None:
    result = run(*LOAD, "--rate", "10", "--workers", "2", "--price-per-hour", "3")
    assert result.exit_code == 0
    header, *rows = result.stdout[result.stdout.index("strategy ") :].splitlines()
    assert header.split()[-4:] == ["price", "of", "1M", "tokens"]
    assert len(rows) >= 3
    for row in rows:
        knee, price = re.search(r"  ([\d.]+) +[\d.]+ +\d+%.* ([\d.]+)$", row.rstrip()).groups()  # type: ignore[union-attr]
        assert float(price) == pytest.approx(2 * 3 / 3600 / (float(knee) * 2500) * 1e6, rel=0.02)
    refused = run(*LOAD, "--price-per-hour", "-1")
    assert refused.stderr.startswith("error: --price-per-hour: -1 is not above 0")


def test_a_trace_gives_rate_lengths_and_cached_prefixes(tmp_path: Path) -> None:
    """The second prompt begins with the first block of the first, and the third with both."""
    file = tmp_path / "trace.jsonl"
    requests = [(0, [1, 2], 1024, 10), (100, [1, 3], 1024, 20), (200, [1, 3, 4], 1536, 30)]
    names = "timestamp", "hash_ids", "input_length", "output_length"
    file.write_text("".join(json.dumps(dict(zip(names, request, strict=True))) + "\n" for request in requests))
    result = run("--workload", str(file), "--no-simulate")
    assert result.exit_code == 0, result.output
    first, prompts, answers, gaps = result.stdout.splitlines()[:4]
    assert first == "workload  trace: 3 requests, 10 a second, 43% of the prompt tokens in an earlier prompt"
    assert prompts.strip() == "prompt tokens: mean 1,195, P50 1,024, P90 1,536, P99 1,536"
    assert answers.strip().startswith("answer tokens: mean 20, P50 20")
    assert gaps.strip().startswith("ms between arrivals: mean 100, P50 100")
    assert "to compute a prompt of 683 tokens" in result.stdout
    file.write_text(json.dumps(dict(zip(names, requests[0], strict=True))) + "\n")
    refused = run("--workload", str(file))
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --workload: trace.jsonl has no two requests at different times")
