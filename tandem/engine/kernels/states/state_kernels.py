"""State layers on GPUs: in Triton, and long rows of Gated DeltaNet by fla-core where it is installed."""

from concurrent.futures import Future
from functools import cached_property

from torch import Tensor

from tandem.engine.config.model import GatedDeltaNet, ShortConvolution
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta
from tandem.engine.kernels.states.projections import RowSpan
from tandem.engine.kernels.states.triton_convolution import convolve
from tandem.engine.kernels.states.triton_output import finish
from tandem.engine.kernels.states.triton_recurrence import recur

_RECURRENT_TOKENS = 32
"""Rows of up to this many tokens are computed one token after the other even where fla-core is installed."""


class StateKernels:
    """The state layers of one model, owned by `CudaKernels`."""

    def __init__(self, pdl: bool, chunked: Future[ChunkedDelta | None]) -> None:
        """Prepare the kernels; `chunked`, those of long rows of Gated DeltaNet, may not be compiled yet."""
        self._pdl, self._chunked_soon = pdl, chunked

    @cached_property
    def _chunked(self) -> ChunkedDelta | None:
        return self._chunked_soon.result()

    def begin_step(self, layout: StepLayout) -> None:
        """Prepare a step. Called once before the step's first layer, with the layout of any group."""
        for span in _spans(layout):
            if span.tokens > _RECURRENT_TOKENS and self._chunked is not None:
                self._chunked.begin_step(layout, span)

    def mix(self, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
        """Compute `Kernels.mix_states` without waiting for the device. Padding rows of one token become 0."""
        out = projected.new_empty(len(projected), layer.spec.inner)
        for span in _spans(layout):
            if isinstance(layer.spec, ShortConvolution):
                convolve(projected, layer, cache, layout, span, out, pdl=self._pdl)
                continue
            chunked = self._chunked if span.tokens > _RECURRENT_TOKENS else None
            if chunked is not None and isinstance(layer.spec, GatedDeltaNet):
                mixed = chunked.mix(projected, layer, cache, layout, span)
            else:
                chunked, mixed = None, out[span.first :]
                recur(projected, layer, cache, layout, span, out, pdl=self._pdl)
            finish(projected, layer, cache, layout, span, mixed, out, keeps=chunked is None, pdl=self._pdl)
        return out


def _spans(layout: StepLayout) -> list[RowSpan]:
    """Return the rows of one token, and the other rows, as far as the step has such rows."""
    rows = len(layout.context_lens)
    single = rows if layout.decode_only else layout.single_rows
    spans = [RowSpan(0, single, 1), RowSpan(single, rows - single, layout.max_row_tokens)]
    return [span for span in spans if span.rows]
