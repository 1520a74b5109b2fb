"""Gated DeltaNet of long rows by fla-core, which computes chunks of tokens with matrix products.

fla-core is the core package of flash-linear-attention. It is given the chunks of a step, because it would otherwise
wait for the device to count them.
"""

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.engine.config.state_layers import GatedDeltaNet
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.fallback import failure_of, why_not_imported
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.projections import RowSpan, projections_of

log = logging.getLogger(__name__)

Rule = Callable[..., tuple[Tensor, Tensor]]
"""`fla.ops.gated_delta_rule.chunk_gated_delta_rule`."""
_CHUNK = 64
"""The number of tokens of a chunk of fla-core."""
_COMPILED_TOKENS = 512
_MOST_KEYS = 256
"""The largest key dimension that fla-core computes."""
_SCALES = {1.0: False, 2.0: True}
"""The supported `GatedDeltaNet.step_scale`, and fla-core's argument `allow_neg_eigval` for them."""


@dataclass(frozen=True, slots=True)
class Gates:
    """The step sizes and decays of a step's tokens before their activations, and what the activations need."""

    step: Tensor
    """[1, T, value heads], before sigmoid."""
    decay: Tensor
    """[1, T, value heads], before the bias and softplus."""
    decay_log: Tensor
    step_bias: Tensor
    step_scale: float


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of the rows of a span.

    starts [rows + 1] int64: the first token of each row, counted from the span's first, and the number of tokens
    table  [chunks, 2] int64: the row of each chunk, and the number of the chunk in its row. There are at most as many
           chunks as the tokens of the rows may need; those that are not needed come after the chunks of the last row.
    """

    starts: Tensor
    table: Tensor


def chunks_of(row_starts: Tensor, tokens: int) -> Chunks:
    """Return the chunks of rows with these `row_starts` [rows + 1], which have `tokens` tokens in all."""
    starts = (row_starts - row_starts[0]).long()
    before = torch.nn.functional.pad(((starts.diff() + _CHUNK - 1) // _CHUNK).cumsum(0), (1, 0))
    number = torch.arange(tokens // _CHUNK + len(starts) - 1, device=starts.device)
    row = (torch.searchsorted(before, number, right=True) - 1).clamp(max=len(starts) - 2)
    return Chunks(starts, torch.stack((row, number - before[row]), 1))


class ChunkedDelta:
    """Gated DeltaNet of rows with many tokens. Its only state is the chunks of the current step, for each thread."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._step = threading.local()

    def begin_step(self, layout: StepLayout, span: RowSpan) -> None:
        """Prepare a step whose rows in `span` have many tokens. Called once before the step's first layer."""
        self._step.chunks = chunks_of(layout.row_starts[span.first :], len(layout.positions) - span.first)

    def mix(
        self,
        convolved: Tensor,
        projected: Tensor,
        layer: RecurrentLayer,
        cache: StateCache,
        layout: StepLayout,
        span: RowSpan,
    ) -> Tensor:
        """Return the outputs [T - span.first, inner] of the span's rows before the norm, and write their states.

        convolved has q, k and v of the rows as `convolve` writes them; projected [T, sum(projected)]. The states of
        padding rows are written to the last page, which no request has.
        """
        spec, places, states = layer.spec, projections_of(layer.spec), cache.states
        assert isinstance(spec, GatedDeltaNet)
        assert states is not None
        assert layout.state_pages is not None
        tokens = len(convolved)
        heads = spec.key_heads, spec.key_heads, spec.value_heads
        widths = spec.key_dim, spec.key_dim, spec.value_dim
        parts = convolved.view(-1).split_with_sizes(
            [tokens * count * width for count, width in zip(heads, widths, strict=True)]
        )
        q, k, v = (part.view(1, tokens, count, -1) for part, count in zip(parts, heads, strict=True))
        step, decay = projected[None, span.first :, places.step :].chunk(2, -1)
        read, write = layout.state_pages[span.first : span.first + span.rows].long().unbind(1)
        before = states[read.clamp(min=0), layer.index].masked_fill(read.view(-1, 1, 1, 1, 1) < 0, 0.0)
        assert layer.decay_log is not None
        assert layer.step_bias is not None
        gates = Gates(step, decay, layer.decay_log, layer.step_bias, spec.step_scale)
        out, after = self.compute(q, k, v, gates, before.flatten(1, 2), self._step.chunks)
        states[write, layer.index] = after.view_as(before)
        return out.view(tokens, spec.inner)

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, states: Tensor, chunks: Chunks
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [1, T, value heads, V] and the new states of the rows.

        q and k [1, T, key heads, K] are not normalized, v is [1, T, value heads, V], and states is
        [rows, value heads, K, V] float32.
        """
        return self._rule(
            q,
            k,
            v,
            gates.decay,
            gates.step,
            initial_state=states,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=_SCALES[gates.step_scale],
            use_gate_in_kernel=True,
            A_log=gates.decay_log,
            dt_bias=gates.step_bias,
            cu_seqlens=chunks.starts,
            chunk_indices=chunks.table,
        )

    def compile(self, spec: GatedDeltaNet, device: torch.device, dtype: torch.dtype) -> None:
        """Compile and tune the kernels with a short row; their tiles do not depend on the number of tokens."""
        tokens = _COMPILED_TOKENS
        wide = torch.zeros(spec.value_heads, device=device)
        q = torch.zeros(1, tokens, spec.key_heads, spec.key_dim, dtype=dtype, device=device)
        v = torch.zeros(1, tokens, spec.value_heads, spec.value_dim, dtype=dtype, device=device)
        gate = torch.zeros(1, tokens, spec.value_heads, dtype=dtype, device=device)
        states = torch.zeros(1, spec.value_heads, spec.key_dim, spec.value_dim, device=device)
        chunks = chunks_of(torch.tensor([0, tokens], device=device), tokens)
        with torch.inference_mode():
            self.compute(q, q, v, Gates(gate, gate, wide, wide, spec.step_scale), states, chunks)


def choose_chunked_delta(
    device: torch.device, dtype: torch.dtype, specs: Collection[GatedDeltaNet]
) -> ChunkedDelta | None:
    """Return fla-core's kernels for layers with these specs, not compiled yet; None where they cannot be used.

    The choice is logged.
    """
    reason = _why_not(device, dtype, specs)
    if reason:
        log.warning("prompts of Gated DeltaNet: one token after the other, which is slow (%s)", reason)
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    log.info("prompts of Gated DeltaNet: fla-core, in chunks")
    return ChunkedDelta(chunk_gated_delta_rule)


def compiled(
    chosen: ChunkedDelta | None, specs: Collection[GatedDeltaNet], device: torch.device, dtype: torch.dtype
) -> ChunkedDelta | None:
    """Compile and tune the kernels of `chosen` for layers with these specs, and return it; None if that fails."""
    if chosen is None:
        return None
    failures = [failure_of(partial(chosen.compile, spec, device, dtype)) for spec in specs]
    if not any(failures):
        return chosen
    log.warning("prompts of Gated DeltaNet: one token after the other, which is slow (fla-core: %s)", max(failures))
    return None


def _why_not(device: torch.device, dtype: torch.dtype, specs: Collection[GatedDeltaNet]) -> str:
    if dtype not in {torch.bfloat16, torch.float16}:
        return "fla-core computes bfloat16 and float16 only"
    if device.type != "cuda":
        return "fla-core computes on GPUs"
    if any(spec.key_dim > _MOST_KEYS for spec in specs):
        return f"fla-core computes key dimensions up to {_MOST_KEYS}"
    if any(spec.step_scale not in _SCALES for spec in specs):
        return "fla-core computes step sizes of at most 1 or 2"
    return why_not_imported("fla.ops.gated_delta_rule", "fla-core")
