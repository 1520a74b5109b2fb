"""Whole steps that verify drafts, as graphs compute them, against steps of single rows: in the interpreter, or a GPU.

What a graph captures is run as it is: the same words are its input, and its logits and greedy tokens the result.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.config import EngineConfig
from tandem.engine.cuda.sampler_cuda import DeviceSampler
from tandem.engine.cuda.verify_graphs import VerifyGraphs, VerifySize
from tandem.engine.host_stepper import HostStepper
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.draft_groups import fill_draft_groups
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tests.soak import soak

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
NOTHING: Any = None
VOCAB, PAGE = 67, 16
CONFIG = {
    "model_type": "qwen3", "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 96, "head_dim": 64,
    "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
CONTEXTS = [21, 3, 31]
"""The prompts' lengths in tokens."""
PAGES = [[3, 1, 9], [5, 2, 8], [6, 7, 4]]
DRAFTS = [[9, 8, 7], [], [1, 2, 3, 4, 5, 6]]


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[ModelRunner, CudaKernels]:
    """An engine with random keys and values in its cache, which stand for those of the prompts."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | getattr(request, "param", {})))
    kernels = CudaKernels(load_spec(tmp_path), DEVICE, torch.float32, PAGE, max_decode_rows=4)
    config = EngineConfig.of(
        tmp_path, device=DEVICE.type, dtype="float32", page_tokens=PAGE, kv_cache_bytes=1 << 20, random_weights=True
    )
    runner = ModelRunner.load(config, kernels=kernels)
    runner.cache.tensor.copy_(torch.randn(runner.cache.tensor.shape, generator=torch.Generator().manual_seed(0)))
    return runner, kernels


def verifying(drafts: Sequence[Sequence[int]]) -> StepBatch:
    """Returns the step behind the prompts: a token of each request, and its drafts."""
    newest = [StepRow([n + 11], context, PAGES[n], DRAW) for n, context in enumerate(CONTEXTS)]
    return StepBatch([], with_drafts(newest, drafts))


def verify_step(runner: ModelRunner, size: VerifySize, batch: StepBatch) -> tuple[Tensor, Tensor]:
    """Returns the logits and the greedy tokens of a graph of `size` without the graph."""
    stepper: Any = runner.stepper
    assert isinstance(stepper, HostStepper)
    drawn = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    sampler = DeviceSampler(VOCAB, 4, DEVICE, overlaps_launches())
    graphs = VerifyGraphs(stepper._packer, stepper._forward, sampler, drawn, NOTHING)
    words, compute, sizes, _ = graphs._step(size)
    packed = torch.full((len(words),), -1, dtype=torch.int64)
    stepper._packer.pack(batch, sizes, packed[: sizes.words].numpy())
    fill_draft_groups(batch.tokens, size.groups, packed[sizes.words :].numpy())
    words.copy_(packed)
    with torch.inference_mode():
        return compute(), drawn


@pytest.mark.parametrize(
    ("engine", "group"),
    [pytest.param({}, 2, marks=soak), ({"num_key_value_heads": 2}, 4), ({}, 8)],
    ids=["4 heads-2", "2 heads-4", "4 heads-8"],
    indirect=["engine"],
)
def test_logits_of_single_rows(engine: tuple[ModelRunner, CudaKernels], group: int) -> None:
    """The step has padding rows, requests and groups, and more rows than decode attention has scratch for."""
    size, batch = VerifySize(16, 4, group), verifying(DRAFTS)
    runner, kernels = engine
    kernels.reserve_draft_groups(size.groups.groups, group)
    plain = runner.logits(batch).clone()
    logits, drawn = verify_step(runner, size, batch)
    assert len(plain) == len(batch) == 12
    assert logits.isfinite().all(), "padding is zeros"
    torch.testing.assert_close(logits[: len(batch)], plain, rtol=2e-5, atol=2e-5)
    assert drawn[: len(batch)].tolist() == plain.argmax(-1).tolist()
