"""Products of many tokens with weights that are not packed, computed by PyTorch some rows of the weight at a time.

With some dozens of tokens or more, the arithmetic takes longer than reading the weight, and PyTorch's libraries are as
fast as any code (docs/decisions/cpu_kernels.md). The division into rows does not depend on the number of threads, so
the sums do not either.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.kernels.cpu.units import has_pair_products
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.reference import activate

LONG_TOKENS = 48
"""Minimum number of tokens for which PyTorch computes products with unpacked weights."""
_PIECE = 256
"""Number of weight rows in a piece.

With fewer rows, the library's copy of the input would cost more; with more, fewer threads would have work.
"""


class LongProducts:
    """Computes products with PyTorch on separate threads, each of which uses no further threads.

    PyTorch's own threads would spin on the cores that the other kernels need. `CpuKernels` owns it; the threads end
    when `close` is called or the object is collected.
    """

    def __init__(self, dtype: torch.dtype, threads: int) -> None:
        """Start the threads; `dtype`, float32 or bfloat16, is that of weights, inputs and outputs."""
        self._computed = dtype if has_pair_products() else torch.float32
        self._pool = ThreadPoolExecutor(threads, "tandem-products", initializer=lambda: torch.set_num_threads(1))

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._pool.shutdown()

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Return x · weightᵀ + bias → [T, N]."""

        def compute(rows: slice) -> None:
            out[:, rows] = self._product(wide, linear, rows)

        wide = x.to(self._computed)
        out = x.new_empty(len(x), len(linear.matrix))
        self._by_piece(out.shape[1], compute)
        return out

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Add x · weightᵀ + bias to hidden [T, N] in place; the sum is rounded once."""

        def add(rows: slice) -> None:
            hidden[:, rows] = self._product(wide, linear, rows).add_(hidden[:, rows])

        wide = x.to(self._computed)
        self._by_piece(hidden.shape[1], add)

    def gate_up(self, x: Tensor, gate_up: Linear, activation: str) -> Tensor:
        """Return activation(g) · u with [g | u] = x · weightᵀ + bias, gate rows first → [T, N / 2]."""

        def compute(rows: slice) -> None:
            gate = self._product(wide, gate_up, rows)
            up = self._product(wide, gate_up, slice(rows.start + width, rows.stop + width))
            out[:, rows] = activate(torch.cat((gate, up), dim=1), activation)

        wide, width = x.to(self._computed), gate_up.matrix.shape[0] // 2
        out = x.new_empty(len(x), width)
        self._by_piece(width, compute)
        return out

    def _product(self, x: Tensor, linear: Linear, rows: slice) -> Tensor:
        """Return x · weightᵀ + bias for the given rows of the weight → [T, rows] float32."""
        product = F.linear(x, linear.matrix[rows].to(x.dtype)).float()
        return product if linear.bias is None else product.add_(linear.bias[rows])

    def _by_piece(self, rows: int, compute: Callable[[slice], None]) -> None:
        pieces = (slice(first, min(first + _PIECE, rows)) for first in range(0, rows, _PIECE))
        # Inference mode is set per thread, and tensors that were made in it may be written only in it.
        for done in [self._pool.submit(torch.inference_mode()(compute), piece) for piece in pieces]:
            done.result()
