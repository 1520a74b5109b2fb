"""Kernels for NVIDIA GPUs: weight-streaming Triton products for few tokens, cuBLAS for many, fused row-wise kernels.

Rows of one token use paged decode attention in Triton, longer rows flash-attn-4.
"""

from functools import cached_property, partial

import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.attention.prefill_attention import (
    FlashPrefill,
    PrefillAttention,
    has_flash_kernel,
    leaves_idle,
)
from tandem.engine.kernels.attention.quantized_prefill import QuantizedPrefill, make_copies
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import group_rows, make_group_plan
from tandem.engine.kernels.base import DeferredTokens, Kernels, StepLayout
from tandem.engine.kernels.experts import packed_experts
from tandem.engine.kernels.experts.triton_experts import ExpertKernels
from tandem.engine.kernels.fallback import why_no_flash
from tandem.engine.kernels.kv_cache import KvCache, LatentCache, StateCache, is_quantized
from tandem.engine.kernels.latent.latent_kernels import LatentKernels
from tandem.engine.kernels.layers import (
    AttentionLayer,
    DenseLayer,
    Experts,
    ExpertsLayer,
    IndexQueries,
    LatentLayer,
    Linear,
    Norm,
    RecurrentLayer,
)
from tandem.engine.kernels.libraries import Libraries, Wanted
from tandem.engine.kernels.linear import triton_linear
from tandem.engine.kernels.linear.gated_product import GatedProduct
from tandem.engine.kernels.linear.triton_activation import gelu_mul
from tandem.engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS, streams
from tandem.engine.kernels.packed import products, scaled_products
from tandem.engine.kernels.packed.products import dequantized_for
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import activate
from tandem.engine.kernels.rowwise import triton_rope
from tandem.engine.kernels.rowwise.triton_embed import embed
from tandem.engine.kernels.rowwise.triton_norm import norm_add, rms_norm
from tandem.engine.kernels.second_stream import SecondStream
from tandem.engine.kernels.states.state_kernels import StateKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.protocol.errors import InvalidArgument

_HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
"""The head dims that the kernels support."""
_ONE_STREAM = SecondStream(None)


class CudaKernels(Kernels):
    """The kernels of one model on one GPU; one thread calls them on one stream.

    Only trial steps at the start (`tandem/engine/cuda/compile_ahead.py`) call them from several threads. They own
    scratch memory that all layers share.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: torch.device,
        dtype: torch.dtype,
        page_tokens: int,
        max_decode_rows: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the scratch memory, and start the compilation of the libraries' kernels in the background.

        `max_decode_rows` is the maximum number of one-token rows that decode attention computes in a step. `dtype` is
        that of the activations, `kv_dtype` that of the cache (None = `dtype`). Raises InvalidArgument if no kernel
        supports a head dim of the model.
        """
        wrong = {dim for shape in model.attention_shapes for dim in (shape.head_dim, shape.v_dim)} - set(_HEAD_DIMS)
        if wrong:
            raise InvalidArgument(
                "model", f"has head dim {min(wrong)}; on GPUs {', '.join(map(str, _HEAD_DIMS))} are served."
            )
        self._dtype = dtype
        self._max_decode_rows = max_decode_rows
        self._device, self._kv_dtype = device, kv_dtype
        self._pdl = overlaps_launches()
        self._has_states = model.has_states
        flash = all(has_flash_kernel(shape) and shape.chunk is None for shape in model.attention_shapes)
        self._waits_in_prompts = not flash
        self._experts = ExpertKernels(self._pdl)
        gpu = device.type == "cuda"
        self._second = SecondStream(device) if gpu else _ONE_STREAM
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if gpu else 0
        wanted = Wanted(model, device, dtype, page_tokens, self._pdl)
        self._decode = {
            shape: DecodeAttention(shape, max_decode_rows, device, dtype, self._pdl, early=True, kv_dtype=kv_dtype)
            for shape in model.attention_shapes
        }
        self._grouped: dict[tuple[AttentionShape, int], DecodeAttention] = {}
        """Decode attention of rows that verify draft tokens, by shape and by the maximum number of rows in a group."""
        self._copies: Tensor | None = None
        if kv_dtype is not None and is_quantized(kv_dtype) and not why_no_flash(device, dtype):
            self._copies = make_copies(model, page_tokens, dtype, device)
        # Libraries take seconds to import and to compile, while weights are loaded and other kernels compiled.
        libraries = Libraries(wanted)
        self._prefill_soon, self._gated_soon = libraries.attention, libraries.gated_product
        self._states = StateKernels(self._pdl, libraries.chunked_delta)
        self._latent = LatentKernels(
            model.latent_shapes, model.sparse_shapes, device, dtype, self._pdl, libraries.latent_blocks
        )

    @cached_property
    def _prefill(self) -> PrefillAttention:
        chosen = self._prefill_soon.result()
        if self._copies is not None and isinstance(chosen, FlashPrefill):
            return QuantizedPrefill(chosen, self._copies)
        return chosen

    @cached_property
    def _gated(self) -> GatedProduct:
        return self._gated_soon.result()

    @property
    def prompts_capturable(self) -> bool:
        """True if prefill uses flash-attn-4 or latent attention, whose launches do not depend on row lengths.

        The prefill of attention that flash-attn-4 does not compute does depend on them.
        """
        # Wait before anything is captured: a thread that uses the device during the capture would invalidate it.
        self._gated_soon.result()
        self._states.wait()
        if self._waits_in_prompts:
            return False
        return not self._decode or isinstance(self._prefill, FlashPrefill | QuantizedPrefill)

    @property
    def drafts_capturable(self) -> bool:
        """True unless the model has attention whose prompts wait for the device."""
        return not self._waits_in_prompts

    @property
    def capturable_tokens(self) -> int | None:
        """Maximum number of prompt tokens in a captured step, see `LatentKernels`; None = no limit."""
        return self._latent.capturable_tokens

    @property
    def capturable_pages(self) -> int | None:
        """Maximum number of KV pages in a captured step, see `QuantizedPrefill.most_pages`; None = no limit."""
        return self._prefill.most_pages if self._decode and isinstance(self._prefill, QuantizedPrefill) else None

    def draft_group_rows(self, drafts: int) -> int:
        """Return the maximum number of rows of a draft group, see `group_rows`; 1 without grouped-query attention."""
        return group_rows(self._decode, drafts)

    def reserve_draft_groups(self, groups: int, rows: int) -> None:
        """Allocate the decode attention of steps with draft groups, see `Kernels.reserve_draft_groups`."""
        for shape in self._decode:
            self._grouped[shape, rows] = DecodeAttention(
                shape,
                groups,
                self._device,
                self._dtype,
                self._pdl,
                early=True,
                choose=make_group_plan,
                kv_dtype=self._kv_dtype,
                tokens=rows,
            )

    def prepare(self, linear: Linear) -> Linear:
        """Rearrange the scales of a packed weight, or dequantize the weight if no kernel multiplies its codes."""
        return products.prepared(linear, self._dtype)

    def prepare_experts(self, experts: Experts) -> Experts:
        """Rearrange the scales of packed weights, or dequantize the weights whose codes no kernel multiplies."""
        return packed_experts.prepared_experts(experts, self._dtype)

    def end_trials(self) -> None:
        """Reset the counters of decode attention."""
        for attention in (*self._decode.values(), *self._grouped.values()):
            attention.reset()

    def begin_step(self, cache: KvCache, layout: StepLayout) -> None:
        """Prepare prefill attention of the rows with several tokens, and decode attention of the one-token rows."""
        if self._has_states and not layout.group:  # the rows are those of all groups
            self._states.begin_step(layout)
        single = self._single_rows(layout)
        self._latent.begin_step(cache, layout, single)
        if self._decode and single < len(layout.context_lens):
            self._prefill.begin_step(cache, layout, single)
        if not single or layout.group:  # decode attention plans by contexts, not by pages, so group 0 is enough
            return
        groups = layout.draft_groups
        for shape, attention in self._decode.items():
            if groups is not None:
                grouped = self._grouped[shape, groups.rows]
                grouped.begin_step(cache, layout.page_table, layout.context_lens, groups.table)
            else:
                attention.begin_step(cache, layout.page_table[:single], layout.context_lens[:single])

    def embed(self, token_ids: Tensor, table: Tensor, feed: DeferredTokens | None = None) -> Tensor:
        """Look up the rows of `table`, also for tokens whose ids only the device knows."""
        sources, drawn = (None, None) if feed is None else (feed.sources, feed.drawn)
        return embed(token_ids, sources, drawn, table, pdl=self._pdl)

    def norm_linear(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> Tensor:
        """Compute RMSNorm and the product: with a streaming kernel for few tokens, else with cuBLAS.

        A packed weight has kernels of its own (`packed/products.py`), or is dequantized first for many tokens.
        """
        linear = dequantized_for(len(hidden), linear, self._dtype)
        if isinstance(linear.weight, PackedWeight):
            return products.products_of(linear.weight, len(hidden), hidden.dtype).norm_linear(
                hidden, norm, linear, pdl=self._pdl
            )
        x, due = self._normed(hidden, norm, linear)
        if _streams(x, linear):
            return triton_linear.norm_linear(x, due, linear, pdl=self._pdl)
        return _product(x, linear)

    def norm_gate_up(self, hidden: Tensor, norm: Norm | None, gate_up: Linear, activation: str = "silu") -> Tensor:
        """Compute RMSNorm and the gated product; the kernel is chosen as in `norm_linear`."""
        gate_up = dequantized_for(len(hidden), gate_up, self._dtype)
        if isinstance(gate_up.weight, PackedWeight):
            packed = products.products_of(gate_up.weight, len(hidden), hidden.dtype)
            return packed.norm_gate_up(hidden, norm, gate_up, pdl=self._pdl, activation=activation)
        x, due = self._normed(hidden, norm, gate_up)
        if _streams(x, gate_up):
            return triton_linear.norm_gate_up(x, due, gate_up, pdl=self._pdl, activation=activation)
        if activation == "gelu_tanh":
            return gelu_mul(_product(x, gate_up), pdl=self._pdl)
        return self._gated(x, gate_up)

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """Compute the product as `norm_linear` does."""
        return self.norm_linear(x, None, linear)

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        """Compute the product and add it to `hidden`; the kernel is chosen as in `norm_linear`."""
        linear = dequantized_for(len(x), linear, self._dtype)
        if isinstance(linear.weight, PackedWeight):
            products.products_of(linear.weight, len(x), x.dtype).linear_add(x, linear, hidden, pdl=self._pdl)
            return
        if _streams(x, linear):
            triton_linear.linear_add(x, linear, hidden, pdl=self._pdl)
            return
        if linear.bias is not None:
            hidden += linear.bias  # added first, where rounding loses less than after the larger product was added
        hidden.addmm_(x, linear.matrix.t())

    def feed_forward(self, hidden: Tensor, layer: DenseLayer) -> None:
        """Compute the feed-forward network. With 8-bit inputs, the activation's kernel also quantizes the result."""
        weights = layer.gate_up.weight, layer.down.weight
        if all(products.quantizes_inputs(weight, len(hidden), hidden.dtype) for weight in weights):
            scaled_products.feed_forward(hidden, layer, pdl=self._pdl)
        else:
            super().feed_forward(hidden, layer)

    def norm_add(self, x: Tensor, norm: Norm, hidden: Tensor) -> None:
        """Apply RMSNorm and add the result to `hidden`."""
        norm_add(x, norm, hidden, pdl=self._pdl)

    def experts(self, hidden: Tensor, layer: ExpertsLayer, slots: Tensor, out: Tensor) -> None:
        """Compute the routed experts with Triton kernels, then the shared expert as a dense network."""
        experts = layer.experts
        if experts.latent_down is None or experts.latent_up is None:
            x = self._experts.add(hidden, layer, slots, out)
        else:
            mixed = hidden.new_zeros(len(hidden), layer.spec.latent)
            x = self._experts.add(hidden, layer, slots, mixed, project=partial(self.linear, linear=experts.latent_down))
            self.linear_add(mixed, experts.latent_up, out)
        if experts.shared_gate_up is None or experts.shared_down is None:
            return
        if layer.spec.gated:
            inner = self.norm_gate_up(x, None, experts.shared_gate_up, layer.spec.shared_activation)
        else:
            inner = activate(self.linear(x, experts.shared_gate_up), layer.spec.shared_activation)
        if experts.shared_gate is not None:
            self._experts.gate(inner, x, experts.shared_gate)
        self.linear_add(inner, experts.shared_down, out)

    def latent_store(
        self, q: Tensor, latents: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout
    ) -> Tensor:
        """Apply norm and rotary embedding and store the latents, in one launch; queries are rotated in place."""
        return self._latent.store(q, latents, layer, cache, layout)

    def latent_attention(self, q: Tensor, layer: LatentLayer, cache: LatentCache, layout: StepLayout) -> Tensor:
        """Compute absorbed attention of rows with few tokens, and expanded attention of longer rows."""
        return self._latent.attention(q, layer, cache, layout, self._single_rows(layout))

    def index_store(
        self, queries: Tensor, keys: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Store index keys in one launch; index queries are rotated in place."""
        return self._latent.index_store(queries, keys, layer, cache, layout)

    def choose_tokens(self, index: IndexQueries, layer: LatentLayer, cache: Tensor, layout: StepLayout) -> Tensor:
        """Compute the scores in one launch, and choose the highest with PyTorch."""
        return self._latent.choose(index, layer, cache, layout)

    def sparse_attention(
        self, q: Tensor, chosen: Tensor, layer: LatentLayer, cache: Tensor, layout: StepLayout
    ) -> Tensor:
        """Compute absorbed attention to the chosen latents, which are read in place."""
        return self._latent.attend(q, chosen, layer, cache, layout)

    def mix_states(self, projected: Tensor, layer: RecurrentLayer, cache: StateCache, layout: StepLayout) -> Tensor:
        """Advance the states of all rows without waiting for the device, in one or two launches for one-token rows."""
        return self._states.mix(projected, layer, cache, layout)

    def norms_apart(self, hidden: Tensor, linear: Linear) -> bool:
        """Return True unless the product's kernel applies the norm: a streaming one, with few tokens or in float32."""
        if isinstance(linear.weight, PackedWeight):
            return products.products_of(linear.weight, len(hidden), hidden.dtype).norms_apart(hidden)
        fused = len(hidden) <= FUSED_NORM_TOKENS or hidden.dtype == torch.float32
        return not (fused and _streams(hidden, linear))

    def _normed(self, hidden: Tensor, norm: Norm | None, linear: Linear) -> tuple[Tensor, Norm | None]:
        """Return the input of a product, and the norm that the product's kernel still has to apply, or None."""
        if norm is None or not self.norms_apart(hidden, linear):
            return hidden, norm
        return rms_norm(hidden, norm, pdl=self._pdl), None

    def rope_and_store(self, qkv: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Apply norms and rotary embedding, and store keys and values, in one launch."""
        return triton_rope.rope_and_store(qkv, layer, cache, layout, pdl=self._pdl)

    def attention(self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout) -> Tensor:
        """Compute decode attention of the one-token rows, and prefill attention of the others."""
        single, groups = self._single_rows(layout), layout.draft_groups
        if single == len(layout.context_lens):
            decode = self._decode[layer.shape] if groups is None else self._grouped[layer.shape, groups.rows]
            return decode(q, cache, layer.index, layout.page_table, layout.context_lens, sinks=layer.sinks)
        if single == 0:
            return self._prefill(q, layer, cache, layout, 0).flatten(1)
        return self._mixed_attention(q, layer, cache, layout, single)

    def _mixed_attention(
        self, q: Tensor, layer: AttentionLayer, cache: KvCache, layout: StepLayout, single: int
    ) -> Tensor:
        """Compute attention of a step with `single` one-token rows and longer rows after them.

        A short chunk of a prompt leaves most of the multiprocessors idle, so the attention of the one-token rows runs
        concurrently on a second stream (docs/decisions/attention_kernels.md).
        """
        second = self._second if leaves_idle(len(q) - single, layer.shape.heads, self._multiprocessors) else _ONE_STREAM
        with second.joined():
            # The chunk is launched first: its programs need whole multiprocessors, and would otherwise wait for those
            # of decode attention to end.
            out = self._prefill(q, layer, cache, layout, single).flatten(1)
            with second.turn():
                self._decode[layer.shape](
                    q[:single],
                    cache,
                    layer.index,
                    layout.page_table[:single],
                    layout.context_lens[:single],
                    out[:single],
                    layer.sinks,
                    alone=second.apart,
                )
        return out

    def _single_rows(self, layout: StepLayout) -> int:
        """Return the number of leading rows that decode attention computes; prefill attention computes the others."""
        if layout.draft_groups is not None:
            return layout.single_rows
        return min(layout.single_rows, self._max_decode_rows)


def _product(x: Tensor, linear: Linear) -> Tensor:
    return torch.nn.functional.linear(x, linear.matrix, linear.bias)


def _streams(x: Tensor, linear: Linear) -> bool:
    rows, columns = linear.weight.shape
    return streams(len(x), rows, columns, x.element_size())
