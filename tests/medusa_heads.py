"""Folders of Medusa heads with random weights, in the layout of published checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write_heads(
    folder: Path,
    hidden: int,
    vocabulary: int,
    *,
    heads: int = 2,
    layers: int = 1,
    token_map: list[int] | None = None,
    own: bool = True,
    without: str = "",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a folder with Medusa heads; `without` names a tensor that is left out, `config` changes config.json."""
    rng = np.random.default_rng(seed)
    rows = vocabulary if token_map is None else len(token_map)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(heads):
        for layer in range(layers):
            shapes |= {f"{head}.{layer}.linear.weight": (hidden, hidden), f"{head}.{layer}.linear.bias": (hidden,)}
        if own:
            shapes[f"{head}.{layers}.weight"] = (rows, hidden)
    scale = hidden**-0.5
    tensors: dict[str, Any] = {
        name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()
    }
    described: dict[str, Any] = {"medusa_num_heads": heads, "medusa_num_layers": layers}
    if not own:
        described["original_lm_head"] = True
    if token_map is not None:
        described["truncated_vocab_size"] = rows
        tensors["token_map"] = np.array(token_map, dtype=np.int64)
    tensors.pop(without, None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described | config))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder
