"""The command of `benchmarks.bottlenecks`."""

import argparse
import json
import os
import time
from collections.abc import Sequence

from benchmarks.bottlenecks.loads import MADE_NARROW, STAGES, Load, Stage, settings_for, worker_of
from benchmarks.bottlenecks.look import Finding, Listener, read, under
from benchmarks.command_line import exit_on_error, need_gpu
from benchmarks.load.served_model import ServedModel, add_model_options, choose_model
from benchmarks.load.stage import running_cluster
from benchmarks.results import run_facts, save_result
from tandem.cli.load.target import find_target, touch
from tandem.metrics import families as f
from tandem.metrics.scrape import Scrape
from tandem.protocol.errors import InvalidArgument

Limits = dict[str, float]
"""A device's ceilings by name."""


def run(arguments: Sequence[str] | None = None) -> bool:
    """Runs the command; returns True if every diagnosis was right."""
    chosen = parse_arguments(arguments)
    on_cpu = chosen.device == "cpu"
    if not on_cpu:
        need_gpu()
    stage = MADE_NARROW[chosen.narrow] if chosen.narrow else STAGES["cpu" if on_cpu else "cuda"]
    workers = stage.workers or chosen.workers
    os.environ.update(stage.environment)
    with exit_on_error():
        loads = chosen_loads(stage, chosen.only)
        model = choose_model(chosen.model, chosen.shape)
        reference = {} if on_cpu else measured_at_length()
        findings, limits = measure(chosen, workers, stage, loads, model)
    result = {"model": model.name, "dtype": stage.dtype, "bottlenecks_workers": workers, **figures(findings)}
    result |= {**limits, **compared(limits, reference), **run_facts(chosen.device)}
    if chosen.save:
        kind = f"-narrow-{chosen.narrow}" if chosen.narrow else ""
        print("saved", save_result(f"bottlenecks-{model.name}-{workers}-workers{kind}", result))
    print(json.dumps(result))
    return all(each.right for each in findings)


def measure(
    chosen: argparse.Namespace, workers: int, stage: Stage, loads: Sequence[Load], model: ServedModel
) -> tuple[list[Finding], Limits]:
    """Returns the finding under each load, and the ceilings that the workers measured."""
    findings: list[Finding] = []
    limits: Limits = {}
    began = time.monotonic()
    with running_cluster(model, settings_for(stage, chosen.device, workers)) as listeners:
        print(f"the cluster serves after {time.monotonic() - began:.0f} s", flush=True)
        target, listener = find_target(listeners.grpc), Listener(listeners.metrics, listeners.metrics_key)
        touch(target)
        for number, load in enumerate(loads):
            worker = worker_of(load.half, workers)
            stretch = under(load, stage, target, listener, chosen.seed + number)
            findings.append(read(load, worker, stretch))
            limits = ceilings_of(stretch.now, worker)
            print(line(findings[-1]), flush=True)
    return findings, limits


def ceilings_of(now: Scrape, worker: str) -> Limits:
    """Returns the ceilings of a worker's device, as it exports them."""
    return {
        "bytes_per_s": now.total(f.DEVICE_BANDWIDTH, worker=worker),
        "flops": now.total(f.DEVICE_FLOPS, worker=worker),
    }


def measured_at_length() -> Limits:
    """Measures the first GPU's ceilings like the engine's benchmark, and frees the memory."""
    import torch

    from benchmarks.gpu.ceilings import measure_ceilings

    found = measure_ceilings()
    torch.cuda.empty_cache()
    return {"bytes_per_s": found.copy, "flops": found.matrix}


def compared(limits: Limits, reference: Limits) -> dict[str, float]:
    """Returns the workers' ceilings as shares of the longer measurement's."""
    return {f"{name}_ratio": round(limits[name] / at_length, 4) for name, at_length in reference.items()}


def figures(findings: Sequence[Finding]) -> dict[str, object]:
    """Returns the result for JSON: the number of right diagnoses, one table cell for each load, and all findings."""
    right = sum(each.right for each in findings)
    lines = {f"bottleneck_{each.load.name.replace(' ', '_')}": in_short(each) for each in findings}
    return {
        "bottlenecks_named_right": f"{right} of {len(findings)}",
        **lines,
        "loads": [each.as_result() for each in findings],
    }


def in_short(found: Finding) -> str:
    """Returns the bottleneck with MBU and MFU, for a table."""
    wrong = "" if found.right else f" (wrong: {found.load.bottleneck})"
    return f"{found.diagnosis.bottleneck}{wrong}, MBU {found.figures.bandwidth:.2f}, MFU {found.figures.compute:.2f}"


def line(found: Finding) -> str:
    """Returns a line of output for one finding."""
    verdict = "right" if found.right else f"WRONG, it should be {found.load.bottleneck}"
    it = found.figures
    return (
        f"{found.load.name:>24}: {found.worker} {found.diagnosis.bottleneck} ({verdict});"
        f" MBU {it.bandwidth:.2f}, MFU {it.compute:.2f}; {found.diagnosis.because}"
    )


def chosen_loads(stage: Stage, only: str) -> list[Load]:
    """Returns all loads, or those named in `only`. InvalidArgument for an unknown name."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {load.name: load for load in stage.loads}
    for name in names:
        if name not in known:
            raise InvalidArgument("--only", f"{name!r} is none of {', '.join(known)}")
    return [known[name] for name in names] or list(stage.loads)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bottlenecks", description="Checks the diagnosis of `tandem why`."
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    add_model_options(parser)
    parser.add_argument(
        "--workers", type=int, choices=(1, 2), default=1, help="1: one of both roles; 2: one of each role"
    )
    parser.add_argument(
        "--narrow",
        choices=tuple(MADE_NARROW),
        help="slow this down on a GPU: the transport (with --shape llama-3-8b) or the host (with --shape qwen3-0.6b)",
    )
    parser.add_argument("--only", default="", help="these loads by name, comma-separated")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts' tokens")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    chosen = parser.parse_args(arguments)
    if chosen.narrow and chosen.device == "cpu":
        parser.error("--narrow is for GPUs: on a CPU neither transport nor host is a bottleneck; give --device cuda")
    return chosen
