"""Adapters on the GPU: through CUDA graphs, chunks and mixed steps, against models into which they are merged."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.settings.parsing import NamedPath
from tests.adapters import ATTENTION, DENSE, TinyAdapter
from tests.factories import draw, write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PROMPT, CHUNK, DECODED, PAGE_TOKENS = 150, 64, 3, 128
ADAPTERS = [
    TinyAdapter(seed=0, changes=WIDE),
    TinyAdapter(seed=1, rank=16, changes=WIDE),
    TinyAdapter(seed=2, rank=20, modules=DENSE, changes=WIDE),
    TinyAdapter(seed=3, modules=ATTENTION, changes=WIDE),
]
ORDER = [1, 0, 2, 4, 3, 1, 0, 4]


def steps() -> list[StepBatch]:
    """Returns the chunks of a prompt for each adapter, mixed steps, and decode steps."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 160) for _ in range(PROMPT)] for _ in ORDER]
    share = -(-(PROMPT + DECODED + 1) // PAGE_TOKENS)
    pages = [list(range(number * share, (number + 1) * share)) for number in range(len(ORDER))]

    def row(number: int, start: int, end: int) -> StepRow:
        ids = prompts[number][start:end] if start < PROMPT else [(7 * start + number) % 150]
        return StepRow(ids, start, pages[number], draw(), adapter=ORDER[number])

    batches = []
    for start in range(0, PROMPT, CHUNK):
        end = min(start + CHUNK, PROMPT)
        batches.append(StepBatch([row(number, start, end) for number in range(len(ORDER))]))
    half = len(ORDER) // 2
    decoding = [row(number, PROMPT, PROMPT + 1) for number in range(half)]
    batches.append(StepBatch([*decoding, *(row(number, CHUNK, PROMPT) for number in range(half, len(ORDER)))]))
    for at in range(PROMPT + 1, PROMPT + DECODED):
        batches.append(StepBatch([row(number, at, at + 1) for number in range(half)]))
    return batches


def config_of(folder: Path, adapters: list[Path], **changes: Any) -> EngineConfig:
    sources = tuple(NamedPath(path.name, path) for path in adapters)
    config = EngineConfig.of(
        folder,
        device="cuda",
        dtype="float32",
        kv_cache_bytes=1 << 26,
        page_tokens=PAGE_TOKENS,
        loras=sources,
        max_lora_rank=max(adapter.rank for adapter in ADAPTERS),
        max_batch_requests=64,
    )
    return replace(config, **changes)


@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [("float32", None, 3e-4), ("bfloat16", None, 0.25), ("float16", None, 0.1), ("bfloat16", "int8", 0.25)],
)
def test_logits_of_the_plain_kernels(dtype: str, tolerance: float, quantization: str | None, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", **WIDE)
    adapters = [adapter.write(tmp_path / f"adapter-{number}") for number, adapter in enumerate(ADAPTERS)]
    ours = ModelRunner.load(config_of(folder, adapters, dtype=dtype, quantization=quantization))
    exact = ModelRunner.load(
        config_of(folder, adapters, device="cpu", threads=4, quantization=quantization), kernels=ReferenceKernels()
    )
    for step in steps():
        wanted = exact.logits(step)
        torch.testing.assert_close(ours.logits(step).float().cpu(), wanted, atol=tolerance, rtol=tolerance)


def test_decode_graphs_take_other_adapters_with_each_replay(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", **WIDE)
    adapters = [adapter.write(tmp_path / f"adapter-{number}") for number, adapter in enumerate(ADAPTERS)]
    together = ModelRunner.load(config_of(folder, adapters))
    prompt = [5, 6, 7, 8, 9, 10, 11]
    for number in (1, 0, 4, 2, 3):
        merged = ADAPTERS[number - 1].merged(tmp_path / f"merged-{number}") if number else folder
        alone = ModelRunner.load(config_of(merged, []))
        for start in range(len(prompt)):
            row = StepRow(prompt[start : start + 1], start, [0], draw(), adapter=number)
            actual = together.logits(StepBatch([row])).cpu()
            torch.testing.assert_close(actual, alone.logits(StepBatch([row])).cpu(), atol=3e-4, rtol=3e-4)
    assert together.graph_use.hits >= 5 * len(prompt)
