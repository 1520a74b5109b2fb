"""The counters of the GPU's stepper. Nothing is launched here."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tandem.engine.cuda import cuda_stepper
from tandem.engine.cuda.cuda_stepper import CudaStepper
from tandem.engine.graph_use import GraphUse
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_buffer import StepLimits, StepSizes
from tandem.engine.steps.step_packer import StepPacker
from tandem.protocol.errors import Internal
from tandem.protocol.messages import SamplingParams

LIMITS = StepLimits(vocab_size=50, max_context=64, pages=4, page_tokens=16)
DRAW = SamplingInput(SamplingParams(max_tokens=1), 0)
SIZES = StepSizes(tokens=8, rows=2, width=4, drawn=2)
GRAPH = SimpleNamespace(
    chunks_at=None,
    groups=None,
    input_words=SIZES.words,
    sizes=SIZES,
    replay=lambda words: torch.zeros(2, 50),
)


def stepper_with(graph: object, monkeypatch: pytest.MonkeyPatch) -> CudaStepper:
    """Returns a stepper on the CPU whose prefill steps all take `graph`."""
    monkeypatch.setattr(cuda_stepper, "_pinned", partial(torch.empty, dtype=torch.int64))
    monkeypatch.setattr(cuda_stepper, "_HostMemory", partial(cuda_stepper._HostMemory, done=cast(Any, None)))
    draws, none = SimpleNamespace(make_memory=lambda: None), SimpleNamespace(fitting=lambda *_: None)
    prompts = SimpleNamespace(fitting=lambda *_: graph)
    parts: list[Any] = [StepPacker(LIMITS), lambda *_: torch.zeros(1, 50), draws, torch.zeros(8, dtype=torch.int64)]
    return CudaStepper(*parts, graphs=cast(Any, none), prompts=cast(Any, prompts), verify=cast(Any, none))


def compute(stepper: CudaStepper, *token_ids: int) -> None:
    batch = StepBatch([StepRow(token_ids, 0, range(4), DRAW)])
    stepper._compute(batch, stepper._packer.sizes(batch), stepper._memory[0])


@pytest.mark.parametrize(("graph", "one_step"), [(GRAPH, GraphUse(1, 0, 5)), (None, GraphUse(0, 1, 0))])
def test_a_step_that_is_refused_counts_nowhere(
    graph: object, one_step: GraphUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = stepper_with(graph, monkeypatch)
    with pytest.raises(Internal, match="token id is outside"):
        compute(stepper, 1, LIMITS.vocab_size, 3)
    assert stepper.graph_use == GraphUse()
    compute(stepper, 1, 2, 3)
    assert stepper.graph_use == one_step
