"""The CUDA graph of one step: captured once for each size, and replayed on the contents of its input buffer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.draft_groups import DraftGroupSizes
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import PackedStep, StepPacker, view_step

Pool = Any
"""The return value of `torch.cuda.graph_pool_handle`: memory that several graphs share."""


class AcceptGraph(NamedTuple):
    """The CUDA graph that writes the states after accepted draft tokens, and its input `counts` [requests] int32."""

    graph: torch.cuda.CUDAGraph
    counts: Tensor


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The CUDA graph of steps of up to `sizes`.

    Every replay reads and writes the same tensors. `logits` are in the memory that all graphs share
    (`tandem/engine/cuda/cuda_graphs.py`).
    """

    sizes: StepSizes
    words: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    chunks_at: int | None = None
    """The `chunks_at` argument of `StepPacker.pack`."""
    groups: DraftGroupSizes | None = None
    """The draft groups of a step that verifies draft tokens; their table follows the sections of `sizes`."""
    accept: AcceptGraph | None = None
    """Follows a step that verifies draft tokens in a model with state layers; else None."""

    @property
    def input_words(self) -> int:
        """The length of the input buffer of `replay`, in int64 elements."""
        return self.sizes.words if self.groups is None else self.sizes.words + self.groups.words

    def replay(self, words: Tensor) -> Tensor:
        """Run the step in the pinned buffer `words` [input_words] int64; return the logits [sizes.drawn, vocab].

        The logits are valid until the next replay of any graph.
        """
        self.words.copy_(words, non_blocking=True)
        self.graph.replay()
        return self.logits

    def accept_drafts(self, counts: Tensor) -> None:
        """Write the states after the accepted draft tokens of the newest replay.

        `counts` [n] has the number for each request of the step, and is in host memory.
        """
        assert self.accept is not None
        self.accept.counts[: len(counts)].copy_(counts, non_blocking=True)
        self.accept.graph.replay()


def empty_step(
    packer: StepPacker,
    sizes: StepSizes,
    device: torch.device,
    *,
    singles: int,
    max_row_tokens: int,
    context: int,
    more_words: int = 0,
) -> tuple[Tensor, PackedStep]:
    """Return an empty step of `sizes`: its int64 input buffer on `device`, and its tensors, which are views of it.

    The buffer ends with `more_words` additional zeros, which follow the sections of `sizes`. The first `singles` rows
    have one token each, the others up to `max_row_tokens`.
    """
    host = torch.zeros(sizes.words + more_words, dtype=torch.int64)
    packer.pack(StepBatch([]), sizes, host[: sizes.words].numpy(), chunks_at=singles)
    words = host.to(device)
    step = words[: sizes.words]
    return words, view_step(step, sizes, max_row_tokens=max_row_tokens, max_context=context, single_rows=singles)


def capture_step(
    compute: Callable[[], Tensor],
    words: Tensor,
    sizes: StepSizes,
    *,
    pool: Pool,
    chunks_at: int | None = None,
    groups: DraftGroupSizes | None = None,
    accept: Callable[[Tensor], None] | None = None,
) -> StepGraph:
    """Capture the graph of `compute`, which reads `words` and returns logits; its memory comes from `pool`.

    `accept`, if given, writes the states after accepted draft tokens, whose numbers it takes [sizes.chains] int32.
    """
    # Run once before, because kernels cannot be compiled during a capture.
    compute()
    counts = torch.zeros(sizes.chains, dtype=torch.int32, device=words.device)
    if accept is not None:
        accept(counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        logits = compute()
    accepting = None
    if accept is not None:
        # Captured directly after the step, whose projections it reads: until both have run, no other graph runs.
        accepting = AcceptGraph(torch.cuda.CUDAGraph(), counts)
        with torch.cuda.graph(accepting.graph, pool=pool):
            accept(counts)
    # Keeping the tensor itself would withhold its memory from the graphs that are captured after this one.
    return StepGraph(sizes, words, graph, borrow(logits), chunks_at, groups, accepting)


class _TensorView:
    """The memory of a tensor as `torch.as_tensor` accepts it, without a reference to the tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "version": 2,
        }


def borrow(tensor: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous GPU tensor, without keeping that memory allocated.

    The caller must keep the memory mapped, and may read the returned tensor only while the contents are valid.
    """
    memory = torch.as_tensor(_TensorView(tensor), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)
