"""Whole models with latent attention: GPU kernels (in the interpreter) and CPU kernels give the plain ones' logits."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from tandem.engine.cache.paged_cache import PagedCache, cache_bytes
from tandem.engine.config.attention import IndexShape, LatentShape
from tandem.engine.config.model import DenseFeedForward, LatentAttention, LayerSpec, ModelSpec
from tandem.engine.config.rope import RopeConfig
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.latent import latent_kernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters, tensors_of
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_packer import StepPacker, step_limits, unpack
from tandem.protocol.messages import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE_TOKENS = 16
DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
PROMPT = [(7 * i) % 97 for i in range(40)]
STEPS = [
    [StepRow(PROMPT[:21], 0, [3, 1, 2], DRAW), StepRow(PROMPT[:5], 0, [5], DRAW)],
    [StepRow([9], 21, [3, 1, 2], DRAW), StepRow([8], 5, [5], DRAW), StepRow(PROMPT[:17], 0, [6, 7, 4], DRAW)],
    [StepRow([3], 22, [3, 1, 2], DRAW), StepRow(PROMPT[17:], 17, [6, 7, 4], DRAW)],
    [StepRow([4], 23, [3, 1, 2], DRAW), StepRow([2], 40, [6, 7, 4], DRAW), StepRow([2], 6, [5], DRAW)],
]


def spec_of(query_rank: int | None, index: IndexShape | None = None) -> ModelSpec:
    """A tiny DeepSeek: latent attention in every layer, with an indexer or without."""
    shape = LatentShape(heads=4, latent=32, rope=16, nope=16, v_dim=16, scale=32**-0.5, index=index)
    attention = LatentAttention(shape, RopeConfig(theta=10000.0), query_rank, norm_eps=1e-6)
    layer = LayerSpec(attention, DenseFeedForward(96))
    return ModelSpec(
        architecture="DeepseekV2ForCausalLM",
        vocab_size=97,
        hidden_size=64,
        layers=(layer, layer),
        norm_eps=1e-5,
        max_context=128,
        tied_embeddings=False,
        eos_token_ids=(0,),
        dtype=None,
    )


def parameters_of(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    parameters = allocate_parameters(spec, dtype, device)
    for name, tensor in tensors_of(parameters):
        values = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(1 + values / 10 if "norm" in name else values / tensor.shape[-1] ** 0.5)
    return parameters


class Model:
    """One model with given kernels over a cache of its own, NaN at first."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
        self.cache = PagedCache(spec, PAGE_TOKENS, cache_bytes(spec, 9, PAGE_TOKENS, dtype), dtype, device)
        self.cache.tensor.fill_(float("nan"))
        self._model = DecoderModel(spec, parameters_of(spec, dtype, device), kernels, spec.max_context)
        self._packer = StepPacker(step_limits(spec, self.cache))
        self._forward = Forward(self._model, self.cache)

    def logits(self, rows: list[StepRow]) -> torch.Tensor:
        batch = StepBatch(rows)
        sizes = self._packer.sizes(batch)
        words = torch.empty(sizes.words, dtype=torch.int64)
        self._packer.pack(batch, sizes, words.numpy())
        with torch.inference_mode():
            logits = self._forward(unpack(words, sizes, batch, self.cache.tensor.device), None)
        assert logits is not None
        return logits.cpu()


def test_logits_of_the_plain_kernels_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(48, lambda spec: CudaKernels(spec, DEVICE, torch.float32, PAGE_TOKENS, max_decode_rows=4), DEVICE)
    # Prompts expanded, too: above they are shorter than what is absorbed.
    monkeypatch.setattr(latent_kernels, "absorbed_tokens", lambda shape: 1)
    _compare(None, lambda spec: CudaKernels(spec, DEVICE, torch.float32, PAGE_TOKENS, max_decode_rows=4), DEVICE)


@pytest.mark.parametrize("query_rank", [None, 48])
def test_logits_of_the_plain_kernels_on_cpus(query_rank: int | None) -> None:
    kernels = CpuKernels(torch.float32, threads=1)
    _compare(query_rank, lambda spec: kernels, torch.device("cpu"))
    kernels.close()


def test_logits_of_sparse_attention_on_gpus() -> None:
    """With many heads no two index scores are equal."""
    make = partial(CudaKernels, device=DEVICE, dtype=torch.float32, page_tokens=PAGE_TOKENS, max_decode_rows=4)
    _compare(48, make, DEVICE, IndexShape(heads=16, dim=24, top_k=8))


def _compare(
    query_rank: int | None, make: Callable[[ModelSpec], Kernels], device: torch.device, index: IndexShape | None = None
) -> None:
    spec = spec_of(query_rank, index)
    ours = Model(spec, make(spec), device, torch.float32)
    plain = Model(spec, ReferenceKernels(), torch.device("cpu"), torch.float32)
    for rows in STEPS:
        torch.testing.assert_close(ours.logits(rows), plain.logits(rows), rtol=2e-5, atol=2e-5)
    written = ~plain.cache.tensor.isnan()
    assert torch.equal(written, ~ours.cache.tensor.cpu().isnan())
    torch.testing.assert_close(ours.cache.tensor.cpu()[written], plain.cache.tensor[written], rtol=2e-5, atol=2e-5)


def test_a_graph_contains_chunks_that_are_absorbed_alone() -> None:
    kernels = CudaKernels(spec_of(None), DEVICE, torch.float32, PAGE_TOKENS, max_decode_rows=4)
    assert kernels.prompts_capturable
    # 32 · 32 / (2 · 32 + 16 - 32 - 16)
    assert kernels.capturable_tokens == 32
