"""Decode attention concurrent with that of a short chunk, on two streams: the same bits as one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.layers import AttentionLayer
from tandem.engine.models.shapes import shape_config
from tests.kernels.prefill_cases import to_device
from tests.kernels.steps import make_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MODEL = shape_config("llama-3.2-1b")
SHAPE = MODEL.attention_shapes[0]
PAGE = 128
ANSWERS = [(1, 40), (1, 1500), (1, 1), (1, 700), (1, 2900)]
CHUNKS = {
    "a chunk": [(100, 3000)],
    "two chunks": [(30, 30), (200, 900)],
    "a chunk that fills the device": [(1000, 1000)],
    "a chunk behind much": [(100, 9000)],
}


@pytest.fixture(scope="module")
def kernels() -> CudaKernels:
    pytest.importorskip("flash_attn.cute", reason="needs the package flash-attn-4")
    return CudaKernels(MODEL, torch.device("cuda:0"), torch.bfloat16, PAGE, max_decode_rows=16)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS.keys())
def test_the_same_bits_as_in_turn(
    kernels: CudaKernels, chunks: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step([*ANSWERS, *chunks], SHAPE, PAGE)
    device = torch.device("cuda:0")
    layout = replace(to_device(step.layout, device), single_rows=len(ANSWERS))
    q, cache = step.q.to(device, torch.bfloat16), step.cache.to(device, torch.bfloat16)

    def attended() -> Tensor:
        with torch.inference_mode():
            kernels.begin_step(cache, layout)
            return kernels.attention(q, step.layer, cache, layout).clone()

    beside = [attended() for _ in range(20)]
    graph, captured = _capture(kernels, step.layer, q, cache, layout)
    for _ in range(20):
        graph.replay()
        beside.append(captured.clone())
    monkeypatch.setattr(kernels, "_multiprocessors", 0)
    in_turn = attended()
    assert in_turn.isfinite().all()
    assert all(torch.equal(output, in_turn) for output in beside)


def _capture(
    kernels: CudaKernels, layer: AttentionLayer, q: Tensor, cache: Tensor, layout: StepLayout
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        kernels.begin_step(cache, layout)
        out = kernels.attention(q, layer, cache, layout)
    return graph, out
