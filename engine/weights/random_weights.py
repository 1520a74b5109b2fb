"""Random weights for performance runs: a real model's shapes, generated on the device in seconds."""

import hashlib
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from engine.models.parameters import Parameters

_SEED = 20_240_601
_SPREAD = 0.02
"""Standard deviation, as models are initialised for training."""


def fill_randomly(parameters: Parameters) -> None:
    """Fills with normal numbers from a fixed seed; norms are 1, biases 0.

    Two processes on one kind of device get the same weights.
    """
    generator = torch.Generator(parameters.embedding.device).manual_seed(_SEED)
    done: set[int] = set()
    for field in fields(parameters):
        tensor: Tensor | None = getattr(parameters, field.name)
        if tensor is None or tensor.data_ptr() in done:  # tied embeddings are one tensor
            continue
        done.add(tensor.data_ptr())
        if field.name.endswith("norm"):
            tensor.fill_(1.0)
        elif field.name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0.0, _SPREAD, generator=generator)


def random_revision(folder: Path) -> str:
    """Returns the name of these weights: the same for the same config.json, never that of a real model."""
    return "random-" + hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
