"""Models with state layers on the GPU's kernels: the logits of the plain ones, in chunks and mixed steps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.config import EngineConfig
from tandem.engine.cuda.sampler_cuda import DeviceSampler
from tandem.engine.cuda.verify_graphs import VerifyGraphs, VerifySize
from tandem.engine.host_stepper import HostStepper
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.draft_groups import accepted_in, fill_draft_groups
from tests.factories import draw, write_tiny_model
from tests.soak import soak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_TOKENS = 16


def runners(family: str, folder: Path) -> tuple[ModelRunner, ModelRunner]:
    """Returns an engine with the GPU's kernels, and one with the plain ones."""
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    folder = write_tiny_model(folder, family, **({} if family == "kimi_linear" else heads))
    config = EngineConfig.of(
        folder, device=DEVICE, dtype="float32", page_tokens=PAGE_TOKENS, kv_cache_bytes=1 << 21, threads=1
    )
    kernels = CudaKernels(load_spec(folder), torch.device(DEVICE), torch.float32, PAGE_TOKENS, 4)
    return ModelRunner.load(config, kernels=kernels), ModelRunner.load(config, kernels=ReferenceKernels())


@pytest.mark.parametrize("family", [pytest.param("qwen3_next", marks=soak), "nemotron_h", "lfm2", "kimi_linear"])
def test_logits_of_the_plain_kernels(family: str, tmp_path: Path) -> None:
    ours, plain = runners(family, tmp_path)
    prompt = [(7 * i) % 67 for i in range(7)]
    share = ours.kv_pages.groups
    pages = [list(range(number * share, (number + 1) * share)) for number in range(3)]
    steps = [
        [StepRow(prompt[:5], 0, pages[0], draw()), StepRow(prompt[:3], 0, pages[1], draw())],
        [
            StepRow([8], 3, pages[1], draw()),
            StepRow(prompt[5:], 5, pages[0], draw()),
            StepRow(prompt[:2], 0, pages[2], draw()),
        ],
        [StepRow([4], 7, pages[0], draw()), StepRow([2], 4, pages[1], draw()), StepRow([3], 2, pages[2], draw())],
    ]
    for rows in steps:
        step = StepBatch(rows)
        torch.testing.assert_close(ours.logits(step), plain.logits(step), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("nemotron_h", marks=soak), "lfm2", "kimi_linear"])
def test_logits_after_accepted_and_rejected_draft_tokens(family: str, tmp_path: Path) -> None:
    ours, plain = runners(family, tmp_path)
    check_drafts(ours, plain, lambda batch: ours.run(batch).token_ids)


@pytest.mark.parametrize("family", ["nemotron_h", pytest.param("lfm2", marks=soak)])
def test_logits_after_a_step_with_padding(family: str, tmp_path: Path) -> None:
    """The computation of the graphs of such steps, without the graphs."""
    ours, plain = runners(family, tmp_path)
    stepper: Any = ours.stepper
    assert isinstance(stepper, HostStepper)
    drawn = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    sampler = DeviceSampler(ours.spec.vocab_size, 4, torch.device(DEVICE), overlaps_launches())
    size = VerifySize(16, 4, 4)
    assert size.groups is not None
    stepper._forward._model.kernels.reserve_draft_groups(size.groups.groups, size.group_rows)
    made: Any = VerifyGraphs(stepper._packer, stepper._forward, sampler, drawn, (0, 0))

    def verify(batch: StepBatch) -> Sequence[int]:
        words, compute, sizes, accept = made._step(size)
        packed = torch.full((len(words),), -1, dtype=torch.int64)
        stepper._packer.pack(batch, sizes, packed[: sizes.words].numpy())
        fill_draft_groups(batch.tokens, size.groups, packed[sizes.words :].numpy())
        words.copy_(packed)
        with torch.inference_mode():
            assert compute().isfinite().all(), "padding is zeros"
            tokens = drawn[: len(batch)].tolist()
            accepted = accepted_in(batch.tokens, tokens)
            accept(torch.tensor([*accepted, 0], dtype=torch.int32, device=DEVICE))
        return tokens

    check_drafts(ours, plain, verify)


def check_drafts(
    ours: ModelRunner, plain: ModelRunner, verify: Callable[[StepBatch], Sequence[int | None]], tolerance: float = 2e-5
) -> None:
    """Checks a step in which one request has a right and a wrong draft token, one a wrong one, and one none.

    `verify` runs a step that verifies draft tokens with `ours`, and returns the tokens of its rows.
    """
    share = ours.kv_pages.groups
    pages = [list(range(number * share, (number + 1) * share)) for number in range(3)]
    prompts = [[5, 6, 7], [9, 8, 7, 6], [11]]
    begin = StepBatch([StepRow(prompt, 0, own, draw()) for prompt, own in zip(prompts, pages, strict=True)])
    newest = tokens_of(plain.run(begin).token_ids)
    assert tokens_of(ours.run(begin).token_ids) == newest

    def next_rows(tokens: Sequence[int], distance: int) -> list[StepRow]:
        starts = [len(prompt) + distance for prompt in prompts]
        rows = zip(tokens, starts, pages, strict=True)
        return [StepRow([token], start, own, draw(index=distance + 1)) for token, start, own in rows]

    second = tokens_of(plain.run(StepBatch(next_rows(newest, 0))).token_ids)
    verified = verify(StepBatch([], with_drafts(next_rows(newest, 0), [[second[0], 3], [second[1] ^ 1], []])))
    assert verified[:3] == second
    third = tokens_of(plain.run(StepBatch(next_rows(second, 1))).token_ids)
    assert verified[3] == third[0]
    # The first request has gained two tokens, so its next position is one further than those of the others.
    wanted = plain.logits(StepBatch(next_rows(third, 2)[:1])).cpu()
    actual = ours.logits(StepBatch([*next_rows(third, 2)[:1], *next_rows(second, 1)[1:]])).cpu()
    torch.testing.assert_close(actual[:1], wanted, rtol=tolerance, atol=tolerance)
    assert actual[1:].argmax(-1).tolist() == third[1:]


def tokens_of(token_ids: Sequence[int | None]) -> list[int]:
    return [token for token in token_ids if token is not None]
