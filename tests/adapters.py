"""LoRA adapters on disk for tiny models, and the models into which they are merged."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.engine.model_runner import ModelRunner
from tandem.engine.weights.safetensors_file import write_float32
from tandem.protocol.messages import AdapterFacts
from tests.factories import FAMILIES, random_weights, write_tiny_model

Matrix = np.ndarray[Any, Any]

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
EVERY = (*ATTENTION, *DENSE)


@dataclass(frozen=True)
class TinyAdapter:
    """An adapter with random updates of some modules of each layer of a tiny model (`tests/factories.py`)."""

    family: str = "llama3"
    seed: int = 0
    rank: int = 4
    alpha: float = 8.0
    modules: Sequence[str] = EVERY
    config: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of fields in adapter_config.json."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of fields in the model's config.json."""

    def write(self, folder: Path) -> Path:
        """Write the adapter in peft's format."""
        tensors = {
            f"base_model.model.{module}.lora_{name}.weight": matrix
            for module, pair in self.matrices().items()
            for name, matrix in zip("AB", pair, strict=True)
        }
        return write_adapter(folder, tensors, r=self.rank, lora_alpha=self.alpha, **self.config)

    def matrices(self) -> dict[str, tuple[Matrix, Matrix]]:
        """Return A [rank, K] and B [N, rank] of each module."""
        rng = np.random.default_rng(1000 + self.seed)
        matrices_of = {}
        for name, weight in random_weights(FAMILIES[self.family] | self.changes).items():
            module = name.removesuffix(".weight")
            if module.endswith(tuple(self.modules)):
                n, k = weight.shape
                a = rng.standard_normal((self.rank, k), dtype=np.float32) / math.sqrt(k)
                matrices_of[module] = (a, rng.standard_normal((n, self.rank), dtype=np.float32) / math.sqrt(self.rank))
        return matrices_of

    def merged(self, folder: Path, scale: Callable[[str], float] | None = None) -> Path:
        """Write the model with W + scale · B · A in place of W.

        The scale is alpha / rank or, if given, `scale(module name)`.
        """
        write_tiny_model(folder, self.family, **self.changes)
        tensors = random_weights(json.loads((folder / "config.json").read_text()))
        for module, (a, b) in self.matrices().items():
            by = self.alpha / self.rank if scale is None else scale(module)
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + np.float32(by) * (b @ a)
        write_float32(
            folder / "model.safetensors", {name: tensor.shape for name, tensor in tensors.items()}, tensors.values()
        )
        return folder


def write_adapter(folder: Path, tensors: Mapping[str, Matrix], **config: Any) -> Path:
    """Write an adapter with these tensors and a config that matches them."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {"peft_type": "LORA", "bias": "none", "task_type": "CAUSAL_LM", **config}
    (folder / "adapter_config.json").write_text(json.dumps(shown))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_float32(
        folder / "adapter_model.safetensors", shapes, (np.ascontiguousarray(tensor) for tensor in tensors.values())
    )
    return folder


def load_at_runtime(runner: ModelRunner, path: Path) -> int:
    """Load an adapter into a free slot, as a worker does, and return its number."""
    folder = runner.adapters.read(path)
    facts = AdapterFacts(path.name, folder.identity, str(path))
    runner.adapters.fill(runner.adapters.claim(folder.identity, ()), facts, folder)
    return runner.adapters.number(folder.identity)
