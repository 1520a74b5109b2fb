"""Every measured tile of `TUNED` against float64, with the columns and the number of tokens of the measurement.

Only a few tiles of the rows are computed. Their number is a multiple of 16, as every real one is: Triton compiles other
kernels for other numbers, and these are the engine's own. The last tile of rows is not full.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from tandem.engine.kernels.linear import triton_linear
from tandem.engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS
from tandem.engine.kernels.linear.triton_linear_tiles import TUNED, Gemv, Tile
from tests.kernels.product_cases import Case, check, make_case, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

GPU = torch.device("cuda", 0)
COMPILERS = 16
OUTPUTS = 512
"""The minimum number of outputs: the largest of few errors is random."""
BESIDE_THE_TILES = 16
STORE, GATE_UP, ADD = (int(op.value) for op in (triton_linear.STORE, triton_linear.GATE_UP, triton_linear.ADD))
OP_NAMES = {STORE: "norm_linear", GATE_UP: "norm_gate_up", ADD: "linear_add"}


@dataclass(frozen=True)
class Entry:
    """A tile of the table, and one product that is computed with it."""

    k: int
    op: int
    bucket: int
    tile: Tile

    @property
    def name(self) -> str:
        return f"{OP_NAMES[self.op]} K{self.k} T{self.bucket} {self.tile}"

    @property
    def tokens(self) -> tuple[int, ...]:
        """The largest step of the tile, one less, and one more, which takes a second tile of tokens."""
        return (1,) if isinstance(self.tile, Gemv) else (self.bucket - 1, self.bucket, self.bucket + 1)

    def case(self) -> Case:
        """The inputs of the largest step, with the norm where the engine leaves it to the product."""
        tiles = -(-OUTPUTS // self.tile.rows)
        outputs = tiles * self.tile.rows + BESIDE_THE_TILES
        n = 2 * outputs if self.op == GATE_UP else outputs
        norm = self.op != ADD and self.bucket <= FUSED_NORM_TOKENS
        return make_case(max(self.tokens), n, self.k, norm=norm, seed=self.k + self.bucket, device=GPU)


def entries() -> list[Entry]:
    """Shapes that differ in their number of rows alone share kernels, and are tested once."""
    every = [
        Entry(k, op, bucket, tile)
        for (_, k, paired), by_bucket in TUNED.items()
        for bucket, tile in by_bucket.items()
        for op in ((GATE_UP,) if paired else (STORE, ADD))
    ]
    return list(dict.fromkeys(every))


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    """Compiles all kernels concurrently; one after another they would take minutes."""

    def launch(entry: Entry) -> None:
        torch.cuda.set_device(GPU)
        run(entry.op, entry.case(), torch.bfloat16, entry.tile)

    triton_linear.reserve_scratch(GPU)
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(launch, entries()))
    torch.cuda.synchronize()
    # The baseline's sums are as wide as the kernels': otherwise it would allow larger errors.
    narrow = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    yield
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = narrow


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.name)
def test_a_tuned_tile_is_as_exact_as_torch(entry: Entry) -> None:
    whole = entry.case()
    parts = [Case(whole.x[:t], whole.norm, whole.weight, None, whole.residual[:t]) for t in entry.tokens]
    check(entry.op, parts, torch.bfloat16, entry.tile)
    if getattr(entry.tile, "splits", 1) > 1:
        assert not triton_linear.reserve_scratch(whole.x.device)[1].any()
