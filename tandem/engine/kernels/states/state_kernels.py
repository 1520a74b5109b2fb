"""State layers on GPUs, in Triton; long rows of Gated DeltaNet by fla-core where it is installed."""

from concurrent.futures import Future
from functools import cached_property

import torch
from torch import Tensor

from tandem.engine.config.state_layers import KimiDeltaAttention, Mamba2, ShortConvolution, StateLayer
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta
from tandem.engine.kernels.states.projections import RowSpan
from tandem.engine.kernels.states.triton_channel_delta import channel_delta
from tandem.engine.kernels.states.triton_convolution import convolve
from tandem.engine.kernels.states.triton_output import finish
from tandem.engine.kernels.states.triton_recurrence import recur
from tandem.engine.kernels.states.triton_scan import scan

_RECURRENT_TOKENS = 32
"""Rows of up to this many tokens are computed one token after the other, longer rows in chunks."""


class StateKernels:
    """The state layers of one model, owned by `CudaKernels`."""

    def __init__(self, pdl: bool, chunked: Future[ChunkedDelta | None]) -> None:
        """Prepare the kernels; `chunked`, those of long rows of Gated DeltaNet, may not be compiled yet."""
        self._pdl, self._chunked_soon = pdl, chunked

    @cached_property
    def _chunked(self) -> ChunkedDelta | None:
        return self._chunked_soon.result()

    def wait(self) -> None:
        """Wait until the kernels of long rows are compiled."""
        self._chunked_soon.result()

    def begin_step(self, layout: StepLayout) -> None:
        """Prepare a step. Called once before the step's first layer, with the layout of any group."""
        for span in _spans(layout):
            # A model without Gated DeltaNet has no kernels of it.
            if span.tokens > _RECURRENT_TOKENS and self._chunked is not None:
                self._chunked.begin_step(layout, span)

    def mix(self, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
        """Compute `Kernels.mix_states` without waiting for the device. Padding rows of one token become 0."""
        out = projected.new_empty(len(projected), layer.spec.inner)
        for span in _spans(layout):
            if isinstance(layer.spec, ShortConvolution):
                convolve(projected, layer, cache, layout, span, out, pdl=self._pdl)
                continue
            mixed = out[span.first :]
            chunked = span.tokens > _RECURRENT_TOKENS and self._takes_chunks(projected.dtype, layer.spec)
            if chunked:
                mixed = self._chunks(projected, layer, cache, layout, span, mixed)
            else:
                recur(projected, layer, cache, layout, span, out, pdl=self._pdl)
            finish(projected, layer, cache, layout, span, mixed, out, keeps=not chunked, pdl=self._pdl)
        return out

    def _takes_chunks(self, dtype: torch.dtype, spec: StateLayer) -> bool:
        # In chunks, the sums of decays would lose digits that float32 otherwise keeps.
        own = isinstance(spec, Mamba2 | KimiDeltaAttention)
        return dtype != torch.float32 and (own or self._chunked is not None)

    def _chunks(
        self,
        projected: Tensor,
        layer: RecurrentLayer,
        cache: StateCache,
        layout: StepLayout,
        span: RowSpan,
        mixed: Tensor,
    ) -> Tensor:
        """Return the outputs of the span's rows before the norm, in `mixed` or in another tensor of its shape."""
        state = layer.spec.state
        convolved = projected.new_empty(len(mixed), state.heads * state.channels)
        convolve(projected, layer, cache, layout, span, convolved, pdl=self._pdl)
        if isinstance(layer.spec, Mamba2):
            scan(convolved, projected, layer, cache, layout, span, mixed, pdl=self._pdl)
            return mixed
        if isinstance(layer.spec, KimiDeltaAttention):
            channel_delta(convolved, projected, layer, cache, layout, span, mixed, pdl=self._pdl)
            return mixed
        assert self._chunked is not None
        return self._chunked.mix(convolved, projected, layer, cache, layout, span)


def _spans(layout: StepLayout) -> list[RowSpan]:
    """Return the rows of one token, and the other rows, as far as the step has such rows."""
    rows = len(layout.context_lens)
    single = rows if layout.decode_only else layout.single_rows
    spans = [RowSpan(0, single, 1), RowSpan(single, rows - single, layout.max_row_tokens)]
    return [span for span in spans if span.rows]
