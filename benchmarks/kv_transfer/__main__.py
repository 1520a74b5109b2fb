"""Measures the KV hand-over from prefill to decode workers: `python -m benchmarks.kv_transfer --device cuda`.

The first part has two page pools without engines, in two processes: the bandwidth of transfers as a share of a plain
copy's, measured in the same run. The second part has a real cluster with one prefill and one decode worker: the time
from a prompt's last chunk to its first decode step, the share of it that delays the answer, and the slowdown of steps
during transfers. With two GPUs each worker has its own; with one GPU they share it; `--device cpu` transfers host
memory. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
from dataclasses import replace

import torch

from benchmarks.cluster import add_model_options, choose_model
from benchmarks.command_line import need_gpu
from benchmarks.kv_transfer.handoffs import ANSWER_RESERVE, SETTINGS, Figures, Settings, through_the_cluster
from benchmarks.kv_transfer.pools import PoolPlan, copy_ceiling, measure_pools
from benchmarks.results import run_facts, save_result, scheme_suffix
from kv_transfer.nixl_backend.ucx_shared_memory import ucx_settings
from tandem.cluster.launcher import Cluster
from tandem.engine.cache.paged_cache import choose_pages
from tandem.engine.config.quantization import Codes
from tandem.engine.device import quantized_kv_dtype
from tandem.engine.models.load_spec import load_spec
from tandem.settings.cluster import ClusterSettings
from tandem.settings.engine import KV_DTYPES

_GPU_SHAPE = "llama-3-8b"
"""The default shape on GPUs."""


def pools(plan: PoolPlan, settings: Settings) -> Figures:
    """Return the bandwidth of transfers of one page, of a chunk and of longer sizes, as shares of a plain copy's."""
    sizes = sorted({1, *(tokens // plan.page_tokens for tokens in (settings.chunk, *settings.transfers))})
    ceiling = copy_ceiling(plan, sizes)
    bandwidths, wire, ports = asyncio.run(measure_pools(plan, sizes))
    opened = ", ".join(ports) or "none"
    print(f"UCX may use {allowed_transports(plan)}, uses {wire}; open TCP ports: {opened}", flush=True)
    figures: Figures = {"copy_gb_per_s": round(ceiling / 1e9, 2), "transport": wire}
    figures |= {"ucx_transports": allowed_transports(plan), "tcp_ports": opened}
    for bandwidth in bandwidths:
        name = "one_page" if bandwidth.pages == 1 else str(bandwidth.pages * plan.page_tokens)
        figures |= {
            f"transfer_bw_ratio_{name}": round(bandwidth.steady / ceiling, 4),
            f"transfer_alone_bw_ratio_{name}": round(bandwidth.alone / ceiling, 4),
        }
        print(
            f"{name:>8} tokens: {bandwidth.steady / 1e9:7.1f} GB/s in a stream, {bandwidth.alone / 1e9:7.1f} alone,"
            f" of {ceiling / 1e9:.1f} over {wire}",
            flush=True,
        )
    return figures


def allowed_transports(plan: PoolPlan) -> str:
    """Return the `UCX_TLS` that UCX will use, from the environment or from Tandem's settings."""
    settings = {**ucx_settings(trusted_network=plan.trusted_network), **os.environ}
    return settings.get("UCX_TLS", "all")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_transfer", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    add_model_options(parser)
    parser.add_argument("--kv-cache-dtype", default="auto", choices=KV_DTYPES, help="(auto)")
    parser.add_argument("--quantization", choices=list(Codes), help="weights rounded at load, as with `tandem up`")
    parser.add_argument("--prompt", type=int, default=None, help="tokens of prompt and answer (8,192; 1,552 on CPUs)")
    parser.add_argument("--trusted-network", action="store_true", help="let UCX take TCP and RDMA as well")
    parser.add_argument("--only", choices=("pools", "cluster"), default=None, help="one half of the measurement")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args()


def measure(only: str | None, settings: Settings, plan: PoolPlan, config: ClusterSettings) -> Figures:
    """Measure the pools and then the cluster, or only the part named by `only`."""
    figures: Figures = {}
    if only != "cluster":
        figures |= pools(plan, settings)
    if only != "pools":
        cluster = Cluster.start(config)
        try:
            figures |= asyncio.run(through_the_cluster(cluster.endpoints.grpc, settings))
        finally:
            cluster.stop()
    return figures


def main() -> None:
    """Run the measurement, print the result, and save it if `--save` is given."""
    arguments = parse_arguments()
    if arguments.device == "cuda":
        need_gpu()
    settings = SETTINGS[arguments.device]
    shape = arguments.shape
    if arguments.device == "cuda" and arguments.model is None and shape is None:
        shape = _GPU_SHAPE
    model = choose_model(arguments.model, shape)
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    ends = ("cuda:0", f"cuda:{min(1, gpus - 1)}") if gpus else ("cpu", "cpu")
    spec, dtype = load_spec(model.folder), getattr(torch, settings.dtype)
    kv_dtype = quantized_kv_dtype(arguments.kv_cache_dtype, spec) or dtype
    # The pages of a model with state layers are larger, because they must hold the state of a layer.
    spec, page_tokens = choose_pages(spec, None, settings.page_tokens, kv_dtype, dtype)
    settings = replace(settings, page_tokens=page_tokens)
    if arguments.prompt is not None:
        settings = replace(settings, prompt=arguments.prompt - ANSWER_RESERVE)
    plan = PoolPlan(spec, page_tokens, kv_dtype, dtype, *ends)
    plan = replace(plan, trusted_network=arguments.trusted_network)
    config = ClusterSettings.of(
        model.folder,
        random_weights=model.random_weights,
        served_model_names=(model.name,),
        device=arguments.device,
        dtype=settings.dtype,
        kv_cache_dtype=arguments.kv_cache_dtype,
        quantization=arguments.quantization,
        page_tokens=settings.page_tokens,
        max_step_tokens=settings.chunk,
        grpc_port=0,
        http_port=0,
        prefix_cache=False,
        trusted_network=arguments.trusted_network,
    )
    result: Figures = {"gpus": gpus}
    result |= measure(arguments.only, settings, plan, config)
    name = model.name + scheme_suffix(arguments.quantization, arguments.kv_cache_dtype)
    result |= {
        "model": name,
        "dtype": settings.dtype,
        "prompt_tokens": settings.prompt,
        "chunk_tokens": settings.chunk,
    }
    result |= run_facts(arguments.device)
    if arguments.save:
        kind = f"kv-transfer-{gpus}-gpus" if gpus else "kv-transfer"
        print("saved", save_result(f"{kind}-{name}", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
