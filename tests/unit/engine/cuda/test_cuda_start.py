"""A start on a GPU: the kernels compiled ahead, and refusals. Nothing is launched here."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tandem.engine.config import EngineConfig
from tandem.engine.cuda import cuda_start
from tandem.engine.cuda.compile_ahead import Trial
from tandem.engine.models.shapes import shape_config
from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.step_packer import StepPacker, step_limits
from tandem.protocol.errors import InvalidArgument

CPU = torch.device("cpu")
PAGE = 16


@pytest.mark.parametrize(("context", "step", "tokens"), [(100, 64, 64), (100, 500, 100), (96, 500, 96)])
def test_what_is_compiled_ahead_fits_into_the_context_and_the_step(
    context: int, step: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context of 100 tokens is included, for which the pages of one row hold 112."""
    whole = shape_config("qwen3-0.6b")
    shape = replace(whole, max_context=context, layers=whole.layers[:1])
    config = EngineConfig.of(Path(), max_step_tokens=step, cuda_graphs=False)
    events: list[str] = []
    over = partial(events.append, "trials are over")
    kernels, trial_tokens = SimpleNamespace(end_trials=over), (16, 96, 97)
    model = cast(Any, SimpleNamespace(spec=shape, dtype=torch.bfloat16, kernels=kernels, trial_tokens=trial_tokens))
    probe = cuda_start._one_row(config, model, PAGE, torch.float32, CPU)
    packer = StepPacker(step_limits(shape, probe))
    sizes = []

    def logits(batch: StepBatch) -> None:
        sizes.append(packer.sizes(batch))

    draws = SimpleNamespace(trials=lambda dtype: {})
    stepper = SimpleNamespace(draws=draws, logits=logits)

    def run_all(trials: Mapping[str, Trial], device: torch.device) -> None:
        for trial in trials.values():
            trial()
        assert not events

    monkeypatch.setattr(cuda_start, "_make_stepper", lambda *_: stepper)
    monkeypatch.setattr(cuda_start, "run_side_by_side", run_all)
    cuda_start._compile(config, model, probe)
    assert events == ["trials are over"]
    asked = [trial for trial in trial_tokens if trial <= tokens]
    prompt, *mixed, later = sizes[:1] + sizes[1 + len(asked) :]
    assert [size.tokens for size in sizes[1 : 1 + len(asked)]] == asked
    assert prompt.tokens == tokens
    assert later.tokens == tokens - tokens // 2, "behind as many cached ones"
    beside = [size.rows - 1 for size in mixed]
    assert beside == [16, 32, min(step - 2, config.batch_requests)], "decode rows with a prompt of two tokens"
    assert [size.tokens for size in mixed] == [answers + 2 for answers in beside]


def test_a_gpu_without_memory_for_the_tiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise OutOfResources(147_968, 101_376, "shared memory")

    monkeypatch.setattr(cuda_start, "_one_row", too_large)
    nothing = cast(Any, None)
    with pytest.raises(InvalidArgument, match=r"cpu is too small .* 147968 of shared memory, it has 101376; use"):
        cuda_start.start_on_gpu(
            EngineConfig.of(Path()), nothing, PAGE, torch.float32, CPU, masks=nothing, progress=None
        )
