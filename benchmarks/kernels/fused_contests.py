"""Compares every fused operation of a model's layer with its unfused form, and makes the inputs of both.

The unfused form is PyTorch's operations one by one, or cuBLAS with the engine's kernels around it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import graph_seconds, median_seconds, race
from benchmarks.kernels.dense_layer import dense_layer
from tandem.engine import sampler
from tandem.engine.config.model import ModelSpec
from tandem.engine.cuda.sampler_cuda import DeviceSampler
from tandem.engine.kernels.base import Kernels, StepLayout
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.layers import AttentionLayer, Linear, Norm
from tandem.engine.kernels.linear.gated_product import FusedGated, PlainGated, choose_gated_product
from tandem.engine.kernels.linear.triton_activation import silu_mul
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.reference import rms_norm as plain_rms_norm
from tandem.engine.kernels.rowwise.triton_norm import rms_norm
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.rope import rope_table
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tandem.settings.engine import GPU_PAGE_TOKENS

_LEAST_LAUNCHES = 16


@dataclass(frozen=True, slots=True)
class Comparison:
    """The seconds of one operation on `tokens` tokens in both forms.

    `bytes` is None except for elementwise operations.
    """

    name: str
    tokens: int
    fused: float
    unfused: float
    bytes: int | None

    @property
    def ratio(self) -> float:
        """The speed of the fused form / the speed of its parts."""
        return self.unfused / self.fused

    def share(self, copy: float) -> float | None:
        """Return the fused form's bandwidth / a copy's bandwidth; it can exceed 1 for inputs smaller than L2."""
        return None if self.bytes is None else self.bytes / self.fused / copy


@dataclass(frozen=True, slots=True)
class Contest:
    """An operation in both forms, launched on each of `inputs` in turn."""

    name: str
    tokens: int
    inputs: Sequence[Any]
    fused: Callable[[Any], object]
    unfused: Callable[[Any], object]
    bytes: int | None = None
    asks_host: bool = False
    """True if the unfused form waits for the device, so that a CUDA graph cannot contain it."""
    heats: bool = False
    """True if both forms are so compute-intensive that they must run in turn on a heated chip, without graphs."""

    def measure(self) -> Comparison:
        """Measure both forms on this process's GPU."""
        if self.heats:
            times_us = race({"fused": self._in_turn(self.fused), "unfused": self._in_turn(self.unfused)})
            return Comparison(self.name, self.tokens, times_us["fused"] / 1e6, times_us["unfused"] / 1e6, self.bytes)
        size = len(self.inputs)
        launches = size * -(-_LEAST_LAUNCHES // size)
        fused = graph_seconds(lambda n: self.fused(self.inputs[n % size]), launches)
        if self.asks_host:
            unfused = median_seconds(lambda: self.unfused(self.inputs[0]), rounds=7, warm=2)
        else:
            unfused = graph_seconds(lambda n: self.unfused(self.inputs[n % size]), launches)
        return Comparison(self.name, self.tokens, fused, unfused, self.bytes)

    def _in_turn(self, form: Callable[[Any], object]) -> Callable[[], object]:
        inputs = cycle(self.inputs)
        return lambda: form(next(inputs))


DECODE_TOKENS = 256
"""Maximum number of tokens of a decode step, with one row per token; a larger step is one prompt."""
_DTYPE = torch.bfloat16

_ROTATED_BYTES = 256 << 20
"""Bytes that the launches of a graph use before they return to the first: five times L2."""
_MOST_COPIES = 32
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_FILTERED = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95)


class Contests:
    """The operations of one model's layer, with weights shared by all sizes."""

    def __init__(self, shape: ModelSpec, device: torch.device, most_tokens: int) -> None:
        self._shape = shape
        self._attention, self._feed_forward = dense_layer(shape)
        self._device = device
        self._pdl = overlaps_launches()
        self._kernels = CudaKernels(shape, device, _DTYPE, GPU_PAGE_TOKENS, DECODE_TOKENS)
        self._norm = Norm(self._random(shape.hidden_size), shape.norm_eps)
        self._sampler = DeviceSampler(shape.vocab_size, min(most_tokens, DECODE_TOKENS), device, self._pdl)

    def of(self, tokens: int) -> list[Contest]:
        """Return the contests for a step of `tokens` tokens.

        Above DECODE_TOKENS, most products and the sampler are left out.
        """
        elementwise = [self._rope(tokens), self._rms_norm(tokens), self._silu(tokens)]
        if tokens > DECODE_TOKENS:
            return [*elementwise, *self._gated(tokens)]
        products = [self._norm_product(tokens), self._gate_up(tokens), self._product_add(tokens)]
        return [*elementwise, *products, self._greedy(tokens), self._filtered(tokens)]

    def _rope(self, tokens: int) -> Contest:
        shape = self._shape
        heads = self._attention.shape
        layout = self._layout(tokens)
        moved = 2 * tokens * heads.qkv_size * _DTYPE.itemsize + tokens * heads.head_dim * self._rope_table.itemsize
        copies = _copies(moved)
        qkv = self._random(copies, tokens, heads.qkv_size)
        norm = self._random(heads.head_dim) if self._attention.qk_norm else None
        pages = int(layout.slots.max()) // GPU_PAGE_TOKENS + 1
        sizes = (pages, copies, 2, heads.kv_heads, GPU_PAGE_TOKENS, heads.head_dim)
        cache = torch.zeros(sizes, dtype=_DTYPE, device=self._device)

        layers = [AttentionLayer(index, heads, self._rope_table, norm, norm, shape.norm_eps) for index in range(copies)]

        def rotate(kernels: Kernels, layer: int) -> Tensor:
            return kernels.rope_and_store(qkv[layer], layers[layer], cache, layout)

        fused, plain = partial(rotate, self._kernels), partial(rotate, ReferenceKernels())
        return Contest("rope + store", tokens, range(copies), fused, plain, moved)

    def _rms_norm(self, tokens: int) -> Contest:
        moved = (2 * tokens + 1) * self._shape.hidden_size * _DTYPE.itemsize
        inputs = self._random(_copies(moved), tokens, self._shape.hidden_size).unbind()

        def plain(x: Tensor) -> Tensor:
            return plain_rms_norm(x, self._norm.weight, self._norm.eps)

        return Contest("rms norm", tokens, inputs, self._normed, plain, moved)

    def _silu(self, tokens: int) -> Contest:
        moved = 3 * tokens * self._feed_forward.width * _DTYPE.itemsize
        inputs = self._random(_copies(moved), tokens, 2 * self._feed_forward.width).unbind()

        def plain(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        return Contest("silu x up", tokens, inputs, partial(silu_mul, pdl=self._pdl), plain, moved)

    def _norm_product(self, tokens: int) -> Contest:
        x = self._random(tokens, self._shape.hidden_size)

        def fused(linear: Linear) -> Tensor:
            return self._kernels.norm_linear(x, self._norm, linear)

        def cut(linear: Linear) -> Tensor:
            return F.linear(self._normed(x), linear.matrix, linear.bias)

        return Contest("norm + product", tokens, self._qkv_weights, fused, cut)

    def _gate_up(self, tokens: int) -> Contest:
        x = self._random(tokens, self._shape.hidden_size)

        def fused(linear: Linear) -> Tensor:
            return self._kernels.norm_gate_up(x, self._norm, linear, self._feed_forward.activation)

        def cut(linear: Linear) -> Tensor:
            return silu_mul(F.linear(self._normed(x), linear.matrix, linear.bias), pdl=self._pdl)

        return Contest("norm + gate/up + silu", tokens, self._gate_up_weights, fused, cut)

    def _gated(self, tokens: int) -> list[Contest]:
        """Return the gate/up product of long prompts, if a library has one with a fused activation."""
        shape = self._shape
        fused = choose_gated_product(self._device, _DTYPE, shape.hidden_size, self._feed_forward.width, pdl=self._pdl)
        if not isinstance(fused, FusedGated):
            return []
        inside, plain = fused.compute, PlainGated(self._pdl)
        x = self._random(tokens, shape.hidden_size)

        def in_one(linear: Linear) -> Tensor:
            return inside(x, linear.matrix)

        def cut(linear: Linear) -> Tensor:
            return plain(x, linear)

        return [Contest("gate/up + silu", tokens, self._gate_up_weights, in_one, cut, heats=True)]

    def _product_add(self, tokens: int) -> Contest:
        x, hidden = (self._random(tokens, n) for n in (self._feed_forward.width, self._shape.hidden_size))

        def fused(linear: Linear) -> None:
            self._kernels.linear_add(x, linear, hidden)

        def cut(linear: Linear) -> None:
            hidden.add_(F.linear(x, linear.matrix, linear.bias))

        return Contest("product + residual", tokens, self._down_weights, fused, cut)

    def _greedy(self, tokens: int) -> Contest:
        inputs = [self._random(tokens, self._shape.vocab_size)]
        sample = self._drawing([SamplingInput(_GREEDY, 0)] * tokens)
        return Contest("sampling, greedy", tokens, inputs, sample, partial(torch.argmax, dim=-1))

    def _filtered(self, tokens: int) -> Contest:
        inputs = [3 * self._random(tokens, self._shape.vocab_size)]
        draws = [SamplingInput(_FILTERED, row) for row in range(tokens)]
        plain = partial(sampler.sample, draws=draws)
        return Contest("sampling, top-k top-p", tokens, inputs, self._drawing(draws), plain, asks_host=True)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._norm, pdl=self._pdl)

    def _drawing(self, draws: Sequence[SamplingInput]) -> Callable[[Tensor], None]:
        plan = self._sampler.plan(draws)
        params = torch.from_numpy(plan.params).to(self._device)
        out = torch.empty(len(draws), dtype=torch.int64, device=self._device)
        return lambda logits: self._sampler.sample(logits, params, out, greedy_only=plan.greedy_only)

    def _layout(self, tokens: int) -> StepLayout:
        """Return rows of one token on separate pages or, above DECODE_TOKENS, one prompt over shuffled pages."""
        decode = tokens <= DECODE_TOKENS
        every = torch.arange(tokens, device=self._device)
        page_of = every if decode else every // GPU_PAGE_TOKENS
        pages = torch.randperm(int(page_of[-1]) + 1, device=self._device)
        offset = torch.randint(GPU_PAGE_TOKENS, (tokens,), device=self._device) if decode else every % GPU_PAGE_TOKENS
        positions = torch.randint(len(self._rope_table), (tokens,), device=self._device) if decode else every
        rows = tokens if decode else 1
        return StepLayout(
            positions=positions.int(),
            slots=pages[page_of] * GPU_PAGE_TOKENS + offset,
            row_starts=torch.linspace(0, tokens, rows + 1, device=self._device).int(),
            context_lens=torch.ones(rows, dtype=torch.int32, device=self._device),
            page_table=pages.int().view(rows, -1),
            max_row_tokens=tokens // rows,
            max_context=1,
        )

    @cached_property
    def _rope_table(self) -> Tensor:
        return rope_table(self._attention.rope, self._attention.shape.rotated, self._shape.max_context, self._device)

    @cached_property
    def _qkv_weights(self) -> list[Linear]:
        return self._weights(self._attention.shape.qkv_size, self._shape.hidden_size, self._attention.qkv_bias)

    @cached_property
    def _gate_up_weights(self) -> list[Linear]:
        return self._weights(2 * self._feed_forward.width, self._shape.hidden_size, self._feed_forward.bias)

    @cached_property
    def _down_weights(self) -> list[Linear]:
        return self._weights(self._shape.hidden_size, self._feed_forward.width, self._feed_forward.bias)

    def _weights(self, n: int, k: int, bias: bool) -> list[Linear]:
        """Return enough weights to exceed L2 together, scaled so that the results of a product are near 1."""
        copies = _copies(n * k * _DTYPE.itemsize)
        return [Linear(self._random(n, k).mul_(k**-0.5), self._random(n) if bias else None) for _ in range(copies)]

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=_DTYPE, device=self._device)


def _copies(size: int) -> int:
    """Return the number of inputs of `size` bytes that together exceed L2: at least 2, at most `_MOST_COPIES`."""
    return min(max(-(-_ROTATED_BYTES // size), 2), _MOST_COPIES)
