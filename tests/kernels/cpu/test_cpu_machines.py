"""The same numbers from code that was kept on disk, and on machines with fewer instructions."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import soak

ROOT = Path(__file__).parents[3]
X86 = platform.machine() == "x86_64"
SCRIPT = """
import sys, torch
sys.path.insert(0, "tests")
from kernels.packed_cases import make_packed
from kernels.steps import assert_as_good, heads, make_step
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.reference import ReferenceKernels
torch.set_num_threads(1)
reference, step = ReferenceKernels(), make_step([(1, 18), (1, 300), (60, 70)], heads(4, 2, 80), 16)
torch.manual_seed(0)
x, norm, weight = torch.randn(60, 130).bfloat16(), torch.randn(130).bfloat16(), torch.randn(66, 130).bfloat16()
for dtype in map(torch.__dict__.get, sys.argv[1:]):
    kernels, numbers = CpuKernels(dtype, threads=2), []
    for made, exact in ((kernels, dtype), (reference, dtype), (reference, torch.float64)):
        few, many = (
            made.norm_gate_up(x[:tokens].to(exact), Norm(norm.to(exact), 1e-5), Linear(weight.to(exact))).flatten()
            for tokens in (5, 60)
        )
        mixed = made.attention(step.q.to(exact), step.layer, step.cache_as(exact), step.layout).flatten()
        numbers.append((few, many, mixed))
    for ours, baseline, exact in zip(*numbers):
        assert_as_good(ours, baseline, exact)
        print(ours.double().sum().item().hex())
    for kind in ("int8", "int4_offsets"):
        packed, x8 = make_packed(kind, (32, 128), 32), x[:5, :128].to(dtype).contiguous()
        ours = kernels.linear(x8, kernels.prepare(Linear(packed))).double()
        exact = x8.double() @ packed.dequantized(torch.float64).T
        assert (ours - exact).norm() <= 0.02 * exact.norm()
        print(ours.sum().item().hex())
"""


AVX2, OLDEST = (
    {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    for cpu, features in (("haswell", "+avx2,+fma"), ("x86-64", "+sse2"))
)
"""Machines without AVX-512, for numba."""


def run(*dtypes: str, sources: Path = ROOT, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *dtypes],
        cwd=sources,
        env=os.environ | {"PYTHONPATH": str(sources)} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@soak
def test_kept_code_computes_what_fresh_code_does(tmp_path: Path) -> None:
    """Code is kept for the same sources wherever they are installed.

    On x86-64 it is for AVX2; all other tests of kernels run on this machine's instruction set.
    """
    machine, cache, elsewhere = AVX2 if X86 else {}, tmp_path / "cache", tmp_path / "elsewhere"
    fresh = run("float32", XDG_CACHE_HOME=str(cache), **machine)
    kept = list(cache.rglob("*.nbc"))
    assert kept
    for package in ("tandem", "tests"):
        shutil.copytree(ROOT / package, elsewhere / package)
    assert run("float32", sources=elsewhere, XDG_CACHE_HOME=str(cache), **machine) == fresh
    assert list(cache.rglob("*.nbc")) == kept


@soak
@pytest.mark.skipif(not X86, reason="names x86-64 instructions")
def test_machines_without_avx_compute_as_exactly(tmp_path: Path) -> None:
    run("bfloat16", XDG_CACHE_HOME=str(tmp_path), **OLDEST)
