"""Where a phase's time goes: a Chrome trace with PREFILL and DECODE_STEP ranges, and the roofline of both."""

from collections import defaultdict
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

from benchmarks.ceilings import Ceilings
from benchmarks.gpu_engine import GpuEngine

_BATCH, _CONTEXT, _PROMPT = 32, 1024, 2048
_BATCHES = (1, 32)
_REPLAYS = 5
_SHOWN = 60


def profile(engine: GpuEngine, ceilings: Ceilings, file: Path) -> dict[str, object]:
    """Write the trace to `file`, print each phase's intensity and rates → them, for JSON."""
    found: dict[str, object] = {}
    found |= _roofline(
        "prefill",
        engine.prefill_flops(1, _PROMPT),
        engine.weight_bytes() + engine.kv_bytes(_PROMPT),
        engine.prefill_seconds(1, _PROMPT),
        ceilings,
    )
    found |= _roofline(
        "decode_step",
        engine.decode_flops(_BATCH, _CONTEXT),
        engine.decode_bytes(_BATCH, _CONTEXT),
        engine.decode_seconds(_BATCH, _CONTEXT),
        ceilings,
    )
    for batch in _BATCHES:
        found |= _kernel_table(engine, batch)
    step = engine.graph(_BATCH, _CONTEXT).graph
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("PREFILL"):
            engine.prefill_seconds(1, _PROMPT, rounds=1)
        for _ in range(_REPLAYS):
            with record_function("DECODE_STEP"):
                step.replay()
                torch.cuda.synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(file))
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
    print("trace:", file)
    return found


def _kernel_table(engine: GpuEngine, batch: int) -> dict[str, object]:
    """What each kernel adds to a decode step: its time after the end of all before it, as kernels overlap."""
    replay = engine.graph(batch, _CONTEXT).graph.replay
    replay()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(_REPLAYS):
            replay()
        torch.cuda.synchronize()
    added: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    end = 0.0
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type == DeviceType.CUDA]
    for start, stop, name in sorted(spans):
        if end:
            added["(idle)"] += max(0.0, start - end) / _REPLAYS
        added[name] += max(0.0, stop - max(start, end)) / _REPLAYS
        calls[name] += 1
        end = max(end, stop)
    print(f"decode b{batch}: {sum(added.values()):.0f} us a step")
    for name, micros in sorted(added.items(), key=lambda item: -item[1]):
        print(f"  {micros:9.1f} us  {calls[name] // _REPLAYS:5} calls  {name[:_SHOWN]}")
    return {f"decode_b{batch}_kernel_us": {name[:_SHOWN]: round(micros, 1) for name, micros in added.items()}}


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
