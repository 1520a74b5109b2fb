"""A model folder for performance runs: a real model's shape, the small model's tokenizer, no weights."""

import shutil
from pathlib import Path

from cli.default_model import find_default_model
from engine.models.shapes import write_shape
from engine.weights.gguf import default_cache, prepare_model

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def random_model(shape: str) -> Path:
    """The folder of `shape` ("llama-3-8b") below the user's cache, for `ClusterConfig.random_weights`.

    Its tokenizer knows fewer tokens than such a model draws: those have no text. InvalidArgument for an unknown shape.
    """
    folder = write_shape(shape, default_cache() / f"random-{shape}")
    small = prepare_model(find_default_model())
    for name in _TOKENIZER_FILES:
        if (small / name).is_file():
            shutil.copyfile(small / name, folder / name)
    return folder
