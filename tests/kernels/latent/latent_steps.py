"""Random steps of latent attention: rows on shuffled pages, a cache that is NaN in all memory never written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import LatentCache, QuantizedKv
from tandem.engine.kernels.layers import LatentLayer, Norm
from tests.kernels.quantized_kv.quantized_caches import moved, quantized

LAYERS, LAYER = 3, 1
EPS = 1e-6
TINY = LatentShape(heads=4, latent=32, rope=16, nope=16, v_dim=16, scale=0.2)
ODD = LatentShape(heads=3, latent=48, rope=8, nope=24, v_dim=40, scale=0.2)
"""No dimension is a power of two."""
MANY = LatentShape(heads=72, latent=32, rope=16, nope=16, v_dim=16, scale=0.2)
"""More heads than a tile has rows."""
REAL = LatentShape(heads=2, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)


@dataclass(frozen=True)
class LatentStep:
    """A step's inputs in float64; `rows` are (tokens, context with them), of which the first `single` have one."""

    rows: Sequence[tuple[int, int]]
    shape: LatentShape
    layout: StepLayout
    cache: Tensor
    q: Tensor
    """[T, heads·(nope + rope)], rotated or not."""
    latents: Tensor
    kv_up: Tensor
    norm: Tensor
    rope: Tensor
    codes: QuantizedKv | None = None
    """The cache that is used instead of `cache`."""

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> "LatentStep":
        """Returns the step with its tensors in `dtype`; angles stay in float32."""
        names = ("positions", "slots", "row_starts", "context_lens", "page_table")
        tensors = {name: getattr(self.layout, name).to(device) for name in names}
        inputs = {name: getattr(self, name).to(device, dtype) for name in ("cache", "q", "latents", "kv_up", "norm")}
        codes = None if self.codes is None else moved(self.codes, torch.device(device))
        layout = replace(self.layout, **tensors)
        return replace(self, layout=layout, rope=self.rope.to(device), codes=codes, **inputs)

    def quantized(self, kind: torch.dtype) -> "LatentStep":
        """Returns the step with its cache as 8-bit codes; scales that were never written are NaN."""
        return replace(self, codes=quantized(self.cache, kind))

    @property
    def held(self) -> LatentCache:
        """The cache that kernels get."""
        return self.cache if self.codes is None else self.codes

    @property
    def layer(self) -> LatentLayer:
        """The layer of the cache that the step has latents of."""
        return LatentLayer(LAYER, self.shape, self.rope, Norm(self.norm, EPS), self.kv_up)

    @property
    def queries(self) -> Tensor:
        """[T, heads, nope + rope]."""
        return self.q.unflatten(1, (self.shape.heads, self.shape.query))


def make_latent_step(
    rows: Sequence[tuple[int, int]],
    shape: LatentShape,
    *,
    page_tokens: int = 16,
    filled: bool = True,
    known: bool = True,
    seed: int = 0,
) -> LatentStep:
    """Returns rows with their context in the cache (`filled`: this step's tokens too), everything else NaN.

    A row of (1, 0) is padding. `known`: the layout knows how many tokens the rows had in the cache.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        # Values that bfloat16 holds exactly, so that every dtype starts from the same numbers.
        return (torch.randn(*sizes, generator=generator) * scale).bfloat16().double()

    columns = max(1, *(-(-context // page_tokens) for _, context in rows))
    pages = columns * len(rows) + 3
    shuffled = torch.randperm(pages, generator=generator)
    table = torch.zeros(len(rows), columns, dtype=torch.int32)
    cache = torch.full((pages, LAYERS, 1, 1, page_tokens, shape.cached), float("nan")).double()
    positions, slots, starts = [], [], [0]
    for number, (tokens, context) in enumerate(rows):
        used = -(-context // page_tokens)
        table[number, :used] = shuffled[number * columns : number * columns + used]
        every = torch.arange(context)
        slot = table[number, every // page_tokens].long() * page_tokens + every % page_tokens
        written = slot if filled else slot[: max(0, context - tokens)]
        cache[written // page_tokens, LAYER, 0, 0, written % page_tokens] = random(len(written), shape.cached)
        positions.append(every[context - tokens :] if context else torch.zeros(tokens, dtype=torch.long))
        slots.append(slot[context - tokens :] if context else torch.full((tokens,), -1))
        starts.append(starts[-1] + tokens)
    single = next((number for number, (tokens, _) in enumerate(rows) if tokens > 1), len(rows))
    longest = max(context for _, context in rows)
    layout = StepLayout(
        positions=torch.cat(positions).int(),
        slots=torch.cat(slots),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        page_table=table,
        max_row_tokens=max(tokens for tokens, _ in rows),
        max_context=longest,
        single_rows=single,
        max_cached=max((context - tokens for tokens, context in rows[single:]), default=0) if known else None,
    )
    angles = torch.arange(longest + 1)[:, None] / 100.0 ** (torch.arange(shape.rope // 2) / (shape.rope // 2))
    total = starts[-1]
    return LatentStep(
        rows=rows,
        shape=shape,
        layout=layout,
        cache=cache,
        q=random(total, shape.heads * shape.query),
        latents=random(total, shape.projected),
        kv_up=random(shape.heads, shape.nope + shape.v_dim, shape.latent, scale=shape.latent**-0.5),
        norm=random(shape.latent),
        rope=torch.cat((angles.cos(), angles.sin()), dim=-1).float(),
    )
