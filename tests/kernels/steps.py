"""Random steps for kernel tests: rows on shuffled pages, a cache that is NaN in all memory that was never written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.layers import AttentionLayer

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Step:
    """A step's inputs in float64; `rows` are (tokens, context with them)."""

    rows: Sequence[tuple[int, int]]
    shape: AttentionShape
    layout: StepLayout
    cache: Tensor
    q: Tensor
    qkv: Tensor
    rope: Tensor
    sinks: Tensor | None = None

    @property
    def layer(self) -> AttentionLayer:
        """The layer of the cache that the step has keys and values of, without norms."""
        return AttentionLayer(LAYER, self.shape, self.rope, norm_eps=1e-6, sinks=self.sinks)

    def cache_as(self, dtype: torch.dtype) -> Tensor:
        return self.cache.to(dtype)


def make_step(
    rows: Sequence[tuple[int, int]], shape: AttentionShape, page_tokens: int = 16, seed: int = 0, filled: bool = True
) -> Step:
    """Returns rows with their context in the cache (`filled`: this step's tokens too), everything else NaN."""
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int) -> Tensor:
        # Values that bfloat16 holds exactly, so that every dtype starts from the same numbers.
        return torch.randn(*sizes, generator=generator).bfloat16().double()

    columns = max(-(-context // page_tokens) for _, context in rows)
    pages = columns * len(rows) + 3
    shuffled = torch.randperm(pages, generator=generator)
    table = torch.zeros(len(rows), columns, dtype=torch.int32)
    cache = torch.full((pages, LAYERS, 2, shape.kv_heads, page_tokens, shape.head_dim), float("nan")).double()
    positions, slots, starts = [], [], [0]
    for number, (tokens, context) in enumerate(rows):
        used = -(-context // page_tokens)
        table[number, :used] = shuffled[number * columns : number * columns + used]
        every = torch.arange(context)
        slot = table[number, every // page_tokens].long() * page_tokens + every % page_tokens
        written = slot if filled else slot[: context - tokens]
        for kind in range(2):
            values = random(len(written), shape.kv_heads, shape.head_dim)
            cache[written // page_tokens, LAYER, kind, :, written % page_tokens] = values
        positions.append(every[context - tokens :])
        slots.append(slot[context - tokens :])
        starts.append(starts[-1] + tokens)
    layout = StepLayout(
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        page_table=table,
        max_row_tokens=max(tokens for tokens, _ in rows),
        max_context=max(context for _, context in rows),
    )
    total = starts[-1]
    pairs = shape.rotated // 2
    angles = torch.arange(layout.max_context)[:, None] / 100.0 ** (torch.arange(pairs) / pairs)
    return Step(
        rows=rows,
        shape=shape,
        layout=layout,
        cache=cache,
        q=random(total, shape.heads, shape.head_dim),
        qkv=random(total, (shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        rope=torch.cat((angles.cos(), angles.sin()), dim=-1).float(),
    )


def row_alone(layout: StepLayout, number: int) -> tuple[slice, StepLayout]:
    """Returns the tokens of a step's row, and the layout of a step of this row alone."""
    mine = slice(int(layout.row_starts[number]), int(layout.row_starts[number + 1]))
    tokens = mine.stop - mine.start
    return mine, StepLayout(
        positions=layout.positions[mine].clone(),
        slots=layout.slots[mine].clone(),
        row_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=layout.context_lens[number : number + 1].clone(),
        page_table=layout.page_table[number : number + 1].clone(),
        max_row_tokens=tokens,
        max_context=int(layout.context_lens[number]),
    )


def head_major(cache: Tensor) -> Tensor:
    """Returns a copy with the same dimensions, in whose memory a page's heads are outermost."""
    return cache.permute(0, 3, 1, 2, 4, 5).contiguous().permute(0, 2, 3, 1, 4, 5)


def with_sinks(step: Step) -> Step:
    """Returns the step with a sink for each head, of scores like those of keys."""
    return replace(step, sinks=torch.linspace(-2, 3, step.shape.heads).bfloat16().float())


def heads(heads: int, kv_heads: int, head_dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(heads, kv_heads, head_dim, head_dim**-0.5, window)


def assert_as_good(ours: Tensor, baseline: Tensor, exact: Tensor, times: float = 2) -> None:
    """Checks for no NaN, and at most `times` the largest error that PyTorch makes in the same dtype."""
    error, allowed = (ours.double() - exact).abs().max(), times * (baseline.double() - exact).abs().max()
    # If few numbers are compared PyTorch may be exact by chance: two units of float32's last digit are allowed.
    luck = 2 * exact.abs().max() * torch.finfo(torch.float32).eps
    assert error <= max(allowed, luck), f"error {error:.3g}, allowed {allowed:.3g}"
