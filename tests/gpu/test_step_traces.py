"""The benchmark's trace of decode steps, launched as a worker does: the kernels and copies that idle shares need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.engine.device_spans import added_time, idle_share, idle_share_next_to_copies
from benchmarks.engine.gpu_engine import GpuEngine
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # A warning of the profiler itself.
    pytest.mark.filterwarnings("default::UserWarning", "default::FutureWarning"),
]

STEPS, KERNELS_OF_A_LAYER = 8, 6


def test_every_kernel_and_both_copies_of_every_step_are_seen(model_folder: Path) -> None:
    config = EngineConfig.of(
        model_folder, device="cuda", dtype="bfloat16", kv_cache_bytes=1 << 28, max_batch_requests=4
    )
    engine = GpuEngine(ModelRunner.load(config))
    spans = engine.decode_spans(batch=2, context=512, steps=STEPS, warm=4)
    copies = [span for span in spans if span.copies]
    print(f"{len(spans)} spans, {len(copies)} copies, {idle_share(spans):.2%} idle,", end=" ")
    print(f"{idle_share_next_to_copies(spans):.2%} between steps; {sorted({span.name for span in copies})}")
    assert len(spans) - len(copies) >= STEPS * KERNELS_OF_A_LAYER * len(engine.shape.layers)
    assert len(copies) >= 2 * STEPS - 1
    assert 0 <= idle_share_next_to_copies(spans) <= idle_share(spans) < 1
    whole = max(span.end for span in spans) - spans[0].start
    assert sum(added_time(spans).values()) == pytest.approx(whole * (1 - idle_share(spans)))
