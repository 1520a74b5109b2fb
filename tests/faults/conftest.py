"""Fixtures for fault tests: a small model, a cluster of two workers, and faults of their engines.

The model has random weights and a real tokenizer, so workers start and requests run quickly. Tests may damage the
cluster, which recovers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.factories import write_tiny_model

from .injected_faults import InjectedFaults

VOCAB = 4096
LAYERS, KV_HEADS, HEAD_DIM = 8, 4, 32
CONTEXT = 8192
STEP_DEADLINE_S = 10.0
"""Far longer than a step of this model takes, even when other tests load the cores."""


@pytest.fixture(scope="session")
def small_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with 8 KiB of KV per token in float32."""
    folder = write_tiny_model(
        tmp_path_factory.mktemp("small-model"),
        vocab_size=VOCAB,
        hidden_size=KV_HEADS * HEAD_DIM,
        intermediate_size=3 * KV_HEADS * HEAD_DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder)
    return folder


@pytest.fixture(scope="session")
def engine_faults(tmp_path_factory: pytest.TempPathFactory) -> InjectedFaults:
    """The engine faults that the workers of `pair` obey."""
    return InjectedFaults(tmp_path_factory.mktemp("engine-faults"))


@pytest.fixture
def pair(
    running_cluster: Callable[..., Any],
    small_model: Path,
    engine_faults: InjectedFaults,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Any]:
    """A cluster of one prefill and one decode worker with prefill chunks of one page."""

    def start() -> Any:
        engine_faults.reach_workers(monkeypatch)
        sizes = {"page_tokens": 16, "max_step_tokens": 16, "kv_cache_bytes": 1 << 27}
        return running_cluster(
            model=small_model,
            dtype="float32",
            step_deadline_s=STEP_DEADLINE_S,
            **sizes,
        )

    return start
