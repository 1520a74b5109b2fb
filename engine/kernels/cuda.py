"""Kernels for NVIDIA GPUs: weight-streaming Triton products for few tokens, cuBLAS for many, fused elementwise work,
attention that walks over pages for rows of one token and flash-attn-4 for longer ones.
"""

from functools import cached_property

import torch
from torch import Tensor

from engine.config.attention import AttentionShape
from engine.config.model import ModelConfig
from engine.kernels.attention.prefill_attention import FlashPrefill, PrefillAttention, leaves_idle
from engine.kernels.attention.triton_attention import DecodeAttention
from engine.kernels.base import Feed, Kernels, Linear, StepLayout
from engine.kernels.libraries import Libraries, Wanted
from engine.kernels.linear import triton_linear
from engine.kernels.linear.gated_product import GatedProduct
from engine.kernels.linear.triton_linear_plan import FUSED_NORM_TOKENS, streams
from engine.kernels.rowwise import triton_rope
from engine.kernels.rowwise.triton_embed import embed
from engine.kernels.rowwise.triton_norm import rms_norm
from engine.kernels.second_stream import SecondStream
from engine.kernels.triton_launch import overlaps_launches
from wire.errors import InvalidArgument

_HEAD_DIMS = (64, 96, 128, 256)
_IN_TURN = SecondStream(None)


class CudaKernels(Kernels):
    """Of one model on one GPU, called by one thread on one stream. Holds scratch memory that all layers share."""

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        page_tokens: int,
        max_decode_rows: int,
    ) -> None:
        """`max_decode_rows`: most rows of one token that a step may have, or that count as such.

        InvalidArgument for a head dim that no kernel takes.
        """
        if model.head_dim not in _HEAD_DIMS:
            raise InvalidArgument(
                "model", f"has head dim {model.head_dim}; on GPUs {', '.join(map(str, _HEAD_DIMS))} are served."
            )
        self._max_decode_rows = max_decode_rows
        self._pdl = overlaps_launches()
        gpu = device.type == "cuda"
        self._second = SecondStream(device) if gpu else _IN_TURN
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if gpu else 0
        wanted = Wanted(model, device, dtype, page_tokens, self._pdl)
        self._decode = {
            shape: DecodeAttention(shape, max_decode_rows, device, dtype, self._pdl, early=True)
            for shape in wanted.shapes
        }
        # Libraries take seconds to import and to compile: meanwhile weights are loaded and other kernels compiled.
        libraries = Libraries(wanted)
        self._prefill_soon, self._gated_soon = libraries.attention, libraries.gated_product

    @cached_property
    def _prefill(self) -> PrefillAttention:
        return self._prefill_soon.result()

    @cached_property
    def _gated(self) -> GatedProduct:
        return self._gated_soon.result()

    @property
    def prompts_capturable(self) -> bool:
        # Asked before anything is captured, which a thread that still uses the device would spoil.
        self._gated_soon.result()
        return isinstance(self._prefill, FlashPrefill)

    def end_trials(self) -> None:
        for attention in self._decode.values():
            attention.reset()

    def begin_step(self, cache: Tensor, layout: StepLayout) -> None:
        single = self._single_rows(layout)
        if single < len(layout.context_lens):
            self._prefill.begin_step(cache, layout, single)
        if single:
            for attention in self._decode.values():
                attention.begin_step(cache, layout.page_table[:single], layout.context_lens[:single])

    def embed(self, token_ids: Tensor, table: Tensor, feed: Feed | None = None) -> Tensor:
        sources, drawn = (None, None) if feed is None else (feed.sources, feed.drawn)
        return embed(token_ids, sources, drawn, table, pdl=self._pdl)

    def norm_linear(self, hidden: Tensor, norm: Tensor, eps: float, linear: Linear) -> Tensor:
        if not _streams(hidden, linear):
            return _product(rms_norm(hidden, norm, eps, pdl=self._pdl), linear)
        x, scale = self._normed(hidden, norm, eps)
        return triton_linear.norm_linear(x, scale, eps, linear.weight, linear.bias, pdl=self._pdl)

    def norm_gate_up(self, hidden: Tensor, norm: Tensor, eps: float, gate_up: Linear) -> Tensor:
        if not _streams(hidden, gate_up):
            return self._gated(rms_norm(hidden, norm, eps, pdl=self._pdl), gate_up)
        x, scale = self._normed(hidden, norm, eps)
        return triton_linear.norm_gate_up(x, scale, eps, gate_up.weight, gate_up.bias, pdl=self._pdl)

    def linear_add(self, x: Tensor, linear: Linear, hidden: Tensor) -> None:
        if _streams(x, linear):
            triton_linear.linear_add(x, linear.weight, linear.bias, hidden, pdl=self._pdl)
            return
        hidden.addmm_(x, linear.weight.t())
        if linear.bias is not None:
            hidden += linear.bias

    def _normed(self, hidden: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
        """What a streaming product takes, and the norm it still has to apply."""
        if len(hidden) <= FUSED_NORM_TOKENS or hidden.dtype == torch.float32:
            return hidden, norm
        return rms_norm(hidden, norm, eps, pdl=self._pdl), None

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
        return triton_rope.rope_and_store(
            qkv, rope, q_norm, k_norm, eps, cache, layer, layout.positions, layout.slots, shape, pdl=self._pdl
        )

    def attention(self, q: Tensor, cache: Tensor, layer: int, layout: StepLayout, shape: AttentionShape) -> Tensor:
        single = self._single_rows(layout)
        if single == len(layout.context_lens):
            return self._decode[shape](q, cache, layer, layout.page_table, layout.context_lens)
        if single == 0:
            return self._prefill(q, cache, layer, layout, shape, 0).flatten(1)
        return self._attention_beside(q, cache, layer, layout, shape, single)

    def _attention_beside(
        self, q: Tensor, cache: Tensor, layer: int, layout: StepLayout, shape: AttentionShape, single: int
    ) -> Tensor:
        """Of `single` rows of one token and longer ones behind them. A short chunk leaves most of the multiprocessors
        idle: the others' keys and values are read meanwhile (docs/decisions/0034).
        """
        second = self._second if leaves_idle(len(q) - single, shape.heads, self._multiprocessors) else _IN_TURN
        with second.joined():
            # The chunk first: its programs need whole multiprocessors, and would wait until the others' have ended.
            out = self._prefill(q, cache, layer, layout, shape, single).flatten(1)
            with second.turn():
                self._decode[shape](
                    q[:single],
                    cache,
                    layer,
                    layout.page_table[:single],
                    layout.context_lens[:single],
                    out[:single],
                    alone=second.apart,
                )
        return out

    def _single_rows(self, layout: StepLayout) -> int:
        """Rows at the front that are decode attention's; the others are prefill attention's."""
        return min(layout.single_rows, self._max_decode_rows)


def _product(x: Tensor, linear: Linear) -> Tensor:
    return torch.nn.functional.linear(x, linear.weight, linear.bias)


def _streams(x: Tensor, linear: Linear) -> bool:
    rows, columns = linear.weight.shape
    return streams(len(x), rows, columns, x.element_size())
