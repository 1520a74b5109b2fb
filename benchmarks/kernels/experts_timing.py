"""Measures the routed experts of one layer on a GPU."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_timing import graph_seconds
from tandem.engine.config.model import MixtureOfExperts
from tandem.engine.config.quantization import Codes, Packing
from tandem.engine.kernels.experts.expert_tiles import ExpertShape, ExpertTile
from tandem.engine.kernels.experts.packed_experts import prepared_experts
from tandem.engine.kernels.experts.triton_experts import ExpertKernels
from tandem.engine.kernels.layers import Experts, ExpertsLayer, Norm
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.allocation import empty_packed
from tandem.engine.models.shapes import shape_config
from tandem.engine.weights.quantized.rounding import rounded
from tandem.engine.weights.random_weights import fill_packed

FORMS = {
    "int8": (Codes.INT8, 0, False),
    "fp8": (Codes.FLOAT8, 0, False),
    "fp8_blocks": (Codes.FLOAT8, 128, False),
    "fp8_inputs": (Codes.FLOAT8, 0, True),
    "fp8_blocks_inputs": (Codes.FLOAT8, 128, True),
    "int4": (Codes.INT4, 128, False),
    "mxfp4": (Codes.FLOAT4, 32, False),
}
"""The quantized weights that are measured, by name: their type, the columns per group, and if inputs are quantized.

A group of 0 columns means one scale per row.
"""
_E8M0 = "float8_e8m0fnu"


def _packed(weight: Tensor, form: str) -> PackedWeight:
    codes, group, inputs = FORMS[form]
    if codes is Codes.FLOAT4:
        packed = empty_packed(tuple(weight.shape), Packing(codes, group, offsets=False, scales=_E8M0), weight.device)
        fill_packed(packed, torch.Generator(weight.device).manual_seed(0), float(weight[0].float().std()))
        return packed
    packing = Packing(codes, group or weight.shape[-1], offsets=False, quantized_inputs=inputs)
    # A few experts at a time, because they are widened to float32.
    parts = [rounded(experts, packing) for experts in torch.split(weight, 16)]
    joined = [torch.cat(tensors) for tensors in zip(*(part.parts() for part in parts), strict=True)]
    return PackedWeight(joined[0], joined[1], None, packing.group, quantized_inputs=inputs)


_DTYPE = torch.bfloat16
_EPS = 1e-6
_COMPILERS = 16
_INPUTS, _LONG_INPUTS, _LONG = 24, 4, 1024
"""Steps per graph: 24, or 4 if a step has at least `_LONG` tokens. Together they read far more than L2 holds."""
_QUIET = 1e-5
"""Standard deviation of the down weights.

It is so small that replays of a graph do not change the hidden states, and so do not change the routing.
"""


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """The result of one step: mean experts hit, the number expected for independent choices, seconds, bytes, FLOPs."""

    hit: float
    expected_hit: float
    seconds: float
    bytes: float
    flops: float


class ExpertLayer:
    """The first mixture-of-experts layer of a shape, with random weights."""

    def __init__(self, name: str) -> None:
        """Create the layer of the shape `name`. Raises ValueError for a shape without experts."""
        config = shape_config(name)
        feed_forwards = (layer.feed_forward for layer in config.layers)
        spec = next(
            (feed_forward for feed_forward in feed_forwards if isinstance(feed_forward, MixtureOfExperts)), None
        )
        if spec is None:
            raise ValueError(f"{name} has no experts")
        self.spec, hidden = spec, config.hidden_size
        self.shape = ExpertShape(spec.experts, spec.top_k, hidden, spec.width)
        self.kernels = ExpertKernels(overlaps_launches())
        self._norm = Norm(torch.ones(hidden, dtype=_DTYPE, device="cuda"), _EPS)
        self.experts = Experts(
            router=_random(0.02, spec.experts, hidden),
            router_bias=_random(0.0, spec.experts) if spec.router.bias else None,
            choice_bias=_random(0.0, spec.experts).float() if spec.router.choice_bias else None,
            gate_up=_random(0.02, spec.experts, 2 * spec.width, hidden),
            gate_up_bias=_random(0.02, spec.experts, 2 * spec.width) if spec.bias else None,
            down=_random(_QUIET, spec.experts, hidden, spec.width),
            down_bias=_random(_QUIET, spec.experts, hidden) if spec.bias else None,
            shared_gate_up=None,
            shared_down=None,
            shared_gate=None,
        )

    def inputs(self, tokens: int) -> list[Tensor]:
        """Return the hidden states of the steps of a graph."""
        count = _INPUTS if tokens < _LONG else _LONG_INPUTS
        return list(_random(1.0, count, tokens, self.shape.hidden).unbind())

    def add(self, hidden: Tensor, tile: ExpertTile | None = None, counter: Tensor | None = None) -> None:
        """Launch one step. `counter` [experts] counts the tokens of each expert; None = a temporary one."""
        tokens = len(hidden)
        slots = torch.arange(tokens, device="cuda")
        used = torch.zeros(self.spec.experts, dtype=torch.int64, device="cuda") if counter is None else counter
        layer = ExpertsLayer(self._norm, replace(self.experts, tokens=used), self.spec)
        self.kernels.add(hidden, layer, slots, hidden, tile)

    def measure(self, tokens: int, tile: ExpertTile | None = None) -> ExpertStep:
        """Measure steps of `tokens` tokens, with `tile` or the tile of the engine's table."""
        spec, shape, inputs = self.spec, self.shape, self.inputs(tokens)
        counter = torch.zeros(spec.experts, dtype=torch.int64, device="cuda")
        hit = 0.0
        for hidden in inputs:
            counter.zero_()
            self.add(hidden, tile, counter)
            hit += int((counter > 0).sum()) / len(inputs)
        slots = torch.arange(tokens, device="cuda")
        layer = ExpertsLayer(self._norm, replace(self.experts, tokens=counter), spec)

        def launch(number: int) -> None:
            self.kernels.add(inputs[number], layer, slots, inputs[number], tile)

        seconds = graph_seconds(launch, len(inputs))
        of_expert = (self.experts.gate_up.nbytes + self.experts.down.nbytes) / shape.experts
        return ExpertStep(
            hit=hit,
            expected_hit=spec.experts * (1 - (1 - spec.top_k / spec.experts) ** tokens),
            seconds=seconds,
            bytes=hit * of_expert + (spec.experts + 2 * tokens) * shape.hidden * _DTYPE.itemsize,
            flops=6.0 * tokens * spec.top_k * shape.hidden * shape.width,
        )


class PackedExpertLayer(ExpertLayer):
    """A layer whose experts have quantized weights."""

    def __init__(self, name: str, form: str) -> None:
        super().__init__(name)
        self.form = form
        gate_up, down = (_packed(matrix, form) for matrix in self.experts.matrices)
        self.experts = prepared_experts(replace(self.experts, gate_up=gate_up, down=down), torch.bfloat16)


def compile_steps(steps: Iterable[tuple[ExpertLayer, int, ExpertTile | None]]) -> list[str | None]:
    """Run each step once, in parallel, because each kernel takes seconds to compile.

    Returns the failure of each step; None if it ran.
    """

    def run(step: tuple[ExpertLayer, int, ExpertTile | None]) -> str | None:
        layer, tokens, tile = step
        try:
            layer.add(_random(1.0, tokens, layer.shape.hidden), tile)
        except Exception as error:  # too much shared memory, or a failure of the compiler
            return f"{type(error).__name__}: {str(error)[:120]}"
        return None

    with ThreadPoolExecutor(_COMPILERS) as pool:
        failures = list(pool.map(run, steps))
    torch.cuda.synchronize()
    return failures


def _random(spread: float, *sizes: int) -> Tensor:
    return (
        torch.empty(sizes, dtype=_DTYPE, device="cuda").normal_(std=spread)
        if spread
        else torch.zeros(sizes, dtype=_DTYPE, device="cuda")
    )
