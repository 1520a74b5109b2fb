"""The memory of a worker's GPU: the weights of the model and of its draft model, and the KV cache in the rest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tandem.capacity.planner.demand import Demand
from tandem.capacity.simulation.hardware import kv_bytes_per_held_token
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.memory import GIB
from tandem.engine.speculation.draft_folder import draft_bytes, drafting_model

OVERHEAD_BYTES = 2 * GIB
"""Memory of a GPU worker other than weights and KV: context, kernels, graphs and activations."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of each GPU of a worker, in bytes."""

    device_bytes: float
    """Memory of the GPU that the worker may use, in bytes."""
    weight_bytes: float
    kv_bytes_per_token: float
    draft_weight_bytes: float = 0.0
    """Bytes of the weights of a draft model, or of EAGLE or Medusa heads."""
    draft_kv_bytes_per_token: float = 0.0
    """KV bytes per token of the draft model, which stores the KV of the same tokens; 0 without a draft model."""

    @property
    def kv_bytes(self) -> float:
        """Bytes of the model's KV page pool; 0 if the weights leave no memory."""
        left = max(self.device_bytes - self.weight_bytes - self.draft_weight_bytes - OVERHEAD_BYTES, 0.0)
        # The pools of the model and of its draft model hold equally many tokens.
        return left * self.kv_bytes_per_token / (self.kv_bytes_per_token + self.draft_kv_bytes_per_token)

    @property
    def kv_tokens(self) -> float:
        """Number of tokens that the KV page pool holds."""
        return self.kv_bytes / self.kv_bytes_per_token

    def fits(self, demand: Demand) -> bool:
        """Return True if the KV page pool holds a mean request at its longest."""
        return self.kv_tokens >= demand.kv_tokens


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """The memory that a draft model, or draft heads, takes in addition to the model's; zero without either."""

    weight_bytes: int = 0
    model: ModelSpec | None = None
    """The draft model, or an EAGLE head as a model of one layer; None for Medusa heads."""

    @classmethod
    def of(cls, folder: Path, model: ModelSpec) -> DraftMemory:
        """Return the memory of the draft model or draft heads in `folder`, in bfloat16 on a GPU."""
        config = EngineConfig.of(folder, dtype="bfloat16", draft=folder)
        weights = draft_bytes(config, model, torch.bfloat16, torch.device("cuda"))
        return cls(weights, drafting_model(folder, model))

    def kv_bytes_per_token(self, demand: Demand) -> float:
        """Return the draft model's KV bytes per token of a mean request; 0 without a draft model."""
        return 0.0 if self.model is None else kv_bytes_per_held_token(self.model, demand.kv_tokens)


NO_DRAFT_MEMORY = DraftMemory()
"""The memory without draft weights: speculative decoding is off, or proposes n-grams."""
