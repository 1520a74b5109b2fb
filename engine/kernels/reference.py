"""The plain PyTorch kernels: any device, any dtype, the reference of every other implementation.

Rounding follows Hugging Face's Llama: norms and softmax run in float32 (float64 inputs stay float64) and round back to
the model's dtype where that code does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config.attention import AttentionShape
from engine.kernels.base import Feed, Kernels, Linear, StepLayout


class ReferenceKernels(Kernels):
    """Every operation in plain PyTorch; holds no state."""

    def embed(self, token_ids: Tensor, table: Tensor, feed: Feed | None = None) -> Tensor:
        """Looks up the rows of `table`, with drawn tokens from the feed."""
        if feed is not None:
            sources = feed.sources.long()
            token_ids = torch.where(sources >= 0, feed.drawn[sources.clamp(min=0)], token_ids)
        return F.embedding(token_ids, table)

    def norm_linear(self, hidden: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        """Applies RMSNorm, then the product."""
        return F.linear(rms_norm(hidden, norm, eps), linear.weight, linear.bias)

    def norm_gate_up(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        """Applies RMSNorm, the product, then silu(gate) · up."""
        gate, up = self.norm_linear(hidden, norm, eps, gate_up).chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Computes the product and adds it to `hidden`."""
        hidden += F.linear(x, linear.weight, linear.bias)

    def rope_and_store(
        self,
        qkv: Tensor,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cache: Tensor,
        layer: int,
        layout: StepLayout,
        shape: AttentionShape,
    ) -> Tensor:
        """Norms and rotates q and k, and stores k and v at their slots."""
        heads, kv_heads = shape.heads, shape.kv_heads
        per_head = qkv.view(-1, heads + 2 * kv_heads, shape.head_dim)
        q, k, v = torch.split(per_head, [heads, kv_heads, kv_heads], dim=1)
        if q_norm is not None:
            q = rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = rms_norm(k, k_norm, eps)
        cos, sin = rope[layout.positions.long()].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
        page_tokens = cache.shape[4]
        page, offset = layout.slots // page_tokens, layout.slots % page_tokens
        cache[page, layer, 0, :, offset] = rotate(k, cos, sin)
        cache[page, layer, 1, :, offset] = v
        return rotate(q, cos, sin)

    def attention(self, q: Tensor, cache: Tensor, layer: int, layout: StepLayout, shape: AttentionShape) -> Tensor:
        """Computes attention row by row over gathered keys and values."""
        starts = layout.row_starts.tolist()
        contexts = layout.context_lens.tolist()
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for row, context in enumerate(contexts):
            tokens = slice(starts[row], starts[row + 1])
            keys, values = gather_row(cache, layer, layout.page_table[row], context)
            out[tokens] = attend(q[tokens], keys, values, layout.positions[tokens], shape)
        return out.flatten(1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x · rsqrt(mean(x²) + eps) · weight over the last dimension, computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, head_dim]; cos and sin [T, 1, head_dim / 2]; dimension i pairs with i + half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def gather_row(cache: Tensor, layer: int, page_ids: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Returns copies of the keys and values of a row's `context` tokens, each [kv_heads, context, head_dim]."""
    page_tokens = cache.shape[4]
    used = page_ids[: -(-context // page_tokens)].long()
    pages = cache[used, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
    return pages[0, :, :context], pages[1, :, :context]


def attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, shape: AttentionShape) -> Tensor:
    """Computes causal attention of q [tokens, heads, head_dim] over keys and values [kv_heads, context, head_dim].

    A token at position p sees p - window + 1 .. p. → [tokens, heads, head_dim].
    """
    tokens, group = q.shape[0], shape.heads // shape.kv_heads
    by_group = q.reshape(tokens, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
    grouped = by_group.flatten(1, 2)
    scores = grouped @ keys.transpose(1, 2) * shape.scale
    seen = visible(positions, keys.shape[1], shape.window).repeat(group, 1)
    wide = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~seen, float("-inf"))
    mixed = torch.softmax(wide, dim=-1).to(q.dtype) @ values
    return mixed.view(by_group.shape).permute(2, 0, 1, 3).flatten(1, 2)


def visible(positions: Tensor, context: int, window: int | None) -> Tensor:
    """Returns the mask of `context` cached positions that each token sees: bool [tokens, context]."""
    query = positions.unsqueeze(1)
    key = torch.arange(context, device=positions.device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
