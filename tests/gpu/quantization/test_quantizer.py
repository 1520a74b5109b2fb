"""Quantization computed by a GPU: the folders that the CPU writes, but for what the order of sums changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.quality.loading import load_for_comparison
from tandem.engine.quality.teacher_forced import compare
from tandem.engine.quantizer.quantize import QuantizationRecipe, quantize
from tandem.engine.quantizer.scheme import SCHEMES
from tests.factories import write_tiny_model
from tests.unit.engine.quantizer.plain_reader import read_plainly

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SAMPLES = [torch.randint(3, 160, (64,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(16)]


@pytest.mark.parametrize(
    ("method", "scheme"),
    [("rtn", "w4a16-asym"), ("rtn", "fp8"), ("gptq", "w4a16"), ("smoothquant", "w8a8")],
)
def test_a_gpu_writes_what_the_cpu_writes(method: str, scheme: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    for device in ("cpu", "cuda"):
        quantize(
            folder, tmp_path / device, QuantizationRecipe(SCHEMES[scheme], method), SAMPLES, device=torch.device(device)
        )
    cpu, gpu = read_plainly(tmp_path / "cpu"), read_plainly(tmp_path / "cuda")
    assert cpu.keys() == gpu.keys()
    for name, weight in cpu.items():
        same = torch.isclose(weight, gpu[name], rtol=1e-3, atol=1e-5).float().mean()
        assert same == 1.0 if method == "rtn" else same > 0.9, name


def test_a_gpu_finds_scales_as_good_as_the_cpu_does(tmp_path: Path) -> None:
    """Exponents of nearly equal error are chosen by the order of sums, so that the weights may differ."""
    folder = write_tiny_model(tmp_path / "tiny")
    divergences = []
    for device in ("cpu", "cuda"):
        quantize(
            folder, tmp_path / device, QuantizationRecipe(SCHEMES["w4a16"], "awq"), SAMPLES, device=torch.device(device)
        )
        ours, theirs = (
            load_for_comparison(EngineConfig.of(path, dtype="float32"), 4 * 64, kernels=ReferenceKernels())
            for path in (folder, tmp_path / device)
        )
        divergences.append(compare(ours, theirs, SAMPLES[:4]).prefill.kl)
    assert divergences[1] == pytest.approx(divergences[0], rel=0.2)
