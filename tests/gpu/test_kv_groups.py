"""Models whose layers have different windows on a GPU: chunks, CUDA graphs and decode steps on pages that are freed."""

from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.kv_pages import FREED, KvPages
from tandem.protocol.messages import SamplingParams
from tests.factories import write_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
WINDOW = 300
CHUNK = 256
PROMPTS = [[(7 * i * i + 31 * salt + i) % 160 for i in range(900 + 70 * salt)] for salt in range(3)]
STEPS = 200


class Pages:
    """The pages of one request; those that its next row does not see are freed, and overwritten with NaN."""

    def __init__(self, runner: ModelRunner, free: list[int]) -> None:
        self._cache, self._free = runner.cache, free
        self._kv: KvPages = runner.kv_pages
        self._pages: list[int] = []

    def of(self, start: int, end: int) -> list[int]:
        kv, pages = self._kv, self._pages
        for entry in kv.dead(pages, start):
            self._cache.tensor[pages[entry]] = float("nan")
            self._free.append(pages[entry])
            pages[entry] = FREED
        pages += [FREED] * (kv.numbers(end) * kv.groups - len(pages))
        for entry in kv.seen(start, start // kv.page_tokens, kv.numbers(end)):
            if pages[entry] == FREED:
                pages[entry] = self._free.pop(0)
        assert sum(page != FREED for page in pages) <= kv.held(end)
        return list(pages)


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    """Returns the logits of each prompt's last chunk and of the decode steps after it, by step."""
    runner.cache.tensor.fill_(float("nan"))
    free = list(range(runner.cache.pages))
    requests = [Pages(runner, free) for _ in PROMPTS]
    steps = []
    for pages, prompt in zip(requests, PROMPTS, strict=True):
        for start in range(0, len(prompt), CHUNK):
            end = min(start + CHUNK, len(prompt))
            row = StepRow(prompt[start:end], start, pages.of(start, end), GREEDY if end == len(prompt) else None)
            steps.append(runner.logits(StepBatch([row])).float().cpu())
    for number in range(STEPS):
        starts = [len(prompt) + number for prompt in PROMPTS]
        rows = [
            StepRow([(number + at) % 160], start, pages.of(start, start + 1), GREEDY)
            for at, (pages, start) in enumerate(zip(requests, starts, strict=True))
        ]
        steps.append(runner.logits(StepBatch(rows)).float().cpu())
    return steps


@pytest.mark.parametrize("page_tokens", [16, 128])
def test_logits_are_as_right_as_the_plain_kernels(tmp_path: Path, page_tokens: int) -> None:
    folder = write_tiny_model(
        tmp_path / "model",
        "qwen3",
        hidden_size=256,
        head_dim=64,
        num_hidden_layers=6,
        max_position_embeddings=2048,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"] * 2,
    )
    config = EngineConfig.of(
        folder,
        device="cuda",
        dtype="bfloat16",
        page_tokens=page_tokens,
        kv_cache_bytes=1 << 28,
        max_step_tokens=CHUNK,
        max_batch_requests=64,
    )
    exact_config = EngineConfig.of(
        folder,
        device="cuda",
        dtype="float32",
        page_tokens=page_tokens,
        kv_cache_bytes=1 << 28,
        max_step_tokens=CHUNK,
        max_batch_requests=64,
    )
    ours = ModelRunner.load(config)
    assert len(ours.cache.groups) > 1
    actual = logits(ours)
    plain = logits(ModelRunner.load(config, kernels=ReferenceKernels()))
    exact = logits(ModelRunner.load(exact_config, kernels=ReferenceKernels()))
    errors = [
        torch.cat([(a - b).abs().flatten() for a, b in zip(outputs, exact, strict=True)]) for outputs in (actual, plain)
    ]
    assert errors[0].isfinite().all()
    assert errors[0].max() <= 2 * errors[1].max()
    assert errors[0].mean() <= 2 * errors[1].mean()
