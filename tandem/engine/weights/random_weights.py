"""Random weights for performance runs: the shapes of a real model, with values generated on the device in seconds."""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.kernels.packed_weight import CENTRE, FLOAT4_VALUES, Float4Weight, PackedWeight
from tandem.engine.models.parameters import Parameters, named_weights

_SEED = 20_240_601
_SPREAD = 0.02
"""The standard deviation of the weights, as in models that are initialized for training."""
_STEP_BIAS = -4.6
"""The bias of dt of state layers: softplus(-4.6) = 0.01, so that a state keeps hundreds of tokens."""
_ROWS = 1024


def fill_randomly(parameters: Parameters) -> None:
    """Fill the weights with normally distributed numbers from a fixed seed; norms and factors become 1, biases 0.

    States decay slowly.

    Two processes on the same kind of device get the same weights.
    """
    generator = torch.Generator(parameters.final_norm.device).manual_seed(_SEED)
    for name, weight in named_weights(parameters):
        if isinstance(weight, Tensor) and weight.is_meta:
            continue  # the embedding of a rank that has none
        if isinstance(weight, PackedWeight):
            fill_packed(weight, generator)
        elif name.endswith(("norm", "scale", "scales")):
            weight.fill_(1.0)
        elif name.endswith("decay_log"):
            # The range in which Mamba-2 initializes the rates.
            weight.copy_(torch.linspace(1, 16, len(weight)).log())
        elif name.endswith("step_bias"):
            weight.fill_(_STEP_BIAS)
        elif name.endswith("bias"):
            weight.zero_()
        else:
            weight.normal_(0.0, _SPREAD, generator=generator)


def fill_packed(weight: PackedWeight, generator: torch.Generator, deviation: float = _SPREAD) -> None:
    """Choose all codes with equal probability, and set scales that give the weights the standard `deviation`."""
    codes = weight.codes
    if isinstance(weight, Float4Weight):
        codes.random_(0, 256, generator=generator)
        weight.scales.fill_(1.0)
        weight.factors.fill_(deviation / (sum(value**2 for value in FLOAT4_VALUES) / len(FLOAT4_VALUES)) ** 0.5)
        return
    if codes.dtype == torch.float8_e4m3fn:
        # One part at a time, because normal numbers are generated in float32, which takes four times the bytes.
        for part in torch.split(codes.view(-1, codes.shape[-1]), _ROWS):
            part.copy_(torch.empty(part.shape, device=part.device).normal_(generator=generator))
        spread = 1.0
    elif codes.dtype == torch.int8:
        codes.random_(-127, 128, generator=generator)
        spread = 127 / 3**0.5
    else:
        codes.random_(0, 256, generator=generator)
        spread = 8 / 3**0.5
    weight.scales.fill_(deviation / spread)
    if weight.offsets is not None:
        centre = CENTRE if weight.bits == 4 else 0
        weight.offsets.fill_(-centre * deviation / spread)


def random_revision(folder: Path) -> str:
    """Return the revision name of random weights.

    Equal config.json files give the same name, which is never the revision hash of a real model.
    """
    return "random-" + hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
