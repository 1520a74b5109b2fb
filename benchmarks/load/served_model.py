"""The model that a benchmark serves: a folder or GGUF file, a shape with random weights, or the small default model."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from tandem.cli.models.default_model import NAME, find_default_model
from tandem.cli.models.random_model import random_model
from tandem.engine.weights.gguf import prepare_model


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A folder in Hugging Face layout, the name that clients use, and whether its weights are random."""

    folder: Path
    name: str
    random_weights: bool


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--model` and `--shape`, which `choose_model` takes."""
    parser.add_argument("--model", type=Path, default=None, help="Hugging Face folder or GGUF file")
    parser.add_argument("--shape", default=None, help="random weights of this shape (llama-3-8b) instead of a model")


def choose_model(model: Path | None, shape: str | None) -> ServedModel:
    """Returns `shape` with random weights if given, else `model`, else the small default model, ready to be served."""
    if shape is not None:
        return ServedModel(random_model(shape), shape, random_weights=True)
    folder = prepare_model(model or find_default_model())
    return ServedModel(folder, NAME if model is None else folder.name, random_weights=False)
