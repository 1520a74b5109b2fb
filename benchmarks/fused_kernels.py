"""What fusing is worth on this GPU: `python -m benchmarks.fused_kernels --shape llama-3-8b [--save]`.

Every fused operation of the engine against the same work in pieces: PyTorch's operations one by one, or cuBLAS with
kernels of our own around it. Both run in CUDA graphs whose launches walk through more memory than L2 holds; only the
sampler that asks the host is timed by events. Products are the engine's own choice for the size, so from the size on
where it takes cuBLAS itself the ratio is 1. Activations are random bfloat16. The last line is one JSON object.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.ceilings import graph_seconds, measure_ceilings, median_seconds
from benchmarks.results import run_facts, save_result
from engine import sampler
from engine.batch import Draw
from engine.kernels.base import AttentionShape, Kernels, Linear, StepLayout
from engine.kernels.cuda import CudaKernels
from engine.kernels.reference import ReferenceKernels
from engine.kernels.reference import rms_norm as plain_rms_norm
from engine.kernels.triton_activation import silu_mul
from engine.kernels.triton_launch import overlaps_launches
from engine.kernels.triton_linear import reserve_scratch
from engine.kernels.triton_norm import rms_norm
from engine.layers.rope import rope_table
from engine.models.config import ModelConfig, load_model_config
from engine.models.shapes import shape_names, write_shape
from engine.sampler_cuda import DeviceSampler
from wire.messages import SamplingParams

TOKENS = (1, 8, 32, 128, 2048)
DECODE_TOKENS = 256
"""Largest step whose tokens are rows of their own: beyond it only elementwise work is compared, on one prompt."""

_DTYPE = torch.bfloat16
_PAGE_TOKENS = 128
_ROTATED_BYTES = 256 << 20
"""What a graph's launches go through before they come back to the first: five times L2."""
_MOST_COPIES = 32
_LEAST_LAUNCHES = 16
_COMPILERS = 16
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
_FILTERED = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of one operation on `tokens` tokens in both forms; `bytes` that elementwise work must move, else None."""

    name: str
    tokens: int
    fused: float
    unfused: float
    bytes: int | None

    @property
    def ratio(self) -> float:
        """How many times faster the fused form is."""
        return self.unfused / self.fused

    def share(self, copy: float) -> float | None:
        """The fused form's bytes a second over those of a copy; inputs smaller than L2 can pass 1."""
        return None if self.bytes is None else self.bytes / self.fused / copy


@dataclass(frozen=True, slots=True)
class _Contest:
    """An operation in both forms, launched on each of `inputs` in turn."""

    name: str
    tokens: int
    inputs: Sequence[Any]
    fused: Callable[[Any], object]
    unfused: Callable[[Any], object]
    bytes: int | None = None
    asks_host: bool = False
    """Whether the unfused form waits for the device, so that no graph can hold it."""

    def measure(self) -> Comparison:
        count = len(self.inputs)
        launches = count * -(-_LEAST_LAUNCHES // count)
        fused = graph_seconds(lambda n: self.fused(self.inputs[n % count]), launches)
        if self.asks_host:
            unfused = median_seconds(lambda: self.unfused(self.inputs[0]), rounds=7, warm=2)
        else:
            unfused = graph_seconds(lambda n: self.unfused(self.inputs[n % count]), launches)
        return Comparison(self.name, self.tokens, fused, unfused, self.bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3-8b", choices=shape_names())
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    folder = write_shape(arguments.shape, Path(tempfile.gettempdir()) / f"tandem-{arguments.shape}")
    copy = measure_ceilings().copy
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}, {_DTYPE}: copy {copy / 1e9:.0f} GB/s", flush=True)
    print(f"{'operation':22} {'tokens':>6} {'fused us':>9} {'unfused us':>10} {'ratio':>6} {'of copy':>8}")
    found = compare_fused(load_model_config(folder), arguments.tokens)
    for each in found:
        share = each.share(copy)
        print(
            f"{each.name:22} {each.tokens:6} {each.fused * 1e6:9.2f} {each.unfused * 1e6:10.2f} {each.ratio:6.2f}"
            + (f" {share:8.1%}" if share is not None else "")
        )
    result = {
        "copy_gb_per_s": round(copy / 1e9, 1),
        "comparisons": [_for_json(each, copy) for each in found],
        "shape": arguments.shape,
        "dtype": str(_DTYPE).removeprefix("torch."),
        **run_facts("cuda"),
    }
    if arguments.save:
        print("saved", save_result(f"fused-kernels-{arguments.shape}", result))
    print(json.dumps(result))


def compare_fused(engine_shape: ModelConfig, tokens: Sequence[int]) -> list[Comparison]:
    """Every operation at every size, in steps of `tokens` tokens; those with products and draws up to DECODE_TOKENS."""
    device = torch.device("cuda")
    reserve_scratch(device)
    contests = _Contests(engine_shape, device, max(tokens))
    entered = [contest for count in tokens for contest in contests.of(count)]
    # Kernels compile at their first launch, a second each: all of them side by side.
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(lambda contest: contest.fused(contest.inputs[0]), entered))
    torch.cuda.synchronize()
    return sorted((contest.measure() for contest in entered), key=lambda found: found.name)


class _Contests:
    """The operations of one model's layer, with weights that all sizes share."""

    def __init__(self, shape: ModelConfig, device: torch.device, most_tokens: int) -> None:
        self._shape = shape
        self._device = device
        self._pdl = overlaps_launches()
        self._kernels = CudaKernels(shape, device, _DTYPE, _PAGE_TOKENS, DECODE_TOKENS)
        self._norm = self._random(shape.hidden_size)
        self._sampler = DeviceSampler(shape.vocab_size, min(most_tokens, DECODE_TOKENS), device, self._pdl)

    def of(self, tokens: int) -> list[_Contest]:
        elementwise = [self._rope(tokens), self._rms_norm(tokens), self._silu(tokens)]
        if tokens > DECODE_TOKENS:
            return elementwise
        products = [self._norm_product(tokens), self._gate_up(tokens), self._product_add(tokens)]
        return [*elementwise, *products, self._greedy(tokens), self._filtered(tokens)]

    def _rope(self, tokens: int) -> _Contest:
        shape = self._shape
        heads = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
        layout = self._layout(tokens)
        moved = 2 * tokens * shape.qkv_size * _DTYPE.itemsize + tokens * shape.head_dim * self._rope_table.itemsize
        copies = _copies(moved)
        qkv = self._random(copies, tokens, shape.qkv_size)
        norm = self._random(shape.head_dim) if shape.qk_norm else None
        pages = int(layout.slots.max()) // _PAGE_TOKENS + 1
        sizes = (pages, copies, 2, shape.kv_heads, _PAGE_TOKENS, shape.head_dim)
        cache = torch.zeros(sizes, dtype=_DTYPE, device=self._device)

        def rotate(kernels: Kernels, layer: int) -> Tensor:
            return kernels.rope_and_store(
                qkv[layer], self._rope_table, norm, norm, shape.norm_eps, cache, layer, layout, heads
            )

        fused, plain = partial(rotate, self._kernels), partial(rotate, ReferenceKernels())
        return _Contest("rope + store", tokens, range(copies), fused, plain, moved)

    def _rms_norm(self, tokens: int) -> _Contest:
        moved = (2 * tokens + 1) * self._shape.hidden_size * _DTYPE.itemsize
        inputs = self._random(_copies(moved), tokens, self._shape.hidden_size).unbind()

        def plain(x: Tensor) -> Tensor:
            return plain_rms_norm(x, self._norm, self._shape.norm_eps)

        return _Contest("rms norm", tokens, inputs, self._normed, plain, moved)

    def _silu(self, tokens: int) -> _Contest:
        moved = 3 * tokens * self._shape.intermediate_size * _DTYPE.itemsize
        inputs = self._random(_copies(moved), tokens, 2 * self._shape.intermediate_size).unbind()

        def plain(x: Tensor) -> Tensor:
            gate, up = x.chunk(2, dim=-1)
            return F.silu(gate) * up

        return _Contest("silu x up", tokens, inputs, partial(silu_mul, pdl=self._pdl), plain, moved)

    def _norm_product(self, tokens: int) -> _Contest:
        x = self._random(tokens, self._shape.hidden_size)

        def fused(linear: Linear) -> Tensor:
            return self._kernels.norm_linear(x, self._norm, self._shape.norm_eps, linear)

        def cut(linear: Linear) -> Tensor:
            return F.linear(self._normed(x), linear.weight, linear.bias)

        return _Contest("norm + product", tokens, self._qkv_weights, fused, cut)

    def _gate_up(self, tokens: int) -> _Contest:
        x = self._random(tokens, self._shape.hidden_size)

        def fused(linear: Linear) -> Tensor:
            return self._kernels.norm_gate_up(x, self._norm, self._shape.norm_eps, linear)

        def cut(linear: Linear) -> Tensor:
            return silu_mul(F.linear(self._normed(x), linear.weight, linear.bias), pdl=self._pdl)

        return _Contest("norm + gate/up + silu", tokens, self._gate_up_weights, fused, cut)

    def _product_add(self, tokens: int) -> _Contest:
        x, hidden = (self._random(tokens, n) for n in (self._shape.intermediate_size, self._shape.hidden_size))

        def fused(linear: Linear) -> None:
            self._kernels.linear_add(x, linear, hidden)

        def cut(linear: Linear) -> None:
            hidden.add_(F.linear(x, linear.weight, linear.bias))

        return _Contest("product + residual", tokens, self._down_weights, fused, cut)

    def _greedy(self, tokens: int) -> _Contest:
        inputs = [self._random(tokens, self._shape.vocab_size)]
        draw = self._drawing([Draw(_GREEDY, 0)] * tokens)
        return _Contest("sampling, greedy", tokens, inputs, draw, partial(torch.argmax, dim=-1))

    def _filtered(self, tokens: int) -> _Contest:
        inputs = [3 * self._random(tokens, self._shape.vocab_size)]
        draws = [Draw(_FILTERED, row) for row in range(tokens)]
        plain = partial(sampler.sample, draws=draws)
        return _Contest("sampling, top-k top-p", tokens, inputs, self._drawing(draws), plain, asks_host=True)

    def _normed(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._norm, self._shape.norm_eps, pdl=self._pdl)

    def _drawing(self, draws: Sequence[Draw]) -> Callable[[Tensor], None]:
        plan = self._sampler.plan(draws)
        params = torch.from_numpy(plan.params).to(self._device)
        out = torch.empty(len(draws), dtype=torch.int64, device=self._device)
        return lambda logits: self._sampler.sample(logits, params, out, greedy_only=plan.greedy_only)

    def _layout(self, tokens: int) -> StepLayout:
        """Rows of one token on pages of their own, or beyond DECODE_TOKENS one prompt over shuffled pages."""
        decode = tokens <= DECODE_TOKENS
        every = torch.arange(tokens, device=self._device)
        page_of = every if decode else every // _PAGE_TOKENS
        pages = torch.randperm(int(page_of[-1]) + 1, device=self._device)
        offset = torch.randint(_PAGE_TOKENS, (tokens,), device=self._device) if decode else every % _PAGE_TOKENS
        positions = torch.randint(len(self._rope_table), (tokens,), device=self._device) if decode else every
        rows = tokens if decode else 1
        return StepLayout(
            positions=positions.int(),
            slots=pages[page_of] * _PAGE_TOKENS + offset,
            row_starts=torch.linspace(0, tokens, rows + 1, device=self._device).int(),
            context_lens=torch.ones(rows, dtype=torch.int32, device=self._device),
            page_table=pages.int().view(rows, -1),
            max_row_tokens=tokens // rows,
            max_context=1,
        )

    @cached_property
    def _rope_table(self) -> Tensor:
        return rope_table(self._shape.rope, self._shape.head_dim, self._shape.max_context, self._device)

    @cached_property
    def _qkv_weights(self) -> list[Linear]:
        return self._weights(self._shape.qkv_size, self._shape.hidden_size, self._shape.qkv_bias)

    @cached_property
    def _gate_up_weights(self) -> list[Linear]:
        return self._weights(2 * self._shape.intermediate_size, self._shape.hidden_size, self._shape.mlp_bias)

    @cached_property
    def _down_weights(self) -> list[Linear]:
        return self._weights(self._shape.hidden_size, self._shape.intermediate_size, self._shape.mlp_bias)

    def _weights(self, n: int, k: int, bias: bool) -> list[Linear]:
        """As many as outgrow L2 together, of a size that leaves a product's results near 1."""
        copies = _copies(n * k * _DTYPE.itemsize)
        return [Linear(self._random(n, k).mul_(k**-0.5), self._random(n) if bias else None) for _ in range(copies)]

    def _random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=_DTYPE, device=self._device)


def _copies(size: int) -> int:
    """How many inputs of `size` bytes outgrow L2: two at least, and few enough where a whole step fits into it."""
    return min(max(-(-_ROTATED_BYTES // size), 2), _MOST_COPIES)


def _for_json(found: Comparison, copy: float) -> dict[str, object]:
    share = found.share(copy)
    return {
        "operation": found.name,
        "tokens": found.tokens,
        "fused_us": round(found.fused * 1e6, 3),
        "unfused_us": round(found.unfused * 1e6, 3),
        "ratio": round(found.ratio, 3),
        "copy_share": None if share is None else round(share, 4),
    }


if __name__ == "__main__":
    main()
