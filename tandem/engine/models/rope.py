"""The table of cosines and sines for rotary position embedding (Su et al. 2021), with context scaling."""

import math

import torch
from torch import Tensor

from tandem.engine.config.model import ModelSpec, QueryScaling, rope_of
from tandem.engine.config.rope import RopeConfig


def rope_table(rope: RopeConfig | None, dims: int, max_context: int, device: torch.device) -> Tensor:
    """Return the RoPE table [max_context, dims] float32: cosines in the first half of the columns, sines in the second.

    Both are multiplied by the attention factor. If `rope` is None, nothing is rotated: each cosine is 1, each sine 0.
    """
    if rope is None:
        return torch.cat((torch.ones(max_context, dims // 2), torch.zeros(max_context, dims // 2)), dim=-1).to(device)
    frequencies = rope_frequencies(rope, dims, max_context)
    angles = torch.outer(torch.arange(max_context, dtype=torch.float32), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table * rope.attention_factor).to(device)


def query_factors(scaling: QueryScaling, max_context: int, device: torch.device) -> Tensor:
    """Return the factor of the queries at each position: [max_context] float32."""
    intervals = torch.arange(scaling.offset, scaling.offset + max_context, device=device) // scaling.interval
    return 1 + scaling.beta * torch.log1p(intervals.float())


def rope_frequencies(rope: RopeConfig, head_dim: int, max_context: int) -> Tensor:
    """Return the rotation of each pair of dimensions in radians per position: float32 [head_dim / 2] on the host.

    The frequencies are scaled as `rope.kind` says, for contexts of up to `max_context` tokens.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "proportional":
        plain[int(rope.fraction * head_dim // 2) :] = 0.0
        return plain / rope.factor
    if rope.kind == "longrope":
        # Cached keys keep their rotation, so all requests have the same factors, whatever their lengths.
        return plain / torch.tensor(rope.long_factors if _is_long(rope, max_context) else rope.short_factors)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Scale frequencies as Llama 3.1 does: low ones are divided by the factor, high ones kept, others interpolated."""
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    slow = wavelength > rope.original_context / rope.low_freq_factor
    fast = wavelength < rope.original_context / rope.high_freq_factor
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Scale frequencies as YaRN does (arXiv:2309.00071, section 3.2).

    High frequencies are kept, low ones are divided by the factor, and those between are interpolated.
    """

    def dimension(rotations: float) -> float:
        inner = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(inner) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # Equal ends would divide by zero; any tiny width gives the same step function.
    width = (high - low) or 0.001
    divided = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return plain / rope.factor * divided + plain * (1 - divided)


def rope_facts(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """Return, as (name, value), which factors of LongRoPE rotate the keys; empty for a model without LongRoPE.

    They depend on the engine's context (`--max-model-len`), so the same model may have either.
    """
    ropes = (rope_of(layer.attention) for layer in spec.layers)
    # All layers of a model have the same factors.
    long = {_is_long(rope, spec.max_context) for rope in ropes if rope is not None and rope.kind == "longrope"}
    return tuple(("longrope_factors", "long" if is_long else "short") for is_long in long)


def _is_long(rope: RopeConfig, max_context: int) -> bool:
    return max_context > rope.original_context
