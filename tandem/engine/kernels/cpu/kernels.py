"""Kernels for CPUs, for models in float32 or bfloat16, on dedicated threads.

In steps of fewer than LONG_TOKENS tokens, a token's result does not depend on the other tokens of the step, because the
order of every sum is fixed. In longer steps, PyTorch computes the products with weights that are not packed
(`long_products.py`), so the last bits may depend on the other tokens. For an expert's products, the number of the
expert's own tokens counts instead of the step's. Attention of a row never depends on the other rows. No result depends
on the number of threads.

Sums are float32. But products with packed weights are summed as integers within blocks of 32 columns, and their input
is quantized to 8 bits in the same blocks; their order of summation is fixed in steps of any length.

The compiled kernels get addresses and check nothing, so the caller must pass tensors as the interface requires:
contiguous (for the cache, only in the last two dimensions) and of the kernels' dtype; only weights of norms may also be
float32. docs/decisions/cpu_kernels.md gives the reasons for this design, with measurements.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.base import DeferredTokens, StepLayout, is_cpu
from tandem.engine.kernels.cpu import attention as cpu_attention
from tandem.engine.kernels.cpu import jobs as cpu_jobs
from tandem.engine.kernels.cpu import latent as cpu_latent
from tandem.engine.kernels.cpu import products as cpu_products
from tandem.engine.kernels.cpu import rope as cpu_rope
from tandem.engine.kernels.cpu.attention import ITEM_FIELDS, KEYS, QUERIES
from tandem.engine.kernels.cpu.compile_ahead import compiling_alone, kernels_folder
from tandem.engine.kernels.cpu.experts import add_experts, with_wide_router
from tandem.engine.kernels.cpu.integer_units import unit_bytes
from tandem.engine.kernels.cpu.ir import LANES
from tandem.engine.kernels.cpu.long_products import LONG_TOKENS, LongProducts
from tandem.engine.kernels.cpu.panel_weight import UNIT, PanelWeight, in_panels
from tandem.engine.kernels.cpu.pool import Pool, usable_cores
from tandem.engine.kernels.cpu.products import MAX_CHUNK_ROWS
from tandem.engine.kernels.held_weight import CODES_A_BLOCK, multiplied_on_cpus
from tandem.engine.kernels.kv_cache import KvCache, LatentCache, codes_of, has_codes, part_stride
from tandem.engine.kernels.latent.sparse_reference import PlainSparse
from tandem.engine.kernels.layers import (
    AttentionLayer,
    Experts,
    ExpertsLayer,
    LatentLayer,
    Linear,
    Norm,
    with_linears,
)
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.kernels.reference import ReferenceKernels, activate, rms_norm
from tandem.engine.kernels.states.reference import PlainStates
from tandem.protocol.errors import Internal

_ALL_POSITIONS = 1 << 30
_CHUNKS_A_THREAD = 8
_LONG_CHUNK_ROWS = 64
"""Maximum number of rows of a packed weight in a chunk, in a step with many tokens: they must stay in the L2 cache."""


class CpuKernels(PlainStates, PlainSparse):
    """The kernels of one model on CPUs; they may be called by one thread at a time.

    They own scratch memory and helper threads, which end when `close` is called or the object is collected.
    """

    def __init__(self, dtype: torch.dtype, threads: int | None = None) -> None:
        """Start the helper threads, and compile the kernels or load their code from disk.

        `dtype`, float32 or bfloat16, is that of all weights and the cache. `threads` None means every core that the
        process may use.
        """
        self._dtype = dtype
        self._threads = threads or usable_cores()
        self._tag = tag = cpu_jobs.TAGS[str(dtype).removeprefix("torch.")]
        # Compile the kernels, or read the code of an earlier start, now, while the model is being loaded, and not in
        # the first step. The helper threads call them as soon as they start.
        with compiling_alone(kernels_folder()):
            self._pool = Pool(
                self._threads, lambda shared, scratch: cpu_jobs.perform(shared, scratch, cpu_jobs.HELP, tag)
            )
            self._perform(cpu_jobs.HELP)
        self._plain = ReferenceKernels()
        self._long = LongProducts(dtype, self._threads)
        self._normed = torch.empty(0, dtype=dtype)
        self._quantized = torch.empty(0, dtype=torch.uint8)
        self._items = torch.empty(0, dtype=torch.int64)
        self._partials = torch.empty(0)

    def close(self) -> None:
        """End the helper threads. Idempotent."""
        self._pool.close()
        self._long.close()

    def prepare(self, linear: Linear) -> Linear:
        """Rearrange a packed weight into panels, or dequantize it if CPUs cannot multiply its codes.

        Returns a plain weight as it is. Raises Internal if a weight or bias is strided, has another dtype, or is not in
        host memory: the machine code would misread it.
        """
        linear = replace(linear, weight=self._prepared(linear.weight))
        tensors = [tensor for tensor in (linear.weight, linear.bias) if isinstance(tensor, Tensor)]
        if not all(
            tensor.is_contiguous() and tensor.dtype == self._dtype and is_cpu(tensor.device) for tensor in tensors
        ):
            raise Internal(f"CPU kernels for {self._dtype} were given a weight or bias of another dtype, or strided.")
        return linear

    def _prepared(self, weight: Weight) -> Weight:
        if not isinstance(weight, PackedWeight):
            return weight
        return in_panels(weight) if multiplied_on_cpus(weight) else weight.dequantized(self._dtype)

    def prepare_experts(self, experts: Experts) -> Experts:
        """Prepare each weight as `prepare` does; convert the router's weight and bias to float32."""
        gate_up = self.prepare(Linear(experts.gate_up, experts.gate_up_bias)).weight
        down = self.prepare(Linear(experts.down, experts.down_bias)).weight
        return with_wide_router(with_linears(replace(experts, gate_up=gate_up, down=down), self.prepare))

    def embed(self, token_ids: Tensor, table: Tensor, feed: DeferredTokens | None = None) -> Tensor:
        """Look up the rows of `table`. Raises Internal if `feed` is given: on a CPU the host knows all tokens."""
        if feed is not None:
            raise Internal("On CPUs the tokens of a step are known before it starts.")
        return F.embedding(token_ids, table)

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Compute RMSNorm as a job, then the product, with PyTorch or as a job like `linear`."""
        if norm is None:
            return self.linear(hidden, linear)
        if _is_long(hidden, linear):
            return self.linear(self._norm(hidden, norm), linear)
        out = torch.empty(len(hidden), len(linear.weight), dtype=self._dtype)
        self._product(cpu_jobs.NORM_LINEAR, hidden, self._normed_memory(hidden.numel()), norm, linear, out)
        return out

    def norm_gate_up(self, hidden: Tensor, norm: Norm | None, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Compute RMSNorm as a job, then the gated product, with PyTorch or as a job like `linear`."""
        if norm is None:
            return self.gate_up(hidden, gate_up, activation)
        if _is_long(hidden, gate_up):
            return self._long.gate_up(self._norm(hidden, norm), gate_up, activation)
        if not _halves_are_apart(gate_up.weight):
            return _activated(self.norm_linear(hidden, norm, gate_up), activation)
        out = torch.empty(len(hidden), len(gate_up.weight) // 2, dtype=self._dtype)
        normed, gelu = self._normed_memory(hidden.numel()), activation == "gelu_tanh"
        self._product(cpu_jobs.NORM_GATE_UP, hidden, normed, norm, gate_up, out, gelu=gelu)
        return out

    def gate_up(self, x: Tensor, gate_up: Linear, activation: str) -> Tensor:
        """Return activation(g) · u with [g | u] = x · gate_upᵀ + bias → [T, intermediate]; see `activate`."""
        if activation == "relu2":
            return activate(self.linear(x, gate_up), activation)
        if _is_long(x, gate_up):
            return self._long.gate_up(x, gate_up, activation)
        if activation != "silu" or not _halves_are_apart(gate_up.weight):
            return _activated(self.linear(x, gate_up), activation)
        out = torch.empty(len(x), len(gate_up.weight) // 2, dtype=self._dtype)
        self._product(cpu_jobs.GATE_UP, x, x, None, gate_up, out)
        return out

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute the product: with PyTorch if there are many tokens and the weight is not packed, else as a job."""
        if _is_long(x, linear):
            return self._long.linear(x, linear)
        out = torch.zeros(len(x), len(linear.weight), dtype=self._dtype)
        self.linear_add(x, linear, out)
        return out

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Compute the product and add it to `hidden`, with PyTorch or as a job like `linear`."""
        if _is_long(x, linear):
            self._long.linear_add(x, linear, hidden)
        else:
            self._product(cpu_jobs.LINEAR, x, x, None, linear, hidden)

    def norm_add(self, x: Tensor, norm: Norm, hidden: Tensor) -> None:
        """Apply RMSNorm and add the result to `hidden`."""
        hidden += rms_norm(x, norm.weight, norm.eps)

    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Compute the chosen experts one after the other, each for all tokens that chose it."""
        x, router_norm = self._norm(hidden, layer.norm), layer.experts.router_norm
        routed = x if router_norm is None else self._norm(hidden, Norm(router_norm, layer.norm.eps))
        add_experts(self, x, routed, out, layer, slots)

    def rope_and_store(self, qkv: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Rotate q and k in place, and store k and v in the cache."""
        shape, rope, q_norm, k_norm = layer.shape, layer.rope, layer.q_norm, layer.k_norm
        if q_norm is not None and q_norm.numel() != shape.head_dim:
            return self._plain.rope_and_store(qkv, layer, cache, layout)
        codes, tokens, width = _int8_or_plain(cache), len(qkv), shape.heads * shape.head_dim
        self._pool.write(
            cpu_rope.ROPE, cpu_jobs.ROPE, 0, qkv.data_ptr(), rope.data_ptr(), _address(q_norm), _address(k_norm),
            _is_wide(q_norm), _layer_address(codes, layer.index), codes.stride(0), part_stride(cache), codes.stride(3),
            layout.positions.data_ptr(), layout.slots.data_ptr(), tokens, shape.heads, shape.kv_heads, shape.head_dim,
            shape.v_dim, rope.shape[1], codes.shape[4], has_codes(cache), layer.norm_eps,
        )  # fmt: skip
        self._perform(cpu_jobs.ROPE)
        return qkv[:, :width].view(tokens, shape.heads, shape.head_dim)

    def attention(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Compute the attention of all rows as one job."""
        shape, codes, tokens, rows = layer.shape, _int8_or_plain(cache), q.shape[0], len(layout.context_lens)
        out = torch.empty(tokens, shape.output_size, dtype=self._dtype)
        self._reserve_items(tokens, rows, layout.max_context, shape)
        self._pool.write(
            cpu_attention.ATTENTION, cpu_jobs.ATTENTION, 0, q.data_ptr(), q.stride(0), out.data_ptr(),
            _layer_address(codes, layer.index), codes.stride(0), part_stride(cache), codes.stride(3), codes.shape[4],
            layout.positions.data_ptr(), layout.row_starts.data_ptr(), layout.context_lens.data_ptr(),
            layout.page_table.data_ptr(), layout.page_table.stride(0), rows, shape.heads, shape.kv_heads,
            shape.head_dim, shape.v_dim, shape.window or _ALL_POSITIONS, shape.chunk or _ALL_POSITIONS,
            _address(layer.sinks), self._items.data_ptr(), self._partials.data_ptr(), has_codes(cache), shape.scale,
            shape.softcap or 0.0,
        )  # fmt: skip
        self._perform(cpu_jobs.ATTENTION)
        return out

    def latent_store(
        self, q: Tensor, latents: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout
    ) -> Tensor:
        """Store the normed latents and the rotated shared key, and rotate the last `rope` dimensions of the queries."""
        return self._plain.latent_store(q, latents, layer, cache, layout)

    def latent_attention(self, q: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout) -> Tensor:
        """Compute absorbed attention of one-token rows, and expanded attention of longer rows."""
        return cpu_latent.latent_attention(q, layer, cache, layout)

    def index_store(
        self, queries: Tensor, keys: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Store the normed and rotated index keys, and rotate the index queries."""
        return self._plain.index_store(queries, keys, layer, cache, layout)

    def _norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        """Return RMSNorm(hidden); a token's result does not depend on the other tokens."""
        out = torch.empty_like(hidden)
        self._product(cpu_jobs.NORM, hidden, out, norm, Linear(hidden), out)
        return out

    def _product(
        self,
        operation: int,
        source: Tensor,
        x: Tensor,
        norm: Norm | None,
        linear: Linear,
        out: Tensor,
        *,
        gelu: bool = False,
    ) -> None:
        """Run the job `operation` of `cpu_jobs`: a norm, a product, or both.

        With a norm, the input of the product is RMSNorm(source), which is stored in `x`, and the result replaces `out`
        [T, rows]. Without one, `x` must be `source`; the product of `cpu_jobs.LINEAR` is then added to `out`.
        """
        tokens, k = source.shape
        rows, weight = out.shape[1], linear.weight
        scale, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        arguments = (
            tokens, k, x.data_ptr(), out.data_ptr(), _codes_of(weight).data_ptr(), _address(linear.bias), rows,
            norm is None, source.data_ptr(), _address(scale), _is_wide(scale), gelu, eps,
        )  # fmt: skip
        if isinstance(weight, PanelWeight):
            step = self._code_chunk_rows(rows, tokens)
            more = self._code_arguments(weight, tokens)
            self._pool.write(cpu_products.CODE_PRODUCT, operation, weight.bits, step, *arguments, *more)
        else:
            self._pool.write(cpu_products.PRODUCT, operation, 0, self._chunk_rows(rows), *arguments)
        self._perform(operation)

    def _code_arguments(self, weight: PanelWeight, tokens: int) -> tuple[int, ...]:
        """Return the additional arguments of a product with a packed weight, and allocate its quantized input."""
        code_bytes = tokens * weight.inputs * unit_bytes() // UNIT
        scale_bytes = tokens * weight.inputs // CODES_A_BLOCK * self._partials.element_size()
        if self._quantized.numel() < code_bytes + 2 * scale_bytes:
            self._quantized = torch.empty(code_bytes + 2 * scale_bytes, dtype=torch.uint8)
        codes = self._quantized.data_ptr()
        scales = weight.scales.data_ptr() if weight.scales.numel() else 0
        return (
            scales, _address(weight.offsets), weight.factors.data_ptr(), weight.group // CODES_A_BLOCK,
            codes, codes + code_bytes, codes + code_bytes + scale_bytes,
        )  # fmt: skip

    def _perform(self, operation: int) -> None:
        cpu_jobs.perform(self._pool.shared, self._pool.scratch, operation, self._tag)

    def _chunk_rows(self, rows: int) -> int:
        """Return the number of weight rows in a chunk.

        A chunk has so few rows that all threads end at about the same time, and enough that the weight is streamed.
        """
        share = rows // (self._threads * _CHUNKS_A_THREAD)
        return min(max(share - share % 4, 8), MAX_CHUNK_ROWS)

    def _code_chunk_rows(self, rows: int, tokens: int) -> int:
        """Return the number of rows of a packed weight in a chunk, like `_chunk_rows`; a multiple of a panel's rows."""
        most = MAX_CHUNK_ROWS if tokens < LONG_TOKENS else _LONG_CHUNK_ROWS
        share = rows // (self._threads * _CHUNKS_A_THREAD)
        return min(max(share - share % LANES, LANES), most)

    def _normed_memory(self, items: int) -> Tensor:
        if self._normed.numel() < items:
            self._normed = torch.empty(items, dtype=self._dtype)
        return self._normed

    def _reserve_items(self, tokens: int, rows: int, max_context: int, shape: AttentionShape) -> None:
        """Allocate memory for the largest list of attention items (`attention.py`) that the step may have."""
        group = shape.heads // shape.kv_heads
        blocks = -(-max_context // KEYS)
        decode = rows * shape.kv_heads * -(-group // QUERIES) * blocks
        items = ITEM_FIELDS * (decode + shape.kv_heads * (-(-tokens * group // QUERIES) + rows))
        if self._items.numel() < items:
            self._items = torch.empty(items, dtype=torch.int64)
        partials = decode * min(group, QUERIES) * (shape.v_dim + 2)
        if blocks > 1 and self._partials.numel() < partials:
            self._partials = torch.empty(partials)


def _is_long(x: Tensor, linear: Linear) -> bool:
    return len(x) >= LONG_TOKENS and not isinstance(linear.weight, PanelWeight)


def _codes_of(weight: Weight) -> Tensor:
    return weight.codes if isinstance(weight, PackedWeight) else weight


def _halves_are_apart(weight: Weight) -> bool:
    """Return True if the gate rows and the up rows of a weight can be computed separately.

    It is False only for a PanelWeight in which one panel of LANES rows contains both gate rows and up rows.
    """
    return not isinstance(weight, PanelWeight) or weight.outputs // 2 % LANES == 0


def _activated(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) · up; if there are fewer than LONG_TOKENS tokens, token by token (see `experts.py`)."""
    if len(gate_up) >= LONG_TOKENS:
        return activate(gate_up, activation)
    return torch.stack([activate(token, activation) for token in gate_up])


def _layer_address(cache: Tensor, layer: int) -> int:
    return cache.data_ptr() + layer * cache.stride(1) * cache.element_size()


def _int8_or_plain(cache: KvCache) -> Tensor:
    """Return the codes or elements of a cache.

    Raises Internal if the codes are not int8, because they would be misread.
    """
    codes = codes_of(cache)
    if has_codes(cache) and codes.dtype != torch.int8:
        raise Internal(f"CPU kernels compute with int8 keys and values, not with {codes.dtype}.")
    return codes


def _is_wide(norm: Tensor | None) -> bool:
    return norm is not None and norm.dtype == torch.float32


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
