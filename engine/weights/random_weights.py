"""Random weights for performance runs: a real model's shapes, generated on the device in seconds."""

import hashlib
from pathlib import Path

import torch

from engine.models.parameters import Parameters, tensors_of

_SEED = 20_240_601
_SPREAD = 0.02
"""Standard deviation, as models are initialised for training."""


def fill_randomly(parameters: Parameters) -> None:
    """Fills with normal numbers from a fixed seed; norms are 1, biases 0.

    Two processes on one kind of device get the same weights.
    """
    generator = torch.Generator(parameters.embedding.device).manual_seed(_SEED)
    for name, tensor in tensors_of(parameters):
        if name.endswith("norm"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0.0, _SPREAD, generator=generator)


def random_revision(folder: Path) -> str:
    """Returns the name of these weights: the same for the same config.json, never that of a real model."""
    return "random-" + hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
