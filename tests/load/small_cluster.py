"""A cluster of one prefill and one decode worker on the CPU, whose small model makes requests short."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.cli.models.default_model import find_default_model
from tandem.engine.weights.gguf import prepare_model
from tandem.settings.cluster import ClusterSettings
from tests.factories import write_tiny_model
from tests.running_cluster import RunningCluster

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
START_WITHIN_S = 600.0


@contextmanager
def small_cluster(**settings: Any) -> Iterator[RunningCluster]:
    """Starts the cluster with further `ClusterSettings`, and stops it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "small-model", **MODEL)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(prepare_model(find_default_model()) / name, model)
        sizes = {"page_tokens": 16, "max_step_tokens": 256, "kv_cache_bytes": 1 << 27, "threads": 1, "dtype": "float32"}
        given = {"model": model, "grpc_port": 0, "http_port": 0, "start_timeout_s": START_WITHIN_S, **sizes, **settings}
        config = ClusterSettings.of(**given)
        cluster = RunningCluster(config, Path(folder))
        try:
            yield cluster
        finally:
            cluster.stop()
