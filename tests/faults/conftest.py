"""A small model of random weights with a real tokenizer: its workers start, and its requests run, in little time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.factories import write_tiny_model

VOCAB = 4096
LAYERS, KV_HEADS, HEAD_DIM = 8, 4, 32
CONTEXT = 8192


@pytest.fixture(scope="session")
def small_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """8 KiB of KV a token in float32."""
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
