"""Options of `tandem up` for workers: model, roles, steps, engine, KV transfer and hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.protocol.policy_name import PolicyName

if TYPE_CHECKING:
    from tandem.cluster.config import ClusterConfig


AUTO = "auto"
"""Value of --mode and --device: chosen by the hardware and by other options (`tandem/cli/start/up.py`)."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of the served model."""

    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Hugging Face folder, GGUF file, or a repository of the Hugging Face Hub, ORG/NAME[@REVISION]"
            "[:FILE.gguf]; default: SmolLM2-135M-Instruct.",
        ),
    ] = None
    random_weights: Annotated[
        str | None,
        typer.Option(help="For performance runs: the shape (llama-3-8b, qwen3-0.6b, …) of a model of random weights."),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            metavar="NAME [NAME...]",
            help="Names by which clients call the model, the first of which answers have; default: that of --model.",
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer and its chat templates; default: the model's own.", exists=True),
    ] = None
    chat_template: Annotated[
        str,
        typer.Option(
            help="Jinja file, or name of one of the model's templates (tool_use, …) or of Tandem's (smollm2); default:"
            " the model's own."
        ),
    ] = ""
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling of requests that name none: auto = as the model's generation_config.json; none = plain"
            " sampling, temperature 1."
        ),
    ] = "auto"
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context in tokens, prompt and answer together; default: the model's.")
    ] = None

    def check(self) -> None:
        """Checks the options; InvalidArgument names one."""
        from tandem.protocol.errors import InvalidArgument

        if self.model is not None and self.random_weights is not None:
            raise InvalidArgument("--random-weights", "takes the place of --model; give one of them")
        if self.model == "":
            raise InvalidArgument("--model", "is empty; give a Hugging Face folder, a GGUF file or a Hub id")
        names = self.served_model_name or []
        if "" in names or len({*names}) < len(names):
            raise InvalidArgument("--served-model-name", "has an empty name, or one twice; give each model name once")

    def path(self) -> Path | None:
        """Returns a folder or file, created for random weights; None = the small model."""
        if self.random_weights is not None:
            from tandem.cli.models.random_model import random_model

            return random_model(self.random_weights)
        return None if self.model is None else Path(self.model)

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        first, *aliases = self.served_model_name or [""]
        return replace(
            config,
            model=Path(self.model or ""),
            random_weights=self.random_weights is not None,
            model_name=first,
            model_aliases=tuple(aliases),
            tokenizer=None if self.tokenizer is None else self.tokenizer.resolve(),
            chat_template=self.chat_template,
            generation_config=self.generation_config,
            max_model_len=self.max_model_len,
        )


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """Options of mode and roles."""

    mode: Annotated[
        str,
        typer.Option(
            help="disaggregated: --prefill and --decode workers; colocated: --workers that do both; adaptive:"
            " --workers, and for each request one of them or two; auto: disaggregated on a CPU or with --prefill or"
            " --decode, else adaptive."
        ),
    ] = AUTO
    prefill: Annotated[int | None, typer.Option("--prefill", help="Prefill workers; default: 1.")] = None
    decode: Annotated[int | None, typer.Option("--decode", help="Decode workers; default: 1.")] = None
    workers: Annotated[
        int | None, typer.Option("--workers", help="Workers that do both; default: one for each GPU.")
    ] = None

    def check(self) -> None:
        """Checks the options; InvalidArgument for workers that the mode does not have."""
        from tandem.protocol.errors import InvalidArgument
        from tandem.protocol.mode import Mode

        if self.mode == AUTO and self.workers is not None and (self.prefill is not None or self.decode is not None):
            raise InvalidArgument("--workers", "is for workers that do both; give it, or --prefill and --decode")
        for option, given, modes in (
            ("--prefill", self.prefill, (Mode.DISAGGREGATED,)),
            ("--decode", self.decode, (Mode.DISAGGREGATED,)),
            ("--workers", self.workers, (Mode.COLOCATED, Mode.ADAPTIVE)),
        ):
            if given is not None and self.mode in set(Mode) and self.mode not in modes:
                raise InvalidArgument(option, f"is for --mode {' or '.join(modes)}")

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        return replace(
            config,
            mode=self.mode,
            prefill=1 if self.prefill is None else self.prefill,
            decode=1 if self.decode is None else self.decode,
            workers=1 if self.workers is None else self.workers,
        )


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of the content of a step."""

    step_policy: Annotated[
        str,
        typer.Option(
            help="Prompt tokens in a mixed step: unchunked = as many as fit, chunked = what --step-budget leaves,"
            " decode-priority = the same, but only beside requests without a target. None exceeds the targets of the"
            " requests' classes."
        ),
    ] = PolicyName.DECODE_PRIORITY.value
    step_budget: Annotated[
        int | None, typer.Option(help="Maximum tokens of a mixed step, decode rows included; default: 512.")
    ] = None
    itl_target_ms: Annotated[
        float | None,
        typer.Option(
            help="Maximum inter-token latency of any request: batches and prefill chunks grow no further; default:"
            " only the targets of service classes."
        ),
    ] = None

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        target_s = None if self.itl_target_ms is None else self.itl_target_ms / 1e3
        return replace(config, step_policy=self.step_policy, step_budget=self.step_budget, itl_target_s=target_s)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of each worker's engine."""

    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto: cuda where PyTorch finds a usable GPU.")
    ] = AUTO
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto"
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            help="Of the KV cache: auto (as --dtype), or int8 or, on GPUs, fp8, which hold up to twice the tokens."
        ),
    ] = "auto"
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Quantize the layers' weights while they are loaded: int8, fp8 or int4; default: as they are stored."
        ),
    ] = None
    prefill_quantization: Annotated[
        str | None, typer.Option(help="The same for prefill workers alone; default: --quantization.")
    ] = None
    decode_quantization: Annotated[
        str | None, typer.Option(help="The same for decode workers alone; default: --quantization.")
    ] = None
    page_tokens: Annotated[int | None, typer.Option(help="Tokens per KV page; default: 16 on CPU, 128 on GPUs.")] = None
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="KV page pool of each worker; default: 1 on CPU; on GPUs what is left of --memory-fraction."),
    ] = None
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Fraction of its GPU's memory each worker may use; default: 0.9, shared equally by a GPU's workers."
        ),
    ] = None
    max_step_tokens: Annotated[int, typer.Option(help="Maximum tokens of one step: the chunk size of prefill.")] = 2048
    max_batch_requests: Annotated[
        int | None, typer.Option(help="Maximum requests of one decode step; default: 64 on CPU, 256 on GPUs.")
    ] = None
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep KV pages, while memory allows, for requests with a common prefix.",
        ),
    ] = True

    def check(self) -> None:
        """Checks the options; InvalidArgument for a KV cache size out of range."""
        from tandem.cluster.limits import check_kv_cache_gib

        if self.kv_cache_gib is not None:
            check_kv_cache_gib(self.kv_cache_gib)

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        from tandem.cluster.config import GIB

        return replace(
            config,
            device=self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            quantization=self.quantization,
            prefill_quantization=self.prefill_quantization,
            decode_quantization=self.decode_quantization,
            page_tokens=self.page_tokens,
            kv_cache_bytes=None if self.kv_cache_gib is None else int(self.kv_cache_gib * GIB),
            memory_fraction=self.memory_fraction,
            max_step_tokens=self.max_step_tokens,
            max_batch_requests=self.max_batch_requests,
            prefix_cache=self.prefix_cache,
        )


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of KV transfers between workers."""

    kv_checksum_rate: Annotated[
        float,
        typer.Option(help="Fraction of each transfer's KV pages whose checksums are verified on arrival, 0 to 1."),
    ] = 0.05
    kv_lease: Annotated[
        float, typer.Option(help="Seconds that a decode worker keeps its reservation for a request of a silent router.")
    ] = 5.0
    kv_transfer_deadline: Annotated[
        float, typer.Option(help="Seconds that a KV page write may take before its prompt is computed again.")
    ] = 30.0
    kv_quarantine_share: Annotated[
        float, typer.Option(help="Fraction of a worker's KV pages in quarantine above which it accepts no requests.")
    ] = 0.5

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        return replace(
            config,
            kv_checksum_rate=self.kv_checksum_rate,
            kv_lease_s=self.kv_lease,
            kv_transfer_deadline_s=self.kv_transfer_deadline,
            kv_quarantine_share=self.kv_quarantine_share,
        )


@dataclass(frozen=True, slots=True)
class HardwareOptions:
    """Options of each worker's hardware."""

    device_ceilings: Annotated[
        str,
        typer.Option(
            help="TFLOPS:GBPS that a worker's device can do at best; utilization and `tandem why` go by it."
            " Default: what each measures at its start."
        ),
    ] = ""
    threads: Annotated[int | None, typer.Option(help="CPU threads of each worker; default: all cores.")] = None

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument for ceilings that are not two numbers."""
        from tandem.cost_model.roofline import parse_ceilings

        ceilings = parse_ceilings("--device-ceilings", self.device_ceilings) if self.device_ceilings else None
        return replace(config, ceilings=ceilings, threads=self.threads)
