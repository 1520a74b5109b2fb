"""Where a phase's time goes: a Chrome trace with PREFILL and DECODE_STEP ranges, and the roofline of both."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, record_function

from benchmarks.ceilings import Ceilings
from benchmarks.gpu_engine import GpuEngine

_BATCH, _CONTEXT, _PROMPT = 32, 1024, 2048


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
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        with record_function("PREFILL"):
            engine.prefill_seconds(1, _PROMPT, rounds=1)
        for _ in range(4):
            with record_function("DECODE_STEP"):
                engine.decode_seconds(_BATCH, _CONTEXT, steps=1, warm=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(file))
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))
    print("trace:", file)
    return found


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
