"""What every Triton kernel here shares: whether kernels overlap their launches, and how they say so.

With programmatic dependent launch a kernel may start while the one before it still runs. It may read weights at once;
before it touches anything that an earlier kernel writes or reads, it calls `wait_for_inputs`, which returns when all
earlier kernels have ended and their writes are visible. Each kernel must call it exactly once, on every path, because
the next kernel relies on this one having waited.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU."""

OVERLAPPED_CAPABILITY = (9, 0)
"""First compute capability whose kernels can overlap their launches."""


def overlaps_launches() -> bool:
    """Whether kernels of this process are launched with `launch_pdl=True` and `PDL=True`."""
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= OVERLAPPED_CAPABILITY


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """The next kernel may begin to start: called first, as starting early costs nothing but registers."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Everything earlier kernels wrote is visible after this."""
    if PDL:
        gdc_wait()
