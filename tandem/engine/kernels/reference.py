"""Kernels in plain PyTorch, for any device and dtype: the reference for all other implementations.

Rounding follows transformers: norms and softmax are computed in float32 (float64 inputs stay float64) and rounded back
to the model's dtype where transformers does so.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.model import SWIGLU_ALPHA, SWIGLU_LIMIT, ExpertRouter, MixtureOfExperts
from tandem.engine.kernels.base import DeferredTokens, StepLayout
from tandem.engine.kernels.kv_cache import KvCache, LatentCache, QuantizedKv, dequantize_kv, layer_part, quantize_kv
from tandem.engine.kernels.latent.sparse_reference import PlainSparse
from tandem.engine.kernels.layers import (
    AttentionLayer,
    Experts,
    ExpertsLayer,
    LatentLayer,
    Linear,
    Norm,
)
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.states.reference import PlainStates
from tandem.engine.kernels.unpacked import as_matrix


class ReferenceKernels(PlainStates, PlainSparse):
    """Every operation in plain PyTorch. It holds no state, and dequantizes packed weights in each product."""

    def embed(self, token_ids: Tensor, table: Tensor, feed: DeferredTokens | None = None) -> Tensor:
        """Look up the rows of `table`; `feed` gives the ids of tokens that only the device knows."""
        if feed is not None:
            token_ids = feed.tokens(token_ids)
        return F.embedding(token_ids, table)

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Apply RMSNorm, then the product."""
        return self.linear(hidden if norm is None else rms_norm(hidden, norm.weight, norm.eps), linear)

    def norm_gate_up(self, hidden: Tensor, norm: Norm | None, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Apply RMSNorm, the product, then activation(gate) · up."""
        return activate(self.norm_linear(hidden, norm, gate_up), activation)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute the product, with a quantized input if the weight has `quantized_inputs`."""
        weight = linear.weight
        if isinstance(weight, PackedWeight) and weight.quantized_inputs:
            wide = torch.promote_types(x.dtype, torch.float32)
            bias = None if linear.bias is None else linear.bias.to(wide)
            return F.linear(rounded_input(x, weight).to(wide), weight.dequantized(wide), bias).to(x.dtype)
        return F.linear(x, as_matrix(weight, x.dtype), linear.bias)

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Compute the product and add it to `hidden`."""
        hidden += self.linear(x, linear)

    def norm_add(self, x: Tensor, norm: Norm, hidden: Tensor) -> None:
        """Apply RMSNorm and add the result to `hidden`."""
        hidden += rms_norm(x, norm.weight, norm.eps)

    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Compute the chosen experts one after the other, each for all tokens that chose it."""
        experts, spec = layer.experts, layer.spec
        x = rms_norm(hidden, layer.norm.weight, layer.norm.eps)
        routed = x if experts.router_norm is None else rms_norm(hidden, experts.router_norm, layer.norm.eps)
        logits = router_logits(routed, experts.router, experts.router_bias)
        weights, chosen = choose_experts(logits, experts.choice_bias, spec)
        weights = scaled_weights(weights, chosen, experts)
        inputs = x if experts.latent_down is None else self.linear(x, experts.latent_down)
        mixed = torch.zeros_like(inputs)
        valid = (slots >= 0).unsqueeze(1)
        count_experts(chosen[valid.squeeze(1)], experts)
        for expert in sorted(set(chosen[valid.squeeze(1)].flatten().tolist()).intersection(spec.local_experts)):
            tokens, ranks = torch.where((chosen == expert) & valid)
            index = expert - spec.local_experts.start
            weight, gate_up = weights[tokens, ranks, None].to(x.dtype), experts.gate_up[index]
            source = inputs[tokens] * weight if spec.router.on_input else inputs[tokens]
            inner = self.linear(source, Linear(gate_up, _row(experts.gate_up_bias, index)))
            down = Linear(experts.down[index], _row(experts.down_bias, index))
            output = self.linear(activate(inner, spec.activation), down)
            mixed.index_add_(0, tokens, output if spec.router.on_input else output * weight)
        if experts.latent_up is not None:
            mixed = self.linear(mixed, experts.latent_up)
        if experts.shared_gate_up is not None and experts.shared_down is not None:
            shared = self.linear(
                activate(self.linear(x, experts.shared_gate_up), spec.shared_activation), experts.shared_down
            )
            if experts.shared_gate is not None:
                shared = torch.sigmoid(F.linear(x, experts.shared_gate)) * shared
            mixed += shared
        out += mixed

    def rope_and_store(self, qkv: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Apply norms and rotary embedding to q and k, and store k and v at their slots."""
        shape = layer.shape
        parts = torch.split(qkv, list(shape.qkv_rows), dim=1)
        dims = (shape.head_dim, shape.head_dim, shape.v_dim)
        q, k, v = (x.view(len(x), x.shape[1] // dim, dim) for x, dim in zip(parts, dims, strict=True))
        if layer.q_norm is not None:
            q = _norm_heads(q, layer.q_norm, layer.norm_eps)
        if layer.k_norm is not None:
            k = _norm_heads(k, layer.k_norm, layer.norm_eps)
        cos, sin = layer.rope[layout.positions.long()].to(qkv.dtype).unsqueeze(1).chunk(2, dim=-1)
        if not shape.kv_heads:
            return rotate(q, cos, sin)
        page_tokens = cache.shape[4]
        page, offset = layout.slots // page_tokens, layout.slots % page_tokens
        for part, values in enumerate((rotate(k, cos, sin), v)):
            stored = layer_part(cache, layer.index, part)
            if isinstance(stored, QuantizedKv):
                stored.codes[page, :, offset], stored.scales[page, :, offset] = quantize_kv(values, stored.codes.dtype)
            else:
                stored[page, :, offset] = values
        return rotate(q, cos, sin)

    def attention(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Compute attention row by row, over copies of the row's keys and values."""
        shape, starts, contexts = layer.shape, layout.row_starts.tolist(), layout.context_lens.tolist()
        out = q.new_empty(len(q), shape.heads, shape.v_dim)
        for row, context in enumerate(contexts):
            tokens = slice(starts[row], starts[row + 1])
            first = first_read(context, starts[row + 1] - starts[row], shape, cache.shape[4])
            keys, values = gather_row(cache, layer.index, layout.page_table[row], context, first, q.dtype)
            out[tokens] = attend(q[tokens], keys, values, layout.positions[tokens], shape, layer.sinks, first)
        return out.flatten(1)

    def latent_store(
        self, q: Tensor, latents: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout
    ) -> Tensor:
        """Store the normed latents and the rotated shared key, and rotate the last `rope` dimensions of the queries."""
        shape = layer.shape
        cos, sin = layer.rope[layout.positions.long()].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
        page_tokens = cache.shape[4]
        page, offset = layout.slots // page_tokens, layout.slots % page_tokens
        latent, key = latents[:, : shape.latent], latents[:, shape.latent :]
        normed = rms_norm(latent, layer.norm.weight, layer.norm.eps)
        values = torch.cat((normed, rotate(key.unsqueeze(1), cos, sin).squeeze(1)), dim=-1)
        stored = layer_part(cache, layer.index, 0)
        if isinstance(stored, QuantizedKv):
            stored.codes[page, 0, offset], stored.scales[page, 0, offset] = quantize_kv(values, stored.codes.dtype)
        else:
            stored[page, 0, offset, : shape.projected] = values
        per_head = q.reshape(-1, shape.heads, shape.query)
        return torch.cat((per_head[..., : shape.nope], rotate(per_head[..., shape.nope :], cos, sin)), dim=-1)

    def latent_attention(self, q: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout) -> Tensor:
        """Expand each row's latents to the keys and values of all heads, and attend to them."""
        shape, starts = layer.shape, layout.row_starts.tolist()
        out = q.new_empty(len(q), shape.heads * shape.v_dim)
        for row, context in enumerate(layout.context_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            stored = gather_latents(cache, layer.index, layout.page_table[row], context, q.dtype)
            out[tokens] = attend_latents(q[tokens], stored, layer.kv_up, layout.positions[tokens], shape)
        return out

    def index_store(
        self, queries: Tensor, keys: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Store the normed and rotated index keys, and rotate the index queries."""
        shape, norm = layer.shape.index, layer.index_norm
        assert shape is not None
        assert norm is not None
        cos, sin = layer.rope[layout.positions.long()].to(keys.dtype).unsqueeze(1).chunk(2, dim=-1)
        normed = F.layer_norm(keys, (shape.dim,), norm.weight, norm.bias, norm.eps)
        page_tokens = cache.shape[4]
        page, offset = layout.slots // page_tokens, layout.slots % page_tokens
        rotated = rotate(normed.unsqueeze(1), cos, sin).squeeze(1)
        cache[page, layer.index, 0, 0, offset, layer.shape.projected :] = rotated
        return rotate(queries.view(-1, shape.heads, shape.dim), cos, sin)


def rounded_input(x: Tensor, weight: PackedWeight) -> Tensor:
    """Quantize x [T, K] as products with a weight of `quantized_inputs` do, and return code · scale in float32.

    The codes have the dtype of the weight's codes, and one scale per group of the weight's columns, as in 8-bit KV
    (`quantize_kv`).
    """
    grouped = x.view(len(x), -1, weight.group)
    return dequantize_kv(*quantize_kv(grouped, weight.codes.dtype), torch.float32).view(x.shape)


def activate(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) · up for [gate | up] [T, 2·I] → [T, I]; `relu2` has no gate, for it [T, I] → [T, I]."""
    if activation == "relu2":
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * (gate * torch.sigmoid(gate * SWIGLU_ALPHA))
    return (F.gelu(gate, approximate="tanh") if activation == "gelu_tanh" else F.silu(gate)) * up


def router_logits(x: Tensor, router: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · routerᵀ + bias in at least float32 → [T, experts]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), router.to(wide), None if bias is None else bias.to(wide))


def choose_experts(logits: Tensor, choice_bias: Tensor | None, spec: MixtureOfExperts) -> tuple[Tensor, Tensor]:
    """Return the weights and the ids of each token's experts, each [T, top_k], as `ExpertRouter` defines them."""
    router = spec.router
    if router.score == "softmax_of_top_k":
        top_logits, chosen = logits.topk(spec.top_k, dim=-1)
        return top_logits.softmax(-1) * router.scaling, chosen
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
    ranked = scores if choice_bias is None else scores + choice_bias
    chosen = _within_groups(ranked, router).topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.scaling, chosen


def scaled_weights(weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Return the weights [T, top_k] of the chosen experts, multiplied by `expert_scales` if there are any."""
    return weights if experts.expert_scales is None else weights * experts.expert_scales[chosen]


def count_experts(chosen: Tensor, experts: Experts) -> None:
    """Add the number of tokens that chose each expert to `experts.tokens`, if tokens are counted.

    `chosen` [any, top_k] holds expert ids.
    """
    if experts.tokens is not None:
        experts.tokens.add_(torch.bincount(chosen.flatten(), minlength=len(experts.tokens)))


def _within_groups(ranked: Tensor, router: ExpertRouter) -> Tensor:
    """Return the scores, with -inf for experts outside each token's best groups."""
    if router.groups == 1:
        return ranked
    grouped = ranked.view(len(ranked), router.groups, -1)
    best = grouped.amax(-1) if router.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(router.top_groups, dim=-1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


def _row(stacked: Tensor | None, index: int) -> Tensor | None:
    return None if stacked is None else stacked[index]


def _norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to x [T, heads, head_dim]: to each head, or to whole rows if the weight is as long as a row."""
    if weight.numel() == x.shape[-1]:
        return rms_norm(x, weight, eps)
    return rms_norm(x.flatten(1), weight, eps).view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x · rsqrt(mean(x²) + eps) · weight over the last dimension, computed in at least float32.

    A weight of another dtype than x's is multiplied before the result is rounded, a weight of x's dtype after it.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype != x.dtype:
        return (weight * scaled).to(x.dtype)
    return weight * scaled.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of x [T, heads, head_dim]: dimension i is paired with i + rotated / 2.

    cos and sin are [T, 1, rotated / 2]. Dimensions from `rotated` on stay unchanged.
    """
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotated:]), dim=-1)


def first_read(context: int, tokens: int, shape: AttentionShape, page_tokens: int) -> int:
    """Return the first position of the first page that the last `tokens` tokens of a context may read.

    Earlier pages must not be read, because they may belong to other requests.
    """
    return shape.first_seen(context - tokens) // page_tokens * page_tokens


def gather_row(
    cache: KvCache, layer: int, page_ids: Tensor, context: int, first: int = 0, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return copies of a row's keys and values at the positions `first` .. `context` - 1; `first` begins a page.

    Both are [kv_heads, context - first, dim]; those of a quantized cache are dequantized to `dtype`.
    """
    page_tokens = cache.shape[4]
    used = page_ids[first // page_tokens : -(-context // page_tokens)].long()

    def gathered(stored: Tensor | QuantizedKv) -> Tensor:
        if isinstance(stored, QuantizedKv):
            assert dtype is not None
            pages = dequantize_kv(stored.codes[used], stored.scales[used], dtype)
        else:
            pages = stored[used]
        return pages.transpose(0, 1).flatten(1, 2)[:, : context - first]

    return gathered(layer_part(cache, layer, 0)), gathered(layer_part(cache, layer, 1))


def gather_latents(cache: LatentCache, layer: int, page_ids: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """Return a copy [context, latent + rope], in `dtype`, of the latents of a row's `context` tokens."""
    page_tokens = cache.shape[4]
    used = page_ids[: -(-context // page_tokens)].long()
    stored = layer_part(cache, layer, 0)
    if isinstance(stored, QuantizedKv):
        pages = dequantize_kv(stored.codes[used, 0], stored.scales[used, 0], dtype)
    else:
        pages = stored[used, 0].to(dtype)
    return pages.flatten(0, 1)[:context]


def attend_latents(q: Tensor, stored: Tensor, kv_up: Tensor, positions: Tensor, shape: LatentShape) -> Tensor:
    """Compute causal attention of a row's q [tokens, heads, nope + rope] to its latents → [tokens, heads·v_dim].

    stored [context, latent + rope] is expanded to the keys and values of all heads with kv_up [heads, nope + v_dim,
    latent].
    """
    per_head = AttentionShape(shape.heads, shape.heads, shape.query, shape.scale)
    expanded = torch.einsum("cl,hdl->hcd", stored[:, : shape.latent], kv_up)
    rotated = stored[:, shape.latent :].expand(shape.heads, -1, -1)
    keys = torch.cat((expanded[..., : shape.nope], rotated), dim=-1)
    return attend(q, keys, expanded[..., shape.nope :], positions, per_head).flatten(1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    shape: AttentionShape,
    sinks: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Compute causal attention of q [tokens, heads, head_dim] over keys and values [kv_heads, n, any dim].

    The keys are those of the positions from `first` on. A token at position p sees the positions p - window + 1 .. p,
    or those of its chunk up to p. Returns [tokens, heads, dim of values].
    """
    tokens, group = q.shape[0], shape.heads // shape.kv_heads
    by_group = q.reshape(tokens, shape.kv_heads, group, shape.head_dim).permute(1, 2, 0, 3)
    scores = by_group.flatten(1, 2) @ keys.transpose(1, 2) * shape.scale
    if shape.softcap is not None:
        scores = (scores / shape.softcap).tanh() * shape.softcap
    seen = visible(positions, range(first, first + keys.shape[1]), shape).repeat(group, 1)
    wide = scores.to(torch.promote_types(q.dtype, torch.float32)).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide.dtype).view(shape.kv_heads, group, 1).expand(-1, -1, tokens).flatten(1)
        wide = torch.cat((wide, column.unsqueeze(-1)), dim=-1)
    weights = torch.softmax(wide, dim=-1)[..., : keys.shape[1]]
    mixed = weights.to(q.dtype) @ values
    return mixed.view(shape.kv_heads, group, tokens, -1).permute(2, 0, 1, 3).flatten(1, 2)


def visible(positions: Tensor, keys: range, shape: AttentionShape) -> Tensor:
    """Return a mask [tokens, keys] of the cached positions `keys` that each token sees."""
    query = positions.unsqueeze(1)
    key = torch.arange(keys.start, keys.stop, device=positions.device)
    seen = key <= query
    if shape.chunk is not None:
        return seen & (key // shape.chunk == query // shape.chunk)
    return seen if shape.window is None else seen & (key > query - shape.window)
