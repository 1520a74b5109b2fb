"""The clusters that `python -m tests.faults` disturbs: their models, settings, and the judges of their answers."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from router.requests.choices import seeded
from tandem.cli.models.default_model import find_default_model
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.messages import SamplingParams
from tandem.settings.parsing import NamedPath
from tests.adapters import write_adapter
from tests.factories import write_tiny_model
from tests.near_ties import near_ties

ADAPTER = "sailor"
JUDGED = {"temperature", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty"}
"""The fields of a body that choose tokens, and that a judge knows."""
CONSTRAINED = {"response_format", "tools", "model", "stop"}
"""The fields of a body whose answers a judge cannot explain: those of grammars, adapters and ends."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A cluster: `name` is that of its model in the results."""

    name: str
    model: Path
    settings: dict[str, Any] = field(default_factory=dict)
    adapter: str = ""
    """The name of the adapter that requests may have; "" = none."""


def smollm2(folder: Path) -> Subject:
    """SmolLM2-135M with an adapter, on workers of one rank that draft from earlier answers."""
    model = prepare_model(find_default_model())
    rng = np.random.default_rng(41)
    layers, hidden, rank = 30, 576, 4

    def matrix(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(hidden**0.5)

    pairs = {f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora": layer for layer in range(layers)}
    tensors = {f"{name}_A.weight": matrix(rank, hidden) for name in pairs}
    tensors |= {f"{name}_B.weight": matrix(hidden, rank) for name in pairs}
    path = write_adapter(folder / ADAPTER, tensors, r=rank, lora_alpha=2 * rank)
    return Subject(
        "SmolLM2-135M-Instruct", model, {"loras": (NamedPath(ADAPTER, path),), "speculate": "suffix"}, ADAPTER
    )


def tiny(folder: Path, family: str, **settings: Any) -> Subject:
    """A tiny model of random weights with the vocabulary and tokenizer of SmolLM2."""
    served = prepare_model(find_default_model())
    model = write_tiny_model(folder / family, family, vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(served / name, model)
    return Subject(f"{family}, random weights", model, settings)


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "smollm2": smollm2,
    "hybrid": lambda folder: tiny(folder, "qwen3_next", page_tokens=48),
    "ranks": lambda folder: tiny(folder, "llama3", decode_tensor_parallel_size=2),
}
"""The clusters by the name that `--cluster` takes; the last one has decode workers of two ranks."""


class EngineJudge:
    """Explains answers with an engine of its own, which is loaded for the first of them. Thread-safe."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._lock = threading.Lock()
        self._engine: ModelRunner | None = None

    def __call__(self, body: dict[str, Any], prompt: list[int], number: int, token_ids: list[int]) -> bool:
        """Return True if rounding explains each token of answer `number` to a body."""
        if CONSTRAINED & body.keys():
            return False
        sampling = SamplingParams(
            len(token_ids), ignore_eos=True, **{name: body[name] for name in JUDGED & body.keys()}
        )
        with self._lock:
            if self._engine is None:
                config = EngineConfig.of(
                    self._subject.model, threads=1, dtype="float32", kv_cache_bytes=1 << 26, max_step_tokens=1024
                )
                self._engine = ModelRunner.load(config)
            return (
                near_ties(self._engine, prompt, token_ids, seeded(sampling, number) if number else sampling) is not None
            )
