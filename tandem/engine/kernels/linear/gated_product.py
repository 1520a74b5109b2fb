"""The gated product silu(x · gateᵀ) ∘ (x · upᵀ) for many tokens: quack's fused kernel if available, else cuBLAS.

The product of gate and up is the largest intermediate result of a layer. Writing it to memory and reading it again
would take about a tenth of the time of the product, and would slow down the tensor cores of a GPU at its power limit
(docs/decisions/gpu_steps.md).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.engine.kernels.fallback import failure_of, why_not_imported
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.linear.triton_activation import silu_mul

log = logging.getLogger(__name__)

FUSED_TOKENS = 1024
"""Minimum number of tokens for which the fused product is faster; at 512 it is 3 % slower on the largest weights."""
_CAPABILITY = (9, 0)
_ALIGNED = 8
"""Row lengths must be a multiple of this number of 16-bit elements, because TMA moves 16 bytes at a time."""
_WARM_UP_ROWS, _WARM_UP_COLUMNS = 256, 512


@dataclass(frozen=True, slots=True)
class GatedTile:
    """A thread block's tile, `rows` x `columns` elements of the product, and the size of a cluster in thread blocks."""

    rows: int
    columns: int
    pingpong: bool
    """True if two warp groups alternate on separate tiles, False if they share one."""
    cluster_rows: int
    cluster_columns: int


BEST_TILE = GatedTile(rows=128, columns=160, pingpong=True, cluster_rows=2, cluster_columns=1)
"""The fastest tile, or within 1 % of the fastest, for every shape and size in benchmarks/kernels/gated.py."""


class GatedProduct(Protocol):
    """Interface of a gated product: x [T, K] and gate_up [2·I, K] with the gate rows first → [T, I].

    An implementation may also round the product of gate and up before it applies the activation.
    """

    def __call__(self, x: Tensor, gate_up: Linear) -> Tensor:
        """Compute the gated product."""


def choose_gated_product(
    device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int, *, pdl: bool
) -> GatedProduct:
    """Choose, compile and return the fastest gated product for these widths on `device`; the choice is logged."""
    plain = PlainGated(pdl)
    reason = _why_not_fused(device, dtype, hidden, intermediate)
    if reason:
        log.info("gate and up of long prompts: cuBLAS, then SiLU (%s)", reason)
        return plain
    fused = FusedGated(plain)
    x = torch.zeros(_WARM_UP_ROWS, hidden, dtype=dtype, device=device)
    weight = torch.zeros(_WARM_UP_COLUMNS, hidden, dtype=dtype, device=device)
    failure = failure_of(lambda: fused.compute(x, weight))
    if failure:
        log.warning("gate and up of long prompts: cuBLAS, then SiLU, which is slower (quack-kernels: %s)", failure)
        return plain
    log.info("gate and up of long prompts: quack, SiLU inside")
    return fused


def _why_not_fused(device: torch.device, dtype: torch.dtype, hidden: int, intermediate: int) -> str:
    if dtype not in {torch.bfloat16, torch.float16}:
        return "quack computes bfloat16 and float16 only"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != _CAPABILITY:
        return "quack is used on GPUs of compute capability 9.0"
    for width in (hidden, intermediate):
        if width % _ALIGNED:
            return f"a width of {width} is no multiple of {_ALIGNED}"
    return why_no_library()


def why_no_library() -> str:
    """Import the fused product's library, which takes seconds; return the reason if the import fails, else ""."""
    return why_not_imported("quack.gemm_interface", "quack-kernels")


class PlainGated:
    """The gated product by cuBLAS, with silu(gate) · up as a separate kernel."""

    def __init__(self, pdl: bool) -> None:
        self._pdl = pdl

    def __call__(self, x: Tensor, gate_up: Linear) -> Tensor:
        """Compute the product, then the activation."""
        return silu_mul(torch.nn.functional.linear(x, gate_up.matrix, gate_up.bias), pdl=self._pdl)


class FusedGated:
    """quack's fused product for many tokens without a bias; all other products are computed by `plain`."""

    def __init__(self, plain: GatedProduct, tile: GatedTile = BEST_TILE) -> None:
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_act

        self._plain = plain
        self._gemm_act: Callable[..., tuple[Any, Tensor]] = gemm_act
        self._config = GemmConfig(
            tile_m=tile.rows,
            tile_n=tile.columns,
            pingpong=tile.pingpong,
            cluster_m=tile.cluster_rows,
            cluster_n=tile.cluster_columns,
            is_dynamic_persistent=False,
            device_capacity=_CAPABILITY[0],
        )

    def __call__(self, x: Tensor, gate_up: Linear) -> Tensor:
        """Compute the fused product, or the plain one if there are few tokens or a bias."""
        if len(x) < FUSED_TOKENS or gate_up.bias is not None:
            return self._plain(x, gate_up)
        return self.compute(x, gate_up.matrix)

    def compute(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the fused product for any number of tokens."""
        _, active = self._gemm_act(
            x,
            weight.t(),
            activation="swiglu",
            store_preact=False,
            concat_layout=("B",),
            config=self._config,
            tuned=False,
        )
        return active
