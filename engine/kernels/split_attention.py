"""Attention of short chunks behind long contexts, all windows of the contexts side by side in one launch.

Attention gives a multiprocessor some queries and all that they attend to, so a short chunk leaves most of them idle for
as long as one takes to walk over the context. Here each query is there once for every window of its context, and the
parts are merged by the sums of their weights, as in Flash-Decoding (Dao et al. 2023).
"""

from typing import Protocol

from torch import Tensor

from costs.step_grid import WINDOW_TOKENS
from engine.kernels.base import AttentionShape, StepLayout
from engine.kernels.triton_split import Segments, gather_queries, merge_segments, plan_segments


class WindowAttention(Protocol):
    """Rows of queries, the last of each at the end of its context, that see the latest tokens before them."""

    def __call__(
        self, q: Tensor, cache: Tensor, layer: int, rows: Segments, shape: AttentionShape
    ) -> tuple[Tensor, Tensor]:
        """q [N, heads, head_dim] → results [N, heads, head_dim], and of each the logarithm of the sum of its scores'
        exponentials, [heads, N] float32.

        A row's queries are as many as its context's tokens or fewer. What lies behind the last row is nobody's.
        """


class SplitAttention:
    """One model's, of steps with `layout.windows`. Holds the plan of the newest step, and a layer's queries until its
    call.
    """

    def __init__(self, attend: WindowAttention, pdl: bool, window: int = WINDOW_TOKENS) -> None:
        self._attend = attend
        self._pdl = pdl
        self._window = window
        self._plan: Segments | None = None
        self._queries: Tensor | None = None

    def begin_step(self, cache: Tensor, layout: StepLayout, first_row: int) -> None:
        """As `PrefillAttention.begin_step`."""
        self._plan = plan_segments(layout, first_row, self._window, cache.shape[4])
        self._queries = None

    def begin_layer(self, q: Tensor) -> None:
        """Before each call: q [T, heads, head_dim] of the whole step."""
        plan = self._plan
        if plan is None or len(plan.positions) != len(q):
            raise ValueError(f"{len(q)} tokens of a step that began with others")
        self._queries = gather_queries(q, plan, pdl=self._pdl)

    def __call__(self, cache: Tensor, layer: int, shape: AttentionShape) -> Tensor:
        """As `PrefillAttention`, of the step's rows and the layer's queries."""
        plan, queries = self._plan, self._queries
        if plan is None or queries is None:
            raise ValueError("a layer that did not begin")
        self._queries = None
        return merge_segments(*self._attend(queries, cache, layer, plan, shape), plan)
