"""Computes the bytes and operations of a step from the model's shape, and step costs from the device's ceilings."""

from dataclasses import dataclass

from tandem.cost_model.step_collectives import StepCollectives
from tandem.cost_model.step_grid import EACH_TOKEN, StepGrid
from tandem.cost_model.step_work import StepWork
from tandem.protocol.cost_parameters import CostParameters
from tandem.settings.ceilings import Ceilings

_FLOP_A_WEIGHT = 2
"""Operations per weight and token: one multiplication and one addition."""
_UNPACKED_BYTES = 2
"""Bytes of a dequantized element."""
_KNEE = 0.35
"""Additional fixed cost of a step with prompts ÷ time to read the weights: reading and computing overlap only in part.

It is the median of the values that workers of an 8B model on H200s have learned (0.22 to 0.74).
"""
_UNPACKING = 1.5
"""Time to unpack quantized weights for one decode row ÷ time of the row's arithmetic with 16-bit weights.

Speed of decode steps of llama-3-8b on an H100, relative to 16-bit weights (docs/decisions/quantized_weights.md):

                             128 rows      256 rows
                            int8   int4   int8   int4
    measured                 .92    .93    .72    .75
    predicted                .87    .94    .78    .81
    predicted without it    1.18   1.31   1.11   1.18
"""
_DEQUANTIZING = 1.5
"""Time to dequantize the weights for a step with a prompt ÷ time to write them in 16 bits at memory bandwidth.

On an H100, prompts of 512, 2,048 and 8,192 tokens in int8 take 7.5, 8.0 and 7.5 ms longer than in 16 bits; with this
factor 7.5 ms is predicted.
"""
_PACKED_LATENCY_S = 4e-6
"""Fixed time in seconds of a product of few tokens with a packed weight: launch, first loads, joins.

It adds to the time to read the weight, in total .5 ms in a step of llama-3-8b on an H100. Speed of a step of one row,
relative to 16-bit weights:

                            int8    fp8   int4
    measured                1.40   1.34   1.74
    predicted               1.52   1.53   2.20
    predicted without it    1.75   1.77   2.74
"""
_FLOAT8_PRODUCTS = 0.58
"""Time of large products of FP8 weights and FP8 inputs ÷ time of the same products in 16 bits.

On an H100, prompts of 512, 2,048 and 8,192 tokens are computed 1.55, 1.62 and 1.52 times as fast; with this factor
1.53, 1.58 and 1.51 are predicted.
"""
_BATCH = 32
"""Number of decode rows at which a step reads most experts of common models."""
_CONTEXT = 2048
"""A typical context in tokens: rows mostly fill the sliding window of a layer if it is narrower than this."""


GPU = Ceilings(flops=6.7e14, bytes_per_s=4e12, launch_s=3e-4, verify_s=2.2e-3)
"""The measured ceilings of an H200 in bfloat16; for other GPUs they are only an estimate.

`verify_s` is the least-squares fit of 16 sizes of steps with draft tokens and 5 without, of llama-3-8b on an H100
(docs/decisions/cost_model.md). It is 0 for CPU workers: the host computes their steps itself, so a step without draft
tokens hides no host work that a step with draft tokens would expose.
"""
CPU = Ceilings(flops=1e11, bytes_per_s=2e10, launch_s=1e-4)
"""The ceilings of a few CPU cores in float32."""


@dataclass(frozen=True, slots=True)
class WindowedLayers:
    """Layers with the same sliding window: a token attends to at most `window` tokens.

    The model's totals include these layers.
    """

    window: int
    kv_bytes_per_token: int
    attention_flop_per_pair: int


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The sizes of the packed (quantized) weight matrices, without embeddings and experts."""

    products: int = 0
    """Number of matrices; each is one matrix product per step."""
    unpacked: int = 0
    """Total number of elements of those matrices that are unpacked, for products with 16-bit inputs."""
    float8: int = 0
    """Total number of elements of those matrices that are multiplied in FP8, with 8-bit inputs."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a model from which the bytes and operations of its steps are computed."""

    weights: int
    """Number of elements of all matrices that a token is multiplied with, including the experts that it chooses.

    Embeddings count if they are also the output projection.
    """
    weight_bytes: int
    """Bytes of the matrices that every step reads: all except the experts."""
    kv_bytes_per_token: int
    """KV bytes of one token in all layers."""
    attention_flop_per_pair: int
    """Operations for one token that attends to one other token, in all layers and heads."""
    output_weights: int = 0
    """Number of elements of the output projection, which is computed only for the last token of a prompt."""
    expert_bytes: int = 0
    """Bytes of all experts of all layers."""
    expert_share: float = 0.0
    """The fraction of a layer's experts that a token chooses."""
    packed: PackedWeights = PackedWeights()
    """The packed matrices, by how GPUs multiply with them."""
    windowed: tuple[WindowedLayers, ...] = ()
    """The layers with sliding windows, one entry per window size."""
    state_bytes: int = 0
    """Bytes of the states of all state layers of one request, which each step of the request reads and writes."""

    def expert_bytes_read(self, tokens: float) -> float:
        """Return the expected bytes of the experts that `tokens` tokens choose independently."""
        return float(self.expert_bytes * (1 - (1 - self.expert_share) ** tokens))

    def context_bytes(self, rows: int, tokens: int) -> float:
        """Return the bytes of KV that `rows` decode rows read, and of states that they read and write.

        Their contexts have `tokens` tokens in total.
        """
        unseen = (layers.kv_bytes_per_token * max(0, tokens - rows * layers.window) for layers in self.windowed)
        return self.kv_bytes_per_token * tokens - sum(unseen) + 2 * self.state_bytes * rows

    def step_bytes(self, work: StepWork) -> float:
        """Return the bytes that a step must read: weights, and the KV that its decode rows attend to.

        The cached context of prompts is left out, because it is unknown here and small.
        """
        return (
            self.weight_bytes
            + self.expert_bytes_read(work.decode_rows + work.prefill_tokens)
            + self.context_bytes(work.decode_rows, work.decode_context_tokens)
            + self.kv_bytes_per_token * work.prefill_tokens
        )

    def step_flops(self, work: StepWork) -> float:
        """Return the floating-point operations that a step must do."""
        products = self.weights * work.decode_rows + (self.weights - self.output_weights) * work.prefill_tokens
        attention = self._attention_flops(work.decode_rows, work.decode_context_tokens)
        return _FLOP_A_WEIGHT * products + attention + self._attention_flops(work.prefill_tokens, work.prefill_pairs)

    def _attention_flops(self, tokens: int, pairs: float) -> float:
        """Return the attention operations of `tokens` tokens that have `pairs` / `tokens` attention pairs each."""
        unseen = (layers.attention_flop_per_pair * max(0, pairs - tokens * layers.window) for layers in self.windowed)
        return self.attention_flop_per_pair * pairs - sum(unseen)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model's sizes and a device's ceilings, for predictions by the roofline."""

    sizes: ModelSizes
    ceilings: Ceilings
    collectives: StepCollectives | None = None
    """The collective operations of a worker with several GPUs, whose `sizes` are those of one GPU's part."""
    token_ranks: int = 1
    """The number of ranks that divide the tokens of steps with prompts; each has the whole model."""

    def step_flops(self, work: StepWork) -> float:
        """Return the floating-point operations of one rank in a step of its group."""
        return self.sizes.step_flops(work) / (self.token_ranks if work.prefill_tokens else 1)


def guess(sizes: ModelSizes, device: Ceilings, grid: StepGrid = EACH_TOKEN) -> CostParameters:
    """Return the cost parameters that a worker assumes before its first measured step.

    Packed weights are assumed to take as long as those of llama-3-8b on an H100.
    """
    packed = sizes.packed
    plain_token_s = _FLOP_A_WEIGHT * sizes.weights / device.flops
    token_s = plain_token_s - (1 - _FLOAT8_PRODUCTS) * _FLOP_A_WEIGHT * packed.float8 / device.flops
    weights_s = (sizes.weight_bytes + sizes.expert_bytes_read(1)) / device.bytes_per_s
    dequantizing_s = _DEQUANTIZING * _UNPACKED_BYTES * packed.unpacked / device.bytes_per_s
    unpacking_s = _UNPACKING * _FLOP_A_WEIGHT * packed.unpacked / device.flops
    # Each further row reads further experts, until most of them are read; approximated by a straight line up to a batch
    # of 32.
    experts_s = (sizes.expert_bytes_read(_BATCH) - sizes.expert_bytes_read(1)) / (_BATCH - 1) / device.bytes_per_s
    # Layers with a narrow window cost each row and token the same, whatever their context is.
    narrow = [layers for layers in sizes.windowed if layers.window < _CONTEXT]
    row_bytes = sum(layers.kv_bytes_per_token * layers.window for layers in narrow) + 2 * sizes.state_bytes
    token_flop = sum(layers.attention_flop_per_pair * layers.window for layers in narrow)
    context_bytes = sizes.kv_bytes_per_token - sum(layers.kv_bytes_per_token for layers in narrow)
    pair_flop = sizes.attention_flop_per_pair - sum(layers.attention_flop_per_pair for layers in narrow)
    return CostParameters(
        base_s=weights_s + device.launch_s + _PACKED_LATENCY_S * packed.products,
        prompt_base_s=device.launch_s + _KNEE * weights_s + dequantizing_s,
        token_s=token_s + token_flop / device.flops,
        pair_s=pair_flop / device.flops,
        # Below the knee a row's arithmetic is hidden behind reading the weights, but not entirely: large batches cost
        # half as much again.
        row_s=plain_token_s / 2 + unpacking_s + experts_s + row_bytes / device.bytes_per_s,
        context_s=context_bytes / device.bytes_per_s,
        free_tokens=int(weights_s / token_s),
        verify_base_s=device.verify_s,
        tile_tokens=grid.tile_tokens,
        wave_tokens=grid.wave_tokens,
    )
