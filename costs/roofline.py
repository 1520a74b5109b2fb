"""The bytes and operations of a step by the model's shape, and their duration at the device's ceilings."""

import math
from dataclasses import dataclass

from costs.step_grid import EACH_TOKEN, StepGrid
from costs.step_work import StepWork
from wire.cost_parameters import CostParameters
from wire.errors import InvalidArgument

_FLOP_A_WEIGHT = 2
"""A weight is multiplied and added once for each token."""
_KNEE = 0.35
"""The fixed cost of prompts in a step / the time in which weights are read: the two do not overlap entirely. The median
that workers of an 8B model on H200s had learned (0.22 to 0.74).
"""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates of a device."""

    flops: float
    """Floating-point operations a second, in the model's dtype."""
    bytes_per_s: float
    """Bytes a second between its memory and its cores."""
    launch_s: float
    """Seconds of a step that are neither arithmetic nor memory reads."""


def parse_ceilings(option: str, text: str) -> Ceilings:
    """TFLOPS:GBPS, 10¹² operations and 10⁹ bytes a second; InvalidArgument names `option`."""
    try:
        tera, giga = (float(part) for part in text.split(":"))
    except ValueError:
        tera = giga = math.nan
    if not (0 < tera < math.inf and 0 < giga < math.inf):
        example = "990:4800 are an H200's in bfloat16"
        raise InvalidArgument(option, f"{text!r} must be TFLOPS:GBPS, both above 0; {example}")
    return Ceilings(tera * 1e12, giga * 1e9, launch_s=0.0)


GPU = Ceilings(flops=6.7e14, bytes_per_s=4e12, launch_s=3e-4)
"""The ceilings of an H200 in bfloat16, as measured: a guess for other GPUs."""
CPU = Ceilings(flops=1e11, bytes_per_s=2e10, launch_s=1e-4)
"""The ceilings of a few cores in float32."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The amounts that a step of a model reads and computes."""

    weights: int
    """Elements of all matrices that every token is multiplied with; embeddings count where they are the output's."""
    weight_bytes: int
    """Bytes of them."""
    kv_bytes_per_token: int
    """Bytes of keys and values of one token, all layers."""
    attention_flop_per_pair: int
    """Operations of one token attending to one other, all layers and heads."""
    output_weights: int = 0
    """The weights of the output projection, which only the last token of a prompt needs."""

    def step_bytes(self, work: StepWork) -> float:
        """Return the bytes that a step must read: all weights, and the KV that its decode rows attend to.

        The cached context of its prompts is not known, and little.
        """
        return self.weight_bytes + self.kv_bytes_per_token * (work.decode_context_tokens + work.prefill_tokens)

    def step_flops(self, work: StepWork) -> float:
        """Return the operations that it must do."""
        products = self.weights * work.decode_rows + (self.weights - self.output_weights) * work.prefill_tokens
        pairs = work.decode_context_tokens + work.prefill_pairs
        return _FLOP_A_WEIGHT * products + self.attention_flop_per_pair * pairs


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model on a device."""

    sizes: ModelSizes
    ceilings: Ceilings


def guess(sizes: ModelSizes, device: Ceilings, grid: StepGrid = EACH_TOKEN) -> CostParameters:
    """Return the parameters with which a worker starts."""
    token_s = _FLOP_A_WEIGHT * sizes.weights / device.flops
    weights_s = sizes.weight_bytes / device.bytes_per_s
    return CostParameters(
        base_s=weights_s + device.launch_s,
        prompt_base_s=device.launch_s + _KNEE * weights_s,
        token_s=token_s,
        pair_s=sizes.attention_flop_per_pair / device.flops,
        # Below the knee a row's arithmetic is hidden but not quite: large batches cost half as much again.
        row_s=token_s / 2,
        context_s=sizes.kv_bytes_per_token / device.bytes_per_s,
        free_tokens=int(weights_s / token_s),
        tile_tokens=grid.tile_tokens,
        wave_tokens=grid.wave_tokens,
    )
