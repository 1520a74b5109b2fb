"""The quality comparison on a GPU: logits of every token, and an engine that does not differ from itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.teacher_forced import compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SAMPLES = [[(31 * number + 7 * position) % 40_000 for position in range(300)] for number in range(5)]


def _runner(folder: Path, dtype: str) -> ModelRunner:
    return ModelRunner.load(
        EngineConfig.of(folder, device="cuda", dtype=dtype, kv_cache_bytes=1 << 28, max_batch_requests=16)
    )


def test_two_engines_share_a_gpu_and_agree(model_folder: Path) -> None:
    same = compare(_runner(model_folder, "bfloat16"), _runner(model_folder, "bfloat16"), SAMPLES)
    assert abs(same.prefill.kl) < 1e-6
    assert abs(same.decode.kl) < 1e-6
    assert same.decode.positions == 5 * 149


def test_half_precision_differs_a_little(model_folder: Path) -> None:
    comparison = compare(_runner(model_folder, "float16"), _runner(model_folder, "bfloat16"), SAMPLES)
    print(comparison)
    assert 0 < comparison.prefill.kl < 0.01
    assert 0 < comparison.decode.kl < 0.01
