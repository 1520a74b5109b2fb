"""`tandem up`: start a cluster, answer a first prompt, serve until Ctrl-C."""

from pathlib import Path
from typing import Annotated

import typer

from cli.options import Temperature, checked_prompt
from cli.plain_errors import plain_errors


@plain_errors
def up(
    *,
    model: Annotated[
        str | None, typer.Option("--model", help="Hugging Face folder or GGUF file; default: SmolLM2-135M-Instruct.")
    ] = None,
    random_weights: Annotated[
        str | None,
        typer.Option(help="For performance runs: the shape (llama-3-8b, qwen3-0.6b, …) of a model of random weights."),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="disaggregated: --prefill and --decode workers; colocated: --workers that do both; adaptive:"
            " --workers, and for each request one of them or two."
        ),
    ] = "disaggregated",
    prefill: Annotated[int | None, typer.Option("--prefill", help="Prefill workers; default: 1.")] = None,
    decode: Annotated[int | None, typer.Option("--decode", help="Decode workers; default: 1.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", help="Colocated workers; default: 1.")] = None,
    step_policy: Annotated[
        str,
        typer.Option(
            help="Prompts in a step beside requests that decode: unchunked = as many as fit, chunked = up to"
            " --step-budget, decode-priority = what --itl-target-ms leaves."
        ),
    ] = "unchunked",
    step_budget: Annotated[
        int | None, typer.Option(help="Most tokens of a chunked step, decoding ones included; default: 512.")
    ] = None,
    itl_target_ms: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds between an answer's tokens beyond which batches do not grow; default: no limit."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    page_tokens: Annotated[int | None, typer.Option(help="Tokens a KV page; default: 16 on CPU, 128 on GPUs.")] = None,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(help="KV page pool of each worker; default: 1 on CPU; on GPUs what is left of --memory-fraction."),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            help="Part of its GPU's memory each worker may use; default: 0.9, shared equally by a GPU's workers."
        ),
    ] = None,
    max_step_tokens: Annotated[int, typer.Option(help="Most tokens of one step: the chunk size of prefill.")] = 2048,
    max_batch_requests: Annotated[
        int | None, typer.Option(help="Most requests of one decode step; default: 64 on CPU, 256 on GPUs.")
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Keep KV pages, while there is room, for requests that begin alike.",
        ),
    ] = True,
    kv_checksum_rate: Annotated[
        float, typer.Option(help="Part of each transfer's KV pages that is checked byte for byte on arrival, 0 to 1.")
    ] = 0.05,
    kv_direction: Annotated[
        str, typer.Option(help="Who moves KV pages: write = the prefill worker, read = the decode worker.")
    ] = "write",
    kv_lease: Annotated[
        float, typer.Option(help="Seconds that a decode worker keeps a place for a request of a silent router.")
    ] = 5.0,
    kv_transfer_deadline: Annotated[
        float, typer.Option(help="Seconds that a write of KV pages may take before its prompt is computed again.")
    ] = 30.0,
    kv_quarantine_share: Annotated[
        float, typer.Option(help="Part of a worker's KV pages that transfers may keep before it takes nothing new.")
    ] = 0.5,
    device_ceilings: Annotated[
        str,
        typer.Option(
            help="TFLOPS:GBPS that a worker's device can do at best; utilization and `tandem why` go by it."
            " Default: what each measures at its start."
        ),
    ] = "",
    threads: Annotated[int | None, typer.Option(help="CPU threads of each worker; default: all cores.")] = None,
    address: Annotated[
        str,
        typer.Option(
            help="Join a Ray cluster, HOST:PORT or auto, whose nodes offer `prefill` and `decode`; "
            "default: a Ray of its own on this host."
        ),
    ] = "",
    places_timeout: Annotated[
        float, typer.Option(help="Seconds to wait for that Ray cluster and for nodes that offer enough.")
    ] = 0.0,
    start_timeout: Annotated[float, typer.Option(help="Seconds that all workers may take to load and serve.")] = 180.0,
    planner: Annotated[
        str,
        typer.Option(
            help="on: roles follow the load, and with --planner-workers the number of workers; dry-run: it only says"
            " what it would do; off."
        ),
    ] = "off",
    planner_window: Annotated[float, typer.Option(help="Seconds between two looks of the planner.")] = 15.0,
    planner_workers: Annotated[
        str, typer.Option(help="MIN:MAX workers the planner may keep; default: as many as there are.")
    ] = "",
    planner_prefill: Annotated[str, typer.Option(help="MIN:MAX of them that prefill when disaggregated.")] = "",
    planner_decode: Annotated[str, typer.Option(help="MIN:MAX of them that decode when disaggregated.")] = "",
    host: Annotated[str, typer.Option(help="Address the router listens on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(help="Port for gRPC clients; 0 = any free one.")] = 50051,
    http_port: Annotated[int, typer.Option(help="Port for OpenAI clients; 0 = any free one.")] = 8000,
    metrics_port: Annotated[
        int, typer.Option(help="Port of the whole cluster's metrics and of /sd, which lists all processes; 0 = any.")
    ] = 0,
    controller_port: Annotated[
        int, typer.Option(help="Port at which the controller hears workers and operators; 0 = any free one.")
    ] = 0,
    token: Annotated[
        str,
        typer.Option(envvar="TANDEM_CLUSTER_TOKEN", help="The secret of cluster and operators; default: a fresh one."),
    ] = "",
    metrics_key: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_METRICS_KEY",
            help="Key that opens all metrics; default: none on loopback, but with API keys they are closed.",
        ),
    ] = "",
    otlp_endpoint: Annotated[
        str,
        typer.Option(
            envvar="TANDEM_OTLP_ENDPOINT",
            help="Where OpenTelemetry spans of requests go by OTLP/gRPC, http://HOST:PORT; needs tandem[otlp].",
        ),
    ] = "",
    log_format: Annotated[str, typer.Option(help="pretty, or json: an object a line.")] = "pretty",
    slo_class: Annotated[
        list[str] | None,
        typer.Option(
            "--slo-class",
            help="NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]: targets that requests may ask for by "
            "name, beside or instead of strict, balanced, quick and best_effort, and what happens when they cannot be "
            "held; repeatable.",
        ),
    ] = None,
    default_slo_class: Annotated[str, typer.Option(help="The class of requests that name none.")] = "best_effort",
    api_key: Annotated[
        list[str] | None, typer.Option("--api-key", envvar="TANDEM_API_KEY", help="Key clients must show; repeatable.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Answer this first and show where the time went.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of that answer.")] = 160,
    temperature: Temperature = 0.0,
    once: Annotated[bool, typer.Option("--once", help="End after that answer.")] = False,
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    from cli.client import Sampling
    from cli.serving import FirstPrompt, serve
    from cluster.config import GIB, ClusterConfig, Mode, check_kv_cache_gib
    from cluster.planner_config import planner_config
    from costs.roofline import parse_ceilings
    from router.slo import parse_class, with_defaults
    from wire.errors import InvalidArgument

    if model is not None and random_weights is not None:
        raise InvalidArgument("--random-weights", "takes the place of --model; give one of them")
    if model == "":
        raise InvalidArgument("--model", "is empty; give a Hugging Face folder or a GGUF file")
    if kv_cache_gib is not None:
        check_kv_cache_gib(kv_cache_gib)
    for option, given, modes in (
        ("--prefill", prefill, (Mode.DISAGGREGATED,)),
        ("--decode", decode, (Mode.DISAGGREGATED,)),
        ("--workers", workers, (Mode.COLOCATED, Mode.ADAPTIVE)),
    ):
        if given is not None and mode in list(Mode) and mode not in modes:
            raise InvalidArgument(option, f"is for --mode {' or '.join(modes)}")
    sampling = Sampling(max_tokens, temperature)
    config = ClusterConfig(
        model=Path(model or ""),
        mode=mode,
        prefill=1 if prefill is None else prefill,
        decode=1 if decode is None else decode,
        workers=1 if workers is None else workers,
        step_policy=step_policy,
        step_budget=step_budget,
        itl_target_s=None if itl_target_ms is None else itl_target_ms / 1e3,
        device=device,
        dtype=dtype,
        page_tokens=page_tokens,
        kv_cache_bytes=None if kv_cache_gib is None else int(kv_cache_gib * GIB),
        memory_fraction=memory_fraction,
        max_step_tokens=max_step_tokens,
        max_batch_requests=max_batch_requests,
        prefix_cache=prefix_cache,
        kv_checksum_rate=kv_checksum_rate,
        kv_direction=kv_direction,
        kv_lease_s=kv_lease,
        kv_transfer_deadline_s=kv_transfer_deadline,
        kv_quarantine_share=kv_quarantine_share,
        ceilings=parse_ceilings("--device-ceilings", device_ceilings) if device_ceilings else None,
        threads=threads,
        ray_address=address,
        places_timeout_s=places_timeout,
        start_timeout_s=start_timeout,
        host=host,
        grpc_port=grpc_port,
        http_port=http_port,
        metrics_port=metrics_port,
        metrics_key=metrics_key,
        controller_port=controller_port,
        token=token,
        otlp_endpoint=otlp_endpoint,
        log_format=log_format,
        slo_classes=with_defaults(parse_class(each) for each in slo_class or ()),
        default_slo_class=default_slo_class,
        api_keys=tuple(api_key or ()),
        random_weights=random_weights is not None,
        planner=planner_config(
            planner, planner_window, workers=planner_workers, prefill=planner_prefill, decode=planner_decode
        ),
    )
    if once and prompt is None:
        raise InvalidArgument("--once", "needs a --prompt to answer")
    first = None if prompt is None else FirstPrompt(checked_prompt("--prompt", prompt), sampling)
    if random_weights is not None:
        from cli.random_model import random_model

        serve(config, random_model(random_weights), first, once=once)
        return
    serve(config, None if model is None else Path(model), first, once=once)
