"""The options of `tandem plan`, in groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.help_text import further_option
from tandem.cli.picture_file import check_picture
from tandem.cli.start.setting_options import OPTIONS

if TYPE_CHECKING:
    from tandem.capacity.plan.memory import DraftMemory
    from tandem.capacity.planner.demand import Demand, LatencyTargets
    from tandem.cli.load.trace import Trace
    from tandem.cost_model.devices import DeviceKind
    from tandem.engine.config.model import ModelSpec
    from tandem.protocol.cost_parameters import CostParameters

kv_option = further_option("KV cache and drafts")
gpu_option = further_option("GPUs of each worker")
report_option = further_option("What is printed")
method_option = further_option("Step times and simulation")
_CUSTOM_GIB = 80.0


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """The options that describe the model."""

    shape: Annotated[str, typer.Option(help="A model's shape: llama-3-8b, qwen3-32b, …")] = "llama-3-8b"
    model: Annotated[Path | None, typer.Option(help="A model folder with config.json, used instead.")] = None
    quantization: Annotated[str | None, typer.Option(help=OPTIONS["quantization"].help)] = None
    kv_cache_dtype: Annotated[str, kv_option(help="Of the KV cache, as with `tandem up`: auto, int8 or fp8.")] = "auto"
    draft: Annotated[
        Path | None,
        kv_option(help="Folder of the model or heads of `tandem up --speculate draft`, whose memory counts."),
    ] = None

    @property
    def name(self) -> str:
        """The name of the shape or of the model folder."""
        return self.shape if self.model is None else self.model.name

    def config(self) -> ModelSpec:
        """Return the model's specification.

        Raises InvalidArgument for an unknown shape or quantization, and ModelError, as `tandem up` does, for a folder
        that cannot be served.
        """
        from tandem.engine.models.load_spec import load_spec, quantized_at_load
        from tandem.engine.models.shapes import shape_config, shape_names
        from tandem.protocol.errors import InvalidArgument

        if self.model is None:
            if self.shape not in shape_names():
                raise InvalidArgument("--shape", f"{self.shape!r} is not one of {', '.join(shape_names())}")
            spec = shape_config(self.shape)
        else:
            spec = load_spec(self.model)
        return quantized_at_load(spec, self.quantization)

    def kv_element_bytes(self, model: ModelSpec) -> float:
        """Return the bytes per KV element, including its share of a quantization scale.

        Raises InvalidArgument for an unknown dtype, or for a model that has no 8-bit KV cache.
        """
        from tandem.capacity.simulation.hardware import kv_element_bytes

        return kv_element_bytes(model, self.kv_cache_dtype)

    def draft_memory(self, model: ModelSpec) -> DraftMemory:
        """Return the additional memory for the draft model or heads of --draft; zero without --draft.

        Raises ModelError if the draft model cannot be served.
        """
        from tandem.capacity.plan.memory import NO_DRAFT_MEMORY, DraftMemory
        from tandem.engine.speculation.draft_folder import check_draft_folder

        if self.draft is None:
            return NO_DRAFT_MEMORY
        check_draft_folder(self.draft, model, self.model or self.draft)
        return DraftMemory.of(self.draft, model)


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """The options that describe the GPUs of each worker."""

    gpu: Annotated[str, typer.Option(help="Each worker's GPU: H200, H100, A100-80, L4, …; --roofline lists all.")] = (
        "H200"
    )
    ceilings: Annotated[
        str,
        gpu_option(help="TFLOPS:GBPS by the data sheet, for another GPU, with an H200's NVLink; with --memory-gib."),
    ] = ""
    memory_gib: Annotated[float | None, gpu_option(help="Its memory; default: that of the GPU, or 80.")] = None
    prefill_gpu: Annotated[str | None, gpu_option(help="GPU of prefill workers, if it is another one.")] = None
    decode_gpu: Annotated[str | None, gpu_option(help="GPU of decode workers, if it is another one.")] = None
    tensor_parallel_size: Annotated[
        int | None,
        gpu_option(
            min=1, help="GPUs of each worker; default: 1, 2, 4 or 8, with which the fewest GPUs serve the load."
        ),
    ] = None
    prefill_tensor_parallel_size: Annotated[
        int | None, gpu_option(min=1, help="GPUs of each prefill worker; default: --tensor-parallel-size.")
    ] = None
    decode_tensor_parallel_size: Annotated[
        int | None, gpu_option(min=1, help="GPUs of each decode worker; default: --tensor-parallel-size.")
    ] = None
    prefill_pipeline_size: Annotated[
        int | None,
        gpu_option(
            min=1, help="Pipeline stages of each prefill worker; default: 1, or 2 with which fewer GPUs serve the load."
        ),
    ] = None
    prefill_context_parallel_size: Annotated[
        int | None,
        gpu_option(
            min=1,
            help="GPUs of each prefill worker that divide the tokens of prompts, with the whole model each; default: 1,"
            " or 2, 4 or 8 with which fewer GPUs serve the load.",
        ),
    ] = None
    prefill_expert_parallel_size: Annotated[
        int | None,
        gpu_option(min=1, help="GPUs over several hosts of each prefill worker, which divide the experts."),
    ] = None
    decode_expert_parallel_size: Annotated[
        int | None, gpu_option(min=1, help="As --prefill-expert-parallel-size, of each decode worker.")
    ] = None
    two_batch_overlap: Annotated[
        bool, gpu_option("--two-batch-overlap", help="Exchange one half of a step while the other is computed.")
    ] = False

    @property
    def tensor_parallel_sizes(self) -> tuple[int | None, int | None]:
        """The numbers of GPUs of prefill and of decode workers; None = the one that needs the fewest GPUs."""
        every = self.tensor_parallel_size
        return self.prefill_tensor_parallel_size or every, self.decode_tensor_parallel_size or every

    @property
    def expert_parallel_sizes(self) -> tuple[int | None, int | None]:
        """The numbers of GPUs among which prefill and decode workers divide the experts; None = they do not."""
        return self.prefill_expert_parallel_size, self.decode_expert_parallel_size

    def kinds(self) -> tuple[DeviceKind, DeviceKind]:
        """Return the GPUs of prefill and of decode workers. Raises InvalidArgument, which names the option."""
        from tandem.cost_model.devices import device_kind

        return (
            device_kind("--prefill-gpu", self.prefill_gpu) if self.prefill_gpu else self._kind(),
            device_kind("--decode-gpu", self.decode_gpu) if self.decode_gpu else self._kind(),
        )

    def _kind(self) -> DeviceKind:
        from dataclasses import replace

        from tandem.cost_model.devices import DeviceKind, device_kind
        from tandem.settings.ceilings import parse_ceilings

        if self.ceilings:
            given = parse_ceilings("--ceilings", self.ceilings)
            return DeviceKind(given.flops, given.bytes_per_s, self.memory_gib or _CUSTOM_GIB)
        device = device_kind("--gpu", self.gpu)
        return device if self.memory_gib is None else replace(device, memory_gib=self.memory_gib)


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """The options that give the latency targets."""

    slo_ttft: Annotated[float, typer.Option(help="Milliseconds to the first token.")] = 1000.0
    slo_itl: Annotated[float, typer.Option(help="Milliseconds between tokens, of 99 in 100 gaps.")] = 25.0

    def targets(self) -> LatencyTargets:
        """Return the latency targets. Raises InvalidArgument, which names the option."""
        from tandem.capacity.planner.demand import LatencyTargets

        check_above_0("--slo-ttft", self.slo_ttft)
        check_above_0("--slo-itl", self.slo_itl)
        return LatencyTargets(self.slo_ttft / 1e3, self.slo_itl / 1e3)


@dataclass(frozen=True, slots=True)
class DemandOptions:
    """The options that describe the load."""

    prompt_tokens: Annotated[float, typer.Option(help="Mean tokens of a prompt.")] = 2000.0
    answer_tokens: Annotated[float, typer.Option(help="Mean output tokens of a request.")] = 500.0
    cached: Annotated[float, kv_option(help="Fraction of prompt tokens in prefix caches, 0 to 1.")] = 0.0
    rate: Annotated[float, typer.Option(help="Requests per second.")] = 10.0
    workload: Annotated[
        Path | None,
        kv_option(help="A trace, as of `tandem bench --dataset`, whose rate, lengths and common prefixes are used."),
    ] = None

    def trace(self) -> Trace | None:
        """Return the trace of --workload, None without it. Raises InvalidArgument if it cannot be read."""
        from tandem.cli.planning.workload_file import read_workload

        return None if self.workload is None else read_workload(self.workload)

    def demand(self) -> Demand:
        """Return the load. Raises InvalidArgument, which names the option."""
        from tandem.capacity.planner.demand import Demand
        from tandem.cli.planning.workload_file import demand_of
        from tandem.protocol.errors import InvalidArgument

        if (trace := self.trace()) is not None:
            return demand_of(trace)
        check_above_0("--prompt-tokens", self.prompt_tokens)
        check_above_0("--answer-tokens", self.answer_tokens)
        check_above_0("--rate", self.rate)
        if not 0 <= self.cached < 1:
            raise InvalidArgument("--cached", f"{self.cached:g} is not 0 or more and below 1")
        return Demand(self.rate, self.prompt_tokens, self.answer_tokens, self.cached)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """The options that choose the source of step costs."""

    costs: Annotated[
        Path | None, method_option("--from", help="JSON with fitted step costs, used instead of the roofline's.")
    ] = None
    live: Annotated[bool, method_option("--live", help="Use the fitted costs of the running cluster.")] = False

    def fitted(self) -> CostParameters | None:
        """Return the fitted step costs from the file of --from or else, with --live, from the running cluster.

        Returns None without either option. Raises FailedPrecondition if the cluster has not fitted step costs yet, and
        Unavailable if no cluster runs.
        """
        import asyncio

        from tandem.capacity.planner.reading import fitted
        from tandem.capacity.simulation.hardware import read_costs
        from tandem.cli.connection.options import metrics_server
        from tandem.cli.observe.top import scrape
        from tandem.protocol.errors import FailedPrecondition

        if self.costs is not None:
            return read_costs(self.costs, "--from")
        if not self.live:
            return None
        costs = fitted(asyncio.run(scrape(*metrics_server("", ""))))
        if costs is None:
            raise FailedPrecondition(
                "the running cluster has not measured prompts and answers yet; send it some requests"
            )
        return costs


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options that choose what is printed."""

    roofline: Annotated[
        bool, report_option("--roofline", help="Only print what limits each phase on each known GPU.")
    ] = False
    kv_table: Annotated[
        bool, report_option("--kv-table", help="Only print the memory of the KV by requests and context.")
    ] = False
    network_gbps: Annotated[float, report_option(help="Gb/s between hosts, for the time of a KV transfer.")] = 400.0
    price_per_hour: Annotated[
        float | None, report_option(help="Price of a GPU for an hour, for the price of tokens by strategy.")
    ] = None
    plot: Annotated[
        Path | None,
        report_option(help="Only draw how many times as fast drafts make decoding, by batch: FILE.svg or FILE.png."),
    ] = None

    def check(self) -> None:
        """Check the values. Raises InvalidArgument, which names the option."""
        if self.plot is not None:
            check_picture(self.plot)
        check_above_0("--network-gbps", self.network_gbps)
        if self.price_per_hour is not None:
            check_above_0("--price-per-hour", self.price_per_hour)


def check_above_0(option: str, value: float) -> None:
    """Raise InvalidArgument unless the value is finite and above 0."""
    from tandem.protocol.errors import InvalidArgument

    if not 0 < value < float("inf"):
        raise InvalidArgument(option, f"{value:g} is not above 0")
