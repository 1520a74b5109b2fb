"""Limits of options are named in errors, and roles become slots."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.ray_processes.worker_actors import WorkerActors
from tandem.cluster.supervision.modes import Topology
from tandem.cluster.supervision.roles import Slot, another, bundle, offer, plan
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Role
from tandem.protocol.policy_name import PolicyName
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.cluster import ClusterSettings
from tandem.settings.planner import PlannerMode, PlannerSettings
from tandem.worker.assignment import check_role
from tandem.worker.config import WorkerConfig


def worker_config(config: ClusterSettings, slot: Slot) -> WorkerConfig:
    """Returns the config that a worker of this slot starts with."""
    actors = WorkerActors(config, "")
    return actors.config(slot, Topology.of(config).assignment(slot.role))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"prefill": 0}, "--prefill"),
        ({"decode": 65}, "--decode"),
        ({"page_tokens": 0}, "--page-tokens"),
        ({"kv_cache_bytes": 1}, "--kv-cache-gib"),
        ({"max_step_tokens": 0}, "--max-step-tokens"),
        ({"threads": 0}, "--threads"),
        ({"grpc_port": 65536}, "--grpc-port"),
        ({"http_port": -1}, "--http-port"),
        ({"grpc_port": 8000, "http_port": 8000}, "--http-port"),
        ({"device": "tpu"}, "--device"),
        ({"device": "cpu:7"}, "--device"),
        ({"memory_fraction": 0.0}, "--memory-fraction"),
        ({"memory_fraction": 1.1}, "--memory-fraction"),
        ({"speculate": "draft"}, "--speculate"),
        ({"speculate": "ngram", "draft": Path("d")}, "--draft"),
        ({"kv_checksum_rate": -0.1}, "--kv-checksum-rate"),
        ({"kv_checksum_rate": 1.1}, "--kv-checksum-rate"),
        ({"kv_checksum_rate": float("nan")}, "--kv-checksum-rate"),
        ({"kv_lease_s": 0.5}, "--kv-lease"),
        ({"kv_transfer_deadline_s": float("inf")}, "--kv-transfer-deadline"),
        ({"kv_quarantine_share": 1.5}, "--kv-quarantine-share"),
        ({"memory_fraction": float("nan")}, "--memory-fraction"),
        ({"max_batch_requests": 0}, "--max-batch-requests"),
        ({"api_keys": ("",)}, "--api-key"),
        ({"api_keys": ("good", "é")}, "--api-key"),
        ({"dtype": "int8"}, "--dtype"),
        ({"quantization": "int3"}, "--quantization"),
        ({"decode_quantization": "awq"}, "--decode-quantization"),
        ({"mode": "colocated", "prefill_quantization": "fp8"}, "--prefill-quantization"),
        ({"decode_quantization": "fp8", "planner": PlannerSettings(PlannerMode.ON)}, "--decode-quantization"),
        ({"ray_address": "local"}, "--address"),
        ({"ray_address": "ray://head:10001"}, "--address"),
        ({"ray_address": "head"}, "--address"),
        ({"ray_address": "auto", "device": "cuda:1"}, "--device"),
        ({"places_timeout_s": float("nan")}, "--places-timeout"),
        ({"start_timeout_s": -1.0}, "--start-timeout"),
        ({"stop_grace_s": -1.0}, "--stop-grace"),
        ({"worker_silence_s": -1.0}, "--worker-silence"),
        ({"recovery_timeout_s": float("inf")}, "--recovery-timeout"),
        ({"metrics_port": 9464, "controller_port": 9464}, "--controller-port"),
        ({"token": "ö"}, "--token"),
        ({"outlive_s": 9.0, "token": "t"}, "--workers-outlive"),
        ({"outlive_s": 9.0, "ray_address": "auto"}, "--workers-outlive"),
        ({"outlive_s": -1.0, "ray_address": "auto", "token": "t"}, "--workers-outlive"),
        ({"outlive_s": float("nan"), "ray_address": "auto", "token": "t"}, "--workers-outlive"),
        ({"cluster_name": "other"}, "--cluster-name"),
        ({"cluster_name": "a b", "outlive_s": 9.0, "ray_address": "auto", "token": "t"}, "--cluster-name"),
        ({"mode": "both"}, "--mode"),
        ({"workers": 0}, "--workers"),
        ({"step_policy": "greedy"}, "--step-policy"),
        ({"step_budget": 0}, "--step-budget"),
        ({"itl_target_s": 0.0}, "--itl-target-ms"),
        ({"mode": "adaptive", "prefill_tensor_parallel_size": 2}, "--prefill-tensor-parallel-size"),
        (
            {"decode_tensor_parallel_size": 2, "planner": PlannerSettings(PlannerMode.ON)},
            "--decode-tensor-parallel-size",
        ),
        ({"pipeline_parallel_size": 2, "mode": "colocated"}, "--prefill-pipeline-size"),
        ({"context_parallel_size": 2, "mode": "colocated"}, "--prefill-context-parallel-size"),
        ({"context_parallel_size": 2, "tensor_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"context_parallel_size": 2, "pipeline_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"context_parallel_size": 2, "planner": PlannerSettings(PlannerMode.ON)}, "--prefill-context-parallel-size"),
        ({"context_parallel_size": 2, "draft": Path("d"), "speculate": "draft"}, "--draft"),
        ({"pipeline_parallel_size": 2, "planner": PlannerSettings(PlannerMode.ON)}, "--prefill-pipeline-size"),
        ({"pipeline_parallel_size": 2, "runtime_loras": True}, "--lora"),
        ({"pipeline_parallel_size": 2, "draft": Path("d"), "speculate": "draft"}, "--draft"),
        ({"pipeline_parallel_size": 2, "speculate": "mtp"}, "--speculate"),
        ({"context_parallel_size": 2, "speculate": "mtp"}, "--speculate"),
        ({"draft": Path("d"), "speculate": "mtp"}, "--draft"),
    ],
)
def test_a_wrong_option_is_named(settings: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        ClusterSettings.of(model=Path("m"), **settings)
    assert failure.value.field == option


def test_each_role_may_have_a_quantization_of_its_own() -> None:
    config = ClusterSettings.of(model=Path("m"), quantization="int8", decode_quantization="int4")
    quantizations = [worker_config(config, slot).engine.quantization for slot in plan(config, gpus=0)]
    assert quantizations == ["int8", "int4"]
    everywhere = ClusterSettings.of(model=Path("m"), mode="colocated", quantization="fp8")
    assert [worker_config(everywhere, slot).engine.quantization for slot in plan(everywhere, gpus=0)] == ["fp8"]


def test_prefill_workers_alone_divide_the_tokens_of_prompts() -> None:
    config = ClusterSettings.of(model=Path("m"), prefill=1, decode=1, device="cuda", context_parallel_size=3)
    slots = plan(config, gpus=8)
    assert [list(slot.gpus) for slot in slots] == [[0, 1, 2], [3]]
    engines = [worker_config(config, slot).engine for slot in slots]
    assert [engine.context_parallel_size for engine in engines] == [3, 1]
    assert [engine.max_step_tokens for engine in engines] == [3 * 2048, 2048], "those of each rank"


def test_on_other_hosts_ray_gives_each_worker_a_gpu() -> None:
    config = ClusterSettings.of(model=Path("m"), prefill=1, decode=2, device="cuda", ray_address="auto")
    slots = plan(config, gpus=0)
    assert [(slot.worker_id, slot.device, slot.memory_fraction) for slot in slots] == [
        ("prefill-0", "cuda", 0.9),
        ("decode-0", "cuda", 0.9),
        ("decode-1", "cuda", 0.9),
    ]
    assert bundle(slots[0]) == {"prefill": 1.0, "GPU": 1.0}
    assert offer(config) == {"prefill": 1.0, "decode": 2.0, "GPU": 3.0}


def test_each_worker_has_a_slot_of_its_role() -> None:
    slots = plan(ClusterSettings.of(model=Path("m"), prefill=2, decode=1), gpus=0)
    assert slots == (
        Slot("prefill-0", Role.PREFILL, "cpu"),
        Slot("prefill-1", Role.PREFILL, "cpu"),
        Slot("decode-0", Role.DECODE, "cpu"),
    )


@pytest.mark.parametrize("mode", ["colocated", "adaptive"])
def test_colocated_workers_play_both_roles_and_there_are_no_others(mode: str) -> None:
    config = ClusterSettings.of(model=Path("m"), mode=mode, workers=2, device="cuda")
    slots = plan(config, gpus=2)
    assert [(slot.worker_id, slot.role, slot.device) for slot in slots] == [
        ("both-0", Role.BOTH, "cuda:0"),
        ("both-1", Role.BOTH, "cuda:1"),
    ]
    assert [slot.memory_fraction for slot in slots] == [0.9, 0.9]
    assert (config.worker_count, offer(config)) == (2, {"prefill": 2.0, "decode": 2.0})


def test_the_policy_of_steps_reaches_the_worker() -> None:
    config = ClusterSettings.of(model=Path("m"), step_policy="chunked", step_budget=700, itl_target_s=0.025)
    worker = worker_config(config, plan(config, gpus=0)[0])
    assert (worker.step_policy, worker.step_budget, worker.itl_target_s) == (PolicyName.CHUNKED, 700, 0.025)


def test_where_and_how_long_workers_wait_for_another_start() -> None:
    outliving = ClusterSettings.of(Path("m"), ray_address="auto", token="t", outlive_s=9.0, cluster_name="a")
    assert outliving.ray_namespace == "tandem-a"
    assert worker_config(outliving, plan(outliving, gpus=0)[0]).outlive_s == 9.0
    assert ClusterSettings.of(Path("m"), ray_address="auto", token="t").ray_namespace is None


def test_what_transfers_may_take_reaches_the_worker() -> None:
    config = ClusterSettings.of(model=Path("m"), kv_lease_s=7.0, kv_transfer_deadline_s=9.0, kv_quarantine_share=0.25)
    worker = worker_config(config, plan(config, gpus=0)[0])
    assert (worker.kv_lease_s, worker.kv_transfer_deadline_s, worker.kv_quarantine_share) == (7.0, 9.0, 0.25)
    given, default = ClusterSettings.of(model=Path("m")), WorkerConfig
    worker = worker_config(given, plan(given, gpus=0)[0])
    for setting in ("kv_lease_s", "kv_transfer_deadline_s", "kv_quarantine_share"):
        assert getattr(worker, setting) == default.__dataclass_fields__[setting].default


@pytest.mark.parametrize(("gpus", "devices"), [(1, ["cuda:0"] * 3), (2, ["cuda:0", "cuda:1", "cuda:0"])])
def test_workers_spread_over_gpus(gpus: int, devices: list[str]) -> None:
    slots = plan(ClusterSettings.of(model=Path("m"), prefill=1, decode=2, device="cuda"), gpus=gpus)
    assert [slot.device for slot in slots] == devices


@pytest.mark.parametrize(("gpus", "fractions"), [(1, [0.3] * 3), (2, [0.45, 0.9, 0.45]), (3, [0.9] * 3)])
def test_workers_share_the_memory_of_their_gpu(gpus: int, fractions: list[float]) -> None:
    slots = plan(ClusterSettings.of(model=Path("m"), prefill=1, decode=2, device="cuda"), gpus=gpus)
    assert [slot.memory_fraction for slot in slots] == pytest.approx(fractions)
    chosen = plan(ClusterSettings.of(model=Path("m"), device="cuda", memory_fraction=0.4), gpus=gpus)
    assert {slot.memory_fraction for slot in chosen} == {0.4}


def test_sizes_follow_the_device() -> None:
    cpu, gpu = ClusterSettings.of(model=Path("m")), ClusterSettings.of(model=Path("m"), device="cuda:1")
    assert (cpu.engine.kv_pool_bytes, gpu.engine.kv_pool_bytes) == (1 << 30, None)
    assert (cpu.engine.batch_requests, gpu.engine.batch_requests) == (64, 256)
    given = ClusterSettings.of(model=Path("m"), device="cuda", kv_cache_bytes=1 << 22, max_batch_requests=7)
    assert (given.engine.kv_pool_bytes, given.engine.batch_requests) == (1 << 22, 7)


def test_settings_reach_the_engine() -> None:
    config = ClusterSettings.of(model=Path("m"), device="cuda", memory_fraction=0.5)
    (slot, *_) = plan(config, gpus=1)
    engine = worker_config(config, slot).engine
    assert (engine.memory_fraction, engine.kv_cache_bytes, engine.max_batch_requests) == (0.5, None, 256)
    drafting = ClusterSettings.of(model=Path("m"), speculate="draft", draft=Path("d"))
    worker = worker_config(drafting, plan(drafting, gpus=0)[0])
    assert (worker.speculate, worker.engine.draft) == (SpeculationMethod.DRAFT, Path("d"))
    predicting = ClusterSettings.of(model=Path("m"), speculate="mtp")
    assert [worker_config(of, plan(of, gpus=0)[0]).engine.mtp for of in (drafting, predicting)] == [False, True]


def test_engines_of_workers_that_draft_capture_their_steps() -> None:
    methods = {"auto": False, "off": False, "ngram": True, "suffix": True, "draft": True}
    configs = {
        method: ClusterSettings.of(
            model=Path("m"), device="cuda", speculate=method, draft=Path("d") if method == "draft" else None
        )
        for method in methods
    }
    engines = {
        method: worker_config(method_config, plan(method_config, gpus=1)[0]).engine
        for method, method_config in configs.items()
    }
    assert {method: engine.draft_graphs for method, engine in engines.items()} == methods


@pytest.mark.parametrize(("gpus", "devices"), [(8, ["cuda:0", "cuda:4"]), (4, ["cuda:0", "cuda:0"])])
def test_a_worker_of_several_ranks_has_gpus_that_follow_one_another(gpus: int, devices: list[str]) -> None:
    config = ClusterSettings.of(model=Path("m"), mode="colocated", workers=2, device="cuda", tensor_parallel_size=4)
    slots = plan(config, gpus=gpus)
    assert [slot.device for slot in slots] == devices
    assert worker_config(config, slots[1]).engine.tensor_parallel_size == 4
    if gpus == 8:
        assert another(config, Role.BOTH, slots[:1], gpus).device == "cuda:4"


def test_each_role_may_have_a_number_of_ranks_of_its_own() -> None:
    config = ClusterSettings.of(
        model=Path("m"), prefill=2, decode=1, device="cuda", prefill_tensor_parallel_size=1, tensor_parallel_size=2
    )
    slots = plan(config, gpus=4)
    assert [(slot.worker_id, list(slot.gpus)) for slot in slots] == [
        ("prefill-0", [0]),
        ("prefill-1", [1]),
        ("decode-0", [2, 3]),
    ]
    assert [worker_config(config, slot).engine.tensor_parallel_size for slot in slots] == [1, 1, 2]
    assert [slot.memory_fraction for slot in plan(config, gpus=3)] == pytest.approx([0.45, 0.45, 0.45])
    assert list(another(config, Role.DECODE, slots[:2], gpus=4).gpus) == [2, 3]


def test_prefill_workers_alone_have_pipeline_stages() -> None:
    config = ClusterSettings.of(
        model=Path("m"), prefill=1, decode=1, device="cuda", prefill_tensor_parallel_size=2, pipeline_parallel_size=3
    )
    slots = plan(config, gpus=8)
    assert [list(slot.gpus) for slot in slots] == [[0, 1, 2, 3, 4, 5], [6]]
    engines = [worker_config(config, slot).engine for slot in slots]
    assert [(engine.tensor_parallel_size, engine.pipeline_parallel_size) for engine in engines] == [(2, 3), (1, 1)]


def test_on_other_hosts_ray_gives_each_worker_all_its_gpus() -> None:
    config = ClusterSettings.of(
        model=Path("m"), mode="colocated", workers=2, device="cuda", ray_address="auto", tensor_parallel_size=2
    )
    assert bundle(plan(config, gpus=0)[0]) == {"prefill": 1.0, "decode": 1.0, "GPU": 2.0}
    assert offer(config)["GPU"] == 4


@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        ({}, ""),
        ({"tensor_parallel_size": 2}, ""),
        ({"pipeline_parallel_size": 2}, "--prefill-pipeline-size"),
        ({"context_parallel_size": 2}, "--prefill-context-parallel-size"),
    ],
)
def test_the_option_with_which_prefill_workers_cannot_decode(sizes: dict[str, Any], option: str) -> None:
    """They refuse the role of decode workers, so they must not be asked to stand in for one."""
    config = ClusterSettings.of(model=Path("m"), prefill=1, decode=1, **sizes)
    assert config.prefill_only_option == option
    engine = worker_config(config, plan(config, gpus=0)[0]).engine
    with pytest.raises(InvalidArgument) if option else nullcontext():
        check_role(Role.BOTH, engine)


def test_a_chosen_gpu_is_kept() -> None:
    slots = plan(ClusterSettings.of(model=Path("m"), device="cuda:3"), gpus=8)
    assert {slot.device for slot in slots} == {"cuda:3"}


def test_a_node_offers_what_its_workers_ask_for() -> None:
    config = ClusterSettings.of(model=Path("m"), prefill=2, decode=3)
    asked: dict[str, float] = {}
    for slot in plan(config, gpus=0):
        for name, amount in bundle(slot).items():
            asked[name] = asked.get(name, 0.0) + amount
    assert asked == offer(config) == {"prefill": 2.0, "decode": 3.0}


def test_a_worker_of_both_roles_needs_both_places() -> None:
    assert bundle(Slot("both-0", Role.BOTH, "cpu")) == {"prefill": 1.0, "decode": 1.0}
