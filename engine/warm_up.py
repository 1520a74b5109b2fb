"""The first steps of a loaded engine, so that no user waits for kernels to be compiled or threads to start."""

from collections.abc import Callable

from engine.cache.paged_cache import PagedCache
from engine.steps.batch import StepBatch, StepRow
from engine.steps.draws import Draw
from engine.weights.checkpoint import Progress
from wire.messages import SamplingParams

_TOKENS = 64


def warm_up(run: Callable[[StepBatch], object], cache: PagedCache, max_context: int, progress: Progress | None) -> None:
    """Run a prompt and a decode step.

    They write to page 0 while nobody owns it, and leave it as it was.
    """
    if progress is not None:
        progress("compiling kernels", 0.0)
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
    tokens = min(cache.page_tokens, _TOKENS, max_context)
    pages = [0] * len(cache.groups)
    for row in (StepRow([0] * tokens, 0, pages, None), StepRow([0], 0, pages, Draw(sampling, 0))):
        run(StepBatch([row]))
    cache.storage[0].zero_()
    if progress is not None:
        progress("compiling kernels", 1.0)
