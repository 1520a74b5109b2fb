"""Profiles both phases: a Chrome trace with PREFILL and DECODE_STEP ranges, and the roofline of both."""

import cProfile
import pstats
import time
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from benchmarks.engine.device_spans import added_time, idle_share
from benchmarks.engine.gpu_engine import GpuEngine
from benchmarks.gpu_timing import Ceilings

_BATCH, _CONTEXT, _PROMPT = 32, 1024, 2048
_BATCHES = (1, 32, 128)
_STEPS = 5
_SHOWN = 60
_SHORT_PROMPT = 512
_LAUNCHES = 20
_FUNCTIONS = 30


def profile(engine: GpuEngine, ceilings: Ceilings, file: Path) -> dict[str, object]:
    """Write the trace to `file`; print and return the arithmetic intensity and the rates of each phase."""
    figures: dict[str, object] = {}
    figures |= _roofline(
        "prefill",
        engine.prefill_flops(1, _PROMPT),
        engine.weight_bytes() + engine.kv_bytes(_PROMPT),
        engine.prefill_seconds(1, _PROMPT),
        ceilings,
    )
    figures |= _roofline(
        "decode_step",
        engine.decode_flops(_BATCH, _CONTEXT),
        engine.decode_bytes([_CONTEXT] * _BATCH),
        engine.decode_seconds(_BATCH, _CONTEXT),
        ceilings,
    )
    for batch in _BATCHES:
        figures |= _kernel_table(engine, batch)
    figures |= _host_table(engine)
    prompts = engine.prompts(1, _PROMPT)
    steps = engine.decode_steps(_BATCH, _CONTEXT, 1 + _STEPS)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("PREFILL"):
            engine.runner.run(prompts)
        next(steps)
        for _ in range(_STEPS):
            with record_function("DECODE_STEP"):  # launches a step and waits for the previous one, as a worker does
                next(steps)
        for _ in steps:
            pass
    file.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(file))
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
    print("trace:", file)
    return figures


def _kernel_table(engine: GpuEngine, batch: int) -> dict[str, object]:
    """Print the time that each kernel adds to a decode step, and the idle share."""
    spans = engine.decode_spans(batch, _CONTEXT, _STEPS)
    idle, calls = idle_share(spans), Counter(span.name for span in spans)
    added = {name: micros / _STEPS for name, micros in added_time(spans).items()}
    print(f"decode b{batch}: {sum(added.values()):.0f} us a step, and {idle:.1%} of the time idle")
    for name, micros in sorted(added.items(), key=lambda item: -item[1]):
        print(f"  {micros:9.1f} us  {calls[name] // _STEPS:5} calls  {name[:_SHOWN]}")
    return {
        f"decode_b{batch}_kernel_us": {name[:_SHOWN]: round(micros, 1) for name, micros in added.items()},
        f"decode_idle_share_b{batch}": round(idle, 4),
    }


def _host_table(engine: GpuEngine) -> dict[str, object]:
    """Print the host time to launch a short prompt, during which the device may be idle."""
    prompt = engine.prompts(1, _SHORT_PROMPT)
    seconds = []
    for _ in range(_LAUNCHES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = engine.runner.launch(prompt)
        seconds.append(time.perf_counter() - started)
        result()
    launch_ms = sorted(seconds)[_LAUNCHES // 2] * 1e3
    profiler = cProfile.Profile()
    with profiler:
        for _ in range(_LAUNCHES):
            engine.runner.run(prompt)
    print(f"host: a prompt of {_SHORT_PROMPT} tokens takes {launch_ms:.2f} ms to launch; {_LAUNCHES} under cProfile:")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(_FUNCTIONS)
    return {f"prefill_launch_ms_1x{_SHORT_PROMPT}": round(launch_ms, 3)}


def _roofline(phase: str, flops: float, read: float, seconds: float, ceilings: Ceilings) -> dict[str, object]:
    compute, memory = flops / seconds / ceilings.matrix, read / seconds / ceilings.copy
    binds = "arithmetic" if flops / ceilings.matrix > read / ceilings.copy else "memory"
    print(
        f"{phase}: {seconds * 1e3:.2f} ms, {flops / read:.1f} FLOP/byte, {flops / seconds / 1e12:.1f} TFLOP/s"
        f" ({compute:.1%}), {read / seconds / 1e9:.0f} GB/s ({memory:.1%}); {binds} binds"
    )
    return {
        f"{phase}_flop_per_byte": round(flops / read, 2),
        f"{phase}_compute_share": round(compute, 4),
        f"{phase}_memory_share": round(memory, 4),
        f"{phase}_bound_by": binds,
    }
