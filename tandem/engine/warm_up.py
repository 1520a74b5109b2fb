"""Runs the first steps of a loaded engine, so that no request waits for compiling kernels or starting threads."""

from collections.abc import Callable

from torch import Tensor

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.weights.checkpoint import Progress
from tandem.protocol.errors import ModelError
from tandem.protocol.messages import SamplingParams

COMPILING = "compiling kernels, which later starts find in the cache"
_TOKENS = 64


def warm_up(run: Callable[[StepBatch], object], cache: PagedCache, max_context: int, progress: Progress | None) -> None:
    """Run one prompt step and one decode step.

    They write to page 0, which no request owns yet, and zero it afterwards.
    """
    if progress is not None:
        progress(COMPILING, 0.0)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    tokens = min(cache.page_tokens, _TOKENS, max_context)
    pages = [0] * len(cache.groups)
    for row in (StepRow([0] * tokens, 0, pages, None), StepRow([0], 0, pages, SamplingInput(sampling, 0))):
        run(StepBatch([row]))
    cache.storage[0].zero_()
    if progress is not None:
        progress(COMPILING, 1.0)


def check_activations(logits: Callable[[StepBatch], Tensor], cache: PagedCache, most_tokens: int) -> None:
    """Raise ModelError if a prompt's activations overflow float16, which makes its logits NaN or infinite.

    In models trained in bfloat16 this mostly happens at the first positions. The check uses page 0, as `warm_up` does.
    """
    tokens = list(range(min(cache.page_tokens, _TOKENS, most_tokens)))
    drawn = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
    finite = logits(StepBatch([StepRow(tokens, 0, [0] * len(cache.groups), drawn)])).isfinite().all()
    cache.storage[0].zero_()
    if not finite:
        raise ModelError(
            "the model computes numbers beyond 65504, the largest of float16; use --dtype bfloat16 or float32."
        )
