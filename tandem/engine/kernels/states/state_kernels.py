"""State layers on GPUs: rows of one token, and longer rows, each computed in Triton."""

from torch import Tensor

from tandem.engine.config.model import ShortConvolution
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan
from tandem.engine.kernels.states.triton_convolution import convolve
from tandem.engine.kernels.states.triton_output import finish
from tandem.engine.kernels.states.triton_recurrence import recur


class StateKernels:
    """The state layers of one model, owned by `CudaKernels`."""

    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def mix(self, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
        """Compute `Kernels.mix_states` without waiting for the device. Padding rows write nothing, and become 0."""
        out = projected.new_empty(len(projected), layer.spec.inner)
        for span in _spans(layout):
            if isinstance(layer.spec, ShortConvolution):
                convolve(projected, layer, cache, layout, span, out, pdl=self._pdl)
            else:
                recur(projected, layer, cache, layout, span, out, pdl=self._pdl)
                mixed = out[span.first :]
                finish(projected, layer, cache, layout, span, mixed, out, keeps=True, pdl=self._pdl)
        return out


def _spans(layout: StepLayout) -> list[RowSpan]:
    """Return the rows of one token, and the other rows, as far as the step has such rows."""
    assert layout.state_pages is not None
    rows = len(layout.state_pages)
    single = rows if layout.decode_only else layout.single_rows
    spans = [RowSpan(0, single, 1), RowSpan(single, rows - single, layout.max_row_tokens)]
    return [span for span in spans if span.rows]
